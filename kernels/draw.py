"""The draw of a batch: slots by mass, uniformly or by rank, and the newest."""

import triton
import triton.language as tl

from .constants import ADDED, DEAD, FIRST, LOWEST, NO_KEY, NO_MASS, RANDOM, REDRAWS, SEED
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
def total_and_last(levels, ranks, BY: tl.constexpr):
    """All mass that can be drawn, and that of the last rank, or 0."""
    if BY == "rank":
        sums_ptr, _, count_ptr = ranks
        count = tl.maximum(tl.load(count_ptr), 1)
        total = tl.load(sums_ptr + count - 1)
        last = total - tl.load(sums_ptr + count - 2, mask=count > 1, other=0)
    else:
        total = total_of(levels)
        last = total * 0
    return total, last


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
        if BY == "rank":
            within, last_mass = total_and_last(levels, ranks, BY)
        target = target_in(within, draw, drawn, per_drawn, counters_ptr, STRATIFIED)
        if BY == "mass" and SKIPS:
            target = from_oldest(target, before, total)
        slot, mass = located(levels, ranks, target, head, capacity, BY, DIGITS)
        chance = mass.to(tl.float64) / tl.maximum(within, 1).to(tl.float64)
        lowest = tl.min(tl.where(by_chance, mass, NO_MASS), axis=0)
        if LOWEST_OF_ALL:
            if BY == "rank":
                lowest = last_mass
            else:
                lowest = tl.load(counters_ptr + LOWEST)
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


@triton.jit
def fits(slot, named, added, head, capacity, streams, rule, STRICT: tl.constexpr):
    """The keys of eligible starts, and which of those named may begin a sequence.

    streams: depths and flags of all steps.
    rule:    slots from the first step of a sequence to its last, steps between them, environments and stride, the last
             two with their reciprocals.
    """
    depth_ptr, flags_ptr = streams
    ahead, between, envs, per_envs, stride, per_stride = rule
    key = key_in_slot(slot, added, head, capacity)
    number = divided(tl.maximum(key, 0), envs, per_envs)[0]
    good = named & (key >= 0) & (key + ahead < added) & (remainder(number, stride, per_stride) == 0)
    if STRICT:
        last = slot + ahead
        last = tl.where(last >= capacity, last - capacity, last)
        # its episode began no later than the sequence, and it is no step after the end of one
        depth = tl.load(depth_ptr + last, mask=good, other=0)
        good = good & (depth >= between) & ((tl.load(flags_ptr + last, mask=good, other=DEAD) & DEAD) == 0)
    return key, good


@triton.jit
def walk(
    starts,
    outputs,
    counters_ptr,
    added,
    head,
    capacity,
    streams,
    rule,
    begin,
    rows,
    DRAWS: tl.constexpr,
    NEWEST: tl.constexpr,
    STRICT: tl.constexpr,
):
    """Fill `rows` rows from one on with the first starts that fit of a random permutation, or of the newest.

    One program walks for all of them, so that none is taken twice. Rows for which none was found are no draws.
    """
    slots_ptr, keys_ptr, probability_ptr, masses_ptr = outputs[0], outputs[1], outputs[2], outputs[3]
    total, before, count = draw_range(starts, head, 0, capacity, False)
    found = begin * 0
    done = begin * 0
    most = tl.minimum(count, rows * (1 + REDRAWS))
    chance = 1.0
    if not NEWEST:
        chance = 1.0 / tl.maximum(count, 1).to(tl.float64)
    block, seed = tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + SEED)
    while (found < rows) & (done < most):
        place = done + tl.arange(0, DRAWS)
        named = place < most
        if NEWEST:
            rank = from_oldest(tl.maximum(count - 1 - place, 0), before, total)
        else:
            rank = permuted_rank(place, named, tl.maximum(count, 1), block, seed)
        slot = descend(starts, rank)[0]
        key, good = fits(slot, named, added, head, capacity, streams, rule, STRICT)
        row = found + tl.cumsum(good.to(tl.int64), axis=0) - 1
        good = good & (row < rows)
        at = begin + (rows - 1 - row if NEWEST else row)
        tl.store(slots_ptr + at, slot, mask=good)
        tl.store(keys_ptr + at, key, mask=good)
        tl.store(probability_ptr + at, (slot * 0 + chance).to(tl.float32), mask=good)
        # without a mass the weight is 1
        tl.store(masses_ptr + at, slot * 0, mask=good)
        found += tl.sum(good.to(tl.int64), axis=0)
        done += DRAWS
    while found < rows:
        row = found + tl.arange(0, DRAWS)
        at = begin + (rows - 1 - row if NEWEST else row)
        not_drawn(outputs, at, row < rows)
        found += DRAWS


@triton.jit
def not_drawn(outputs, row, named):
    """Mark rows for which no start was found: no key, and a mass by which their weight is 0."""
    slots_ptr, keys_ptr, probability_ptr, masses_ptr = outputs[0], outputs[1], outputs[2], outputs[3]
    tl.store(slots_ptr + row, row * 0, mask=named)
    tl.store(keys_ptr + row, row * 0 + NO_KEY, mask=named)
    tl.store(probability_ptr + row, (row * 0).to(tl.float32), mask=named)
    tl.store(masses_ptr + row, row * 0 - 1, mask=named)


@triton.jit(
    do_not_specialize=[
        "drawn",
        "batch",
        "capacity",
        "ahead",
        "between",
        "envs",
        "stride",
        "per_drawn",
        "per_capacity",
        "per_envs",
        "per_stride",
        "blocks_drawn",
        "blocks_once",
        "drawing",
    ]
)
def draw_sequences_kernel(
    levels,
    starts,
    streams,
    counters_ptr,
    ranks,
    outputs,
    words,
    drawn,
    batch,
    capacity,
    ahead,
    between,
    envs,
    stride,
    per_drawn,
    per_capacity,
    per_envs,
    per_stride,
    blocks_drawn,
    blocks_once,
    drawing,
    BY: tl.constexpr,
    DRAWS: tl.constexpr,
    DIGITS: tl.constexpr,
    STRATIFIED: tl.constexpr,
    WALKS: tl.constexpr,
    STRICT: tl.constexpr,
    LOWEST_OF_ALL: tl.constexpr,
):
    """As `draw_kernel`, of starts that fit a rule, see `fits`: rows that do not are drawn again from all mass, at most
    REDRAWS times, by `blocks_once` blocks of words each time.

    The first `drawing` programs draw by chance; with WALKS one of them draws without replacement. Another one takes the
    newest. Rows that do not fit at last have weight 0 and no key.
    """
    program = tl.program_id(0).to(tl.int64)
    added = tl.load(counters_ptr + ADDED)
    head = remainder(added, capacity, per_capacity)
    capacity = capacity.to(tl.int64)
    rule = (ahead.to(tl.int64), between, envs.to(tl.int64), per_envs, stride.to(tl.int64), per_stride)
    if len(words) > 0:
        if program == 0:
            tl.store(words[0], tl.load(counters_ptr + RANDOM) + blocks_drawn)
    drawn = drawn.to(tl.int64)
    if len(starts) > 0:
        if program >= drawing:
            rows = batch - drawn
            walk(starts, outputs, counters_ptr, added, head, capacity, streams, rule, drawn, rows, DRAWS, True, STRICT)
    if WALKS:
        if program < drawing:
            first = drawn * 0
            walk(
                starts, outputs, counters_ptr, added, head, capacity, streams, rule, first, drawn, DRAWS, False, STRICT
            )
    elif program < drawing:
        slots_ptr, keys_ptr, probability_ptr, masses_ptr, lowest_ptr = outputs
        draw = program * DRAWS + tl.arange(0, DRAWS)
        by_chance = draw < drawn
        total, last_mass = total_and_last(levels, ranks, BY)
        target = target_in(total, draw, drawn, per_drawn, counters_ptr, STRATIFIED)
        slot, mass = located(levels, ranks, target, head, capacity, BY, DIGITS)
        key, good = fits(slot, by_chance & (mass > 0), added, head, capacity, streams, rule, STRICT)
        block, seed = tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + SEED)
        again = tl.full([], 0, tl.int32)
        while (again < REDRAWS) & (tl.max((by_chance & ~good).to(tl.int32), axis=0) > 0):
            again += 1
            word = words_at(draw, block + again * blocks_once, seed)
            other, other_mass = located(levels, ranks, floor_of_product(word, total), head, capacity, BY, DIGITS)
            other_key, fitting = fits(
                other, by_chance & ~good & (other_mass > 0), added, head, capacity, streams, rule, STRICT
            )
            slot = tl.where(fitting, other, slot)
            mass = tl.where(fitting, other_mass, mass)
            key = tl.where(fitting, other_key, key)
            good = good | fitting
        if BY != "uniform":
            lowest = tl.min(tl.where(good, mass, NO_MASS), axis=0)
            if LOWEST_OF_ALL:
                lowest = last_mass
                if BY == "mass":
                    lowest = tl.load(counters_ptr + LOWEST)
            tl.store(lowest_ptr + program, lowest)
        chance = mass.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)
        tl.store(slots_ptr + draw, slot, mask=good)
        tl.store(keys_ptr + draw, key, mask=good)
        tl.store(probability_ptr + draw, chance.to(tl.float32), mask=good)
        tl.store(masses_ptr + draw, mass * 0 if BY == "uniform" else mass, mask=good)
        not_drawn(outputs, draw, by_chance & ~good)
