"""Asks for the pages of drawn rows of a mapped file at once, where reading them one by one would wait for the disk."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np


class ReadAhead:
    """Asks only while gathers read from the disk: to ask for pages that are in memory takes longer than to copy a small
    row.

    mapping: of the whole file.
    pieces:  where in it the rows of a field, or records of several, begin, and the bytes of one.
    """

    def __init__(self, mapping: mmap.mmap, pieces: Sequence[tuple[int, int]]) -> None:
        # not on Windows, where `mmap` has no MADV_WILLNEED either
        import resource

        self._mapping, self._pieces = mapping, pieces
        self._usage = lambda: resource.getrusage(resource.RUSAGE_SELF)
        # blocks that this process had read when the last gather began, those that it asked for included
        self._before = 0
        # whether the last gather read from the disk
        self.reads = False

    def begin(self, slots: np.ndarray) -> None:
        """Rows of these slots are gathered from here on."""
        self._before = self._usage().ru_inblock
        if self.reads:
            self._ask(slots)

    def end(self) -> None:
        """All of them are gathered."""
        self.reads = self._usage().ru_inblock > self._before

    def _ask(self, slots: np.ndarray) -> None:
        rows = np.unique(slots)
        for begin, nbytes in self._pieces:
            first = begin + rows * nbytes
            pages = first // mmap.PAGESIZE * mmap.PAGESIZE
            for page, length in zip(pages.tolist(), (first + nbytes - pages).tolist(), strict=True):
                self._mapping.madvise(mmap.MADV_WILLNEED, page, length)
