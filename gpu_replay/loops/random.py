# mypy: ignore-errors
# (types are what Numba infers)
"""Random permutations, as `ops/draw.py` describes them; products stay below 2**63."""

from __future__ import annotations

import numpy as np

from gpu_replay.loops.compiling import inner, loop

_LOW = 2**32 - 1


@inner
def _shift(fixed, moved, left, by, more, side):
    """Move the first `left` of some places by a hash of their other coordinate, around a side of a rectangle.

    The hash is the upper half of `fixed * by + more` modulo 2**64, of words as int64; coordinates are below 2**31.
    """
    by_high, by_low = (by >> 32) & _LOW, by & _LOW
    more_high, more_low = (more >> 32) & _LOW, more & _LOW
    for place in range(left):
        number = fixed[place] & _LOW
        below = ((number * by_low + more_low) >> 32) & _LOW
        hashed = (number * by_high + more_high + below) & _LOW
        shifted = moved[place] + ((hashed * side >> 32) & _LOW)
        moved[place] = shifted - side if shifted >= side else shifted


@loop("(int64, int64, int64, int64[::1], int64[::1])")
def permuted_ranks(count, wide, high, words, ranks):
    """The first (B,) places of a random permutation of [0, count).

    wide, high: sides of a rectangle that just covers them, below 2**31. words: int64, a multiple of 4.
    """
    left = ranks.size
    rows, columns = np.empty(left, dtype=np.int64), np.empty(left, dtype=np.int64)
    which = np.empty(left, dtype=np.int64)
    row, column = 0, 0
    for start in range(left):
        rows[start], columns[start], which[start] = row, column, start
        column += 1
        if column == wide:
            row, column = row + 1, 0
    while left:
        # all places through a round, then through the next: the processor works on several at once
        for at in range(0, words.size, 4):
            _shift(rows, columns, left, words[at], words[at + 1], wide)
            _shift(columns, rows, left, words[at + 2], words[at + 3], high)
        # those that fell outside are moved on
        outside = 0
        for place in range(left):
            image = rows[place] * wide + columns[place]
            ranks[which[place]] = image
            if image >= count:
                rows[outside], columns[outside], which[outside] = rows[place], columns[place], which[place]
                outside += 1
        left = outside
