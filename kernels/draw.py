"""The draw of a batch: slots by mass, uniformly or by rank, and the newest."""

import triton
import triton.language as tl

from .constants import ADDED, BASE, FIRST, LOWEST, NO_MASS, RANDOM, SEED
from .masses import descend, from_oldest, mass_before, newest_eligible, newest_with_mass, total_of
from .random import divided, floor_of_product, permuted_rank, remainder, words_at


@triton.jit
def key_in_slot(slot, added, head, capacity):
    """The live key in a slot: the largest below `added` that belongs there; head: the slot of `added`."""
    key = slot + (added - head)
    return tl.where(slot >= head, key - capacity, key)


@triton.jit(do_not_specialize=["count", "after"])
def doubles_kernel(counters_ptr, numbers_ptr, count, after, DRAWS: tl.constexpr):
    """(count,) float64 in [0, 1): those of the words that come `after` so many blocks of the next draw."""
    place = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    word = words_at(place, tl.load(counters_ptr + RANDOM) + after, tl.load(counters_ptr + SEED))
    tl.store(numbers_ptr + place, (word >> 11).to(tl.float64) * 1.1102230246251565e-16, mask=place < count)


@triton.jit
def stratified_target(draw, strata, per_strata, total, word):
    """A point in each draw's own part of the total mass; strata: the number of parts, with its reciprocal."""
    each, part = divided(total, strata, per_strata)
    share, rest = divided(draw * part, strata, per_strata)
    # the next stratum begins a unit later where another share of the rest is full
    width = each + (rest + part >= strata).to(tl.int64)
    return draw * each + share + floor_of_product(word, width)


@triton.jit
def target_in(total, draw, drawn, per_drawn, stream, STRATIFIED: tl.constexpr, REPLACEMENT: tl.constexpr):
    """A point in [0, total) for each of the first `drawn` draws, 0 for the others; distinct ones without REPLACEMENT.

    stream: where their words begin.
    """
    block, seed = stream
    by_chance = draw < drawn
    if REPLACEMENT:
        word = words_at(draw, block, seed)
        if STRATIFIED:
            target = stratified_target(draw, drawn.to(tl.int64), per_drawn, total, word)
        else:
            target = floor_of_product(word, total)
        target = tl.where(by_chance, target, 0)
    else:
        target = permuted_rank(draw, by_chance, total, block, seed)
    return target


@triton.jit
def rank_at(sums_ptr, target, count, DIGITS: tl.constexpr):
    """The first ranks whose sum of masses exceeds (DRAWS,) targets, one digit of the rank after the other.

    A thread searches for one target, as in `masses.py`.
    """
    rank = target * 0
    # of the parts into which a digit divides what is left
    width = tl.full([], BASE**DIGITS, tl.int64)
    for _ in range(DIGITS):
        width //= BASE
        passed = rank * 0
        for digit in tl.static_range(1, BASE):
            # the last rank of a part; no target passes the end of all ranks
            last = rank + (digit * width - 1)
            passed += (tl.load(sums_ptr + last, mask=last < count, other=NO_MASS) <= target).to(tl.int64)
        rank += passed * width
    # in bounds where nothing is ranked
    return tl.minimum(rank, count - 1)


@triton.jit
def located(levels, ranks, target, head, capacity, BY: tl.constexpr, DIGITS: tl.constexpr):
    """The slots on which targets in all mass fall, and their masses: see `draw_kernel`."""
    if BY == "rank":
        sums_ptr, ages_ptr, count_ptr = ranks
        rank = rank_at(sums_ptr, target, tl.maximum(tl.load(count_ptr), 1), DIGITS)
        # nothing comes before rank 1
        mass = tl.load(sums_ptr + rank) - tl.load(sums_ptr + (rank - 1), mask=rank > 0, other=0)
        slot = head + tl.load(ages_ptr + rank)
        slot = tl.where(slot >= capacity, slot - capacity, slot)
    else:
        slot, mass = descend(levels, target)
    return slot, mass


@triton.jit
def total_and_lowest(levels, ranks, counters_ptr, BY: tl.constexpr):
    """All mass that can be drawn, and the smallest mass of all: that of the last rank, or the one found before."""
    if BY == "rank":
        sums_ptr, _, count_ptr = ranks
        count = tl.maximum(tl.load(count_ptr), 1)
        total = tl.load(sums_ptr + count - 1)
        lowest = total - tl.load(sums_ptr + count - 2, mask=count > 1, other=0)
    else:
        total = total_of(levels)
        lowest = tl.load(counters_ptr + LOWEST)
    return total, lowest


@triton.jit(
    do_not_specialize=[
        "drawn",
        "batch",
        "capacity",
        "per_drawn",
        "per_capacity",
    ]
)
def draw_kernel(
    levels,
    starts,
    held,
    counters_ptr,
    ranks,
    outputs,
    drawn,
    batch,
    capacity,
    per_drawn,
    per_capacity,
    BY: tl.constexpr,
    DRAWS: tl.constexpr,
    DIGITS: tl.constexpr,
    STRATIFIED: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    LOWEST_OF_ALL: tl.constexpr,
):
    """Draw `drawn` slots and take the newest for the rest of the batch.

    levels: of the tree of masses for BY "mass"; of eligible starts, or () where all stored slots can be drawn, for
            "uniform".
    starts: levels of the tree of eligible starts, to take the newest of them, or ().
    held:   the masses of transitions, to take the newest that have one, in a tuple. Without these and `starts` it takes
            the newest stored slots.
    ranks:  for "rank": the running sums of the masses of ranks, the ages in order of rank, and how many of these can
            be drawn.
    outputs: slots, keys, probabilities (1 from row `drawn` on) and masses, 0 in rows that were not drawn by one; and,
             of draws by priority, for each program the smallest mass that it drew, or with LOWEST_OF_ALL that of all
             slots, found before, or of the last rank.
    per_...: reciprocals, see `random.py`.

    It changes nothing that lasts.

    A graph replayed after a `clear` may ask for more than there is: keys then repeat or mean nothing, and every access
    is in bounds.
    """
    UNIFORM: tl.constexpr = BY == "uniform"
    program = tl.program_id(0).to(tl.int64)
    draw = program * DRAWS + tl.arange(0, DRAWS)
    by_chance = draw < drawn
    added = tl.load(counters_ptr + ADDED)
    head = remainder(added, capacity, per_capacity)
    newest = tl.maximum(added - batch + draw, 0)
    oldest = tl.maximum(added - capacity, tl.load(counters_ptr + FIRST))
    if not UNIFORM:
        within, lowest = total_and_lowest(levels, ranks, counters_ptr, BY)
    elif len(levels) == 0:
        within = added - oldest
    else:
        within = total_of(levels)
    count = tl.maximum(within, 1)
    stream = tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + SEED)
    target = target_in(count, draw, drawn, per_drawn, stream, STRATIFIED, REPLACEMENT)

    if UNIFORM:
        if len(levels) > 0:
            last = from_oldest(tl.maximum(within - batch + draw, 0), mass_before(levels, head), within)
            slot, _ = descend(levels, tl.where(by_chance, target, last))
        else:
            slot = remainder(tl.where(by_chance, oldest + target, newest), capacity, per_capacity)
            if len(held) > 0:
                slot = newest_with_mass(held[0], batch - 1 - draw, batch, added - oldest, head, capacity)
        chance = 1.0 / count.to(tl.float64)
        # without a mass the weight is 1
        mass = slot * 0
    else:
        slot, mass = located(levels, ranks, target, head, capacity, BY, DIGITS)
        chance = mass.to(tl.float64) / count.to(tl.float64)
        if not LOWEST_OF_ALL:
            lowest = tl.min(tl.where(by_chance, mass, NO_MASS), axis=0)
        tl.store(outputs[4] + program, lowest)
        # only the last programs have newest rows
        if (program + 1) * DRAWS > drawn:
            if len(starts) > 0:
                last = newest_eligible(starts, draw, batch, head)
            elif len(held) > 0:
                last = newest_with_mass(held[0], batch - 1 - draw, batch - drawn, added - oldest, head, capacity)
            else:
                last = slot
            slot = tl.where(by_chance, slot, last)
    slots_ptr, keys_ptr, probability_ptr, masses_ptr = outputs[0], outputs[1], outputs[2], outputs[3]
    named = draw < batch
    tl.store(slots_ptr + draw, slot, mask=named)
    tl.store(keys_ptr + draw, key_in_slot(slot, added, head, capacity), mask=named)
    tl.store(probability_ptr + draw, tl.where(by_chance, chance, 1.0).to(tl.float32), mask=named)
    tl.store(masses_ptr + draw, tl.where(by_chance, mass, 0), mask=named)
