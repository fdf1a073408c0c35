"""The registry of operations, and the cases that suites make of them: at which sizes, and the bytes that must move.

An operation is a call of a buffer (`call`), or one below the buffers with the torch operations that do the same
(`ours`, `baselines`). To add one, add an entry to `OPERATIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch

from gpu_replay.console.errors import UserError

from . import baselines, ours
from .baselines import Maker
from .kernel_checks import draw_updates, draws, updates
from .subjects import FIELDS, FRAME_BYTES, ROW_BYTES, STACK, WIDE, described, dtypes_of, row_bytes

OURS = "gpu_replay"
CAPACITIES = (10_000, 100_000, 1_000_000)
BATCHES = (32, 256, 4096)
ADDED = 8
# steps in a ring of frames
FRAME_SLOTS = 20_000
# rings of rows and of frames that kernels gather from: on a GPU as many frames as Atari agents keep
KERNEL_ROWS, KERNEL_FRAMES = 10**6, {"cuda": 10**6, "cpu": 10**5}

# bytes that must move, read and written together, to add a transition, to draw its key, to sample it and to update it:
# beside its fields a key and a mass of 8 bytes, a priority, a probability and a weight of 4
ADD, DRAWN, UPDATE = 2 * ROW_BYTES + 16, 16, 8 + 4 + 2 * 8
SAMPLE = 2 * ROW_BYTES + DRAWN + 8
CYCLE: dict[str, Any] = {"call": "cycle", "added": ADD, "drawn": SAMPLE + UPDATE}
# two stacks, read and written; one frame, read and written
STACKS, FRAME = 2 * 2 * STACK * FRAME_BYTES, 2 * FRAME_BYTES

# a transition of a humanoid, with what only its critic sees
HUMANOID: dict[str, list[Any]] = {"actor": ["float32", [99]], "critic": ["float32", [120]], "action": ["float32", [29]]}
# two observations of each kind, an action and a reward
HUMANOID_BYTES = 4 * (2 * 99 + 2 * 120 + 29 + 1)


@dataclass(frozen=True)
class Operation:
    """What a call does, and the bytes that it must move.

    about:              a description, or the name of its rows in the table of peers, with a place for the rows added.
    call:               name of the call in `measure.bind`, if it is one of those.
    slot, added, drawn: bytes read and written together, for each slot of the ring, each row added and each transition
                        of the batch.
    fields:             of one stored row: name to [dtype, shape].
    ours, baselines:    makers of the implementations of an operation below the buffers: this package's, others by name.
    memory:             upper bound on the bytes per slot of all of them together, beside the fields.
    cold:               whether caches are flushed before each call, for memory-bound operations.
    dtype:              dtype of gathered frames, None if there are none.
    """

    about: str = ""
    call: str = ""
    slot: int = 0
    added: int = 0
    drawn: int = 0
    fields: Mapping[str, list[Any]] = field(default_factory=described)
    ours: Maker | None = None
    baselines: Mapping[str, Maker] = field(default_factory=dict)
    memory: int = 120
    cold: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Case:
    """One cell of a table.

    capacity, batch: 0 if the operation does not depend on it; for adds `batch` is the number of rows added.
    added:           rows that the call adds.
    width:           float32 numbers of an observation, where they are not four.
    name:            what `--only` matches: "cycle/N=1M/B=256", "prefix-sum/N=1M".
    kind:            the operation itself.
    bytes:           that must move, read and written together, whatever the implementation.
    """

    operation: str
    capacity: int
    batch: int
    added: int = 0
    width: int = 0
    name: str = field(init=False)
    kind: Operation = field(init=False, repr=False, compare=False)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        kind = OPERATIONS[self.operation]
        sizes = {"N": short(self.capacity), "B": str(self.batch), "W": str(self.width)}
        name = "/".join([self.operation, *(f"{letter}={size}" for letter, size in sizes.items() if size != "0")])
        moved = self.capacity * kind.slot + self.added * kind.added + self.batch * kind.drawn
        # the way to give a frozen dataclass what follows from its other fields
        for field_name, value in (("name", name), ("kind", kind), ("bytes", moved)):
            object.__setattr__(self, field_name, value)


def short(count: int) -> str:
    """10000 as "10k", 1000000 as "1M", others as they are."""
    for size, letter in ((10**6, "M"), (10**3, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return str(count)


def _below(about: str, mine: Maker, others: Mapping[str, Maker], **of: Any) -> Operation:
    # without rows, if `of` gives no fields
    return Operation(about, ours=mine, baselines=others, **{"fields": {}, **of})


def _frame_gather(dtype: torch.dtype) -> Operation:
    # stacks are read as bytes and written as this type
    cast, select = " + cast" if dtype.itemsize > 1 else "", baselines.index_select_frames
    others: dict[str, Maker] = {
        f"index_select{cast}": select,
        f"index_select of words{cast}": partial(select, dtype=torch.int64),
    }
    about = f"stacks of {STACK} frames of 84x84 before and after, at given slots, as {dtype}"
    moved: dict[str, Any] = {"drawn": 8 + STACKS // 2 * (1 + dtype.itemsize), "dtype": dtype}
    return _below(about, ours.frame_gather, others, fields=FIELDS, cold=True, **moved)


_STEP = "one environment: add"
_frames = partial(Operation, fields=FIELDS)
_draws, _updates, _both = (partial(each, make=ours.Index) for each in (draws, updates, draw_updates))

# the operations below the buffers, in the order of their table
KERNELS: dict[str, Operation] = {
    "empty": _below("nothing: an empty kernel, on a CPU one NumPy call on one number", ours.empty, baselines.EMPTY),
    "prefix-sum": _below("inclusive prefix sums of N int64", ours.prefix_sum, baselines.SCANS, slot=16, cold=True),
    # the masses once; what is written is internal to a structure
    "tree-build": _below(
        "the sums that draws need, from N masses", ours.tree_build, baselines.TREES, slot=8, cold=True
    ),
    "draw": _below("B slots by mass, stratified, after any change", _draws, baselines.DRAWS, drawn=DRAWN),
    "update": Operation("update", "update", drawn=UPDATE, ours=_updates, baselines=baselines.UPDATES),
    "draw-update": _below(
        "B slots by mass, then new masses for them", _both, baselines.DRAW_UPDATES, drawn=DRAWN + UPDATE
    ),
    "rank-draw": _below(
        "B slots by rank, stratified, after B priorities have changed",
        ours.rank_draw,
        baselines.RANKS,
        memory=200,
        drawn=DRAWN,
    ),
    "row-gather": Operation(
        f"rows of five small fields, {ROW_BYTES} bytes, at given slots",
        ours=ours.row_gather,
        baselines=baselines.ROWS,
        drawn=8 + 2 * ROW_BYTES,
        cold=True,
    ),
    "frame-gather": _frame_gather(torch.uint8),
    "frame-gather-bf16": _frame_gather(torch.bfloat16),
}

OPERATIONS: dict[str, Operation] = {
    # add 8 rows, or a step of 8 environments, sample B, update B
    "cycle": Operation("cycle", **CYCLE),
    # the same without priorities and their updates
    "uniform-cycle": Operation("add, sample, no priorities", "read", added=ADD, drawn=SAMPLE),
    "frame-cycle": _frames("cycle, Atari", "cycle", added=FRAME, drawn=STACKS),
    # the same with a step of thousands of environments
    "many-cycle": Operation("cycle, {:,} added", **CYCLE),
    "many-frame-cycle": _frames("cycle, Atari, {:,} added", "cycle", added=FRAME, drawn=STACKS),
    "add": Operation("add", "add", added=ADD),
    "frame-add": _frames("add, Atari", "add", added=FRAME),
    "update": KERNELS["update"],
    # store one step of one environment; "exact" in the dtypes of the fields, "uniform" without priorities
    "step-add": Operation(_STEP, "add", added=ADD),
    "step-exact": Operation(f"{_STEP}, exact dtypes", "add", added=ADD),
    "step-cycle": Operation(f"{_STEP}, sample, update", **CYCLE),
    "step-uniform": Operation(f"{_STEP}, sample, no priorities", "read", added=ADD, drawn=SAMPLE),
    "sample": Operation(call="sample", drawn=SAMPLE),
    # rows of 3.7 kB, without priorities
    "wide-sample": Operation(
        call="sample", drawn=2 * row_bytes(dtypes_of(WIDE)) + 8, fields=described(dtypes_of(WIDE))
    ),
    # stacks of four frames of 84x84 before and after
    "frames": _frames(call="sample", drawn=STACKS),
    # settings of this package beside each other: by rank or by mass, with or without replacement
    "ratio-rank": Operation(**CYCLE),
    "ratio-replacement": Operation(call="sample", drawn=SAMPLE),
    "storage-one": Operation(call="add", added=2 * ROW_BYTES + 8),
    "storage-blocks": Operation(call="add", added=2 * ROW_BYTES + 8),
    "storage-batches": Operation(call="sample", drawn=2 * ROW_BYTES),
    # many environments: a step of all is added, rows of n-step windows are sampled
    "field/add": Operation(call="add", added=2 * HUMANOID_BYTES, fields=HUMANOID),
    "field/bytes": Operation(fields=HUMANOID),
    # 12 batches, of windows of 3 steps
    "field/loop": Operation(call="read", added=2 * HUMANOID_BYTES, drawn=12 * 2 * HUMANOID_BYTES, fields=HUMANOID),
    **{
        f"field/sample, n = {n}": Operation(call="sample", drawn=2 * HUMANOID_BYTES, fields=HUMANOID) for n in (1, 3, 8)
    },
    # over the bytes of a row's fields
    "bytes": Operation(),
    "sharded": Operation(),
    # several calls, each by itself
    "host": Operation(),
    "checkpoint-save": _frames(slot=FRAME_BYTES),
    "checkpoint-load": _frames(slot=FRAME_BYTES),
    # 1% of the frames are new
    "checkpoint-again": _frames(),
    **KERNELS,
}


def step_cases(capacities: Sequence[int] = CAPACITIES, batches: Sequence[int] = BATCHES) -> list[Case]:
    """The buffer's calls at all sizes, those of one capacity together."""
    cases = []
    for capacity in capacities:
        cases += [Case("add", capacity, added, added) for added in (ADDED, 64)]
        cases += [Case(operation, capacity, batch) for operation in ("sample", "update") for batch in batches]
        cases += cycle_cases((capacity,), batches)
    return cases


def cycle_cases(capacities: Sequence[int] = CAPACITIES, batches: Sequence[int] = BATCHES) -> list[Case]:
    """Full cycles only, as all peers are measured."""
    return [Case("cycle", capacity, batch, ADDED) for capacity in capacities for batch in batches]


def chosen(cases: Sequence[Case], pattern: str | None, skipped: Sequence[str] = ()) -> list[Case]:
    """The cases whose name contains the pattern or matches it as a glob ("cycle*", "*N=1M*"), without those skipped.

    Raises UserError with the names there are when none matches.
    """
    found = list(cases) if pattern is None else _matching(cases, pattern)
    if not found:
        names = ", ".join(case.name for case in cases)
        raise UserError(f"--only {pattern!r} matches no case. There are: {names}.")
    left_out = {case.name for each in skipped for case in _matching(found, each)}
    return [case for case in found if case.name not in left_out]


def _matching(cases: Sequence[Case], pattern: str) -> list[Case]:
    """Cases with the pattern between slashes, or as a glob of the name; if there are none, those that contain it."""
    exact = [case for case in cases if pattern in case.name.split("/") or fnmatch(case.name, pattern)]
    return exact or [case for case in cases if pattern in case.name]
