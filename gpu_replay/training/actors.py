"""Parallel environments as the agent sees them: on its device and with stacked frames, wherever the simulators run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_replay.training.environments import Environment, Step, joined
from gpu_replay.training.pinned_transfer import PinnedTransfer

ALL = slice(None)


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

    def push(self, frame: Tensor, ended: Tensor, rows: slice = ALL) -> Tensor:
        """Add the next frames; where `ended`, (E,) bool, they are the first ones of new episodes.

        rows: the environments whose frames these are, if not all; the others stay, and are not returned.
        """
        if self.depth == 1:
            return frame
        if self._frames is None:
            raise RuntimeError("push needs the frames before; call begin first.")
        cleared = ended.reshape(-1, *[1] * frame.dim())
        stack = self._frames[rows]
        return stack.copy_(torch.cat((stack[:, 1:].masked_fill(cleared, 0), frame[:, None]), 1))

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

    home:  the device on which the simulators run, known after a `reset`.
    parts: of the environments, which `send_to`, `fetch` and `push` step apart.
    rows:  of each part among all environments.

    Steps of environments on the device itself are passed through. From host memory each step is one copy out of pinned
    memory, and its actions are one copy back.
    """

    def __init__(self, environment: Environment, device: torch.device) -> None:
        self.environment = environment
        self.device = device
        self.home = device
        self.parts = environment.parts
        size = environment.num_envs // len(self.parts)
        self.rows = [slice(size * part, size * (part + 1)) for part in range(len(self.parts))]
        self._stack = FrameStack(environment.spec.stack)
        self._transfers: list[tuple[PinnedTransfer, PinnedTransfer]] = []

    def reset(self, seed: int) -> tuple[Tensor, Tensor]:
        """Start new episodes in all environments: their first frames, and the observations to act on."""
        frame = self.environment.reset(seed)
        self.home = frame.device
        if frame.device.type != self.device.type:
            if not self._transfers:
                self._transfers = [self._make_transfers(frame[rows]) for rows in self.rows]
            # no step is in flight that could use the same memory
            frame = frame.to(self.device)
        return frame, self._stack.begin(frame)

    def send(self, actions: Tensor) -> None:
        """Start a step with actions (E,) int64 on the agent's device."""
        self.environment.send(actions)

    def recv(self) -> DeviceStep:
        """Wait for the step. Its frame and its observation are valid until the next one."""
        steps = [part.recv() for part in self.parts]
        there = joined([self._moved(step, part) for part, step in enumerate(steps)])
        obs = self._stack.push(there.obs, there.terminated | there.truncated)
        kept = there.reward, there.terminated, there.truncated, there.final_obs
        return DeviceStep(joined(steps), there.obs, obs, *kept)

    def send_to(self, part: int, actions: Tensor) -> None:
        """Start a step of one part with its actions."""
        self.parts[part].send(actions)

    def fetch(self, part: int) -> Step:
        """Wait for the step of one part; on the agent's device, in memory that the next one of this part overwrites.

        Out of host memory it is the same memory every time, with final frames that mean nothing where none ended.
        """
        step = self._moved(self.parts[part].recv(), part)
        if not self._transfers:
            return step
        return dataclasses.replace(step, final_obs=self._transfers[part][1].there["frame"])

    def push(self, part: int, step: Step) -> Tensor:
        """The observations of a part to act on after the step that was fetched."""
        return self._stack.push(step.obs, step.terminated | step.truncated, self.rows[part])

    def _moved(self, step: Step, part: int) -> Step:
        """A step of one part on the agent's device."""
        if not self._transfers:
            return step
        steps, finals = self._transfers[part]
        there = steps.copy(frame=step.obs, reward=step.reward, terminated=step.terminated, truncated=step.truncated)
        final = None if step.final_obs is None else finals.copy(frame=step.final_obs)["frame"]
        return Step(there["frame"], there["reward"], there["terminated"], there["truncated"], final)

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
        rest = {name: ((len(frame),), dtype) for name, dtype in dtypes.items()}
        return PinnedTransfer({**frames, **rest}, self.device), PinnedTransfer(frames, self.device)
