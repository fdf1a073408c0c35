"""Asks for the pages of drawn rows of a mapped file at once, where reading them one by one would wait for the disk."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

# a gather that takes longer than this for each row and piece, and for its bytes, has waited for the disk
_SECONDS_A_PIECE = 8e-6
_BYTES_A_SECOND = 4e9


class ReadAhead:
    """Asks only while gathers are slow: to ask for pages that are in memory takes longer than to copy a small row.

    mapping: of the whole file.
    pieces:  where in it the rows of a field, or records of several, begin, and the bytes of one.
    """

    def __init__(self, mapping: mmap.mmap, pieces: Sequence[tuple[int, int]]) -> None:
        self._mapping, self._pieces = mapping, pieces
        self._allowed = sum(_SECONDS_A_PIECE + nbytes / _BYTES_A_SECOND for _, nbytes in pieces)
        # whether the last gather waited for the disk
        self.slow = False

    @contextmanager
    def reading(self, slots: np.ndarray) -> Iterator[None]:
        """Within it rows of these slots are gathered."""
        start = time.perf_counter()
        if self.slow:
            self._ask(slots)
        yield
        self.slow = time.perf_counter() - start > slots.size * self._allowed

    def _ask(self, slots: np.ndarray) -> None:
        rows = np.unique(slots)
        for begin, nbytes in self._pieces:
            first = begin + rows * nbytes
            pages = first // mmap.PAGESIZE * mmap.PAGESIZE
            for page, length in zip(pages.tolist(), (first + nbytes - pages).tolist(), strict=True):
                self._mapping.madvise(mmap.MADV_WILLNEED, page, length)
