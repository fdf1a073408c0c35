"""Kernel microbenchmarks: operations, sizes, the bytes that must move, implementations, and the measurement.

This package and the torch operations that a user would write (`baselines.py`) do every operation on the same inputs.
To add an operation, add an entry to `KERNELS`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from gpu_replay.console.progress import Progress
from gpu_replay.engines.storage import free_bytes

from . import baselines, ours
from .cases import (
    DRAW,
    DRAWN,
    FRAMES,
    KEY,
    MASS,
    OPERATIONS,
    OURS,
    RING,
    STEPS,
    UPDATE,
    UPDATED,
    Bound,
    Case,
    Operation,
)
from .kernel_checks import Implementation
from .kernel_inputs import Inputs
from .measure import Run, flush_bytes
from .records import CannotMeasure, Record
from .rows import FIELDS, FRAME_BYTES, ROW_BYTES, STACK, described

CAPACITIES = (10**4, 10**5, 10**6, 10**7, 10**8)
BATCHES = (32, 256, 4096, 65_536)
ROWS = 10**6
ANSWERS = "bench_kernels::test_every_implementation_gives_right_answers"
# rings of frames: on a GPU as many as Atari agents keep, elsewhere what fits a small machine
FRAME_SLOTS = {"cuda": 10**6, "cpu": 10**5}

# share of free memory that a case may take
_SHARE = 0.9

Maker = Callable[[Inputs], Implementation]


@dataclass(frozen=True)
class Kernel(Operation):
    """An operation below the buffers.

    about:           a description.
    ours, baselines: makers of the implementations: this package's, and others by name.
    float32:         how many baselines, counted from the last, are right only up to `FLOAT32_SLOTS` slots.
    memory:          upper bound on the bytes per slot and per sampled transition of all implementations together; 0
                     if the operation does not depend on that size.
    cold:            whether caches are flushed before each call, for memory-bound operations.
    dtype:           dtype of gathered frames, None if there are none.
    fields:          fields of the gathered rows; the ring is then one of `ROWS` or `FRAME_SLOTS`.
    """

    about: str = field(kw_only=True)
    ours: Maker = field(kw_only=True)
    baselines: Mapping[str, Maker] = field(kw_only=True)
    memory: tuple[int, int] = (0, 0)
    float32: int = 0
    cold: bool = False
    dtype: torch.dtype | None = None
    fields: Mapping[str, list[Any]] = field(default_factory=dict, kw_only=True)


def _frames_kernel(dtype: torch.dtype) -> Kernel:
    # stacks are read as bytes and written as this type
    moved = FRAMES // 2 * (1 + dtype.itemsize)
    cast = " + cast" if dtype.itemsize > 1 else ""
    select = baselines.index_select_frames
    return Kernel(
        about=f"stacks of {STACK} frames of 84x84 before and after, at given slots, as {dtype}",
        ours=ours.frame_gather,
        baselines={f"index_select{cast}": select, f"index_select of words{cast}": partial(select, dtype=torch.int64)},
        memory=(FRAME_BYTES + 64, 4 * moved),
        tests=STEPS,
        drawn=KEY + moved,
        cold=True,
        dtype=dtype,
        fields=FIELDS,
    )


KERNELS: dict[str, Kernel] = {
    "empty": Kernel(
        about="nothing: an empty kernel, on a CPU one NumPy call on one number",
        ours=ours.empty,
        baselines={"zero_ of one number": baselines.smallest},
        tests=ANSWERS,
    ),
    "prefix-sum": Kernel(
        about="inclusive prefix sums of N int64",
        ours=ours.prefix_sum,
        baselines={"cumsum": baselines.cumsum_of_integers},
        memory=(64, 0),
        tests="prefix_sum",
        slot=2 * MASS,
        cold=True,
    ),
    "tree-build": Kernel(
        about="the sums that draws need, from N masses",
        ours=ours.tree_build,
        baselines={"cumsum": baselines.cumsum},
        memory=(80, 0),
        tests=f"prefix_sum {DRAW}",
        # the masses once; what is written is internal to a structure
        slot=MASS,
        cold=True,
    ),
    "draw": Kernel(
        about="B slots by mass, stratified, after any change",
        ours=ours.draw,
        baselines={
            "searchsorted alone": baselines.searchsorted,
            "cumsum + searchsorted": baselines.cumsum_searchsorted,
            "cumsum + searchsorted, float32": partial(baselines.cumsum_searchsorted, dtype=torch.float32),
            "multinomial": baselines.multinomial,
        },
        memory=(120, 200),
        float32=2,
        tests=DRAW,
        drawn=DRAWN,
    ),
    "update": Kernel(
        about="new masses at B slots, ready to draw from",
        ours=ours.update,
        baselines={
            "scatter alone": baselines.scatter,
            "scatter + cumsum": baselines.scatter_cumsum,
            "scatter + cumsum, float32": partial(baselines.scatter_cumsum, dtype=torch.float32),
        },
        memory=(120, 600),
        float32=1,
        tests=UPDATED,
        drawn=UPDATE,
    ),
    "draw-update": Kernel(
        about="B slots by mass, then new masses for them",
        ours=ours.draw_update,
        baselines={
            "cumsum + searchsorted + scatter": baselines.draw_update,
            "cumsum + searchsorted + scatter, float32": partial(baselines.draw_update, dtype=torch.float32),
        },
        memory=(120, 600),
        float32=1,
        tests=f"{DRAW} {UPDATED}",
        drawn=DRAWN + UPDATE,
    ),
    "rank-draw": Kernel(
        about="B slots by rank, stratified, after B priorities have changed",
        ours=ours.rank_draw,
        baselines={"sort + searchsorted": baselines.sort_searchsorted},
        memory=(200, 1500),
        tests=DRAW,
        drawn=DRAWN,
    ),
    "row-gather": Kernel(
        about=f"rows of five small fields, {ROW_BYTES} bytes, at given slots",
        ours=ours.row_gather,
        baselines={
            "index_select per field": baselines.index_select_fields,
            "index_select of packed rows alone": baselines.index_select_packed,
        },
        memory=(5 * ROW_BYTES, 8 * ROW_BYTES),
        tests=RING,
        drawn=KEY + 2 * ROW_BYTES,
        cold=True,
        fields=described(),
    ),
    "frame-gather": _frames_kernel(torch.uint8),
    "frame-gather-bf16": _frames_kernel(torch.bfloat16),
    "frame-gather-f16": _frames_kernel(torch.float16),
}
# "update" is also a call of buffers, whose bytes and tests are the same
OPERATIONS.update({name: kernel for name, kernel in KERNELS.items() if name not in OPERATIONS})


def kernel_cases(
    device_type: str,
    capacities: tuple[int, ...] = CAPACITIES,
    batches: tuple[int, ...] = BATCHES,
    *,
    rows: int = ROWS,
    frames: int | None = None,
    most: int | None = None,
) -> list[Case]:
    """All cases for a kind of device, those of one operation and capacity together; none with more than `most` slots.

    rows, frames: slots of the rings that are only gathered from; as many frames as `FRAME_SLOTS` says for None.

    A batch is never larger than the ring that it is drawn from.
    """
    cases = []
    for name, kernel in KERNELS.items():
        rings = capacities if kernel.memory[0] else (0,)
        if kernel.fields:
            rings = (rows if kernel.dtype is None else frames or FRAME_SLOTS[device_type],)
        for ring in rings:
            cases += [Case(name, ring, batch) for batch in (batches if kernel.memory[1] else (0,))]
    return [case for case in cases if case.batch <= case.capacity <= (most or case.capacity)]


def records(run: Run, cases: Sequence[Case], progress: Progress) -> Iterator[Record]:
    """Measure the cases; yields each record as soon as it is known.

    A case that does not fit into free memory is reported and skipped, and so is a baseline with wrong answers; where
    this package's own are wrong the case fails.
    """
    flush = flush_bytes(run.device)

    def measured(case: Case) -> Iterator[Record]:
        gc.collect()
        if reason := too_large(case, run.device):
            progress.say(reason)
            return
        kernel = KERNELS[case.operation]
        for record in run.timed(case, _bound(run, case, progress), progress, flush if kernel.cold else 0):
            yield replace(record, fields=dict(kernel.fields))

    return run.each(cases, progress, measured)


def too_large(case: Case, device: torch.device) -> str | None:
    """Why the case does not fit into the memory that is free on the device; None when it does."""
    if device.type == "cuda":
        # what torch has cached is free
        torch.cuda.empty_cache()
    slot, drawn = KERNELS[case.operation].memory
    needed, free = case.capacity * slot + case.batch * drawn, free_bytes(device)
    if free is None or needed <= _SHARE * free:
        return None
    return f"{case.name} is skipped: it takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free."


def makers(case: Case) -> dict[str, Maker]:
    """The implementations that can do the case at its size, this package first."""
    kernel = KERNELS[case.operation]
    last = len(kernel.baselines) - (kernel.float32 if case.capacity > baselines.FLOAT32_SLOTS else 0)
    return {OURS: kernel.ours, **dict(list(kernel.baselines.items())[:last])}


def inputs(case: Case, device: torch.device) -> Inputs:
    """The inputs of the case."""
    return Inputs(max(1, case.capacity), max(1, case.batch), device, KERNELS[case.operation].dtype or torch.uint8)


def _bound(run: Run, case: Case, progress: Progress) -> dict[str, Bound]:
    """The calls of all implementations whose answers are right."""
    given, bound, able = inputs(case, run.device), {}, makers(case)
    for name, make in able.items():
        work = make(given)
        wrong = work.wrong()
        if not wrong:
            bound[name] = (work.call, work.prepare)
            continue
        reason = f"{name} is not measured in {case.name}: {'; '.join(wrong)}."
        if name == OURS:
            raise CannotMeasure(reason)
        progress.say(reason)
    if out := [name for name in KERNELS[case.operation].baselines if name not in able]:
        progress.say(f"{case.name}: no {' or '.join(out)}, which end at {baselines.FLOAT32_SLOTS:,} slots.")
    return bound
