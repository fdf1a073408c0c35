"""The measurements of `bench peers`: what is compared, at which sizes, and who takes part in each.

The parts are filled, checked and measured one after the other, so that at most one buffer of each library is in
memory. Most people start with one environment: its steps have a float64 reward and a Python bool, whatever the fields
are. Settings of this package are compared in the same interleaved way (`ratio-*`): sampling by rank and by mass,
uniform sampling with and without replacement, relabelled and plain batches, steps and transitions, two threads and one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_replay import Hindsight, Proportional, RankBased, Uniform

from . import subjects
from .measure import Maker, Part, compared
from .operations import ADDED, FRAME_SLOTS, OURS, Case, cycle_cases
from .peers import PEERS, make_peer
from .subjects import ALPHA, BETA, CHECKED, Subject, Task

STEP_BATCH = 64


class Sizes(NamedTuple):
    """How large the buffers are.

    many:    rows of an add measured alone, for which new buffers are made.
    stepped: transitions of the loop over one environment.
    slots:   transitions of the compared settings.
    """

    vectors: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    stacks: int = FRAME_SLOTS
    batches: tuple[int, ...] = (32, 256, 4096)
    many: tuple[int, ...] = (64,)
    stepped: int = 100_000
    slots: int = 1_000_000


# most of a trial's time goes into compiling, again for every size
QUICK = Sizes((4_000,), 1_000, (32,), many=(), stepped=4_000, slots=4_000)


def parts(sizes: Sizes, names: Sequence[str], device: torch.device) -> list[Part]:
    """All that is compared on a device: this package first, then those of the libraries that take part."""
    largest, stacks, one = sizes.vectors[-1], sizes.stacks, sizes.stepped
    vectors: Maker = partial(subjects.replay, device=device)
    stepped = partial(subjects.replay, device=device, stepped=True)

    def beside(cases: list[Case], ours: Maker, peers: Sequence[str] = names, **task: Any) -> Part:
        def made(name: str, capacity: int) -> Subject:
            return make_peer(name, Task(capacity, device=device, **task))

        return cases, compared({OURS: ours, **{name: partial(made, name) for name in peers}})

    def framed(cases: list[Case], added: int) -> Part:
        return beside(cases, partial(subjects.frames, device=device, n_step=1, envs=added), added=added, stacks=True)

    found = [
        beside(cycle_cases(sizes.vectors, sizes.batches), vectors, added=ADDED),
        framed([Case("frame-cycle", stacks, batch, ADDED) for batch in sizes.batches], ADDED),
    ]
    for many in sizes.many:
        found.append(beside([Case("add", largest, many, many)], vectors, added=many))
        found.append(framed([Case("frame-add", stacks, many, many)], many))
    if device.type != "cpu":
        # trees on a GPU differ most in how they take new priorities
        return [*found, beside([Case("update", largest, batch) for batch in sizes.batches], vectors, added=ADDED)]
    uniform = [name for name in names if PEERS[name].uniform]
    without = partial(stepped, sampler=Uniform())
    return [
        *found,
        beside([Case("step-add", one, 1, 1), Case("step-cycle", one, STEP_BATCH, 1)], stepped, added=1, stepped=True),
        beside([Case("step-exact", one, 1, 1)], vectors, added=1),
        beside([Case("step-uniform", one, STEP_BATCH, 1)], without, uniform, added=1, stepped=True),
        *[(cases, compared(makers)) for cases, makers in _settings(sizes)],
    ]


def _reward(achieved: Tensor, desired: Tensor) -> Tensor:
    return -(torch.linalg.vector_norm(achieved - desired, dim=1) > 0.05).float()


def _settings(sizes: Sizes) -> list[tuple[list[Case], dict[str, Maker]]]:
    """Comparisons of settings of this package; the first maker of each is the reference of the ratios."""
    slots = sizes.slots

    def sampled(**samplers: Any) -> dict[str, Maker]:
        return {name: partial(subjects.replay, sampler=sampler) for name, sampler in samplers.items()}

    def on_threads(threads: int) -> Maker:
        return lambda capacity: subjects.on_threads(subjects.frames(capacity, n_step=1), threads)

    def steps(envs: int) -> dict[str, Maker]:
        stored = partial(subjects.replay, stepped=True)
        return {"ReplayBuffer": stored, "TrajectoryReplayBuffer": partial(subjects.steps, envs=envs)}

    masses, ranks = Proportional(alpha=ALPHA, beta=BETA), RankBased(alpha=ALPHA, beta=BETA)
    uniform = sampled(**{"Uniform(replacement=True)": Uniform(replacement=True), "Uniform()": Uniform()})
    goals = {"plain": None, "Hindsight": Hindsight(reward_fn=_reward)}
    relabelled: dict[str, Maker] = {name: partial(subjects.goals, relabel=each) for name, each in goals.items()}
    return [
        *[([Case("ratio-steps", sizes.stepped, envs, envs)], steps(envs)) for envs in (1, ADDED)],
        (
            [Case("ratio-rank", slots, batch, ADDED) for batch in sizes.batches],
            sampled(Proportional=masses, RankBased=ranks),
        ),
        ([Case("ratio-replacement", slots, 64)], uniform),
        ([Case("ratio-hindsight", slots, CHECKED)], relabelled),
        ([Case("ratio-threads", sizes.stacks, CHECKED)], {"1 thread": on_threads(1), "2 threads": on_threads(2)}),
    ]
