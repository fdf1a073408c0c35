"""Draws from the eligible starts of a trajectory buffer: by mass, uniformly, and the newest."""

import triton
import triton.language as tl

from .philox import floor_of_product, words_at
from .stratified_draw import NO_MASS, descend, key_in_slot, note_lowest, stratified_target
from .uniform_draw import permuted_rank


@triton.jit
def mass_before(levels, slot, LEVELS: tl.constexpr, FANOUT: tl.constexpr):
    """The mass of the slots below each of some."""
    child = tl.arange(0, FANOUT)
    mass = slot * 0
    node = slot
    for level in tl.static_range(LEVELS):
        # the last block of a level is padded with zeros, so every place exists
        block = node // FANOUT * FANOUT
        masses = tl.load(levels[level] + (block[:, None] + child[None, :]))
        mass += tl.sum(tl.where(child[None, :] < (node - block)[:, None], masses, 0), axis=1)
        node = node // FANOUT
    return mass


@triton.jit
def reach(levels, head, skipped, capacity, LEVELS: tl.constexpr, FANOUT: tl.constexpr, SKIPS: tl.constexpr):
    """All mass, the mass before the slot of the oldest key, and the mass of all but the newest `skipped` slots.

    head: slot of the next key; the slots from it on hold the oldest keys.
    """
    total = tl.sum(tl.load(levels[LEVELS - 1] + tl.arange(0, FANOUT)), axis=0)
    if SKIPS:
        # both ends of what is within reach are looked up together
        end = tl.arange(0, 2)
        last = (head + capacity - skipped) % capacity
        masses = mass_before(levels, tl.where(end == 0, head, last), LEVELS, FANOUT)
        before = tl.sum(tl.where(end == 0, masses, 0), axis=0)
        newest = before - tl.sum(tl.where(end == 1, masses, 0), axis=0)
        within = total - tl.where(last > head, newest + total, newest)
    else:
        before = tl.sum(mass_before(levels, head + tl.arange(0, 1), LEVELS, FANOUT), axis=0)
        within = total
    return total, before, within


@triton.jit
def from_oldest(target, before, total):
    """Targets counted from the oldest key, as the tree counts them: from slot 0."""
    target += before
    return tl.where(target >= total, target - total, target)


@triton.jit(do_not_specialize=["drawn", "batch", "capacity", "skipped", "blocks", "draw_programs"])
def draw_by_mass_kernel(
    levels,
    marks,
    low_ptr,
    counters_ptr,
    times_sampled_ptr,
    slots_ptr,
    keys_ptr,
    masses_ptr,
    probability_ptr,
    words_ptr,
    drawn,
    batch,
    capacity,
    skipped,
    blocks,
    draw_programs,
    LEVELS: tl.constexpr,
    MARK_LEVELS: tl.constexpr,
    FANOUT: tl.constexpr,
    DRAWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STRATIFIED: tl.constexpr,
    SKIPS: tl.constexpr,
    LOWEST_OF_ALL: tl.constexpr,
    SHIFTED: tl.constexpr,
    ADDED: tl.constexpr,
    RANDOM: tl.constexpr,
    SEED: tl.constexpr,
    EDGE_LOW: tl.constexpr,
):
    """Draw `drawn` slots by mass and, with MARK_LEVELS, take the newest marked ones for the rest of the batch.

    None of them is one of the newest `skipped` slots. Leaves the smallest mass of the batch in counters[EDGE_LOW]; with
    LOWEST_OF_ALL further programs leave the smallest of all slots there instead. The mass of a newest row is written as
    0: it was not drawn. Where nothing has mass, as in a graph replayed after a `clear`, the draws stay inside but mean
    nothing. SHIFTED: leaves in words[0] the block of the stream that comes after the words of the draws.
    """
    program = tl.program_id(0).to(tl.int64)
    if program < draw_programs:
        draw = program * DRAWS + tl.arange(0, DRAWS)
        live = draw < batch
        by_mass = draw < drawn
        added = tl.load(counters_ptr + ADDED)
        head = added % capacity
        total, before, within = reach(levels, head, skipped, capacity, LEVELS, FANOUT, SKIPS)
        random = tl.load(counters_ptr + RANDOM)
        if SHIFTED:
            if program == 0:
                tl.store(words_ptr, random + (drawn + 3) // 4)
        word = words_at(draw, random, tl.load(counters_ptr + SEED))
        if STRATIFIED:
            target = stratified_target(draw, drawn.to(tl.int64), within, word)
        else:
            target = floor_of_product(word, within)
        if SKIPS:
            target = from_oldest(target, before, total)
        # rows that draw nothing look for the first unit of mass
        slot, mass = descend(levels, tl.where(by_mass, target, 0), LEVELS, FANOUT)
        chance = mass.to(tl.float64) / tl.maximum(within, 1).to(tl.float64)
        tl.store(masses_ptr + draw, tl.where(by_mass, mass, 0), mask=live)
        tl.store(probability_ptr + draw, tl.where(by_mass, chance, 1.0).to(tl.float32), mask=live)
        if MARK_LEVELS > 0:
            # only the last programs have newest rows
            if (program + 1) * DRAWS > drawn:
                marked, oldest, among = reach(marks, head, skipped, capacity, MARK_LEVELS, FANOUT, SKIPS)
                rank = from_oldest(tl.maximum(among - batch + draw, 0), oldest, marked)
                newest, _ = descend(marks, rank, MARK_LEVELS, FANOUT)
                slot = tl.where(by_mass, slot, newest)
        tl.store(slots_ptr + draw, slot, mask=live)
        tl.store(keys_ptr + draw, key_in_slot(slot, added, capacity), mask=live)
        tl.atomic_add(times_sampled_ptr + slot, tl.full([DRAWS], 1, tl.int32), mask=live, sem="relaxed")
        if not LOWEST_OF_ALL:
            lowest = tl.min(tl.where(by_mass, mass, NO_MASS), axis=0)
            tl.atomic_min(counters_ptr + EDGE_LOW, lowest, sem="relaxed")
    elif LOWEST_OF_ALL:
        note_lowest(low_ptr, levels[0], program - draw_programs, blocks, counters_ptr, EDGE_LOW, FANOUT, BLOCKS)


@triton.jit(do_not_specialize=["drawn", "batch", "capacity", "skipped", "blocks_drawn"])
def draw_marked_kernel(
    marks,
    counters_ptr,
    times_sampled_ptr,
    slots_ptr,
    keys_ptr,
    probability_ptr,
    weight_ptr,
    words_ptr,
    drawn,
    batch,
    capacity,
    skipped,
    blocks_drawn,
    LEVELS: tl.constexpr,
    FANOUT: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROUNDS_OF_FEW: tl.constexpr,
    FEW: tl.constexpr,
    DRAWS: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    SKIPS: tl.constexpr,
    SHIFTED: tl.constexpr,
    ADDED: tl.constexpr,
    RANDOM: tl.constexpr,
    SEED: tl.constexpr,
    STEP: tl.constexpr,
    TICKET: tl.constexpr,
):
    """Draw `drawn` marked slots uniformly and take the newest marked ones for the rest of the batch.

    None of them is one of the newest `skipped` slots. The last program moves the stream on. A replayed graph may ask
    for more than is left after a `clear`: slots then repeat, and all of it stays inside. SHIFTED: leaves in words[0]
    the block of the stream where the last `batch` of the words that are moved past begin.
    """
    draw = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    live = draw < batch
    by_chance = draw < drawn
    added = tl.load(counters_ptr + ADDED)
    block = tl.load(counters_ptr + RANDOM)
    step = tl.load(counters_ptr + STEP)
    seed = tl.load(counters_ptr + SEED)
    total, before, within = reach(marks, added % capacity, skipped, capacity, LEVELS, FANOUT, SKIPS)
    count = tl.maximum(within, 1)
    if REPLACEMENT:
        rank = floor_of_product(words_at(draw, block, seed), count)
    else:
        rank = permuted_rank(draw, by_chance, count, block, seed, ROUNDS, ROUNDS_OF_FEW, FEW)
    if SKIPS:
        rank = from_oldest(rank, before, total)
    newest = from_oldest(tl.maximum(within - batch + draw, 0), before, total)
    slot, _ = descend(marks, tl.where(by_chance, rank, newest), LEVELS, FANOUT)
    chance = tl.where(by_chance, 1.0 / count.to(tl.float64), 1.0)
    tl.store(slots_ptr + draw, slot, mask=live)
    tl.store(keys_ptr + draw, key_in_slot(slot, added, capacity), mask=live)
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
        if SHIFTED:
            tl.store(words_ptr, block + blocks_drawn - (batch + 3) // 4)
