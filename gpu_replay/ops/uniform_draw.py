"""Draws in which every stored transition is equally likely, and the draw of the newest.

Without replacement, row `i` of a batch is the image of `i` under a random permutation of the stored transitions: a
Feistel network over a rectangle that just covers them, walked on until the image falls inside. It costs O(B) whatever
is stored, needs no memory, and gives the same integers everywhere.

Luby and Rackoff 1988; Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from torch import Tensor

from gpu_replay.ops import _backend
from gpu_replay.ops.counters import blocks_for
from gpu_replay.ops.draws import DeviceDraws, Draw, new_draws, per_program, reciprocal
from gpu_replay.ops.launch import Launch

# measured over 200,000 keys: pairs of places are uniform to the noise after 8 rounds from 31 transitions on, and after
# 16 to 24 rounds over 5 or 6, where the two halves of the network have two or three values each
ROUNDS = 8
ROUNDS_OF_FEW = 32
FEW = 64
# up to so many numbers one division each is cheaper than three operations without
SMALL = 512
# each round hashes with a random multiplier and a random addend (multiply-shift, Dietzfelbinger 1996)
PERMUTATION_WORDS = 2 * ROUNDS_OF_FEW


def independent_ranks(count: int, doubles: np.ndarray) -> np.ndarray:
    """One independent number in [0, count) for each of (B,) float64 in [0, 1); count > 0; returns (B,) int64."""
    ranks = (doubles * count).astype(np.int64)
    return np.minimum(ranks, count - 1, out=ranks)


def slots_of(ages: np.ndarray, first: int, capacity: int) -> np.ndarray:
    """Host: slots of the live keys `first + ages`."""
    slots = ages + np.array(first % capacity)
    if slots.size <= SMALL:
        return np.remainder(slots, np.array(capacity), slots)
    # one subtraction does for a modulus, since live keys span at most one lap of the ring
    slots -= (slots >= capacity) * capacity
    return slots


@lru_cache(maxsize=256)
def rectangle(count: int) -> tuple[int, int]:
    """The sides of a rectangle that just covers [0, count)."""
    wide = math.isqrt(count - 1) + 1
    return wide, -(-count // wide)


def words_of(count: int, words: np.ndarray) -> np.ndarray:
    """Those of the (PERMUTATION_WORDS,) words that a permutation of [0, count) takes."""
    return words[: 2 * ROUNDS] if count >= FEW else words


def permuted_ranks(count: int, batch: int, words: np.ndarray) -> np.ndarray:
    """The first `batch` places of a random permutation of [0, count).

    words:   (PERMUTATION_WORDS,) uint64, the only source of randomness.
    returns: (batch,) int64, distinct; batch <= count.
    """
    wide, high = rectangle(count)
    words = words_of(count, words)
    ranks: np.ndarray = _backend.inner_loops().permuted_ranks(count, batch, wide, high, words)
    return ranks


def uniform_blocks(drawn: int, replacement: bool) -> int:
    """Philox blocks that `drawn` uniform draws take; none where all rows are the newest."""
    return blocks_for(drawn if replacement else PERMUTATION_WORDS) if drawn else 0


def plan_uniform_draw(
    counters: Tensor, times_sampled: Tensor, drawn: int, batch: int, capacity: int, *, replacement: bool
) -> Draw:
    """Device: `drawn` uniform draws and the newest for the rest of the batch; one launch a call."""
    from gpu_replay.kernels.uniform_draw import uniform_draw_kernel

    device = counters.device
    # one draw per thread
    draws = per_program(128, batch, device.type == "cpu")
    numbers = (drawn, batch, capacity, reciprocal(capacity), uniform_blocks(drawn, replacement))
    launch = Launch(uniform_draw_kernel, -(-batch // draws), DRAWS=draws, REPLACEMENT=replacement or drawn == 0)

    def draw() -> DeviceDraws:
        found = new_draws(batch, device, by_priority=False)
        launch(counters, found.outputs(times_sampled), *numbers)
        return found

    return draw
