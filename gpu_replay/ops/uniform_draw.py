"""Draws in which every stored transition is equally likely, and the draw of the newest.

Without replacement, row `i` of a batch is the image of `i` under a random permutation of the stored transitions: a
Feistel network over a rectangle that just covers them, walked on until the image falls inside. It costs O(B) whatever
is stored, needs no memory, and gives the same integers everywhere.

Luby and Rackoff 1988; Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops import _backend
from gpu_replay.ops.counters import Counter, blocks_for

# measured over 200,000 keys: pairs of places are uniform to the noise after 8 rounds from 31 transitions on, and after
# 16 to 24 rounds over 5 or 6, where the two halves of the network have two or three values each
ROUNDS = 8
ROUNDS_OF_FEW = 32
FEW = 64
# each round hashes with a random multiplier and a random addend (multiply-shift, Dietzfelbinger 1996)
PERMUTATION_WORDS = 2 * ROUNDS_OF_FEW
_HALF = np.array(32, dtype=np.uint64)


def independent_ranks(count: int, doubles: np.ndarray) -> np.ndarray:
    """One independent number in [0, count) for each of (B,) float64 in [0, 1); count > 0; returns (B,) int64."""
    ranks = (doubles * count).astype(np.int64)
    return np.minimum(ranks, count - 1, out=ranks)


def permuted_ranks(count: int, batch: int, words: np.ndarray) -> np.ndarray:
    """The first `batch` places of a random permutation of [0, count).

    words:   (PERMUTATION_WORDS,) uint64, the only source of randomness.
    returns: (batch,) int64, distinct; batch <= count.
    """
    wide = math.isqrt(count - 1) + 1
    high = -(-count // wide)
    if count >= FEW:
        words = words[: 2 * ROUNDS]
    loops = _backend.numba_loops()
    if loops is not None:
        found = np.empty(batch, dtype=np.uint64)
        loops.permuted_ranks(np.uint64(count), np.uint64(wide), np.uint64(high), words, found)
        return found.view(np.int64)
    ranks = _permute(np.arange(batch, dtype=np.uint64), wide, high, words)
    outside = np.flatnonzero(ranks >= count)
    while outside.size:
        walked = _permute(ranks[outside], wide, high, words)
        ranks[outside] = walked
        outside = outside[walked >= count]
    return ranks.view(np.int64)


def _permute(places: np.ndarray, wide: int, high: int, words: np.ndarray) -> np.ndarray:
    """A permutation of [0, wide * high): the column is shifted by a hash of the row, then the other way round."""
    # arrays without dimensions: at these sizes a scalar operand costs as much again as the operation
    sides = np.array(wide, dtype=np.uint64), np.array(high, dtype=np.uint64)
    numbers = [words[at, ...] for at in range(words.size)]
    row, column = np.divmod(places, sides[0])
    shift = np.empty_like(row)
    for turn in range(0, words.size, 2):
        # the even turns move the column, the odd ones the row
        moved, fixed, side = (column, row, sides[0]) if turn % 4 == 0 else (row, column, sides[1])
        np.multiply(fixed, numbers[turn], shift)
        np.add(shift, numbers[turn + 1], shift)
        np.right_shift(shift, _HALF, shift)
        np.multiply(shift, side, shift)
        np.right_shift(shift, _HALF, shift)
        np.add(moved, shift, moved)
        # a place that did not go round wraps to a huge one here, which is not the smaller
        np.subtract(moved, side, shift)
        np.minimum(moved, shift, out=moved)
    np.multiply(row, sides[0], row)
    np.add(row, column, row)
    return row


def draws_per_program(batch: int, interpreted: bool) -> int:
    """Draws of one program: one per thread, to spread over a GPU; as many as there are where a program is dear."""
    return min(2048, 1 << (batch - 1).bit_length()) if interpreted else 128


def launch_uniform_draw(
    counters: Tensor, times_sampled: Tensor, drawn: int, batch: int, capacity: int, *, replacement: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Device: (batch,) slots, keys, probabilities and weights of `drawn` uniform draws and the newest; one launch."""
    from gpu_replay.kernels.uniform_draw import uniform_draw_kernel

    device = counters.device
    slots = torch.empty(batch, dtype=torch.int64, device=device)
    keys = torch.empty(batch, dtype=torch.int64, device=device)
    probability = torch.empty(batch, dtype=torch.float32, device=device)
    weight = torch.empty(batch, dtype=torch.float32, device=device)
    words = drawn if replacement else PERMUTATION_WORDS
    draws = draws_per_program(batch, device.type == "cpu")
    uniform_draw_kernel[(-(-batch // draws),)](
        counters,
        times_sampled,
        slots,
        keys,
        probability,
        weight,
        drawn,
        batch,
        capacity,
        blocks_for(words) if drawn else 0,
        ROUNDS=ROUNDS,
        ROUNDS_OF_FEW=ROUNDS_OF_FEW,
        FEW=FEW,
        DRAWS=draws,
        REPLACEMENT=replacement or drawn == 0,
        ADDED=int(Counter.ADDED),
        FIRST=int(Counter.FIRST),
        RANDOM=int(Counter.RANDOM),
        SEED=int(Counter.SEED),
        STEP=int(Counter.STEP),
        TICKET=int(Counter.TICKET),
    )
    return slots, keys, probability, weight
