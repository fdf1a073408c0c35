"""What `bench peers` compares beside whole cycles: the loop over one environment, and settings of this package.

Most people start with one environment: a step has a float64 reward and a Python bool, whatever the fields are. Settings
are compared with each other in the same interleaved way as libraries are: draws by rank with draws by mass, NumPy with
Numba, relabelled batches with plain ones, two threads with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field, Hindsight, Proportional, RankBased, ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.ops import _backend, numpy_loops

from .cases import ADDED, Case
from .frames import FrameSubject
from .rows import Rows, as_stepped
from .runner import Maker
from .stacks import FRAME_DTYPES, STACK, StackStream, faults
from .subjects import ALPHA, BETA, CPU, POOL, ReplaySubject, Subject

_GOAL = Field((3,), torch.float32)
_GOAL_FIELDS = {
    "obs.observation": Field((10,), torch.float32),
    "obs.achieved_goal": _GOAL,
    "obs.desired_goal": _GOAL,
    "action": Field((4,), torch.float32),
}
_EPISODE = 50
_STACKS = FRAME_DTYPES.items()
_RATIO_BATCH = 256


class SteppedSubject(ReplaySubject):
    """This package's buffer, fed as a loop over one environment feeds it."""

    def inputs(self, rows: Rows) -> Any:
        """See Subject: what fills it comes as it is."""
        return as_stepped(rows) if len(rows["reward"]) == 1 else rows


class Stepped(Subject):
    """Another library's buffer, fed in the same way, but with its flags in an array, which some need."""

    def __init__(self, peer: Subject) -> None:
        self._peer = peer
        self.add_size, self.chunk, self.has_next_obs = peer.add_size, peer.chunk, peer.has_next_obs

    def inputs(self, rows: Rows) -> Any:
        """See Subject."""
        return self._peer.inputs({**rows, "reward": rows["reward"].astype(np.float64)})

    def add(self, rows: Any) -> object:
        """See Subject."""
        return self._peer.add(rows)

    def sample(self, batch: int) -> Any:
        """See Subject."""
        return self._peer.sample(batch)

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """See Subject."""
        return self._peer.update(sampled, priorities)

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """See Subject."""
        return self._peer.fields(sampled)


class GoalSubject(ReplaySubject):
    """A buffer of one environment with goals, whose batches are relabelled or not."""

    add_size = 1
    chunk = _RATIO_BATCH

    def __init__(self, capacity: int, relabel: Hindsight | None) -> None:
        self._device = CPU
        self._relabelled = relabel is not None
        self._buffer = TrajectoryReplayBuffer(
            capacity, 1, _GOAL_FIELDS, sampler=Uniform(), relabel=relabel, device=CPU, seed=0
        )

    def stream(self, count: int, pool: int = POOL) -> Iterator[Any]:
        """See Subject: episodes of 50 steps in which nothing is reached."""
        random = np.random.default_rng(1)
        steps = []
        for number in range(_EPISODE * 8):
            step: dict[str, Any] = {
                name: random.standard_normal((1, *field.shape), dtype=np.float32)
                for name, field in _GOAL_FIELDS.items()
            }
            step |= {"reward": np.zeros(1, np.float32), "terminated": np.zeros(1, bool)}
            steps.append({**step, "truncated": np.array([number % _EPISODE == _EPISODE - 1])})
        return cycle(steps)

    def wrong(self) -> list[str]:
        """See Subject."""
        batch = self.sample(_RATIO_BATCH)
        moved = bool((batch["obs.desired_goal"] == batch["next_obs.desired_goal"]).all(dim=1).float().mean() > 0.5)
        return [] if moved == self._relabelled else ["goals are not those that were asked for"]


class ThreadsSubject(FrameSubject):
    """Atari frames, gathered on so many threads."""

    def __init__(self, capacity: int, threads: int) -> None:
        super().__init__(capacity, CPU, n_step=1)
        self._threads = threads

    def sample(self, batch: int) -> Any:
        """See Subject."""
        with _on_threads(self._threads):
            return super().sample(batch)


class StackThreadsSubject(ReplaySubject):
    """Stacks of Atari frames as rows of a ReplayBuffer, gathered on so many threads."""

    chunk = _RATIO_BATCH

    def __init__(self, capacity: int, threads: int) -> None:
        self._device = CPU
        self._threads = threads
        fields = {name: Field(shape, torch.from_numpy(np.empty(0, kind)).dtype) for name, (shape, kind) in _STACKS}
        self._buffer = ReplayBuffer(capacity, fields, sampler=Proportional(alpha=ALPHA, beta=BETA), device=CPU, seed=0)

    def stream(self, count: int, pool: int = POOL) -> Iterator[Any]:
        """See Subject: steps of so many environments."""
        steps = StackStream(count)
        while True:
            yield {name: value.numpy() for name, value in steps.step().items()}

    def sample(self, batch: int) -> Any:
        """See Subject."""
        with _on_threads(self._threads):
            return super().sample(batch)

    def wrong(self) -> list[str]:
        """See Subject."""
        return faults(self.sample(_RATIO_BATCH))


@contextmanager
def _on_threads(count: int) -> Iterator[None]:
    """Torch uses so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _reward(achieved: Tensor, desired: Tensor) -> Tensor:
    return -(torch.linalg.vector_norm(achieved - desired, dim=1) > 0.05).float()


@contextmanager
def _without_numba() -> Iterator[None]:
    """Buffers made meanwhile use NumPy alone."""
    chosen = _backend.inner_loops
    _backend.inner_loops = lambda: numpy_loops  # type: ignore[assignment]
    try:
        yield
    finally:
        _backend.inner_loops = chosen


def _plain(capacity: int) -> Subject:
    with _without_numba():
        return ReplaySubject(capacity, CPU)


def makers(operation: str) -> Mapping[str, Maker]:
    """What makes the subjects of a case that compares settings of this package: the first is what others relate to."""
    vectors = partial(ReplaySubject, device=CPU)
    found: dict[str, dict[str, Maker]] = {
        "ratio-rank": {
            "Proportional": vectors,
            "RankBased": partial(vectors, sampler=RankBased(alpha=ALPHA, beta=BETA)),
        },
        "ratio-replacement": {
            "Uniform(replacement=True)": partial(vectors, sampler=Uniform(replacement=True)),
            "Uniform()": partial(vectors, sampler=Uniform()),
        },
        "ratio-loops": {"Numba": vectors, "NumPy": _plain},
        "ratio-hindsight": {
            "plain": partial(GoalSubject, relabel=None),
            "Hindsight": partial(GoalSubject, relabel=Hindsight(reward_fn=_reward)),
        },
        "ratio-threads": {
            "1 thread": partial(ThreadsSubject, threads=1),
            "2 threads": partial(ThreadsSubject, threads=2),
        },
        "ratio-threads-stacks": {
            "1 thread": partial(StackThreadsSubject, threads=1),
            "2 threads": partial(StackThreadsSubject, threads=2),
        },
    }
    return found[operation]


def cases(slots: int, stacks: int, batches: tuple[int, ...]) -> list[Case]:
    """Those of settings."""
    small, fewer = batches[0], [batch for batch in batches if batch != 64]
    return [
        *[Case("ratio-rank", slots, batch, ADDED) for batch in fewer],
        Case("ratio-replacement", slots, 64),
        Case("ratio-loops", slots, small, ADDED),
        Case("ratio-hindsight", slots, _RATIO_BATCH),
        Case("ratio-threads", stacks, _RATIO_BATCH),
        # about as many bytes
        Case("ratio-threads-stacks", stacks // (2 * STACK), _RATIO_BATCH),
    ]
