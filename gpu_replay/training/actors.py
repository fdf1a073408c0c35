"""Parallel environments as the agent sees them: on its device and with stacked frames, wherever the simulators run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_replay.training.environments import Environment, Step
from gpu_replay.training.pinned_transfer import PinnedTransfer


class FrameStack:
    """The newest `depth` frames of each of `E` environments, oldest first; zeros before an episode's first frame.

    ALE's own stacks begin the same way, and so do the buffer's with `padding="zero"`. With a depth of 1 an observation
    is the frame itself, without a stack axis. Never synchronises with the device.

    A stack stays in the memory of `begin`: each `push` writes there, so that a captured graph goes on with it.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._frames: Tensor | None = None

    def begin(self, frame: Tensor) -> Tensor:
        """All environments were reset. frame: (E, *shape); returns (E, depth, *shape), or the frame at a depth of 1."""
        if self.depth == 1:
            return frame
        before = torch.zeros((len(frame), self.depth - 1, *frame.shape[1:]), dtype=frame.dtype, device=frame.device)
        self._frames = torch.cat((before, frame[:, None]), 1)
        return self._frames

    def push(self, frame: Tensor, ended: Tensor) -> Tensor:
        """Add the next frames; where `ended`, (E,) bool, they are the first ones of new episodes."""
        if self.depth == 1:
            return frame
        if self._frames is None:
            raise RuntimeError("push needs the frames before; call begin first.")
        cleared = ended.reshape(-1, *[1] * frame.dim())
        return self._frames.copy_(torch.cat((self._frames[:, 1:].masked_fill(cleared, 0), frame[:, None]), 1))

    def state(self) -> dict[str, Tensor]:
        """The frames; empty at a depth of 1."""
        return {} if self._frames is None else {"frames": self._frames}

    def restore(self, frame: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Continue with the frames of `state`, of which `frame` is the newest."""
        if self.depth == 1:
            return frame
        self._frames = state["frames"].to(frame.device, copy=True)
        return self._frames


@dataclass(frozen=True)
class DeviceStep:
    """A step of all environments on the agent's device.

    step:  the same where the simulators run, for statistics that are kept there.
    frame: (E, *shape) the newest frame, which the replay buffer stores.
    obs:   (E, S, *shape) the observation to act on next; the frame itself where frames are not stacked.
    reward, terminated, truncated: (E,) float32, bool, bool.
    final_frame: (E, *shape) the last frame of each episode that ended, undefined in other rows; None if none ended.
    """

    step: Step
    frame: Tensor
    obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_frame: Tensor | None


class Actors:
    """Environments, and the transfer of their steps to `device`.

    home: the device on which the simulators run, known after a `reset`.

    Steps of environments on the device itself are passed through. From host memory each step is one copy out of pinned
    memory, and its actions are one copy back.
    """

    def __init__(self, environment: Environment, device: torch.device) -> None:
        self.environment = environment
        self.device = device
        self.home = device
        self._stack = FrameStack(environment.spec.stack)
        self._transfers: tuple[PinnedTransfer, PinnedTransfer] | None = None

    def reset(self, seed: int) -> tuple[Tensor, Tensor]:
        """Start new episodes in all environments: their first frames, and the observations to act on."""
        frame = self.environment.reset(seed)
        self.home = frame.device
        if frame.device.type != self.device.type:
            if self._transfers is None:
                self._transfers = self._make_transfers(frame)
            # no step is in flight that could use the same memory
            frame = frame.to(self.device)
        return frame, self._stack.begin(frame)

    def send(self, actions: Tensor) -> None:
        """Start a step with actions (E,) int64 on the agent's device."""
        self.environment.send(actions)

    def recv(self) -> DeviceStep:
        """Wait for the step. Its frame is valid until the step after the next one."""
        step = self.environment.recv()
        frame, reward, terminated, truncated = step.obs, step.reward, step.terminated, step.truncated
        final = step.final_obs
        if self._transfers is not None:
            steps, finals = self._transfers
            frame, reward, terminated, truncated = steps.copy(
                frame=frame, reward=reward, terminated=terminated, truncated=truncated
            ).values()
            if final is not None:
                final = finals.copy(frame=final)["frame"]
        obs = self._stack.push(frame, terminated | truncated)
        return DeviceStep(step, frame, obs, reward, terminated, truncated, final)

    def state(self) -> dict[str, Any] | None:
        """What `restore` needs, or None where the environments cannot continue in mid-episode."""
        games = self.environment.state()
        return None if games is None else {"games": games, "stack": self._stack.state()}

    def restore(self, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Continue from a state, after a `reset`: the newest frames, and the observations to act on."""
        frame = self.environment.restore(state["games"]).to(self.device)
        return frame, self._stack.restore(frame, state["stack"])

    def _make_transfers(self, frame: Tensor) -> tuple[PinnedTransfer, PinnedTransfer]:
        """One for steps, one for the final frames of those steps in which an episode ends."""
        frames = {"frame": (tuple(frame.shape), frame.dtype)}
        dtypes = {"reward": torch.float32, "terminated": torch.bool, "truncated": torch.bool}
        rest = {name: ((self.environment.num_envs,), dtype) for name, dtype in dtypes.items()}
        return PinnedTransfer({**frames, **rest}, self.device), PinnedTransfer(frames, self.device)
