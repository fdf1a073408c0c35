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
def target_in(total, draw, drawn, per_drawn, stream, again, STRATIFIED: tl.constexpr, REPLACEMENT: tl.constexpr):
    """A point in [0, total) for each of the first `drawn` draws, 0 for the others; distinct ones without REPLACEMENT.

    stream: where their words begin. again: whether they were drawn before, and so not by strata.
    """
    block, seed = stream
    by_chance = draw < drawn
    if REPLACEMENT:
        word = words_at(draw, block, seed)
        target = floor_of_product(word, total)
        if STRATIFIED:
            first = stratified_target(draw, drawn.to(tl.int64), per_drawn, total, word)
            target = tl.where(again, target, first)
        target = tl.where(by_chance, target, 0)
    else:
        target = permuted_rank(draw, by_chance, total, block, seed)
    return target


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


@triton.jit
def store_rows(outputs, row, slot, key, probability, mass, named):
    """Store what was drawn for the named rows."""
    slots_ptr, keys_ptr, probability_ptr, masses_ptr = outputs[0], outputs[1], outputs[2], outputs[3]
    tl.store(slots_ptr + row, slot, mask=named)
    tl.store(keys_ptr + row, key, mask=named)
    tl.store(probability_ptr + row, probability.to(tl.float32), mask=named)
    tl.store(masses_ptr + row, mass, mask=named)


@triton.jit(
    do_not_specialize=[
        "drawn",
        "batch",
        "capacity",
        "skipped",
        "per_drawn",
        "per_capacity",
    ]
)
def draw_kernel(
    levels,
    starts,
    counters_ptr,
    ranks,
    outputs,
    drawn,
    batch,
    capacity,
    skipped,
    per_drawn,
    per_capacity,
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
    per_...: reciprocals, see `division.py`.

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
    if len(levels) > 0 and (SKIPS or UNIFORM):
        total, before, within = draw_range(levels, head, skipped, capacity, SKIPS)
    count = tl.maximum(within, 1)
    stream = tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + SEED)
    target = target_in(count, draw, drawn, per_drawn, stream, False, STRATIFIED, REPLACEMENT)

    if UNIFORM:
        if len(levels) > 0:
            if SKIPS:
                target = from_oldest(target, before, total)
            last = from_oldest(tl.maximum(within - batch + draw, 0), before, total)
            slot, _ = descend(levels, tl.where(by_chance, target, last))
        else:
            slot = remainder(tl.where(by_chance, oldest + target, newest), capacity, per_capacity)
        chance = 1.0 / count.to(tl.float64)
        # without a mass the weight is 1
        mass = slot * 0
    else:
        if BY == "mass" and SKIPS:
            target = from_oldest(target, before, total)
        slot, mass = located(levels, ranks, target, head, capacity, BY, DIGITS)
        chance = mass.to(tl.float64) / count.to(tl.float64)
        if not LOWEST_OF_ALL:
            lowest = tl.min(tl.where(by_chance, mass, NO_MASS), axis=0)
        tl.store(outputs[4] + program, lowest)
        # only the last programs have newest rows
        if (program + 1) * DRAWS > drawn:
            if len(starts) > 0:
                last = newest_eligible(starts, draw, batch, head, skipped, capacity, SKIPS)
            else:
                last = remainder(newest, capacity, per_capacity)
            slot = tl.where(by_chance, slot, last)
    key = key_in_slot(slot, added, head, capacity)
    chance = tl.where(by_chance, chance, 1.0)
    store_rows(outputs, draw, slot, key, chance, tl.where(by_chance, mass, 0), draw < batch)


@triton.jit
def fits(slot, named, ring, rule):
    """The keys of eligible starts, and which of those named may begin a sequence.

    ring:    the next key, its slot, and the capacity with its reciprocal.
    rule:    slots from the first step of a sequence to its last, steps between them, environments and stride, the last
             two with their reciprocals, and depths and flags of all steps, or () if a sequence may go past an end.
    """
    added, head, capacity, _ = ring
    ahead, between, envs, per_envs, stride, per_stride, streams = rule
    key = key_in_slot(slot, added, head, capacity)
    number = divided(tl.maximum(key, 0), envs, per_envs)[0]
    good = named & (key >= 0) & (key + ahead < added) & (remainder(number, stride, per_stride) == 0)
    if len(streams) > 0:
        depth_ptr, flags_ptr = streams
        last = slot + ahead
        last = tl.where(last >= capacity, last - capacity, last)
        # its episode began no later than the sequence, and it is no step after the end of one
        depth = tl.load(depth_ptr + last, mask=good, other=0)
        good = good & (depth >= between) & ((tl.load(flags_ptr + last, mask=good, other=DEAD) & DEAD) == 0)
    return key, good


@triton.jit
def newest_starts(place, named, eligible_ptr, ring, rule):
    """The slots of steps from which a sequence is stored, from the newest back, and which of those named are eligible.

    eligible: 1 for each slot that can be drawn, or 0.
    """
    added, _, capacity, per_capacity = ring
    ahead, _, envs, per_envs, stride, per_stride, _ = rule
    newest = divided(tl.maximum(added - 1 - ahead, 0), envs, per_envs)[0]
    steps, env = divided(place, envs, per_envs)
    key = (newest - remainder(newest, stride, per_stride) - steps * stride) * envs + envs - 1 - env
    named = named & (key >= 0) & (key >= added - capacity)
    slot = remainder(tl.maximum(key, 0), capacity, per_capacity)
    return slot, named & (tl.load(eligible_ptr + slot, mask=named, other=0) > 0)


@triton.jit
def not_drawn(outputs, row, named):
    """Mark rows for which no start was found: no key, and a mass by which their weight is 0."""
    store_rows(outputs, row, row * 0, row * 0 + NO_KEY, row * 0, row * 0 - 1, named)


@triton.jit
def walk(levels, outputs, ring, rule, stream, batch, rows, DRAWS: tl.constexpr, NEWEST: tl.constexpr):
    """Fill the first `rows` rows with the first starts that fit of a random permutation, or the last with the newest.

    levels: of the tree of eligible starts, of which the newest need the leaves alone.

    One program walks for all of them, so that none is taken twice. Rows for which none was found are no draws.
    """
    most = rows * (1 + REDRAWS)
    if NEWEST:
        chance = 1.0
        # the newest episodes may all be shorter than a sequence
        most += rule[0]
    else:
        count = tl.maximum(total_of(levels), 1)
        chance = 1.0 / count.to(tl.float64)
        most = tl.minimum(count, most)
    found = rows * 0
    done = rows * 0
    while (found < rows) & (done < most):
        place = done + tl.arange(0, DRAWS)
        if NEWEST:
            slot, named = newest_starts(place, place < most, levels[0], ring, rule)
        else:
            slot, mass = descend(levels, permuted_rank(place, place < most, count, stream[0], stream[1]))
            named = (place < most) & (mass > 0)
        key, good = fits(slot, named, ring, rule)
        row = found + tl.cumsum(good.to(tl.int64), axis=0) - 1
        good = good & (row < rows)
        # without a mass the weight is 1
        store_rows(outputs, batch - 1 - row if NEWEST else row, slot, key, slot * 0 + chance, slot * 0, good)
        found += tl.sum(good.to(tl.int64), axis=0)
        done += DRAWS
    while found < rows:
        row = found + tl.arange(0, DRAWS)
        not_drawn(outputs, batch - 1 - row if NEWEST else row, row < rows)
        found += DRAWS


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
        "blocks_once",
        "drawing",
    ]
)
def draw_sequences_kernel(
    levels,
    newest,
    streams,
    counters_ptr,
    ranks,
    outputs,
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
    blocks_once,
    drawing,
    BY: tl.constexpr,
    DRAWS: tl.constexpr,
    DIGITS: tl.constexpr,
    STRATIFIED: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    LOWEST_OF_ALL: tl.constexpr,
):
    """As `draw_kernel`, of starts that fit a rule: rows that do not are drawn again from all mass, at most REDRAWS
    times, by `blocks_once` blocks of words each time.

    The first `drawing` programs draw by chance, without REPLACEMENT one of them: see `walk`. One more takes the newest,
    of the tree `newest`. Rows that do not fit at last have weight 0 and no key. For streams and the numbers from
    `ahead` to `stride` see `fits`.
    """
    program = tl.program_id(0).to(tl.int64)
    added = tl.load(counters_ptr + ADDED)
    head = remainder(added, capacity, per_capacity)
    ring = (added, head, capacity.to(tl.int64), per_capacity)
    rule = (ahead.to(tl.int64), between, envs.to(tl.int64), per_envs, stride.to(tl.int64), per_stride, streams)
    block, seed = tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + SEED)
    drawn = drawn.to(tl.int64)
    if program >= drawing:
        if len(newest) > 0:
            walk(newest, outputs, ring, rule, (block, seed), batch, batch - drawn, DRAWS, True)
    elif not REPLACEMENT:
        walk(levels, outputs, ring, rule, (block, seed), batch, drawn, DRAWS, False)
    else:
        draw = program * DRAWS + tl.arange(0, DRAWS)
        missing = draw < drawn
        smallest = draw * 0 + NO_MASS
        total, lowest = total_and_lowest(levels, ranks, counters_ptr, BY)
        total = tl.maximum(total, 1)
        again = 0
        while (again <= REDRAWS) & (tl.max(missing.to(tl.int32), axis=0) > 0):
            stream = (block + again * blocks_once, seed)
            target = target_in(total, draw, drawn, per_drawn, stream, again > 0, STRATIFIED, True)
            slot, mass = located(levels, ranks, target, head, capacity, BY, DIGITS)
            key, good = fits(slot, missing & (mass > 0), ring, rule)
            chance = mass.to(tl.float64) / total.to(tl.float64)
            store_rows(outputs, draw, slot, key, chance, mass * 0 if BY == "uniform" else mass, good)
            smallest = tl.where(good, mass, smallest)
            missing = missing & ~good
            again += 1
        not_drawn(outputs, draw, missing)
        if BY != "uniform":
            if not LOWEST_OF_ALL:
                lowest = tl.min(smallest, axis=0)
            tl.store(outputs[4] + program, lowest)
