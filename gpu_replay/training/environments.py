"""The interface of environments, and `Actors`: environments as the agent sees them, on its device, frames stacked.

`send` starts a step and `recv` returns it, so that emulators run while the network learns. An episode that ends is
reset within the same step (same-step autoreset); its last frame is returned as `final_frame`, from which a truncated
episode is bootstrapped. Environments return single frames; `Actors` stacks them.
"""

from __future__ import annotations

import dataclasses
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpu_replay import Field

# a mean return as good as a win, in games that end at 21
PONG_WON = 18.0
PONG_POINTS = 21.0

# points, of all environments together, that count most in the return that they let expect: ten games of Pong
LATEST_POINTS = 300


@dataclass(frozen=True)
class EnvironmentSpec:
    """What the agent needs to know about an environment.

    observation:      the field that stores one frame; integers are multiplied by its `scale`.
    reward_threshold: mean return at which the environment counts as solved, or None.
    bounds:           (low, high) of vector observations, or None for images.
    stack:            how many of the newest frames make one observation; more than one adds a stack axis.
    most_points:      what the positive rewards of an episode cannot exceed, or None.
    """

    name: str
    observation: Field
    num_actions: int
    reward_threshold: float | None
    bounds: tuple[Tensor, Tensor] | None
    stack: int = 1
    most_points: float | None = None

    @property
    def stacked(self) -> Field:
        """The agent's observation: (stack, *shape), or the frame alone for a stack of 1."""
        frame = self.observation
        shape = frame.shape if self.stack == 1 else (self.stack, *frame.shape)
        return dataclasses.replace(frame, shape=shape)


@dataclass(frozen=True)
class Step:
    """One step of `E` environments.

    frame:       (E, *shape) the newest frame; after the end of an episode the first one of the next.
    reward:      (E,) float32.
    terminated, truncated: (E,) bool.
    final_frame: (E, *shape) the last frame of each episode that ended, undefined in other rows; None if none ended.
    """

    frame: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_frame: Tensor | None

    @property
    def ended(self) -> Tensor:
        """(E,) bool: where an episode ended."""
        return self.terminated | self.truncated


class Environment(nn.Module):
    """`num_envs` parallel environments; the `state_dict` is what they need to continue in mid-episode.

    on_device:  whether a step runs on the agent's device alone and changes its memory in place, so that it can be
                captured in a CUDA graph.
    generators: the random generators that such steps use.
    resumable:  whether the `state_dict` is complete: simulators may not expose their state.
    """

    spec: EnvironmentSpec
    num_envs: int
    on_device: bool = False
    generators: Sequence[torch.Generator] = ()
    resumable: bool = True

    @abstractmethod
    def reset(self, seed: int) -> Tensor:
        """First frames (E, *shape); the same seed gives the same episodes."""

    def send(self, actions: Tensor) -> None:
        """Start a step with actions (E,) int64, or keep them for `recv`."""
        self._actions = actions

    @abstractmethod
    def recv(self) -> Step:
        """Wait for the step that `send` started."""

    def close(self) -> None:
        """Release what the environments hold."""


Graphs = dict[str, Callable[[], Any]]


def replayed(graphs: Graphs, name: str) -> bool:
    """Replay the CUDA graph of this name; returns whether there is one and it was replayed.

    If it cannot be captured, standard error says so, and its work is done by ordinary calls from then on.
    """
    if name not in graphs:
        return False
    try:
        graphs[name]()
    except RuntimeError as error:
        # an error of the call itself is raised again by the ordinary calls
        print(f"{name} cannot be captured as a CUDA graph and runs without: {error}", file=sys.stderr)
        del graphs[name]
        return False
    return True


class FrameStack(nn.Module):
    """The newest `depth` frames of each of `E` environments, oldest first; zeros before an episode's first frame.

    ALE's own stacks begin the same way, and so do the buffer's with `padding="zero"`. No call synchronises with the
    device. The frames are changed in place, so a captured graph keeps working on them.

    frame: (E, *shape) the newest frames.
    obs:   (E, depth, *shape) all frames, or the newest ones without a stack axis at a depth of 1.
    """

    frames: Tensor

    def __init__(self, depth: int, num_envs: int, frame: Field, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("frames", torch.zeros((num_envs, depth, *frame.shape), dtype=frame.dtype, device=device))
        self.frame = self.frames[:, -1]
        self.obs = self.frames if depth > 1 else self.frame

    def begin(self, frame: Tensor) -> None:
        """All environments were reset. frame: (E, *shape)."""
        self.frames.zero_()
        self.frames[:, -1] = frame

    def push(self, frame: Tensor, ended: Tensor) -> None:
        """Add the next frames; where `ended`, (E,) bool, they are the first ones of new episodes."""
        if self.frames.shape[1] > 1:
            older = self.frames[:, 1:].masked_fill(ended.reshape(-1, *[1] * frame.dim()), 0)
            self.frames[:, :-1] = older
        self.frames[:, -1] = frame


class EpisodeStatistics(nn.Module):
    """Returns and lengths of the last `window` finished episodes of `E` environments, and of the running ones.

    They lie on the device of the rewards. `read` and `expected` synchronise with it, `push` does not.
    """

    points: Tensor
    returns: Tensor
    lengths: Tensor
    finished: Tensor
    count: Tensor

    def __init__(self, num_envs: int, window: int, device: torch.device) -> None:
        super().__init__()
        self._window = window
        # points won and lost, exponentially weighted by the number of points since
        self.register_buffer("points", torch.zeros(2, device=device))
        self.register_buffer("returns", torch.zeros(num_envs, device=device))
        self.register_buffer("lengths", torch.zeros(num_envs, device=device))
        # the extra row receives the writes of episodes that have not ended
        self.register_buffer("finished", torch.zeros((window + 1, 2), device=device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))

    def push(self, reward: Tensor, ended: Tensor) -> None:
        """reward: (E,) float32; ended: (E,) bool."""
        self.count_points(reward)
        self.returns += reward
        self.lengths += 1
        place = self.count + torch.cumsum(ended, 0) - 1
        # if more episodes end than the window holds, only the last ones write, so no row has two writers
        total = self.count + ended.sum()
        kept = ended & (place >= total - self._window)
        row = torch.where(kept, place % self._window, self._window)
        self.finished[row] = torch.stack((self.returns, self.lengths), 1)
        self.count.copy_(total)
        self.returns *= ~ended
        self.lengths *= ~ended

    def count_points(self, reward: Tensor) -> None:
        """Count rewards of any shape as points won, or lost where they are negative."""
        points = torch.stack((reward.clamp(min=0).sum(), -reward.clamp(max=0).sum()))
        self.points.mul_((1 - 1 / LATEST_POINTS) ** points.sum()).add_(points)

    def expected(self, most: float) -> float:
        """The return of a game to `most` points that are won and lost as the latest ones were, NaN before the first.

        Mean returns of finished games follow later: in half of a game of Pong 64 environments make 100,000 steps.
        """
        won, lost = self.points.tolist()
        return most * (won - lost) / max(won, lost) if won or lost else float("nan")

    def finish(self, returns: Sequence[float], lengths: Sequence[float]) -> None:
        """Count finished episodes whose returns and lengths actors have summed."""
        for row in zip(returns, lengths, strict=True):
            self.finished[int(self.count) % self._window] = torch.tensor(row)
            self.count += 1

    def abandon(self) -> None:
        """Discard the running episodes, whose environments were reset before they ended."""
        self.returns.zero_()
        self.lengths.zero_()

    def read(self) -> tuple[int, float, float]:
        """Number of finished episodes, and mean return and length of the last ones (NaN before the first)."""
        count = int(self.count)
        rows = self.finished[: min(count, self._window)]
        if not len(rows):
            return 0, float("nan"), float("nan")
        return count, *rows.mean(0).tolist()


class Actors:
    """Environments, the transfer of their steps to `device`, and the stacks of their frames there.

    statistics: episode statistics that each `push` extends, or None.

    Steps of environments on the device itself are passed through. Steps of emulators are copied from pinned memory, so
    that the host does not wait for the device, to fixed device memory, from which captured graphs read.
    """

    def __init__(
        self, environment: Environment, device: torch.device, statistics: EpisodeStatistics | None = None
    ) -> None:
        spec, count = environment.spec, environment.num_envs
        self.environment = environment
        self.device = device
        self.statistics = statistics
        self.stack = FrameStack(spec.stack, count, spec.observation, device)
        self._there: Step | None = None
        if device.type != "cpu" and not environment.on_device:
            frame, reward = self.stack.frame.clone(), torch.zeros(count, device=device)
            self._there = Step(frame, reward, reward > 0, reward > 0, frame.clone())

    def reset(self, seed: int) -> None:
        """Start new episodes in all environments; `stack` holds their first frames."""
        self.stack.begin(self.environment.reset(seed).to(self.device))

    def recv(self) -> Step:
        """Wait for the step that `environment.send` started; its tensors, on the agent's device, hold until the next.

        Steps from host memory reuse the same tensors; their final frames are undefined where no episode ended.
        """
        step = self.environment.recv()
        if self._there is None:
            return step
        for name, there in vars(self._there).items():
            value = getattr(step, name)
            if value is not None:
                # torch reuses the pinned memory once the copy is done
                there.copy_(value.pin_memory(), non_blocking=True)
        return self._there

    def push(self, step: Step) -> None:
        """Add a received step to the statistics, and its frames to the stacks."""
        ended = step.ended
        if self.statistics is not None:
            self.statistics.push(step.reward, ended)
        self.stack.push(step.frame, ended)

    def state_dict(self) -> dict[str, Any]:
        """The state from which the environments continue in mid-episode."""
        return {"environment": self.environment.state_dict(), "stack": self.stack.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; call `reset` first."""
        self.environment.load_state_dict(state["environment"])
        self.stack.load_state_dict(state["stack"])
