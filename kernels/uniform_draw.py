"""Draws in which every stored transition is equally likely, and the newest ones."""

import triton
import triton.language as tl

from .philox import floor_of_product, words_at


@triton.jit
def permute(place, wide, high, few, words_block, seed, ROUNDS: tl.constexpr, ROUNDS_OF_FEW: tl.constexpr):
    """A permutation of [0, wide * high): the column is shifted by a hash of the row, then the other way round."""
    row = place // wide
    column = place % wide
    for turn in tl.static_range(ROUNDS_OF_FEW):
        if few | (turn < ROUNDS):
            factor = words_at(words_block * 0 + 2 * turn, words_block, seed)
            addend = words_at(words_block * 0 + (2 * turn + 1), words_block, seed)
            if turn % 2 == 0:
                column += (((row * factor + addend) >> 32) * wide) >> 32
                column = tl.where(column >= wide, column - wide, column)
            else:
                row += (((column * factor + addend) >> 32) * high) >> 32
                row = tl.where(row >= high, row - high, row)
    return row * wide + column


@triton.jit
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
    """Draw `drawn` live keys and take the newest for the rest of the batch."""
    draw = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    added = tl.load(counters_ptr + ADDED)
    first = tl.maximum(added - capacity, tl.load(counters_ptr + FIRST))
    count = added - first
    block = tl.load(counters_ptr + RANDOM)
    step = tl.load(counters_ptr + STEP)
    seed = tl.load(counters_ptr + SEED)
    by_chance = draw < drawn
    if REPLACEMENT:
        rank = floor_of_product(words_at(draw, block, seed), draw * 0 + count)
    else:
        # the narrowest rectangle that covers the count: the root is mended where it was rounded
        wide = tl.sqrt(tl.maximum(count - 1, 0).to(tl.float64)).to(tl.int64) + 1
        wide = tl.where((wide - 1) * (wide - 1) >= count, wide - 1, wide)
        wide = tl.maximum(tl.where(wide * wide < count, wide + 1, wide), 1)
        high = ((count + wide - 1) // wide).to(tl.uint64)
        wide = wide.to(tl.uint64)
        few = count < FEW
        limit = count.to(tl.uint64)
        # rows that draw nothing start inside
        image = tl.where(by_chance, draw, 0).to(tl.uint64)
        image = permute(image, wide, high, few, block, seed, ROUNDS, ROUNDS_OF_FEW)
        outside = by_chance & (image >= limit)
        while tl.max(outside.to(tl.int32), axis=0) > 0:
            inside = tl.where(outside, image, 0)
            walked = permute(inside, wide, high, few, block, seed, ROUNDS, ROUNDS_OF_FEW)
            image = tl.where(outside, walked, image)
            outside = by_chance & (image >= limit)
        rank = image.to(tl.int64)
    key = tl.where(by_chance, first + rank, added - batch + draw)
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
