"""Draws from the starts that are eligible, by mass, uniformly, or the newest; on request without the newest steps.

A tree of ones beside the tree of masses ("marks") makes a uniform draw the same search: rank `r` among the eligible
starts is a target in its total. Rotated by the mass before the oldest slot, targets run from the oldest key to the
newest, so that leaving out the newest steps means drawing below a smaller total.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.stratified_draw import locate


class Reach(NamedTuple):
    """What can be drawn from one tree.

    prefix: 0 and the inclusive prefix sums of the root.
    total:  mass of all slots; `mass` of those within reach; `offset` of the slots before target 0.
    """

    tree: MassTree
    prefix: np.ndarray
    total: int
    mass: int
    offset: int

    def slots(self, targets: np.ndarray) -> np.ndarray:
        """The slots on which (B,) targets in [0, mass) fall; the targets are used up."""
        if self.offset:
            targets += self.offset
            targets -= (targets >= self.total) * self.total
        return locate(self.tree, self.prefix, targets)


def reach(tree: MassTree, head: int, skipped: int, *, by_key: bool) -> Reach:
    """Host: all mass but that of the newest `skipped` slots.

    head:   slot of the next key; the slots from it on hold the oldest keys.
    by_key: whether targets ascend with keys instead of slots; without effect on what can be drawn.
    """
    root = tree.arrays[-1]
    prefix = np.empty(root.size + 1, dtype=np.int64)
    prefix[0] = 0
    np.add.accumulate(root, 0, None, prefix[1:])
    total = prefix.item(root.size)
    if not skipped and not by_key:
        return Reach(tree, prefix, total, total, 0)
    before = _mass_before(tree, prefix, head)
    if not skipped:
        return Reach(tree, prefix, total, total, before % max(total, 1))
    end = (head - skipped) % tree.slots
    newest = before - _mass_before(tree, prefix, end) + (total if end > head else 0)
    return Reach(tree, prefix, total, total - newest, before % max(total, 1))


def _mass_before(tree: MassTree, prefix: np.ndarray, slot: int) -> int:
    """The mass of the slots below `slot`."""
    mass, node = 0, slot
    for level in tree.arrays[:-1]:
        begin = node // tree.fanout * tree.fanout
        mass += int(level[begin:node].sum())
        node //= tree.fanout
    return mass + prefix.item(node)
