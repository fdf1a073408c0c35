"""Draws in proportion to mass and their probabilities."""

import triton
import triton.language as tl

from .counters import ADDED, LOWEST, NO_MASS, RANDOM, SEED
from .philox import floor_of_product, words_at


@triton.jit
def key_in_slot(slot, added, capacity):
    """The live key in a slot: the largest below `added` that belongs there."""
    head = added % capacity
    key = slot + (added - head)
    return tl.where(slot >= head, key - capacity, key)


@triton.jit
def stratified_target(draw, strata, total, word):
    """A point in each draw's own part of the total mass; strata is the number of parts, as int64."""
    whole = total // strata
    part = total % strata
    start = draw * whole + draw * part // strata
    stop = (draw + 1) * whole + (draw + 1) * part // strata
    return start + floor_of_product(word, stop - start)


@triton.jit
def target_in(total, draw, drawn, counters_ptr, STRATIFIED: tl.constexpr):
    """A point in the total mass for each of the first `drawn` draws, from the words of the stream."""
    word = words_at(draw, tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + SEED))
    if STRATIFIED:
        target = stratified_target(draw, drawn.to(tl.int64), total, word)
    else:
        target = floor_of_product(word, total)
    # rows that draw nothing look for the first unit of mass
    return tl.where(draw < drawn, target, 0)


@triton.jit
def store_draws(outputs, draw, drawn, batch, slot, key, chance, value):
    """Write draws to the outputs: slots, keys, probabilities, 1 from row `drawn` on, and masses or weights.

    Counts the slots as sampled in outputs[4].
    """
    live = draw < batch
    tl.store(outputs[0] + draw, slot, mask=live)
    tl.store(outputs[1] + draw, key, mask=live)
    tl.store(outputs[3] + draw, value, mask=live)
    tl.store(outputs[2] + draw, tl.where(draw < drawn, chance, 1.0).to(tl.float32), mask=live)
    tl.atomic_add(outputs[4] + slot, tl.full(slot.shape, 1, tl.int32), mask=live, sem="relaxed")


@triton.jit
def descend(levels, target, FANOUT: tl.constexpr):
    """The slots on which (DRAWS,) targets fall, and their masses; a slot for any target, wherever it lies."""
    child = tl.arange(0, FANOUT)
    rest = target
    node = target * 0
    mass = target * 0
    for level in tl.static_range(len(levels)):
        place = node[:, None] * FANOUT + child[None, :]
        # the last block of a level is padded with zeros, so every place exists
        masses = tl.load(levels[len(levels) - 1 - level] + place)  # [DRAWS, FANOUT]
        prefix = tl.cumsum(masses, axis=1)
        passed = prefix <= rest[:, None]
        step = tl.sum(passed.to(tl.int32), axis=1)
        # a tree without mass is descended along its first nodes, which exist
        step = tl.where(step < FANOUT, step, 0)
        rest -= tl.max(tl.where(passed, prefix, 0), axis=1)
        node = node * FANOUT + step
        mass = tl.sum(tl.where(child[None, :] == step[:, None], masses, 0), axis=1)
    return node, mass


@triton.jit
def find_lowest(low_ptr, leaves_ptr, program, blocks, counters_ptr, FANOUT: tl.constexpr, BLOCKS: tl.constexpr):
    """Bring the smallest masses of a program's blocks of leaves into counters[LOWEST]."""
    block = program * BLOCKS + tl.arange(0, BLOCKS)
    # blocks past the end hold no mass
    low = tl.load(low_ptr + block, mask=block < blocks, other=NO_MASS)
    dirty = low < 0
    leaf = block[:, None] * FANOUT + tl.arange(0, FANOUT)[None, :]
    # only blocks that changed are read again
    leaves = tl.load(leaves_ptr + leaf, mask=dirty[:, None], other=0)  # [BLOCKS, FANOUT]
    found = tl.min(tl.where(leaves == 0, NO_MASS, leaves), axis=1)
    low = tl.where(dirty, found, low)
    # copies of a thread's block in other threads have been read before it changes
    tl.debug_barrier()
    tl.store(low_ptr + block, low, mask=dirty)
    tl.atomic_min(counters_ptr + LOWEST, tl.min(low, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["drawn", "batch", "capacity", "blocks", "draw_programs"])
def stratified_draw_kernel(
    levels,
    low,
    counters_ptr,
    outputs,
    drawn,
    batch,
    capacity,
    blocks,
    draw_programs,
    FANOUT: tl.constexpr,
    DRAWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STRATIFIED: tl.constexpr,
):
    """Draw `drawn` slots by mass and take the newest for the rest of the batch.

    Leaves the smallest mass of the batch in counters[LOWEST]. If `low` is given, the smallest mass of each block of
    leaves, further programs leave the smallest of all slots there instead. The mass of a newest row is written as 0: it
    was not drawn. Where nothing has mass, as in a graph replayed after a `clear`, the draws stay inside but mean
    nothing.
    """
    program = tl.program_id(0).to(tl.int64)
    if program < draw_programs:
        draw = program * DRAWS + tl.arange(0, DRAWS)
        by_mass = draw < drawn
        total = tl.sum(tl.load(levels[len(levels) - 1] + tl.arange(0, FANOUT)), axis=0)
        node, mass = descend(levels, target_in(total, draw, drawn, counters_ptr, STRATIFIED), FANOUT)
        added = tl.load(counters_ptr + ADDED)
        newest = tl.maximum(added - batch + draw, 0)
        slot = tl.where(by_mass, node, newest % capacity)
        key = tl.where(by_mass, key_in_slot(node, added, capacity), newest)
        chance = mass.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)
        store_draws(outputs, draw, drawn, batch, slot, key, chance, tl.where(by_mass, mass, 0))
        if len(low) == 0:
            lowest = tl.min(tl.where(by_mass, mass, NO_MASS), axis=0)
            tl.atomic_min(counters_ptr + LOWEST, lowest, sem="relaxed")
    elif len(low) > 0:
        find_lowest(low[0], levels[0], program - draw_programs, blocks, counters_ptr, FANOUT, BLOCKS)
