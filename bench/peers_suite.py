"""The measurements of `bench peers`: what is compared, at which sizes, and which libraries take part in each.

The parts are filled, checked and measured one after the other, so that at most one buffer of each library is in
memory. Most people start with one environment: its steps have a float64 reward and a Python bool, whatever the fields
are. Settings of this package are compared in the same interleaved way (`ratio-*`): sampling by rank and by mass,
uniform sampling with and without replacement, relabelled and plain batches, steps and transitions, two threads and one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field, Hindsight, Proportional, RankBased, TrajectoryReplayBuffer, Uniform

from . import frames
from .cases import ADDED, OURS, Case, cycle_cases
from .environment import CannotMeasure
from .frames import FrameSubject
from .rows import Rows, buffer_fields
from .runner import Maker, Part, compared
from .subjects import ALPHA, BETA, CPU, PEERS, POOL, ReplaySubject, Subject, Task, make_peer

_GOAL = Field((3,), torch.float32)
_GOAL_FIELDS = {
    "obs.observation": Field((10,), torch.float32),
    "obs.achieved_goal": _GOAL,
    "obs.desired_goal": _GOAL,
    "action": Field((4,), torch.float32),
}
_EPISODE = 50
_BATCH = 256


class GoalSubject(ReplaySubject):
    """A buffer of one environment with goals, whose batches are relabelled or not."""

    add_size = 1
    chunk = _BATCH

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
            step: dict[str, Any] = {"reward": np.zeros(1, np.float32), "terminated": np.zeros(1, bool)}
            for name, field in _GOAL_FIELDS.items():
                step[name] = random.standard_normal((1, *field.shape), dtype=np.float32)
            steps.append({**step, "truncated": np.array([number % _EPISODE == _EPISODE - 1])})
        return cycle(steps)

    def wrong(self) -> list[str]:
        """See Subject."""
        batch = self.sample(_BATCH)
        moved = bool((batch["obs.desired_goal"] == batch["next_obs.desired_goal"]).all(dim=1).float().mean() > 0.5)
        return [] if moved == self._relabelled else ["goals are not those that were asked for"]


class StepSubject(ReplaySubject):
    """A buffer of steps that environments return as they do: a float64 reward, flags in arrays."""

    has_next_obs = False

    def __init__(self, capacity: int, envs: int) -> None:
        self._device, self.add_size = CPU, envs
        fields = {name: each for name, each in buffer_fields().items() if name in ("obs", "action")}
        sampler = Proportional(alpha=ALPHA, beta=BETA)
        self._buffer = TrajectoryReplayBuffer(capacity, envs, fields, sampler=sampler, device=CPU, seed=0)

    def inputs(self, rows: Rows) -> Any:
        """See Subject."""
        step = {**rows, "reward": rows["reward"].astype(np.float64), "truncated": np.zeros(len(rows["obs"]), bool)}
        del step["next_obs"]
        return step

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """See Subject."""
        return {**sampled, "terminated": sampled["discount"] == 0}


def _on_threads(kind: type[ReplaySubject], threads: int, **options: Any) -> Maker:
    """Subjects of a kind whose batches are sampled while torch uses so many threads."""

    class OnThreads(kind):  # type: ignore[valid-type,misc]
        def sample(self, batch: int) -> Any:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                return super().sample(batch)
            finally:
                torch.set_num_threads(before)

    return partial(OnThreads, **options)


def _reward(achieved: Tensor, desired: Tensor) -> Tensor:
    return -(torch.linalg.vector_norm(achieved - desired, dim=1) > 0.05).float()


def _vectors(sampler: Proportional | RankBased | Uniform) -> Maker:
    return partial(ReplaySubject, device=CPU, sampler=sampler)


def _settings(
    slots: int, stacks: int, stepped: int, batches: tuple[int, ...]
) -> list[tuple[list[Case], Mapping[str, Maker]]]:
    """One comparison; the first maker is the reference of the ratios."""
    frames: dict[str, Any] = {"device": CPU, "n_step": 1}
    exponents: dict[str, Any] = {"alpha": ALPHA, "beta": BETA}
    ranks: dict[str, Any] = {"Proportional": Proportional(**exponents), "RankBased": RankBased(**exponents)}
    uniform: dict[str, Any] = {"Uniform(replacement=True)": Uniform(replacement=True), "Uniform()": Uniform()}
    relabelled = {"plain": None, "Hindsight": Hindsight(reward_fn=_reward)}
    threads = {"1 thread": 1, "2 threads": 2}
    steps: list[tuple[list[Case], Mapping[str, Maker]]] = [
        (
            [Case("ratio-steps", stepped, envs, envs)],
            {
                "ReplayBuffer": partial(ReplaySubject, device=CPU, stepped=True),
                "TrajectoryReplayBuffer": partial(StepSubject, envs=envs),
            },
        )
        for envs in (1, ADDED)
    ]
    return [
        *steps,
        ([Case("ratio-rank", slots, batch, ADDED) for batch in batches], {n: _vectors(s) for n, s in ranks.items()}),
        ([Case("ratio-replacement", slots, 64)], {n: _vectors(s) for n, s in uniform.items()}),
        ([Case("ratio-hindsight", slots, _BATCH)], {n: partial(GoalSubject, relabel=r) for n, r in relabelled.items()}),
        (
            [Case("ratio-threads", stacks, _BATCH)],
            {name: _on_threads(FrameSubject, count, **frames) for name, count in threads.items()},
        ),
    ]


STEP_BATCH = 64


@dataclass(frozen=True)
class Sizes:
    """How large the buffers are.

    many:     rows of an add measured alone, for which new buffers are made.
    stepped:  transitions of the loop over one environment. variants: of the compared settings.
    """

    vectors: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    stacks: int = frames.CAPACITY
    batches: tuple[int, ...] = (32, 256, 4096)
    many: tuple[int, ...] = (64,)
    stepped: int = 100_000
    variants: int = 1_000_000


# most of a trial's time goes into compiling, again for every size
QUICK = Sizes((4_000,), 1_000, (32,), many=(), stepped=4_000, variants=4_000)


def parts(sizes: Sizes, names: Sequence[str], device: torch.device) -> list[Part]:
    """All that is compared on a device: this package first, then those of the libraries that take part."""
    largest, steps = sizes.vectors[-1], sizes.stacks
    vectors: Maker = partial(ReplaySubject, device=device)
    stepped = partial(ReplaySubject, device=device, stepped=True)

    def beside(cases: list[Case], ours: Maker, peers: Sequence[str] = names, **task: Any) -> Part:
        theirs = {name: partial(_made, name, device=device, **task) for name in peers}
        return cases, compared({OURS: ours, **theirs})

    def stacks(cases: list[Case], added: int) -> Part:
        ours = partial(frames.FrameSubject, device=device, n_step=1, envs=added)
        return beside(cases, ours, added=added, stacks=True)

    found = [
        beside(cycle_cases(sizes.vectors, sizes.batches), vectors, added=ADDED),
        stacks([Case("frame-cycle", steps, batch, ADDED) for batch in sizes.batches], ADDED),
    ]
    for many in sizes.many:
        found.append(beside([Case("add", largest, many, many)], vectors, added=many))
        found.append(stacks([Case("frame-add", steps, many, many)], many))
    if device.type != "cpu":
        # trees on a GPU differ most in how they take new priorities
        return [*found, beside([Case("update", largest, batch) for batch in sizes.batches], vectors, added=ADDED)]
    one, uniform = sizes.stepped, [name for name in names if PEERS[name].uniform]
    return [
        *found,
        beside([Case("step-add", one, 1, 1), Case("step-cycle", one, STEP_BATCH, 1)], stepped, added=1, stepped=True),
        beside([Case("step-exact", one, 1, 1)], vectors, added=1),
        beside(
            [Case("step-uniform", one, STEP_BATCH, 1)],
            partial(stepped, sampler=Uniform()),
            uniform,
            added=1,
            stepped=True,
        ),
        *[(cases, compared(makers)) for cases, makers in _settings(sizes.variants, steps, one, sizes.batches)],
    ]


def _made(name: str, capacity: int, **task: Any) -> Subject:
    return make_peer(name, Task(capacity, **task))


def available(names: Sequence[str], device: torch.device) -> list[str]:
    """Those of the libraries that make a buffer here; the others are reported once, with the reason."""
    found = []
    for name in names:
        try:
            make_peer(name, Task(1_000, ADDED, device=device))
        except CannotMeasure as reason:
            print(reason, file=sys.stderr)
        else:
            found.append(name)
    return found
