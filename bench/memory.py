"""Resident memory of a full buffer, as the operating system counts it, in a process of its own.

In the same process, memory freed by an earlier buffer would hide what the next one takes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch

from gpu_replay import ReplayBuffer
from gpu_replay.console.progress import Progress

from .cases import OURS, Case
from .measure import Run, quantiles
from .records import Record
from .rows import ROW_BYTES, make_rows
from .subjects import replay_buffer

_STATM = Path("/proc/self/statm")


def measured(capacity: int) -> tuple[float, float]:
    """Resident bytes per stored transition in a new process, and the bytes that the buffer itself reports.

    Raises OSError if the system does not report resident memory.
    """
    if not _STATM.is_file():
        raise OSError("resident memory is read from /proc, which this system does not have.")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        resident, counted = pool.submit(_filled, capacity).result()
    return resident / capacity, counted / capacity


def _filled(capacity: int) -> tuple[int, int]:
    """Fill a buffer: bytes that the process takes more, and bytes that the buffer reports."""
    torch.set_num_threads(1)
    # a small buffer first, kept, so that code and scratch memory of all calls are there before the reading
    kept = [_used(8192)]
    before = _resident()
    kept.append(_used(capacity))
    return _resident() - before, kept[1].nbytes


def _resident() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _used(capacity: int) -> ReplayBuffer:
    """A buffer with every slot written, sampled and updated for a while."""
    buffer, rows = replay_buffer(capacity), make_rows(4096, np.random.default_rng(1))
    for _ in range(-(-capacity // 4096)):
        buffer.add(**rows)
    for _ in range(64):
        buffer.update_priorities(buffer.sample(256).key, torch.ones(256))
    gc.collect()
    return buffer


def cases(capacity: int) -> list[Case]:
    """The one case."""
    return [Case("memory", capacity, 0)]


def records(run: Run, cases: Sequence[Case], progress: Progress) -> Iterator[Record]:
    """Resident bytes a transition of a full buffer, beside the bytes of its fields; errors as of `measured`."""

    def filled(case: Case) -> Iterator[Record]:
        found = np.array([measured(case.capacity) for _ in range(1 if run.quick else 3)])
        spread, counted = quantiles(found[:, 0]), round(float(found[0, 1]), 2)
        more = {"unit": "bytes", "bytes": ROW_BYTES, "counted": counted, "copy_share": None}
        yield run.record(case, OURS, spread, len(found), **more)

    return run.each(cases, progress, filled)
