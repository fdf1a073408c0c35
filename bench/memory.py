"""Resident memory of a full buffer, as the operating system counts it, in a process of its own.

In the same process, memory freed by an earlier buffer would hide what the next one takes.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import torch

from gpu_replay.console.progress import Progress

from .measure import Run, quantiles
from .operations import Case
from .peers import make_peer
from .records import Record
from .subjects import Subject, Task, described, dtypes_of, row_bytes

ADDED = 64
# an empty buffer of a capacity, and of a `width` of observations; it is given to other processes
Maker = Callable[..., Subject]


def of_peer(name: str, capacity: int, width: int) -> Subject:
    """Another library's buffer."""
    return make_peer(name, Task(capacity, ADDED, width=width))


def resident() -> int:
    """Bytes of this process in memory. Raises OSError if the system does not tell."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


def measured(make: Maker, capacity: int, width: int) -> int:
    """Bytes that a new process takes more for a full buffer."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_filled, make, capacity, width).result()


def _filled(make: Maker, capacity: int, width: int) -> int:
    torch.set_num_threads(1)
    # a small buffer first, kept, so that code and scratch memory of all calls are there before the reading
    kept = [_used(make, 8192, width)]
    before = resident()
    kept.append(_used(make, capacity, width))
    return resident() - before


def _used(make: Maker, capacity: int, width: int) -> Subject:
    """A buffer with every slot written, sampled and updated for a while."""
    subject = make(capacity, width=width)
    rows = next(subject.stream(ADDED, 1))
    for _ in range(-(-capacity // ADDED)):
        subject.add(rows)
    for _ in range(64):
        subject.update(subject.sample(256)[0], torch.ones(256))
    gc.collect()
    return subject


def records(run: Run, cases: Sequence[Case], progress: Progress, makers: Mapping[str, Maker]) -> Iterator[Record]:
    """Resident bytes a transition of full buffers, beside the bytes of its fields; errors as of `resident`."""

    def filled(case: Case) -> Iterator[Record]:
        dtypes = dtypes_of(case.width or 4)
        for name, make in makers.items():
            held = quantiles(np.array([measured(make, case.capacity, case.width or 4) / case.capacity]))
            more = {"unit": "bytes", "bytes": row_bytes(dtypes), "copy_share": None}
            yield run.record(case, name, held, 1, fields=described(dtypes), **more)

    return run.each(cases, progress, filled)
