"""Kernel microbenchmarks: operations, sizes, the bytes that must move, who does it, and measuring them.

Every operation is done by this package and by the torch operations that a user would write (`baselines.py`), from the
same inputs. Adding one is one entry of `KERNELS`, and one of `test_gate.TESTS` that names its tests.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gpu_replay.console.progress import Progress
from gpu_replay.engines.storage import free_bytes

from . import baselines, ours
from .cases import DRAW, FRAMES, KEY, MASS, OURS, UPDATE, Case, Operation
from .kernel_checks import Implementation
from .kernel_inputs import Inputs
from .record import Record
from .rows import ROW_BYTES, described
from .runner import Refused, Run
from .stacks import FIELDS, FRAME_BYTES, STACK
from .timing import flush_bytes

CAPACITIES = (10**4, 10**5, 10**6, 10**7, 10**8)
BATCHES = (32, 256, 4096, 65_536)
ROWS = 10**6
# rings of frames: on a GPU as many as Atari agents keep, elsewhere what fits a small machine
FRAME_SLOTS = {"cuda": 10**6, "cpu": 10**5}

# share of free memory that a case may take
_SHARE = 0.9

Maker = Callable[[Inputs], Implementation]


@dataclass(frozen=True)
class Kernel(Operation):
    """An operation below the buffers.

    memory:    bytes for each slot and for each drawn transition that all implementations take together, generously; 0
               where the operation does not depend on that size.
    baselines: name to who makes it.
    float32:   baselines that are right up to `FLOAT32_SLOTS` slots.
    cold:      whether caches are flushed before each call, for memory-bound operations.
    dtype:     of gathered frames, None where there are none.
    fields:    of the stored rows that are gathered; the ring is then one of `ROWS` or `FRAME_SLOTS`.
    """

    ours: Maker
    memory: tuple[int, int]
    baselines: Mapping[str, Maker]
    float32: Mapping[str, Maker] = field(default_factory=dict)
    cold: bool = False
    dtype: torch.dtype | None = None
    fields: Mapping[str, list[Any]] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class KernelCase(Case):
    """One operation at one size."""

    @property
    def kind(self) -> Kernel:
        """The operation itself."""
        return KERNELS[self.operation]

    @property
    def memory(self) -> int:
        """Bytes that all implementations of the case take together, checks included; a generous estimate."""
        slot, drawn = self.kind.memory
        return self.capacity * slot + self.batch * drawn

    def makers(self) -> dict[str, Maker]:
        """Who can do it at this size, this package first."""
        return {OURS: self.kind.ours, **self.kind.baselines, **({} if self.left_out() else self.kind.float32)}

    def left_out(self) -> list[str]:
        """Baselines that cannot do it at this size."""
        return list(self.kind.float32) if self.capacity > baselines.FLOAT32_SLOTS else []

    def inputs(self, device: torch.device) -> Inputs:
        """The inputs of the case."""
        return Inputs(max(1, self.capacity), max(1, self.batch), device, self.kind.dtype or torch.uint8)


def _frames_kernel(dtype: torch.dtype) -> Kernel:
    # stacks are read as bytes and written as this type
    moved = FRAMES // 2 * (1 + dtype.itemsize)
    cast = " + cast" if dtype.itemsize > 1 else ""
    select = baselines.index_select_frames
    return Kernel(
        f"stacks of {STACK} frames of 84x84 before and after, at given slots, as {str(dtype).removeprefix('torch.')}",
        ours.frame_gather,
        (FRAME_BYTES + 64, 4 * moved),
        {f"index_select{cast}": select, f"index_select of words{cast}": partial(select, dtype=torch.int64)},
        drawn=KEY + moved,
        cold=True,
        dtype=dtype,
        fields=FIELDS,
    )


def _float32(make: Callable[..., Implementation]) -> Maker:
    return partial(make, dtype=torch.float32)


KERNELS: dict[str, Kernel] = {
    "empty": Kernel(
        "nothing: an empty kernel, on a CPU one NumPy call on one number",
        ours.empty,
        (0, 0),
        {"zero_ of one number": baselines.smallest},
    ),
    "prefix-sum": Kernel(
        "inclusive prefix sums of N int64",
        ours.prefix_sum,
        (64, 0),
        {"cumsum": baselines.cumsum_of_integers},
        slot=2 * MASS,
        cold=True,
    ),
    "tree-build": Kernel(
        "the sums that draws need, from N masses",
        ours.tree_build,
        (80, 0),
        {"cumsum": baselines.cumsum},
        # the masses once; what is written is internal to a structure
        slot=MASS,
        cold=True,
    ),
    "draw": Kernel(
        "B slots by mass, stratified, after any change",
        ours.draw,
        (120, 200),
        {"cumsum + searchsorted": baselines.cumsum_searchsorted, "searchsorted alone": baselines.searchsorted},
        {
            "cumsum + searchsorted, float32": _float32(baselines.cumsum_searchsorted),
            "multinomial": baselines.multinomial,
        },
        drawn=DRAW,
    ),
    "update": Kernel(
        "new masses at B slots, ready to draw from",
        ours.update,
        (120, 600),
        {"scatter + cumsum": baselines.scatter_cumsum, "scatter alone": baselines.scatter},
        {"scatter + cumsum, float32": _float32(baselines.scatter_cumsum)},
        drawn=UPDATE,
    ),
    "draw-update": Kernel(
        "B slots by mass, then new masses for them",
        ours.draw_update,
        (120, 600),
        {"cumsum + searchsorted + scatter": baselines.draw_update},
        {"cumsum + searchsorted + scatter, float32": _float32(baselines.draw_update)},
        drawn=DRAW + UPDATE,
    ),
    "rank-draw": Kernel(
        "B slots by rank, stratified, after B priorities have changed",
        ours.rank_draw,
        (200, 1500),
        {"sort + searchsorted": baselines.sort_searchsorted},
        drawn=DRAW,
    ),
    "row-gather": Kernel(
        f"rows of five small fields, {ROW_BYTES} bytes, at given slots",
        ours.row_gather,
        (5 * ROW_BYTES, 8 * ROW_BYTES),
        {
            "index_select per field": baselines.index_select_fields,
            "index_select of packed rows alone": baselines.index_select_packed,
        },
        drawn=KEY + 2 * ROW_BYTES,
        cold=True,
        fields=described(),
    ),
    "frame-gather": _frames_kernel(torch.uint8),
    "frame-gather-bf16": _frames_kernel(torch.bfloat16),
    "frame-gather-f16": _frames_kernel(torch.float16),
}


def kernel_cases(
    device_type: str,
    capacities: tuple[int, ...] = CAPACITIES,
    batches: tuple[int, ...] = BATCHES,
    *,
    rows: int = ROWS,
    frames: int | None = None,
    most: int | None = None,
) -> list[KernelCase]:
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
            cases += [KernelCase(name, ring, batch) for batch in (batches if kernel.memory[1] else (0,))]
    return [case for case in cases if case.batch <= case.capacity <= (most or case.capacity)]


def records(run: Run, cases: list[KernelCase], progress: Progress) -> Iterator[Record]:
    """Measure the cases; yields each record as soon as it is known.

    A case that does not fit into free memory is reported and skipped, and so is a baseline with wrong
    answers. Raises Refused when this package's own are wrong.
    """
    flush = flush_bytes(run.device)
    for case in cases:
        progress.show(case.name)
        reason = too_large(case, run.device)
        if reason:
            progress.say(reason)
        else:
            yield from _measured(run, case, flush if case.kind.cold else 0, progress)
            gc.collect()
        progress.advance()


def too_large(case: KernelCase, device: torch.device) -> str | None:
    """Why the case does not fit into the memory that is free on the device; None when it does."""
    if device.type == "cuda":
        # what torch has cached is free
        torch.cuda.empty_cache()
    free = free_bytes(device)
    if free is None or case.memory <= _SHARE * free:
        return None
    return f"{case.name} is skipped: it takes {case.memory / 1e9:.1f} GB and {free / 1e9:.1f} GB are free."


def _measured(run: Run, case: KernelCase, flush: int, progress: Progress) -> Iterator[Record]:
    inputs = case.inputs(run.device)
    bound = {}
    for name, make in case.makers().items():
        work = make(inputs)
        wrong = work.wrong()
        if not wrong:
            bound[name] = (work.call, work.prepare)
            continue
        reason = f"{name} is not measured in {case.name}: {'; '.join(wrong)}."
        if name == OURS:
            raise Refused(reason)
        progress.say(reason)
    if case.left_out():
        progress.say(f"{case.name}: no {' or '.join(case.left_out())}, which end at {baselines.FLOAT32_SLOTS:,} slots.")
    yield from run.timed(case, bound, progress, flush)
