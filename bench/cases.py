"""The registry of cases: which operation, at which sizes, on which inputs, and the bytes that it must move.

Every measured call starts from a full ring whose priorities are already spread, and takes its inputs from a pool made
beforehand, so that making them is not measured and no two consecutive calls see the same values.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle, repeat
from typing import Any, TypeVar

import numpy as np
import torch

from .rows import ROW_BYTES, described, make_priorities
from .stacks import FIELDS, FRAME_BYTES, STACK
from .subjects import POOL, Subject
from .timing import Call

OURS = "gpu_replay"
CAPACITIES = (10_000, 100_000, 1_000_000)
BATCHES = (32, 256, 4096)
ADDED = 8
FRAME_ENVS = 8

# bytes a transition takes besides its fields, read or written once per call that touches it
KEY, MASS, PRIORITY, PROBABILITY, WEIGHT = 8, 8, 4, 4, 4
# bytes that must move for a transition that is added, drawn, sampled with its fields, or updated
ADD = 2 * ROW_BYTES + MASS + KEY
DRAW = MASS + KEY
SAMPLE = 2 * ROW_BYTES + DRAW + PROBABILITY + WEIGHT
UPDATE = KEY + PRIORITY + 2 * MASS
FRAMES = 2 * 2 * STACK * FRAME_BYTES


@dataclass(frozen=True)
class Operation:
    """What a call does, and the bytes that it must move.

    slot, added, drawn: bytes read and written together, for each slot of the ring, each row added and each transition
                        of the batch.
    fields:             of one stored row: name to [dtype, shape].
    """

    about: str
    slot: int = field(default=0, kw_only=True)
    added: int = field(default=0, kw_only=True)
    drawn: int = field(default=0, kw_only=True)
    fields: Mapping[str, list[Any]] = field(default_factory=described, kw_only=True)


@dataclass(frozen=True)
class Case:
    """One cell of a table.

    capacity, batch: 0 where the operation depends on none; for additions the batch is what is added.
    added:           rows that the call adds.
    """

    operation: str
    capacity: int
    batch: int
    added: int = 0

    @property
    def name(self) -> str:
        """What `--only` is matched with: "cycle/N=1M/B=256", "prefix-sum/N=1M"."""
        sizes = [f"N={short(self.capacity)}"] * bool(self.capacity) + [f"B={self.batch}"] * bool(self.batch)
        return "/".join([self.operation, *sizes])

    @property
    def kind(self) -> Operation:
        """The operation itself."""
        return OPERATIONS[self.operation]

    @property
    def bytes(self) -> int:
        """Bytes that must move, read and written together, whatever the implementation."""
        kind = self.kind
        return self.capacity * kind.slot + self.added * kind.added + self.batch * kind.drawn


Bound = tuple[Call, Call]
Chosen = TypeVar("Chosen", bound=Case)


def short(count: int) -> str:
    """10000 as "10k", 1000000 as "1M", others as they are."""
    for size, letter in ((10**6, "M"), (10**3, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return str(count)


OPERATIONS: dict[str, Operation] = {
    "add": Operation("store B new transitions", added=ADD),
    "sample": Operation("draw B transitions with all fields, probabilities and weights", drawn=SAMPLE),
    "update": Operation("give B sampled transitions new priorities", drawn=UPDATE),
    "cycle": Operation(f"add {ADDED}, sample B, update B", added=ADD, drawn=SAMPLE + UPDATE),
    "index": Operation("draw B slots and give them new priorities, without fields", drawn=DRAW + UPDATE, fields={}),
    "frames": Operation(
        f"draw B transitions with stacks of {STACK} frames of 84x84 before and after", drawn=FRAMES, fields=FIELDS
    ),
    "frame-add": Operation(f"add one step of {FRAME_ENVS} environments", added=2 * FRAME_BYTES, fields=FIELDS),
    "frame-cycle": Operation(
        f"add a step of {FRAME_ENVS}, sample B, update B", added=2 * FRAME_BYTES, drawn=FRAMES, fields=FIELDS
    ),
    "step-add": Operation("store one step of one environment", added=ADD),
    "step-exact": Operation("store one step whose dtypes are those of the fields", added=ADD),
    "step-cycle": Operation("store one step of one environment, sample B, update B", added=ADD, drawn=SAMPLE + UPDATE),
    "step-uniform": Operation(
        "store one step of one environment, sample B without priorities", added=ADD, drawn=SAMPLE
    ),
    "ratio-rank": Operation(f"add {ADDED}, sample B, update B, by rank or by mass", added=ADD, drawn=SAMPLE + UPDATE),
    "ratio-replacement": Operation("draw B transitions uniformly, with or without replacement", drawn=SAMPLE),
    "ratio-loops": Operation(
        f"add {ADDED}, sample B, update B, with or without Numba", added=ADD, drawn=SAMPLE + UPDATE
    ),
    "ratio-hindsight": Operation("draw B transitions, four fifths of them with other goals"),
    "ratio-threads": Operation(
        f"draw B transitions with stacks of {STACK} frames, on one thread or two", drawn=FRAMES, fields=FIELDS
    ),
    "ratio-threads-stacks": Operation(
        f"draw B transitions stored as stacks of {STACK} frames, on one thread or two", drawn=FRAMES, fields=FIELDS
    ),
    "storage-one": Operation("store transitions one at a time", added=2 * ROW_BYTES + KEY),
    "storage-blocks": Operation("store blocks of B transitions", added=2 * ROW_BYTES + KEY),
    "storage-batches": Operation("read batches of B transitions", drawn=2 * ROW_BYTES),
    "memory": Operation("fill a buffer of N transitions"),
    "checkpoint-save": Operation("save a buffer of N frames", slot=FRAME_BYTES, fields=FIELDS),
    "checkpoint-load": Operation("load a buffer of N frames", slot=FRAME_BYTES, fields=FIELDS),
    "checkpoint-again": Operation("save a buffer of N frames again, 1% of them new", fields=FIELDS),
    "checkpoint-memory": Operation("peak of memory beyond the buffer's", slot=FRAME_BYTES, fields=FIELDS),
}


# operations of another name than their call
_CALLS = {
    "frames": "sample",
    "step-add": "add",
    "step-exact": "add",
    "step-cycle": "cycle",
    "step-uniform": "read",
    "ratio-rank": "cycle",
    "ratio-replacement": "sample",
    "ratio-loops": "cycle",
    "ratio-hindsight": "sample",
    "ratio-threads": "sample",
    "ratio-threads-stacks": "sample",
}


def bind(case: Case, subject: Subject, device: torch.device) -> Bound:
    """The call of a case to measure on a full subject, and what to do before each call."""
    random = np.random.default_rng(1)
    rows = subject.stream(case.added) if case.added else repeat(None)
    priorities = cycle([make_priorities(case.batch, random).to(device) for _ in range(POOL)])
    # inputs of the next call: rows, priorities, what was sampled
    given: list[Any] = [None, None, None]

    def prepare() -> None:
        # a copy is as fresh as the tensor that a learner has just computed
        given[:2] = next(rows), next(priorities).clone()

    def prepare_update() -> None:
        prepare()
        given[2] = subject.sample(case.batch)

    def draw_and_update() -> None:
        subject.update(subject.sample(case.batch), given[1])

    def whole_cycle() -> None:
        subject.add(given[0])
        draw_and_update()

    def add_and_sample() -> None:
        subject.add(given[0])
        subject.sample(case.batch)

    calls: dict[str, Bound] = {
        "add": (lambda: subject.add(given[0]), prepare),
        "sample": (lambda: subject.sample(case.batch), lambda: None),
        "update": (lambda: subject.update(given[2], given[1]), prepare_update),
        "cycle": (whole_cycle, prepare),
        "read": (add_and_sample, prepare),
        "index": (draw_and_update, prepare),
    }
    return calls[_CALLS.get(case.operation, case.operation.removeprefix("frame-"))]


def step_cases(capacities: tuple[int, ...] = CAPACITIES, batches: tuple[int, ...] = BATCHES) -> list[Case]:
    """The buffer's calls at all sizes, those of one capacity together."""
    cases = []
    for capacity in capacities:
        cases += [Case("add", capacity, added, added) for added in (ADDED, 64)]
        for operation in ("sample", "update"):
            cases += [Case(operation, capacity, batch) for batch in batches]
        cases += cycle_cases((capacity,), batches)
    return cases


def index_cases(
    capacities: tuple[int, ...] = (1_000_000, 10_000_000), batches: tuple[int, ...] = BATCHES
) -> list[Case]:
    """The index alone."""
    return [Case("index", capacity, batch) for capacity in capacities for batch in batches]


def cycle_cases(capacities: tuple[int, ...] = CAPACITIES, batches: tuple[int, ...] = BATCHES) -> list[Case]:
    """Full cycles only, as all peers are measured."""
    return [Case("cycle", capacity, batch, ADDED) for capacity in capacities for batch in batches]


def chosen(cases: list[Chosen], pattern: str | None) -> list[Chosen]:
    """The cases whose name contains the pattern or matches it as a glob ("cycle*", "*N=1M*"); all for None.

    Raises ValueError with the names there are when none does.
    """
    if pattern is None:
        return cases
    found = [case for case in cases if pattern in case.name.split("/") or fnmatch.fnmatch(case.name, pattern)]
    found = found or [case for case in cases if pattern in case.name]
    if not found:
        raise ValueError(f"--only {pattern!r} matches no case. There are: {', '.join(case.name for case in cases)}.")
    return found
