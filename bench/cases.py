"""The registry of cases: which operation, at which sizes, on which inputs, and the bytes that it must move.

Every measured call starts from a full ring whose priorities are already spread, and takes its inputs from a pool made
beforehand, so that making them is not measured and no two consecutive calls see the same values.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, repeat
from typing import Any, TypeVar

import numpy as np
import torch

from gpu_replay.console.errors import UserError

from .rows import FIELDS, FRAME_BYTES, ROW_BYTES, STACK, described, make_priorities
from .subjects import POOL, Subject

OURS = "gpu_replay"
CAPACITIES = (10_000, 100_000, 1_000_000)
BATCHES = (32, 256, 4096)
FRAME_BATCHES = (32, 256, 1024)
ADDED = 8
# environments that step together, and steps of them all in a ring
FRAME_ENVS, FRAME_SLOTS = 8, 20_000

# bytes a transition takes besides its fields, read or written once per call that touches it
KEY, MASS, PRIORITY, PROBABILITY, WEIGHT = 8, 8, 4, 4, 4
# bytes that must move to add a transition, to draw its key, to sample it with its fields, and to update it
ADD = 2 * ROW_BYTES + MASS + KEY
DRAWN = MASS + KEY
SAMPLE = 2 * ROW_BYTES + DRAWN + PROBABILITY + WEIGHT
UPDATE = KEY + PRIORITY + 2 * MASS
FRAMES = 2 * 2 * STACK * FRAME_BYTES


@dataclass(frozen=True)
class Operation:
    """The bytes that a call must move, the tests that check its answers, and how it is called.

    tests:              files of tests: "ring" for the file test_ring.py, "ring::test_wrap" for one of its tests.
    call:               name of the call in `bind`, if it is one of those.
    label:              name of its rows in the table of peers.
    slot, added, drawn: bytes read and written together, for each slot of the ring, each row added and each transition
                        of the batch.
    fields:             of one stored row: name to [dtype, shape].
    """

    tests: str
    call: str = ""
    label: str = ""
    slot: int = field(default=0, kw_only=True)
    added: int = field(default=0, kw_only=True)
    drawn: int = field(default=0, kw_only=True)
    fields: Mapping[str, list[Any]] = field(default_factory=described, kw_only=True)


@dataclass(frozen=True)
class Case:
    """One cell of a table.

    capacity, batch: 0 if the operation does not depend on it; for adds `batch` is the number of rows added.
    added:           rows that the call adds.
    """

    operation: str
    capacity: int
    batch: int
    added: int = 0

    @property
    def name(self) -> str:
        """The name that `--only` matches: "cycle/N=1M/B=256", "prefix-sum/N=1M"."""
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


# a call, and what to do before each
Call = Callable[[], object]
Bound = tuple[Call, Call]
Chosen = TypeVar("Chosen", bound=Case)


def short(count: int) -> str:
    """10000 as "10k", 1000000 as "1M", others as they are."""
    for size, letter in ((10**6, "M"), (10**3, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return str(count)


RING, DRAW, UPDATED = "programs buffer_add_inputs", "distributions", "priorities"
STEPS, SAVED = "trajectory_oracle", "checkpoints"
CYCLE = f"{RING} {DRAW} {UPDATED}"
STEP = "one environment: add"
_frames = partial(Operation, fields=FIELDS)
_saved = partial(Operation, SAVED, fields=FIELDS)

OPERATIONS: dict[str, Operation] = {
    # add 8 rows, or a step of 8 environments, sample B, update B
    "cycle": Operation(CYCLE, "cycle", "cycle", added=ADD, drawn=SAMPLE + UPDATE),
    "frame-cycle": _frames(f"{STEPS} {UPDATED}", "cycle", "cycle, Atari", added=2 * FRAME_BYTES, drawn=FRAMES),
    "add": Operation(RING, "add", "add", added=ADD),
    "frame-add": _frames(STEPS, "add", "add, Atari", added=2 * FRAME_BYTES),
    "update": Operation(UPDATED, "update", "update", drawn=UPDATE),
    # store one step of one environment; "exact" in the dtypes of the fields, "uniform" without priorities
    "step-add": Operation(RING, "add", STEP, added=ADD),
    "step-exact": Operation(RING, "add", f"{STEP}, exact dtypes", added=ADD),
    "step-cycle": Operation(CYCLE, "cycle", f"{STEP}, sample, update", added=ADD, drawn=SAMPLE + UPDATE),
    "step-uniform": Operation(f"{RING} {DRAW}", "read", f"{STEP}, sample, no priorities", added=ADD, drawn=SAMPLE),
    "sample": Operation(DRAW, "sample", drawn=SAMPLE),
    # stacks of four frames of 84x84 before and after
    "frames": _frames(STEPS, "sample", drawn=FRAMES),
    # settings of this package beside each other: by rank or by mass, with or without replacement, with other goals or
    # not, steps as such or as transitions, on one thread or two
    "ratio-rank": Operation(DRAW, "cycle", added=ADD, drawn=SAMPLE + UPDATE),
    "ratio-replacement": Operation(DRAW, "sample", drawn=SAMPLE),
    "ratio-hindsight": Operation("hindsight", "sample"),
    "ratio-steps": Operation(RING, "add", added=ADD),
    "ratio-threads": _frames(f"{STEPS} gather_threads", "sample", drawn=FRAMES),
    "storage-one": Operation("bench_storage", added=2 * ROW_BYTES + KEY),
    "storage-blocks": Operation("bench_storage", added=2 * ROW_BYTES + KEY),
    "storage-batches": Operation("bench_storage", drawn=2 * ROW_BYTES),
    "memory": Operation("memory::test_nbytes_holds_the_payload_and_little_more"),
    "checkpoint-save": _saved(slot=FRAME_BYTES),
    "checkpoint-load": _saved(slot=FRAME_BYTES),
    # 1% of the frames are new
    "checkpoint-again": _saved(),
    "checkpoint-memory": _saved(slot=FRAME_BYTES),
}


def bind(case: Case, subject: Subject, device: torch.device) -> Bound:
    """The call of a case to measure on a full subject, and what to do before each call."""
    random = np.random.default_rng(1)
    rows = subject.stream(case.added, POOL) if case.added else repeat(None)
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
    }
    return calls[case.kind.call]


def step_cases(capacities: tuple[int, ...] = CAPACITIES, batches: tuple[int, ...] = BATCHES) -> list[Case]:
    """The buffer's calls at all sizes, those of one capacity together."""
    cases = []
    for capacity in capacities:
        cases += [Case("add", capacity, added, added) for added in (ADDED, 64)]
        for operation in ("sample", "update"):
            cases += [Case(operation, capacity, batch) for batch in batches]
        cases += cycle_cases((capacity,), batches)
    return cases


def gather_cases(capacity: int = FRAME_SLOTS, batches: tuple[int, ...] = FRAME_BATCHES) -> list[Case]:
    """Sampling frames, which a plain copy does too."""
    return [Case("frames", capacity, batch) for batch in batches]


def stream_cases(
    capacity: int = FRAME_SLOTS, batches: tuple[int, ...] = FRAME_BATCHES, envs: int = FRAME_ENVS
) -> list[Case]:
    """Adding a step of frames, and whole cycles."""
    cycles = [Case("frame-cycle", capacity, batch, envs) for batch in batches]
    return [Case("frame-add", capacity, envs, envs), *cycles]


def cycle_cases(capacities: tuple[int, ...] = CAPACITIES, batches: tuple[int, ...] = BATCHES) -> list[Case]:
    """Full cycles only, as all peers are measured."""
    return [Case("cycle", capacity, batch, ADDED) for capacity in capacities for batch in batches]


def chosen(cases: list[Chosen], pattern: str | None) -> list[Chosen]:
    """The cases whose name contains the pattern or matches it as a glob ("cycle*", "*N=1M*"); all for None.

    Raises UserError with the names there are when none does.
    """
    if pattern is None:
        return cases
    found = [case for case in cases if pattern in case.name.split("/") or fnmatch.fnmatch(case.name, pattern)]
    found = found or [case for case in cases if pattern in case.name]
    if not found:
        raise UserError(f"--only {pattern!r} matches no case. There are: {', '.join(case.name for case in cases)}.")
    return found
