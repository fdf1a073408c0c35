"""Host: a large gather on as many threads as torch uses, `torch.get_num_threads()`.

The threads are plain ones, made when they are first needed and kept for the process. What they run holds no lock of the
interpreter: a loop compiled for that, or NumPy's `take`. Each takes the next piece when it is done with one and writes
rows that no other does, so the bytes are those of one thread. Calls from several threads share them; a process made by
`fork` makes its own.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

# bytes from which more threads take less time than waking them does
LARGE = 2**20
# the smallest pieces are this fraction of a thread's share: each costs about two microseconds
_FINEST = 8


class _Job:
    """Pieces of some work, of which each thread takes the next until there are none.

    begun: an item for each thread that has begun. done: of each of these what it raised, or None, when it has ended.
    """

    def __init__(self, work: Callable[[int, int], object], pieces: Sequence[tuple[int, int]]) -> None:
        self._work = work
        # no lock: the interpreter's own is held while the next one is taken
        self._pieces = iter(pieces)
        self.begun: list[None] = []
        self.done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Work on the pieces that are left; after an exception none are."""
        try:
            for begin, end in self._pieces:
                self._work(begin, end)
        finally:
            deque(self._pieces, maxlen=0)


class _Threads:
    """Threads that wait for jobs."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0

    def start(self, job: _Job, helpers: int) -> None:
        """Let so many threads help with a job, each on its own where no other job has them."""
        with self._lock:
            while self._count < helpers:
                threading.Thread(target=self._serve, name="gpu_replay gather", daemon=True).start()
                self._count += 1
        for _ in range(helpers):
            self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            job.begun.append(None)
            try:
                job.run()
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


@lru_cache(maxsize=64)
def _pieces(count: int, threads: int) -> tuple[tuple[int, int], ...]:
    """`count` rows in pieces that become smaller, so that threads end together however late or slow one is."""
    pieces, begin, fewest = [], 0, max(1, count // (_FINEST * threads))
    while begin < count:
        end = min(count, begin + max(fewest, 3 * (count - begin) // (4 * threads)))
        pieces.append((begin, end))
        begin = end
    return tuple(pieces)


def in_parts(work: Callable[[int, int], object], count: int, threads: int) -> None:
    """Call `work(begin, end)` for pieces of `count` rows on so many threads, this one among them.

    A thread that comes when nothing is left is not waited for. Raises what one of them raised, once all are done.
    """
    threads = min(threads, count)
    if threads < 2:
        work(0, count)
        return
    job = _Job(work, _pieces(count, threads))
    _threads.start(job, threads - 1)
    errors: list[BaseException | None] = []
    try:
        job.run()
    finally:
        # nothing is left for those that begin from here on
        errors += [job.done.get() for _ in job.begun[:]]
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
