"""Draws in which every stored transition is equally likely, and the newest ones."""

import triton
import triton.language as tl

from .counters import ADDED, FIRST, RANDOM, SEED, STEP, is_last
from .division import divided, remainder
from .philox import floor_of_product, words_at, words_of
from .stratified_draw import store_draws

# rounds of the permutation, those of one of fewer than FEW numbers, and the words that they take in blocks of 4
ROUNDS = tl.constexpr(8)
ROUNDS_OF_FEW = tl.constexpr(32)
FEW = tl.constexpr(64)


@triton.jit
def permute(place, wide, per_wide, high, pairs, first, second, third, fourth):
    """A permutation of [0, wide * high): the column is shifted by a hash of the row, then the other way round.

    first, second: multipliers and addends of the shifts of the column, one a round; third, fourth: those of the row.
    """
    row, column = divided(place.to(tl.int64), wide.to(tl.int64), per_wide)
    row, column = row.to(tl.uint64), column.to(tl.uint64)
    nothing = (place * 0).to(tl.int64)
    for pair in range(pairs):
        at = nothing + pair
        column += (((row * tl.gather(first, at, 0) + tl.gather(second, at, 0)) >> 32) * wide) >> 32
        column = tl.where(column >= wide, column - wide, column)
        row += (((column * tl.gather(third, at, 0) + tl.gather(fourth, at, 0)) >> 32) * high) >> 32
        row = tl.where(row >= high, row - high, row)
    return row * wide + column


@triton.jit
def permuted_rank(draw, by_chance, count, block, seed):
    """The places of a random permutation of [0, count) that the draws by chance take; 0 for the others.

    More draws than there are places go round again.
    """
    # the narrowest rectangle that covers the count: the root is mended where it was rounded
    wide = tl.sqrt((count - 1).to(tl.float64)).to(tl.int64) + 1
    wide = tl.where((wide - 1) * (wide - 1) >= count, wide - 1, wide)
    wide = tl.where(wide * wide < count, wide + 1, wide)
    # each walk divides by it again
    per_wide = 9223372036854775807 // wide
    high = divided(count + wide - 1, wide, per_wide)[0]
    pairs = tl.where(count < FEW, ROUNDS_OF_FEW // 2, ROUNDS // 2)
    first, second, third, fourth = words_of(block + tl.arange(0, ROUNDS_OF_FEW // 2), seed)
    limit = count.to(tl.uint64)
    # rows that draw nothing stay where they are; the others start inside and so come back inside
    image = tl.where(by_chance, draw % count, 0).to(tl.uint64)
    outside = by_chance
    while tl.max(outside.to(tl.int32), axis=0) > 0:
        walked = permute(image, wide.to(tl.uint64), per_wide, high.to(tl.uint64), pairs, first, second, third, fourth)
        image = tl.where(outside, walked, image)
        outside = outside & (image >= limit)
    return image.to(tl.int64)


@triton.jit
def uniform_rank(draw, by_chance, count, counters_ptr, REPLACEMENT: tl.constexpr):
    """A number in [0, count) for each draw by chance, distinct ones unless REPLACEMENT."""
    block, seed = tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + SEED)
    if REPLACEMENT:
        rank = floor_of_product(words_at(draw, block, seed), count)
    else:
        rank = permuted_rank(draw, by_chance, count, block, seed)
    return rank


@triton.jit(do_not_specialize=["drawn", "batch", "capacity", "per_capacity", "blocks_drawn"])
def uniform_draw_kernel(
    counters_ptr,
    outputs,
    drawn,
    batch,
    capacity,
    per_capacity,
    blocks_drawn,
    DRAWS: tl.constexpr,
    REPLACEMENT: tl.constexpr,
):
    """Draw `drawn` live keys and take the newest for the rest of the batch.

    A replayed graph may ask for more than is left after a `clear`: keys then repeat, and all of it stays inside.
    per_capacity: see `division.py`.
    """
    draw = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    added = tl.load(counters_ptr + ADDED)
    first_key = tl.maximum(added - capacity, tl.load(counters_ptr + FIRST))
    count = tl.maximum(added - first_key, 1)
    block, step = tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + STEP)
    by_chance = draw < drawn
    rank = uniform_rank(draw, by_chance, count, counters_ptr, REPLACEMENT)
    key = tl.maximum(tl.where(by_chance, first_key + rank, added - batch + draw), 0)
    slot = remainder(key, capacity, per_capacity)
    ones = tl.full([DRAWS], 1.0, tl.float32)
    chance = 1.0 / count.to(tl.float64)
    store_draws(outputs, draw, drawn, batch, slot, key, chance, ones)
    if is_last(counters_ptr, tl.num_programs(0)):
        tl.store(counters_ptr + STEP, step + 1)
        tl.store(counters_ptr + RANDOM, block + blocks_drawn)
