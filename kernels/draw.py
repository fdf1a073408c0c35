"""The draw of a batch: slots by mass, uniformly or by rank, and the newest."""

import triton
import triton.language as tl

from .constants import ADDED, FIRST, LOWEST, NO_MASS, RANDOM, SEED
from .division import divided, remainder
from .random import floor_of_product, permuted_rank, words_at
from .ranks import rank_at
from .tree import descend, draw_range, from_oldest, newest_eligible, total_of


@triton.jit
def key_in_slot(slot, added, head, capacity):
    """The live key in a slot: the largest below `added` that belongs there; head: the slot of `added`."""
    key = slot + (added - head)
    return tl.where(slot >= head, key - capacity, key)


@triton.jit
def stratified_target(draw, strata, per_strata, total, word):
    """A point in each draw's own part of the total mass; strata: the number of parts, with its reciprocal."""
    each, part = divided(total, strata, per_strata)
    share, rest = divided(draw * part, strata, per_strata)
    # the next stratum begins a unit later where another share of the rest is full
    width = each + (rest + part >= strata).to(tl.int64)
    return draw * each + share + floor_of_product(word, width)


@triton.jit
def target_in(total, draw, drawn, per_drawn, counters_ptr, STRATIFIED: tl.constexpr):
    """A point in the total mass for each of the first `drawn` draws, from the words of the stream."""
    word = words_at(draw, tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + SEED))
    if STRATIFIED:
        target = stratified_target(draw, drawn.to(tl.int64), per_drawn, total, word)
    else:
        target = floor_of_product(word, total)
    # rows that draw nothing look for the first unit of mass
    return tl.where(draw < drawn, target, 0)


@triton.jit
def uniform_rank(draw, by_chance, count, counters_ptr, REPLACEMENT: tl.constexpr):
    """A number in [0, count) for each draw by chance, distinct ones unless REPLACEMENT."""
    block, seed = tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + SEED)
    if REPLACEMENT:
        rank = floor_of_product(words_at(draw, block, seed), count)
    else:
        rank = permuted_rank(draw, by_chance, count, block, seed)
    return rank


@triton.jit(
    do_not_specialize=[
        "drawn",
        "batch",
        "capacity",
        "skipped",
        "per_drawn",
        "per_capacity",
        "blocks_drawn",
    ]
)
def draw_kernel(
    levels,
    starts,
    counters_ptr,
    ranks,
    outputs,
    words,
    drawn,
    batch,
    capacity,
    skipped,
    per_drawn,
    per_capacity,
    blocks_drawn,
    BY: tl.constexpr,
    DRAWS: tl.constexpr,
    DIGITS: tl.constexpr,
    STRATIFIED: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    SKIPS: tl.constexpr,
    LOWEST_OF_ALL: tl.constexpr,
):
    """Draw `drawn` slots and take the newest for the rest of the batch, none of them among the newest `skipped`.

    levels: of the tree of masses for BY "mass"; of eligible starts, or () where all stored slots can be drawn, for
            "uniform".
    starts: levels of the tree of eligible starts, to take the newest of them; () takes the newest stored slots.
    ranks:  for "rank": the running sums of the masses of ranks, the ages in order of rank, and how many of these can
            be drawn: none of the newest `skipped` slots.
    outputs: slots, keys, probabilities (1 from row `drawn` on) and masses, 0 in rows that were not drawn by one; and,
             of draws by priority, for each program the smallest mass that it drew, or with LOWEST_OF_ALL that of all
             slots, found before, or of the last rank.
    words:  words[0], if given, becomes the block of the stream after the words of the draws, which are `blocks_drawn`
            blocks; `batch` more words are then taken as well.
    per_...: reciprocals, see `division.py`.

    It changes nothing that lasts.

    A graph replayed after a `clear` may ask for more than there is: keys then repeat or mean nothing, and every access
    is in bounds.
    """
    slots_ptr, keys_ptr, probability_ptr, masses_ptr, lowest_ptr = outputs
    UNIFORM: tl.constexpr = BY == "uniform"
    program = tl.program_id(0).to(tl.int64)
    draw = program * DRAWS + tl.arange(0, DRAWS)
    by_chance = draw < drawn
    added = tl.load(counters_ptr + ADDED)
    head = remainder(added, capacity, per_capacity)
    newest = tl.maximum(added - batch + draw, 0)
    if len(words) > 0:
        if program == 0:
            tl.store(words[0], tl.load(counters_ptr + RANDOM) + blocks_drawn)
    if len(levels) > 0:
        if SKIPS or UNIFORM:
            total, before, within = draw_range(levels, head, skipped, capacity, SKIPS)
        else:
            within = total_of(levels)

    if UNIFORM:
        if len(levels) > 0:
            count = tl.maximum(within, 1)
        else:
            oldest = tl.maximum(added - capacity, tl.load(counters_ptr + FIRST))
            count = tl.maximum(added - oldest, 1)
        rank = uniform_rank(draw, by_chance, count, counters_ptr, REPLACEMENT)
        if len(levels) > 0:
            if SKIPS:
                rank = from_oldest(rank, before, total)
            last = from_oldest(tl.maximum(within - batch + draw, 0), before, total)
            slot, _ = descend(levels, tl.where(by_chance, rank, last))
        else:
            slot = remainder(tl.where(by_chance, oldest + rank, newest), capacity, per_capacity)
        chance = 1.0 / count.to(tl.float64)
        # without a mass the weight is 1
        mass = slot * 0
    else:
        if BY == "mass":
            target = target_in(within, draw, drawn, per_drawn, counters_ptr, STRATIFIED)
            if SKIPS:
                target = from_oldest(target, before, total)
            slot, mass = descend(levels, target)
            chance = mass.to(tl.float64) / tl.maximum(within, 1).to(tl.float64)
            lowest = tl.min(tl.where(by_chance, mass, NO_MASS), axis=0)
            if LOWEST_OF_ALL:
                lowest = tl.load(counters_ptr + LOWEST)
        else:
            sums_ptr, ages_ptr, count_ptr = ranks
            count = tl.maximum(tl.load(count_ptr), 1)
            total = tl.load(sums_ptr + count - 1)
            target = target_in(total, draw, drawn, per_drawn, counters_ptr, STRATIFIED)
            rank = rank_at(sums_ptr, target, count, DIGITS)
            # nothing comes before rank 1
            mass = tl.load(sums_ptr + rank) - tl.load(sums_ptr + (rank - 1), mask=rank > 0, other=0)
            slot = head + tl.load(ages_ptr + rank)
            slot = tl.where(slot >= capacity, slot - capacity, slot)
            chance = mass.to(tl.float64) / total.to(tl.float64)
            lowest = tl.min(tl.where(by_chance, mass, NO_MASS), axis=0)
            if LOWEST_OF_ALL:
                # that of the last rank
                lowest = total - tl.load(sums_ptr + count - 2, mask=count > 1, other=0)
        tl.store(lowest_ptr + program, lowest)
        # only the last programs have newest rows
        if (program + 1) * DRAWS > drawn:
            if len(starts) > 0:
                last = newest_eligible(starts, draw, batch, head, skipped, capacity, SKIPS)
            else:
                last = remainder(newest, capacity, per_capacity)
            slot = tl.where(by_chance, slot, last)

    live = draw < batch
    tl.store(slots_ptr + draw, slot, mask=live)
    tl.store(keys_ptr + draw, key_in_slot(slot, added, head, capacity), mask=live)
    tl.store(probability_ptr + draw, tl.where(by_chance, chance, 1.0).to(tl.float32), mask=live)
    tl.store(masses_ptr + draw, tl.where(by_chance, mass, 0), mask=live)
