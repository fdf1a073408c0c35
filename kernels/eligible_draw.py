"""Draws from the eligible starts of a trajectory buffer: by mass, uniformly, and the newest."""

import triton
import triton.language as tl

from .counters import ADDED, LOWEST, NO_MASS, RANDOM, STEP, is_last
from .division import remainder
from .stratified_draw import descend, find_lowest, halves, key_in_slot, root_of, store_draws, target_in, word_of
from .uniform_draw import uniform_rank


@triton.jit
def masses_before(levels, root, slot, FANOUT: tl.constexpr):
    """Numbers whose sums are the masses of the slots below (DRAWS,) slots: [DRAWS, FANOUT // 2]."""
    HALF: tl.constexpr = FANOUT // 2
    child = tl.arange(0, HALF)[None, :]
    node = slot
    for level in tl.static_range(len(levels)):
        if level == len(levels) - 1:
            first, second = root
        else:
            first, second = halves(levels[level], node // FANOUT, FANOUT)
        below = (node % FANOUT)[:, None]
        masses = tl.where(child < below, first, 0) + tl.where(child + HALF < below, second, 0)
        if level == 0:
            found = masses
        else:
            found += masses
        node = node // FANOUT
    return found


@triton.jit
def draw_range(levels, root, draw, head, skipped, capacity, FANOUT: tl.constexpr, SKIPS: tl.constexpr):
    """All mass, the mass before the slot of the oldest key, and the mass of all but the newest `skipped` slots.

    Each (DRAWS,) times the same. head: slot of the next key; the slots from it on hold the oldest keys. Sums come after
    all that is loaded.
    """
    start = head + draw * 0
    to_head = masses_before(levels, root, start, FANOUT)
    if SKIPS:
        last = start + capacity - skipped
        last = tl.where(last >= capacity, last - capacity, last)
        to_last = masses_before(levels, root, last, FANOUT)
    total = tl.sum(root[0] + root[1], axis=1)
    before = tl.sum(to_head, axis=1)
    within = total
    if SKIPS:
        newest = before - tl.sum(to_last, axis=1)
        within = total - tl.where(last > start, newest + total, newest)
    return total, before, within


@triton.jit
def from_oldest(target, before, total):
    """Targets counted from the oldest key, as the tree counts them: from slot 0."""
    target += before
    return tl.where(target >= total, target - total, target)


@triton.jit
def newest_eligible(eligible, draw, batch, head, skipped, capacity, FANOUT: tl.constexpr, SKIPS: tl.constexpr):
    """The slots of the newest eligible starts, for the last draws of a batch; eligible: levels of a tree of ones."""
    root = root_of(eligible, draw, FANOUT)
    total, before, within = draw_range(eligible, root, draw, head, skipped, capacity, FANOUT, SKIPS)
    slot, _ = descend(eligible, root, from_oldest(tl.maximum(within - batch + draw, 0), before, total), FANOUT)
    return slot


@triton.jit
def store_words_after(words, drawn, counters_ptr):
    """First program: leave in words[0], if that is given, the block of the stream after the words of the draws."""
    if len(words) > 0:
        if tl.program_id(0) == 0:
            tl.store(words[0], tl.load(counters_ptr + RANDOM) + (drawn + 3) // 4)


@triton.jit(
    do_not_specialize=["drawn", "batch", "capacity", "skipped", "per_drawn", "per_capacity", "blocks", "draw_programs"]
)
def draw_by_mass_kernel(
    levels,
    eligible,
    low,
    counters_ptr,
    outputs,
    words,
    drawn,
    batch,
    capacity,
    skipped,
    per_drawn,
    per_capacity,
    blocks,
    draw_programs,
    FANOUT: tl.constexpr,
    DRAWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STRATIFIED: tl.constexpr,
    SKIPS: tl.constexpr,
):
    """Draw `drawn` slots by mass and, with an eligible tree, take the newest eligible ones for the rest of the batch.

    None of them is one of the newest `skipped` slots. Leaves the smallest mass of the batch in counters[LOWEST]; given
    `low` further programs leave the smallest of all slots there instead. The mass of a newest row is written as
    0: it was not drawn. Where nothing has mass, as in a graph replayed after a `clear`, the draws stay inside but mean
    nothing. words: see `store_words_after`.
    """
    program = tl.program_id(0).to(tl.int64)
    if program < draw_programs:
        draw = program * DRAWS + tl.arange(0, DRAWS)
        by_mass = draw < drawn
        added = tl.load(counters_ptr + ADDED)
        root, word = root_of(levels, draw, FANOUT), word_of(draw, counters_ptr)
        head = remainder(added, capacity, per_capacity)
        if SKIPS:
            total, before, within = draw_range(levels, root, draw, head, skipped, capacity, FANOUT, SKIPS)
        else:
            within = tl.sum(root[0] + root[1], axis=1)
        store_words_after(words, drawn, counters_ptr)
        target = target_in(within, draw, drawn, per_drawn, word, STRATIFIED)
        if SKIPS:
            target = from_oldest(target, before, total)
        slot, mass = descend(levels, root, target, FANOUT)
        chance = mass.to(tl.float64) / tl.maximum(within, 1).to(tl.float64)
        if len(eligible) > 0:
            # only the last programs have newest rows
            if (program + 1) * DRAWS > drawn:
                newest = newest_eligible(eligible, draw, batch, head, skipped, capacity, FANOUT, SKIPS)
                slot = tl.where(by_mass, slot, newest)
        key = key_in_slot(slot, added, head, capacity)
        store_draws(outputs, draw, drawn, batch, slot, key, chance, tl.where(by_mass, mass, 0))
        if len(low) == 0:
            lowest = tl.min(tl.where(by_mass, mass, NO_MASS), axis=0)
            tl.atomic_min(counters_ptr + LOWEST, lowest, sem="relaxed")
    elif len(low) > 0:
        find_lowest(low[0], levels[0], program - draw_programs, blocks, counters_ptr, FANOUT, BLOCKS)


@triton.jit(do_not_specialize=["drawn", "batch", "capacity", "skipped", "per_capacity", "blocks_drawn"])
def draw_eligible_kernel(
    eligible,
    counters_ptr,
    outputs,
    words,
    drawn,
    batch,
    capacity,
    skipped,
    per_capacity,
    blocks_drawn,
    FANOUT: tl.constexpr,
    DRAWS: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    SKIPS: tl.constexpr,
):
    """Draw `drawn` eligible slots uniformly and take the newest eligible ones for the rest of the batch.

    None of them is one of the newest `skipped` slots. The last program moves the stream on. A replayed graph may ask
    for more than is left after a `clear`: slots then repeat, and all of it stays inside. words: if given, words[0]
    becomes the block of the stream where the last `batch` of the words that are moved past begin.
    """
    draw = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    by_chance = draw < drawn
    added = tl.load(counters_ptr + ADDED)
    block, step = tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + STEP)
    root = root_of(eligible, draw, FANOUT)
    head = remainder(added, capacity, per_capacity)
    total, before, within = draw_range(eligible, root, draw, head, skipped, capacity, FANOUT, SKIPS)
    count = tl.maximum(tl.max(within, axis=0), 1)
    rank = uniform_rank(draw, by_chance, count, counters_ptr, REPLACEMENT)
    if SKIPS:
        rank = from_oldest(rank, before, total)
    newest = from_oldest(tl.maximum(within - batch + draw, 0), before, total)
    slot, _ = descend(eligible, root, tl.where(by_chance, rank, newest), FANOUT)
    chance = 1.0 / count.to(tl.float64)
    ones = tl.full([DRAWS], 1.0, tl.float32)
    key = key_in_slot(slot, added, head, capacity)
    store_draws(outputs, draw, drawn, batch, slot, key, chance, ones)
    if is_last(counters_ptr, tl.num_programs(0)):
        tl.store(counters_ptr + STEP, step + 1)
        tl.store(counters_ptr + RANDOM, block + blocks_drawn)
        if len(words) > 0:
            tl.store(words[0], block + blocks_drawn - (batch + 3) // 4)
