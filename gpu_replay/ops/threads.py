"""Host: a large gather on as many threads as torch uses, `torch.get_num_threads()`.

The threads are plain ones, made when they are first needed and kept for the process. What they run holds no lock of the
interpreter: a loop compiled for that, or NumPy's `take`. Each writes rows that no other does, so the bytes are those of
one thread. Calls from several threads share them; a process made by `fork` makes its own.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

# bytes from which more threads take less time than waking them does
LARGE = 2**20


class _Job(NamedTuple):
    """A part of some work, and where it says that it is done: None, or what it raised."""

    work: Callable[[int, int], object]
    begin: int
    end: int
    done: queue.SimpleQueue[BaseException | None]


class _Threads:
    """Threads that wait for jobs."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0

    def start(self, jobs: list[_Job]) -> None:
        """Run these jobs, each on a thread of its own where there are no others."""
        with self._lock:
            while self._count < len(jobs):
                threading.Thread(target=self._serve, name="gpu_replay gather", daemon=True).start()
                self._count += 1
        for job in jobs:
            self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job.work(job.begin, job.end)
            except BaseException as error:
                job.done.put(error)
            else:
                job.done.put(None)
            # a thread that waits keeps no batch
            del job


_threads = _Threads()


def _forget() -> None:
    global _threads
    _threads = _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def threads_for(size: int) -> int:
    """How many threads move so many bytes."""
    return torch.get_num_threads() if size >= LARGE else 1


def in_parts(work: Callable[[int, int], object], count: int, threads: int) -> None:
    """Call `work(begin, end)` for parts of `count` rows, one on each of so many threads, this one among them.

    Raises what one of them raised, once all are done.
    """
    threads = min(threads, count)
    if threads < 2:
        work(0, count)
        return
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    parts = list(pairwise(count * part // threads for part in range(threads + 1)))
    jobs = [_Job(work, begin, end, done) for begin, end in parts[1:]]
    _threads.start(jobs)
    errors: list[BaseException | None] = []
    try:
        work(*parts[0])
    finally:
        errors += [done.get() for _ in jobs]
    for error in errors:
        if error is not None:
            raise error


def take_rows(rows: np.ndarray, slots: np.ndarray, out: np.ndarray) -> None:
    """Copy the rows at (B,) slots to `out`, (B, ...), on as many threads as their bytes are worth.

    A slot that does not exist is an error of the caller: nothing says so.
    """
    # clipping changes no slot that exists; it is the mode that writes straight into `out`
    threads = threads_for(out.nbytes)
    in_parts(lambda begin, end: rows.take(slots[begin:end], 0, out[begin:end], "clip"), slots.size, threads)
