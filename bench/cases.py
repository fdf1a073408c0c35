"""The registry of cases: which operation, at which sizes, on which inputs, and the bytes that it must move.

Every measured call starts from a full ring whose priorities are already spread, and gets inputs from a pool made
beforehand, so that making them is not measured and no two calls in a row see the same values.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from .rows import ROW_BYTES, described, make_priorities, make_rows
from .subjects import Subject
from .timing import Call

CAPACITIES = (10_000, 100_000, 1_000_000)
BATCHES = (32, 256, 4096)
ADDED = 8
POOL = 64

# bytes a transition takes besides its fields, read or written once per call that touches it
KEY, MASS, PRIORITY, PROBABILITY, WEIGHT = 8, 8, 4, 4, 4


class Named(Protocol):
    """Something that a pattern can choose."""

    @property
    def name(self) -> str:
        """Parts with slashes between them."""


Chosen = TypeVar("Chosen", bound=Named)


@dataclass(frozen=True)
class Case:
    """One cell of a table.

    batch: transitions of the call; the rows added for the operation "add".
    added: rows that the call adds.
    """

    operation: str
    capacity: int
    batch: int
    added: int

    @property
    def name(self) -> str:
        """What `--only` looks at: "cycle/N=1M/B=256"."""
        return f"{self.operation}/N={short(self.capacity)}/B={self.batch}"

    @property
    def bytes(self) -> int:
        """Bytes that must move, read and written together, whatever the implementation."""
        return OPERATIONS[self.operation].bytes(self.batch, self.added)

    @property
    def fields(self) -> Mapping[str, list[Any]]:
        """What one stored row holds: name to [dtype, shape]."""
        return OPERATIONS[self.operation].fields

    def bind(self, subject: Subject, device: torch.device) -> tuple[Call, Call]:
        """The call to measure on a full subject, and what to do before each call."""
        return OPERATIONS[self.operation].bind(self, subject, device)


@dataclass(frozen=True)
class Kind:
    """An operation: what it is, what it must move, how it is called.

    bytes:  from batch size and rows added.
    fields: what one stored row holds: name to [dtype, shape].
    """

    about: str
    bytes: Callable[[int, int], int]
    bind: Callable[[Case, Subject, torch.device], tuple[Call, Call]]
    fields: Mapping[str, list[Any]] = field(default_factory=described)


def short(count: int) -> str:
    """10000 as "10k", 1000000 as "1M", others as they are."""
    for size, letter in ((10**6, "M"), (10**3, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return str(count)


def _add_bytes(batch: int, added: int) -> int:
    return added * (2 * ROW_BYTES + MASS + KEY)


def _sample_bytes(batch: int, added: int) -> int:
    return batch * (2 * ROW_BYTES + MASS + KEY + PROBABILITY + WEIGHT)


def _update_bytes(batch: int, added: int) -> int:
    return batch * (KEY + PRIORITY + 2 * MASS)


def _cycle_bytes(batch: int, added: int) -> int:
    return _add_bytes(batch, added) + _sample_bytes(batch, added) + _update_bytes(batch, added)


def _index_bytes(batch: int, added: int) -> int:
    return batch * (MASS + KEY) + _update_bytes(batch, added)


class _Pool:
    """Inputs in turn: `rows` and `priorities` are those of the call to come."""

    def __init__(self, case: Case, subject: Subject, device: torch.device) -> None:
        random = np.random.default_rng(1)
        self._rows = cycle([subject.inputs(make_rows(case.added, random)) for _ in range(POOL)] if case.added else [{}])
        self._priorities = cycle([make_priorities(case.batch, random).to(device) for _ in range(POOL)])
        self.rows: Any = None
        self.priorities = torch.empty(0)

    def turn(self) -> None:
        # a copy is as fresh as the tensor a learner has just computed
        self.rows = next(self._rows)
        self.priorities = next(self._priorities).clone()


def _bind_add(case: Case, subject: Subject, device: torch.device) -> tuple[Call, Call]:
    pool = _Pool(case, subject, device)
    return lambda: subject.add(pool.rows), pool.turn


def _bind_sample(case: Case, subject: Subject, device: torch.device) -> tuple[Call, Call]:
    return lambda: subject.sample(case.batch), lambda: None


def _bind_update(case: Case, subject: Subject, device: torch.device) -> tuple[Call, Call]:
    pool = _Pool(case, subject, device)
    sampled: list[Any] = [None]

    def prepare() -> None:
        pool.turn()
        sampled[0] = subject.sample(case.batch)

    return lambda: subject.update(sampled[0], pool.priorities), prepare


def _bind_cycle(case: Case, subject: Subject, device: torch.device) -> tuple[Call, Call]:
    pool = _Pool(case, subject, device)

    def call() -> None:
        subject.add(pool.rows)
        subject.update(subject.sample(case.batch), pool.priorities)

    return call, pool.turn


def _bind_index(case: Case, subject: Subject, device: torch.device) -> tuple[Call, Call]:
    pool = _Pool(case, subject, device)
    return lambda: subject.update(subject.sample(case.batch), pool.priorities), pool.turn


OPERATIONS: dict[str, Kind] = {
    "add": Kind("store B new transitions", _add_bytes, _bind_add),
    "sample": Kind("draw B transitions with all fields, probabilities and weights", _sample_bytes, _bind_sample),
    "update": Kind("give B sampled transitions new priorities", _update_bytes, _bind_update),
    "cycle": Kind(f"add {ADDED}, sample B, update B", _cycle_bytes, _bind_cycle),
    "index": Kind("draw B slots and give them new priorities, without fields", _index_bytes, _bind_index, {}),
}


def step_cases(capacities: tuple[int, ...] = CAPACITIES, batches: tuple[int, ...] = BATCHES) -> list[Case]:
    """The buffer's calls at all sizes, those of one capacity together."""
    cases = []
    for capacity in capacities:
        cases += [Case("add", capacity, added, added) for added in (ADDED, 64)]
        for operation in ("sample", "update"):
            cases += [Case(operation, capacity, batch, 0) for batch in batches]
        cases += [Case("cycle", capacity, batch, ADDED) for batch in batches]
    return cases


def index_cases(
    capacities: tuple[int, ...] = (1_000_000, 10_000_000), batches: tuple[int, ...] = BATCHES
) -> list[Case]:
    """The index alone."""
    return [Case("index", capacity, batch, 0) for capacity in capacities for batch in batches]


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
