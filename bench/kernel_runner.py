"""Measures kernel microbenchmarks: makes the inputs, checks every implementation, times them interleaved, records."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from gpu_replay.console.progress import Progress
from gpu_replay.engines.storage import free_bytes

from .baselines import FLOAT32_SLOTS
from .cases import OURS
from .kernel_cases import KernelCase
from .record import Record
from .runner import Refused, Run
from .timing import flush_bytes

# the share of free memory that a case may take
_SHARE = 0.9


def records(run: Run, cases: list[KernelCase], progress: Progress) -> Iterator[Record]:
    """Measure the cases; yields each record as soon as it is known.

    A case that does not fit into free memory is skipped with a line that says so, and so is a baseline with wrong
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
        progress.say(f"{case.name}: no {' or '.join(case.left_out())}, which end at {FLOAT32_SLOTS:,} slots.")
    for way in run.ways:
        yield from run.timed(case, bound, way, progress, flush)
