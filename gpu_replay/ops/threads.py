"""Host: a large gather on as many threads as torch uses, `torch.get_num_threads()`.

What the threads run holds no lock of the interpreter: a loop compiled for that, or NumPy's `take`. Each piece writes
rows that no other does, so the bytes are those of one thread.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch

# bytes from which more threads take less time than waking them does
LARGE = 2**20
# pieces for each thread, so that a late or slow thread does not delay the others
_PIECES = 4

_pool: ThreadPoolExecutor | None = None


def _forget() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    # a forked process has none of the threads
    os.register_at_fork(after_in_child=_forget)


def threads_for(size: int) -> int:
    """The number of threads to move `size` bytes with."""
    return torch.get_num_threads() if size >= LARGE else 1


def in_parts(work: Callable[[int, int], object], count: int, threads: int) -> None:
    """Call `work(begin, end)` for pieces of `count` rows on `threads` threads, this one among them.

    Returns when every piece is done; raises what one of them raised. After an interrupt of this thread others may still
    work, so `work` must hold the memory that it writes to.
    """
    global _pool
    if min(threads, count) < 2:
        work(0, count)
        return
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), "gpu_replay gather")
    size = -(-count // min(count, _PIECES * threads))
    pieces = deque((begin, min(begin + size, count)) for begin in range(0, count, size))

    def run() -> None:
        while True:
            try:
                piece = pieces.popleft()
            except IndexError:
                return
            work(*piece)

    helpers: list[Future[None]] = []
    # an interpreter that is ending starts no threads: this one does it all
    with suppress(RuntimeError):
        for _ in range(min(threads, count) - 1):
            helpers.append(_pool.submit(run))
    errors: list[BaseException | None] = []
    try:
        run()
    finally:
        # threads that begin later find no pieces
        pieces.clear()
        errors += [helper.exception() for helper in helpers if not helper.cancel()]
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
