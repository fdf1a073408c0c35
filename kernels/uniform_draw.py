"""Draws in which every stored transition is equally likely, and the newest ones."""

import triton
import triton.language as tl

from .philox import floor_of_product, words_at, words_of


@triton.jit
def permute(place, wide, high, pairs, first, second, third, fourth):
    """A permutation of [0, wide * high): the column is shifted by a hash of the row, then the other way round.

    first, second: multipliers and addends of the shifts of the column, one a turn; third, fourth: those of the row.
    """
    row = place // wide
    column = place % wide
    nothing = (place * 0).to(tl.int64)
    for pair in range(pairs):
        turn = nothing + pair
        column += (((row * tl.gather(first, turn, 0) + tl.gather(second, turn, 0)) >> 32) * wide) >> 32
        column = tl.where(column >= wide, column - wide, column)
        row += (((column * tl.gather(third, turn, 0) + tl.gather(fourth, turn, 0)) >> 32) * high) >> 32
        row = tl.where(row >= high, row - high, row)
    return row * wide + column


@triton.jit
def permuted_rank(
    draw, by_chance, count, block, seed, ROUNDS: tl.constexpr, ROUNDS_OF_FEW: tl.constexpr, FEW: tl.constexpr
):
    """The places of a random permutation of [0, count) that the draws by chance take; 0 for the others.

    More draws than there are places go round again.
    """
    # the narrowest rectangle that covers the count: the root is mended where it was rounded
    wide = tl.sqrt((count - 1).to(tl.float64)).to(tl.int64) + 1
    wide = tl.where((wide - 1) * (wide - 1) >= count, wide - 1, wide)
    wide = tl.where(wide * wide < count, wide + 1, wide)
    high = (count + wide - 1) // wide
    pairs = tl.where(count < FEW, ROUNDS_OF_FEW // 2, ROUNDS // 2)
    first, second, third, fourth = words_of(block + tl.arange(0, ROUNDS_OF_FEW // 2), seed)
    limit = count.to(tl.uint64)
    # rows that draw nothing stay where they are; the others start inside and so come back inside
    image = tl.where(by_chance, draw % count, 0).to(tl.uint64)
    outside = by_chance
    while tl.max(outside.to(tl.int32), axis=0) > 0:
        walked = permute(image, wide.to(tl.uint64), high.to(tl.uint64), pairs, first, second, third, fourth)
        image = tl.where(outside, walked, image)
        outside = outside & (image >= limit)
    return image.to(tl.int64)


@triton.jit(do_not_specialize=["drawn", "batch", "capacity", "blocks_drawn"])
def uniform_draw_kernel(
    counters_ptr,
    times_sampled_ptr,
    slots_ptr,
    keys_ptr,
    probability_ptr,
    weight_ptr,
    drawn,
    batch,
    capacity,
    blocks_drawn,
    ROUNDS: tl.constexpr,
    ROUNDS_OF_FEW: tl.constexpr,
    FEW: tl.constexpr,
    DRAWS: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    ADDED: tl.constexpr,
    FIRST: tl.constexpr,
    RANDOM: tl.constexpr,
    SEED: tl.constexpr,
    STEP: tl.constexpr,
    TICKET: tl.constexpr,
):
    """Draw `drawn` live keys and take the newest for the rest of the batch.

    A replayed graph may ask for more than is left after a `clear`: keys then repeat, and all of it stays inside.
    """
    draw = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    added = tl.load(counters_ptr + ADDED)
    first_key = tl.maximum(added - capacity, tl.load(counters_ptr + FIRST))
    count = tl.maximum(added - first_key, 1)
    block = tl.load(counters_ptr + RANDOM)
    step = tl.load(counters_ptr + STEP)
    seed = tl.load(counters_ptr + SEED)
    by_chance = draw < drawn
    if REPLACEMENT:
        rank = floor_of_product(words_at(draw, block, seed), count)
    else:
        rank = permuted_rank(draw, by_chance, count, block, seed, ROUNDS, ROUNDS_OF_FEW, FEW)
    key = tl.maximum(tl.where(by_chance, first_key + rank, added - batch + draw), 0)
    slot = key % capacity
    live = draw < batch
    chance = tl.where(by_chance, 1.0 / count.to(tl.float64), 1.0)
    tl.store(slots_ptr + draw, slot, mask=live)
    tl.store(keys_ptr + draw, key, mask=live)
    tl.store(probability_ptr + draw, chance.to(tl.float32), mask=live)
    tl.store(weight_ptr + draw, tl.full([DRAWS], 1.0, tl.float32), mask=live)
    tl.atomic_add(times_sampled_ptr + slot, tl.full([DRAWS], 1, tl.int32), mask=live, sem="relaxed")
    # every thread has read the counters before the last program changes them
    tl.debug_barrier()
    finished = tl.atomic_add(counters_ptr + TICKET, 1)
    if finished == tl.num_programs(0) - 1:
        tl.store(counters_ptr + TICKET, 0)
        tl.store(counters_ptr + STEP, step + 1)
        tl.store(counters_ptr + RANDOM, block + blocks_drawn)
