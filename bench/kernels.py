"""Measuring operations below the buffers: this package and the torch operations that a user would write.

Both get the same inputs, and an implementation whose answer is wrong is not measured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import torch

from gpu_replay.console.progress import Progress
from gpu_replay.engines.memory import free_bytes

from .baselines import FLOAT32_SLOTS, Maker
from .kernel_inputs import Inputs
from .measure import Run, flush_bytes
from .operations import KERNEL_FRAMES, KERNEL_ROWS, KERNELS, OURS, Case
from .records import CannotMeasure, Record
from .subjects import FRAME_BYTES, Bound

CAPACITIES = (10**4, 10**5, 10**6, 10**7, 10**8)
BATCHES = (32, 256, 4096, 65_536)
# share of free memory that a case may take
_SHARE = 0.9


def kernel_cases(
    device_type: str,
    capacities: Sequence[int] = CAPACITIES,
    batches: Sequence[int] = BATCHES,
    *,
    rows: int = KERNEL_ROWS,
    frames: int | None = None,
) -> list[Case]:
    """All cases for a kind of device, those of one operation and capacity together.

    rows, frames: slots of the rings that are only gathered from; as many frames as `KERNEL_FRAMES` says for None.

    A batch is never larger than the ring that it is drawn from.
    """
    cases = []
    for name, kernel in KERNELS.items():
        rings = capacities if kernel.slot or kernel.drawn else (0,)
        if "gather" in name:
            rings = (rows if kernel.dtype is None else frames or KERNEL_FRAMES[device_type],)
        cases += [Case(name, ring, batch) for ring in rings for batch in (batches if kernel.drawn else (0,))]
    return [case for case in cases if case.batch <= case.capacity]


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
        else:
            yield from run.timed(case, _bound(run, case, progress), progress, flush if case.kind.cold else 0)

    return run.each(cases, progress, measured)


def too_large(case: Case, device: torch.device) -> str | None:
    """Why the case does not fit into the memory that is free on the device; None when it does."""
    # what torch has cached on a GPU is free
    torch.cuda.empty_cache()
    slot = case.kind.memory + (0 if case.kind.dtype is None else FRAME_BYTES)
    needed, free = case.capacity * slot + case.batch * max(1500, 4 * case.kind.drawn), free_bytes(device)
    if free is None or needed <= _SHARE * free:
        return None
    return f"{case.name} is skipped: it takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free."


def makers(case: Case) -> dict[str, Maker]:
    """The implementations that can do the case at its size, this package first."""
    found = {OURS: case.kind.ours, **case.kind.baselines}
    large = case.capacity > FLOAT32_SLOTS
    out = [name for name in found if large and ("float32" in name or name == "multinomial")]
    return {name: make for name, make in found.items() if make and name not in out}


def inputs(case: Case, device: torch.device) -> Inputs:
    """The inputs of the case."""
    return Inputs(max(1, case.capacity), max(1, case.batch), device, case.kind.dtype or torch.uint8)


def _bound(run: Run, case: Case, progress: Progress) -> dict[str, Bound]:
    """The calls of all implementations whose answers are right."""
    given, bound = inputs(case, run.device), {}
    for name, make in makers(case).items():
        work = make(given)
        if wrong := work.faults():
            reason = f"{name} is not measured in {case.name}: {'; '.join(wrong)}."
            if name == OURS:
                raise CannotMeasure(reason)
            progress.say(reason)
        else:
            bound[name] = (work.call, work.prepare)
    return bound
