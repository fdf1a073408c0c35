"""The measurements of `bench peers`: what is compared, at which sizes, and who takes part in each.

The parts are filled, checked and measured one after the other, so that at most one buffer of each library is in
memory. Most people start with one environment: its steps have a float64 reward and a Python bool, whatever the fields
are. Settings of this package are compared in the same interleaved way (`ratio-*`): sampling by rank and by mass,
uniform sampling with and without replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from gpu_replay import Proportional, RankBased, Uniform

from . import subjects
from .measure import Maker, Part, Run
from .operations import ADDED, FRAME_SLOTS, OURS, Case, cycle_cases
from .peers import PEERS, make_peer
from .subjects import ALPHA, BETA, CPU, Subject, Task

STEP_BATCH = 64


class Sizes(NamedTuple):
    """How large the buffers are.

    small:   batches, beside the others, of cycles in the two largest rings.
    many:    rows of an add measured alone, on a GPU of an add in a cycle, for which new buffers are made.
    stepped: transitions of the loop over one environment.
    slots:   transitions of the compared settings.
    """

    vectors: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    stacks: int = FRAME_SLOTS
    batches: tuple[int, ...] = (32, 256, 4096)
    small: tuple[int, ...] = (1, 8, 64)
    many: tuple[int, ...] = (64,)
    stepped: int = 100_000
    slots: int = 1_000_000


# others store stacks twice, 56 KB, so that a million of them would fill a GPU for one library alone; and as many
# environments as are added at once must have the same number of steps
ON_GPU = Sizes((1_000_000,), 102_400, (256, 4096, 32_768), many=(4096,))
# most of a trial's time goes into compiling, again for every size
QUICK = Sizes((4_000,), 1_000, (32,), small=(), many=(), stepped=4_000, slots=4_000)


def beside(cases: list[Case], ours: Maker, peers: Sequence[str], device: torch.device = CPU, **task: Any) -> Part:
    """Cases of this package and of the libraries that take part."""

    def made(name: str, capacity: int) -> Subject:
        return make_peer(name, Task(capacity, device=device, **task))

    return cases, partial(Run.records, makers={OURS: ours, **{name: partial(made, name) for name in peers}})


def gpu_parts(sizes: Sizes, names: Sequence[str], device: torch.device) -> list[Part]:
    """Cycles that add few rows or many, and updates; calls of this package are also captured."""
    vectors = cache(partial(subjects.replay, device=device))
    found: list[Part] = []
    for stacks, kind, capacity in ((False, "cycle", sizes.vectors[-1]), (True, "frame-cycle", sizes.stacks)):
        for added, name in ((ADDED, kind), *((many, f"many-{kind}") for many in sizes.many)):
            ours = cache(partial(subjects.frames, device=device, n_step=1, envs=added)) if stacks else vectors
            cases = [Case(name, capacity, batch, added) for batch in sizes.batches]
            found.append(beside(cases, ours, names, device, added=added, stacks=stacks))
    # trees on a GPU differ most in how they take new priorities
    updates = [Case("update", sizes.vectors[-1], batch) for batch in sizes.batches]
    with_priorities = [name for name in names if not PEERS[name].uniform]
    return [*found, beside(updates, vectors, with_priorities, device, added=ADDED)]


def parts(sizes: Sizes, names: Sequence[str]) -> list[Part]:
    """All that is compared on a CPU: this package first, then those of the libraries that take part."""
    largest, stacks, one = sizes.vectors[-1], sizes.stacks, sizes.stepped
    all_batches, large = sorted({*sizes.batches, *sizes.small}), sizes.vectors[-2:]
    cycles = [(slots, all_batches if slots in large else sizes.batches) for slots in sizes.vectors]
    vectors: Maker = subjects.replay
    stepped = partial(subjects.replay, stepped=True)

    def framed(cases: list[Case], added: int) -> Part:
        return beside(cases, partial(subjects.frames, n_step=1, envs=added), names, added=added, stacks=True)

    uniform = [name for name in names if PEERS[name].uniform or PEERS[name].both]
    plain = [Case("uniform-cycle", slots, batch, ADDED) for slots in large for batch in all_batches]
    found = [
        beside([case for slots, of in cycles for case in cycle_cases((slots,), of)], vectors, names, added=ADDED),
        beside(plain, partial(subjects.replay, sampler=Uniform()), uniform, added=ADDED, uniform=True),
        framed([Case("frame-cycle", stacks, batch, ADDED) for batch in sizes.batches], ADDED),
    ]
    for many in sizes.many:
        found.append(beside([Case("add", largest, many, many)], vectors, names, added=many))
        found.append(framed([Case("frame-add", stacks, many, many)], many))
    steps = [Case("step-add", one, 1, 1), Case("step-cycle", one, STEP_BATCH, 1)]
    without = partial(stepped, sampler=Uniform())
    # settings of this package; the first of each is the reference of the ratios
    samplers = (Proportional(alpha=ALPHA, beta=BETA), RankBased(alpha=ALPHA, beta=BETA))
    ranks = {type(each).__name__: partial(subjects.replay, sampler=each) for each in samplers}
    ranked = [Case("ratio-rank", sizes.slots, batch, ADDED) for batch in sizes.batches]
    draws = {str(each): partial(subjects.replay, sampler=each) for each in (Uniform(replacement=True), Uniform())}
    return [
        *found,
        beside(steps, stepped, names, added=1, stepped=True),
        beside([Case("step-exact", one, 1, 1)], vectors, names, added=1),
        beside([Case("step-uniform", one, STEP_BATCH, 1)], without, uniform, added=1, stepped=True, uniform=True),
        (ranked, partial(Run.records, makers=ranks)),
        ([Case("ratio-replacement", sizes.slots, 64)], partial(Run.records, makers=draws)),
    ]
