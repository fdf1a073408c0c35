"""Draws in proportion to mass and their probabilities."""

import triton
import triton.language as tl

from .counters import ADDED, LOWEST, NO_MASS, RANDOM, SEED
from .division import divided, remainder
from .philox import floor_of_product, words_at
from .weights import weigh_when_all_are_drawn


@triton.jit
def key_in_slot(slot, added, head, capacity):
    """The live key in a slot: the largest below `added` that belongs there; head: the slot of `added`."""
    key = slot + (added - head)
    return tl.where(slot >= head, key - capacity, key)


@triton.jit
def stratified_target(draw, strata, per_strata, total, word):
    """A point in each draw's own part of the total mass; strata: the number of parts, with its reciprocal."""
    whole, part = divided(total, strata, per_strata)
    share, rest = divided(draw * part, strata, per_strata)
    # the next stratum begins a unit later where another share of the rest is full
    width = whole + (rest + part >= strata).to(tl.int64)
    return draw * whole + share + floor_of_product(word, width)


@triton.jit
def word_of(draw, counters_ptr):
    """The word of the stream for each draw."""
    return words_at(draw, tl.load(counters_ptr + RANDOM), tl.load(counters_ptr + SEED))


@triton.jit
def target_in(total, draw, drawn, per_drawn, word, STRATIFIED: tl.constexpr):
    """A point in the total mass for each of the first `drawn` draws, from their words."""
    if STRATIFIED:
        target = stratified_target(draw, drawn.to(tl.int64), per_drawn, total, word)
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
def halves(level, node, FANOUT: tl.constexpr):
    """Both halves of the children of (DRAWS,) nodes: [DRAWS, FANOUT // 2] each.

    The 16-byte words of half a row are as many as the 32 threads of a warp, so that no row is shared by two warps,
    which would pass sums through shared memory. The last block of a level is padded with zeros: every place exists.
    """
    HALF: tl.constexpr = FANOUT // 2
    place = node[:, None] * FANOUT + tl.arange(0, HALF)[None, :]
    return tl.load(level + place), tl.load(level + (place + HALF))


@triton.jit
def root_of(levels, draw, FANOUT: tl.constexpr):
    """Both halves of the root, once for each draw, so that all that is made of them is where its draw is."""
    return halves(levels[len(levels) - 1], draw * 0, FANOUT)


@triton.jit
def descend(levels, root, target, FANOUT: tl.constexpr):
    """The slots on which (DRAWS,) targets fall, and their masses; a slot for any target, wherever it lies.

    root: see `root_of`.
    """
    rest = target
    node = target * 0
    mass = target * 0
    for level in tl.static_range(len(levels)):
        if level == 0:
            first, second = root
        else:
            first, second = halves(levels[len(levels) - 1 - level], node, FANOUT)
        # the half in which a target lies, then the child
        skipped = tl.sum(first, axis=1)
        beyond = rest >= skipped
        rest -= tl.where(beyond, skipped, 0)
        masses = tl.where(beyond[:, None], second, first)
        prefix = tl.cumsum(masses, axis=1)
        passed = prefix <= rest[:, None]
        before, step = tl.min(tl.where(passed, NO_MASS, prefix - masses), axis=1, return_indices=True)
        # a tree without mass is descended along its first nodes, which exist
        found = before < NO_MASS
        node = node * FANOUT + tl.where(found, tl.where(beyond, FANOUT // 2, 0) + step, 0)
        rest -= tl.where(found, before, 0)
        if level == len(levels) - 1:
            mass = tl.where(found, tl.min(tl.where(passed, NO_MASS, prefix), axis=1) - before, 0)
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


@triton.jit(
    do_not_specialize=[
        "drawn",
        "batch",
        "capacity",
        "per_drawn",
        "per_capacity",
        "blocks",
        "draw_programs",
        "blocks_drawn",
    ]
)
def stratified_draw_kernel(
    levels,
    low,
    counters_ptr,
    outputs,
    pending,
    drawn,
    batch,
    capacity,
    per_drawn,
    per_capacity,
    blocks,
    draw_programs,
    blocks_drawn,
    beta,
    beta_rest,
    FANOUT: tl.constexpr,
    DRAWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STRATIFIED: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """Draw `drawn` slots by mass and take the newest for the rest of the batch.

    Leaves the smallest mass of the batch in counters[LOWEST]. If `low` is given, the smallest mass of each block of
    leaves, further programs leave the smallest of all slots there instead. The mass of a newest row is written as 0: it
    was not drawn. Where nothing has mass, as in a graph replayed after a `clear`, the draws stay inside but mean
    nothing. per_...: reciprocals, see `division.py`. With WEIGHED, a power of two that is at least the batch, the last
    program makes the weights: see `weigh_when_all_are_drawn`.
    """
    program = tl.program_id(0).to(tl.int64)
    if program < draw_programs:
        draw = program * DRAWS + tl.arange(0, DRAWS)
        by_mass = draw < drawn
        # all that no other load has to be waited for
        root, added = root_of(levels, draw, FANOUT), tl.load(counters_ptr + ADDED)
        word = word_of(draw, counters_ptr)
        total = tl.sum(root[0] + root[1], axis=1)
        node, mass = descend(levels, root, target_in(total, draw, drawn, per_drawn, word, STRATIFIED), FANOUT)
        head = remainder(added, capacity, per_capacity)
        newest = tl.maximum(added - batch + draw, 0)
        slot = tl.where(by_mass, node, remainder(newest, capacity, per_capacity))
        key = tl.where(by_mass, key_in_slot(node, added, head, capacity), newest)
        chance = mass.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)
        store_draws(outputs, draw, drawn, batch, slot, key, chance, tl.where(by_mass, mass, 0))
        if len(low) == 0:
            lowest = tl.min(tl.where(by_mass, mass, NO_MASS), axis=0)
            tl.atomic_min(counters_ptr + LOWEST, lowest, sem="relaxed")
    elif len(low) > 0:
        find_lowest(low[0], levels[0], program - draw_programs, blocks, counters_ptr, FANOUT, BLOCKS)
    if WEIGHED > 0:
        weigh_when_all_are_drawn(pending, counters_ptr, batch, blocks_drawn, beta, beta_rest, WEIGHED)
