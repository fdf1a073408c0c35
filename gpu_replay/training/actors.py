"""Parallel environments as the agent meets them: on its device, with frames stacked, wherever they really live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_replay.training.environments import Environment, Step
from gpu_replay.training.pinned_transfer import Crossing
from gpu_replay.training.stacks import FrameStack


@dataclass(frozen=True)
class Arrival:
    """A step of all environments, on the agent's device.

    step:  the same where the environments live, for what is counted there.
    frame: (E, *shape) the newest frame, which the replay buffer stores.
    obs:   (E, S, *shape) what to act upon next; the frame itself where frames are not stacked.
    reward, terminated, truncated: (E,) float32, bool, bool.
    final_frame: (E, *shape) the last frame of episodes that ended, without meaning in other rows; None where none did.
    """

    step: Step
    frame: Tensor
    obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_frame: Tensor | None


class Actors:
    """An environment and the way from it to `device`.

    home: the device on which the environment itself lives, after a `reset`.

    Environments on the device itself are passed through. From host memory everything crosses in one copy out of pinned
    memory, and actions come back in one.
    """

    def __init__(self, environment: Environment, device: torch.device) -> None:
        self.environment = environment
        self.device = device
        self.home = device
        self._stack = FrameStack(environment.spec.stack)
        self._crossing: Crossing | None = None
        self._finals: Crossing | None = None

    def reset(self, seed: int) -> tuple[Tensor, Tensor]:
        """New episodes in all environments: their first frames, and what to act upon."""
        frame = self.environment.reset(seed)
        self.home = frame.device
        if frame.device.type != self.device.type:
            if self._crossing is None:
                self._crossing, self._finals = self._crossings(frame)
            # no step is on its way that could use the same memory
            frame = frame.to(self.device)
        return frame, self._stack.begin(frame)

    def send(self, actions: Tensor) -> None:
        """Start a step with actions (E,) int64 on the agent's device."""
        self.environment.send(actions)

    def recv(self) -> Arrival:
        """Finish it. The frame lasts until the step after the next one."""
        step = self.environment.recv()
        frame, reward, terminated, truncated = step.obs, step.reward, step.terminated, step.truncated
        final = step.final_obs
        if self._crossing is not None and self._finals is not None:
            there = self._crossing.carry(frame=frame, reward=reward, terminated=terminated, truncated=truncated)
            frame, reward, terminated, truncated = there.values()
            if final is not None:
                final = self._finals.carry(frame=final)["frame"]
        obs = self._stack.push(frame, terminated | truncated)
        return Arrival(step, frame, obs, reward, terminated, truncated, final)

    def state(self) -> dict[str, Any] | None:
        """What `restore` needs, or None where the environments cannot go on in mid-episode."""
        games = self.environment.state()
        return None if games is None else {"games": games, "stack": self._stack.state()}

    def restore(self, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Go on from there, after a `reset`: the newest frames, and what to act upon."""
        frame = self.environment.restore(state["games"]).to(self.device)
        return frame, self._stack.restore(frame, state["stack"])

    def _crossings(self, frame: Tensor) -> tuple[Crossing, Crossing]:
        envs = (self.environment.num_envs,)
        frames = {"frame": (tuple(frame.shape), frame.dtype)}
        rest = {"reward": (envs, torch.float32), "terminated": (envs, torch.bool), "truncated": (envs, torch.bool)}
        return Crossing({**frames, **rest}, self.device), Crossing(frames, self.device)
