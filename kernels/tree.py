"""The search of a tree of masses: the slot on which a target falls, and the mass before a slot.

A thread searches for one target and adds up the children of its node itself: sums pass through no other thread. Targets
of a stratified draw ascend, so that neighbouring threads read the same nodes but for the last levels.
"""

import triton
import triton.language as tl

from .constants import FANOUT


@triton.jit
def pass_child(mass, rest, sums, before, step):
    """Add the mass of a child to the sums; a target past it is in a later child: those before it are counted in `step`.

    before: the mass of those children.
    """
    sums += mass
    passed = sums <= rest
    return sums, tl.where(passed, sums, before), step + passed.to(tl.int32)


@triton.jit
def descend(levels, target):
    """The slots on which (DRAWS,) targets fall, and their masses; a slot for any target, wherever it lies.

    The last block of a level is padded with zeros: every place exists.
    """
    rest = target
    node = target * 0
    exists = target >= 0
    # a loop: the compiler's time grows faster than the loads that it sees
    for below in range(len(levels)):
        level_ptr = levels[len(levels) - 1]
        for level in tl.static_range(len(levels) - 1):
            level_ptr = tl.where(below == len(levels) - 1 - level, levels[level], level_ptr)
        # two children a load, 16 bytes
        children = level_ptr + (node * FANOUT)[:, None] + tl.arange(0, 2)[None, :]
        sums = target * 0
        before = sums
        step = sums.to(tl.int32)
        for child in tl.static_range(0, FANOUT, 2):
            first, second = tl.split(tl.load(children + child))
            sums, before, step = pass_child(first, rest, sums, before, step)
            sums, before, step = pass_child(second, rest, sums, before, step)
        # a tree without mass is descended along its first nodes, which exist
        exists = step < FANOUT
        node = node * FANOUT + tl.where(exists, step, 0)
        rest -= tl.where(exists, before, 0)
    return node, tl.load(levels[0] + node, mask=exists, other=0)


@triton.jit
def total_of(levels):
    """All mass."""
    return tl.sum(tl.load(levels[len(levels) - 1] + tl.arange(0, FANOUT)), axis=0)


@triton.jit
def mass_before(levels, slot):
    """The mass of the slots below one slot."""
    child = tl.arange(0, FANOUT)
    node = slot
    sums = tl.full([FANOUT], 0, tl.int64)
    for level in tl.static_range(len(levels)):
        first = node // FANOUT * FANOUT
        # the node itself and those after it are not before the slot
        sums += tl.load(levels[level] + first + child, mask=child < node - first, other=0)
        node = node // FANOUT
    return tl.sum(sums, axis=0)


@triton.jit
def from_oldest(target, before, total):
    """Targets counted from the oldest key, as the tree counts them: from slot 0."""
    target += before
    return tl.where(target >= total, target - total, target)


@triton.jit
def newest_eligible(eligible, draw, batch, head):
    """The slots of the newest eligible starts, for the last draws of a batch; eligible: levels of a tree of ones.

    head: slot of the next key; the slots from it on hold the oldest keys.
    """
    total = total_of(eligible)
    last = from_oldest(tl.maximum(total - batch + draw, 0), mass_before(eligible, head), total)
    return descend(eligible, last)[0]
