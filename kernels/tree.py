"""The search of a tree of masses: the slot on which a target falls, and the mass before a slot."""

import triton
import triton.language as tl

from .constants import FANOUT, NO_MASS


@triton.jit
def halves(level, node):
    """Both halves of the children of (DRAWS,) nodes: [DRAWS, FANOUT // 2] each.

    A warp has the 16-byte words of half of four rows, so that no row is shared by two warps, which would pass sums
    through shared memory; with halves there are fewer sums to pass on than with rows as they are. The last block of a
    level is padded with zeros: every place exists.
    """
    HALF: tl.constexpr = FANOUT // 2
    place = node[:, None] * FANOUT + tl.arange(0, HALF)[None, :]
    return tl.load(level + place), tl.load(level + (place + HALF))


@triton.jit
def root_of(levels, draw):
    """Both halves of the root, once for each draw, so that all that is made of them is where its draw is."""
    return halves(levels[len(levels) - 1], draw * 0)


@triton.jit
def descend(levels, root, target):
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
            first, second = halves(levels[len(levels) - 1 - level], node)
        # the half in which a target lies, then the child
        skipped = tl.sum(first, axis=1)
        beyond = rest >= skipped
        rest -= tl.where(beyond, skipped, 0)
        masses = tl.where(beyond[:, None], second, first)
        prefix = tl.cumsum(masses, axis=1)
        passed = prefix <= rest[:, None]
        before, step = tl.min(tl.where(passed, NO_MASS, prefix - masses), axis=1, return_indices=True)
        # a tree without mass is descended along its first nodes, which exist
        exists = before < NO_MASS
        node = node * FANOUT + tl.where(exists, tl.where(beyond, FANOUT // 2, 0) + step, 0)
        rest -= tl.where(exists, before, 0)
        if level == len(levels) - 1:
            mass = tl.where(exists, tl.min(tl.where(passed, NO_MASS, prefix), axis=1) - before, 0)
    return node, mass


@triton.jit
def masses_before(levels, root, slot):
    """Numbers whose sums are the masses of the slots below (DRAWS,) slots: [DRAWS, FANOUT // 2]."""
    HALF: tl.constexpr = FANOUT // 2
    child = tl.arange(0, HALF)[None, :]
    node = slot
    for level in tl.static_range(len(levels)):
        if level == len(levels) - 1:
            first, second = root
        else:
            first, second = halves(levels[level], node // FANOUT)
        below = (node % FANOUT)[:, None]
        masses = tl.where(child < below, first, 0) + tl.where(child + HALF < below, second, 0)
        if level == 0:
            sums = masses
        else:
            sums += masses
        node = node // FANOUT
    return sums


@triton.jit
def draw_range(levels, root, draw, head, skipped, capacity, SKIPS: tl.constexpr):
    """All mass, the mass before the slot of the oldest key, and the mass of all but the newest `skipped` slots.

    Each (DRAWS,) times the same. head: slot of the next key; the slots from it on hold the oldest keys. Sums come after
    all that is loaded.
    """
    start = head + draw * 0
    to_head = masses_before(levels, root, start)
    if SKIPS:
        last = start + capacity - skipped
        last = tl.where(last >= capacity, last - capacity, last)
        to_last = masses_before(levels, root, last)
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
def newest_eligible(eligible, draw, batch, head, skipped, capacity, SKIPS: tl.constexpr):
    """The slots of the newest eligible starts, for the last draws of a batch; eligible: levels of a tree of ones."""
    root = root_of(eligible, draw)
    total, before, within = draw_range(eligible, root, draw, head, skipped, capacity, SKIPS)
    slot, _ = descend(eligible, root, from_oldest(tl.maximum(within - batch + draw, 0), before, total))
    return slot
