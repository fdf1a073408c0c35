"""The measurements of `bench peers`: what is compared, at which sizes, and who takes part in each.

The parts are filled, checked and measured one after the other, so that at most one buffer of each library is in
memory. Most people start with one environment: its steps have a float64 reward and a Python bool, whatever the fields
are. Settings of this package are compared in the same interleaved way (`ratio-*`): sampling by rank and by mass,
uniform sampling with and without replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from gpu_replay import Proportional, RankBased, Uniform

from . import subjects
from .measure import Maker, Part, Run
from .operations import ADDED, FRAME_SLOTS, OURS, Case, cycle_cases
from .peers import PEERS, make_peer
from .subjects import ALPHA, BETA, Subject, Task

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

        return cases, partial(Run.records, makers={OURS: ours, **{name: partial(made, name) for name in peers}})

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
    # settings of this package; the first of each is the reference of the ratios
    samplers = (Proportional(alpha=ALPHA, beta=BETA), RankBased(alpha=ALPHA, beta=BETA))
    ranks = {type(each).__name__: partial(subjects.replay, sampler=each) for each in samplers}
    ranked = [Case("ratio-rank", sizes.slots, batch, ADDED) for batch in sizes.batches]
    draws = {str(each): partial(subjects.replay, sampler=each) for each in (Uniform(replacement=True), Uniform())}
    return [
        *found,
        beside([Case("step-add", one, 1, 1), Case("step-cycle", one, STEP_BATCH, 1)], stepped, added=1, stepped=True),
        beside([Case("step-exact", one, 1, 1)], vectors, added=1),
        beside([Case("step-uniform", one, STEP_BATCH, 1)], without, uniform, added=1, stepped=True),
        (ranked, partial(Run.records, makers=ranks)),
        ([Case("ratio-replacement", sizes.slots, 64)], partial(Run.records, makers=draws)),
    ]
