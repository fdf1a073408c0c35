"""Draws from the eligible starts of a trajectory buffer: by mass, uniformly, and the newest."""

import triton
import triton.language as tl

from .counters import ADDED, LOWEST, NO_MASS, RANDOM, STEP, is_last
from .stratified_draw import descend, find_lowest, key_in_slot, store_draws, target_in
from .uniform_draw import uniform_rank


@triton.jit
def mass_before(levels, slot, FANOUT: tl.constexpr):
    """The mass of the slots below each of some."""
    child = tl.arange(0, FANOUT)
    mass = slot * 0
    node = slot
    for level in tl.static_range(len(levels)):
        # the last block of a level is padded with zeros, so every place exists
        block = node // FANOUT * FANOUT
        masses = tl.load(levels[level] + (block[:, None] + child[None, :]))
        mass += tl.sum(tl.where(child[None, :] < (node - block)[:, None], masses, 0), axis=1)
        node = node // FANOUT
    return mass


@triton.jit
def draw_range(levels, head, skipped, capacity, FANOUT: tl.constexpr, SKIPS: tl.constexpr):
    """All mass, the mass before the slot of the oldest key, and the mass of all but the newest `skipped` slots.

    head: slot of the next key; the slots from it on hold the oldest keys.
    """
    total = tl.sum(tl.load(levels[len(levels) - 1] + tl.arange(0, FANOUT)), axis=0)
    if SKIPS:
        # both ends of what can be drawn are looked up together
        end = tl.arange(0, 2)
        last = (head + capacity - skipped) % capacity
        masses = mass_before(levels, tl.where(end == 0, head, last), FANOUT)
        before = tl.sum(tl.where(end == 0, masses, 0), axis=0)
        newest = before - tl.sum(tl.where(end == 1, masses, 0), axis=0)
        within = total - tl.where(last > head, newest + total, newest)
    else:
        before = tl.sum(mass_before(levels, head + tl.arange(0, 1), FANOUT), axis=0)
        within = total
    return total, before, within


@triton.jit
def from_oldest(target, before, total):
    """Targets counted from the oldest key, as the tree counts them: from slot 0."""
    target += before
    return tl.where(target >= total, target - total, target)


@triton.jit
def newest_eligible(eligible, draw, batch, head, skipped, capacity, FANOUT: tl.constexpr, SKIPS: tl.constexpr):
    """The slots of the newest eligible starts, for the last draws of a batch; eligible: levels of a tree of ones."""
    total, before, within = draw_range(eligible, head, skipped, capacity, FANOUT, SKIPS)
    slot, _ = descend(eligible, from_oldest(tl.maximum(within - batch + draw, 0), before, total), FANOUT)
    return slot


@triton.jit
def store_words_after(words, drawn, counters_ptr):
    """First program: leave in words[0], if that is given, the block of the stream after the words of the draws."""
    if len(words) > 0:
        if tl.program_id(0) == 0:
            tl.store(words[0], tl.load(counters_ptr + RANDOM) + (drawn + 3) // 4)


@triton.jit(do_not_specialize=["drawn", "batch", "capacity", "skipped", "blocks", "draw_programs"])
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
        head = added % capacity
        total, before, within = draw_range(levels, head, skipped, capacity, FANOUT, SKIPS)
        store_words_after(words, drawn, counters_ptr)
        target = target_in(within, draw, drawn, counters_ptr, STRATIFIED)
        if SKIPS:
            target = from_oldest(target, before, total)
        slot, mass = descend(levels, target, FANOUT)
        chance = mass.to(tl.float64) / tl.maximum(within, 1).to(tl.float64)
        if len(eligible) > 0:
            # only the last programs have newest rows
            if (program + 1) * DRAWS > drawn:
                newest = newest_eligible(eligible, draw, batch, head, skipped, capacity, FANOUT, SKIPS)
                slot = tl.where(by_mass, slot, newest)
        key = key_in_slot(slot, added, capacity)
        store_draws(outputs, draw, drawn, batch, slot, key, chance, tl.where(by_mass, mass, 0))
        if len(low) == 0:
            lowest = tl.min(tl.where(by_mass, mass, NO_MASS), axis=0)
            tl.atomic_min(counters_ptr + LOWEST, lowest, sem="relaxed")
    elif len(low) > 0:
        find_lowest(low[0], levels[0], program - draw_programs, blocks, counters_ptr, FANOUT, BLOCKS)


@triton.jit(do_not_specialize=["drawn", "batch", "capacity", "skipped", "blocks_drawn"])
def draw_eligible_kernel(
    eligible,
    counters_ptr,
    outputs,
    words,
    drawn,
    batch,
    capacity,
    skipped,
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
    total, before, within = draw_range(eligible, added % capacity, skipped, capacity, FANOUT, SKIPS)
    count = tl.maximum(within, 1)
    rank = uniform_rank(draw, by_chance, count, counters_ptr, REPLACEMENT)
    if SKIPS:
        rank = from_oldest(rank, before, total)
    newest = from_oldest(tl.maximum(within - batch + draw, 0), before, total)
    slot, _ = descend(eligible, tl.where(by_chance, rank, newest), FANOUT)
    chance = 1.0 / count.to(tl.float64)
    ones = tl.full([DRAWS], 1.0, tl.float32)
    key = key_in_slot(slot, added, capacity)
    store_draws(outputs, draw, drawn, batch, slot, key, chance, ones)
    if is_last(counters_ptr, tl.num_programs(0)):
        tl.store(counters_ptr + STEP, step + 1)
        tl.store(counters_ptr + RANDOM, block + blocks_drawn)
        if len(words) > 0:
            tl.store(words[0], block + blocks_drawn - (batch + 3) // 4)
