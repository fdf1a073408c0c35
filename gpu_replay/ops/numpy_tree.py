"""The masses of a tree in operations on arrays: drawn by, changed, summed up. `numpy_loops.py` has them from here.

`numba_tree.py` does the same in compiled loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, starmap
from operator import setitem

import numpy as np

from gpu_replay.ops.counters import Counter
from gpu_replay.ops.mass import Rule
from gpu_replay.ops.mass_tree import DIRTY, MassTree
from gpu_replay.ops.ring import Write, commit
from gpu_replay.ops.stratified_draw import MassDraw, Strata, stratified_targets
from gpu_replay.ops.uniform_draw import SMALL, independent_ranks, slots_of

# nodes of the root of a tree: to add up so many takes less than a level more
ROOT_LIMIT = 16384
# from this many draws on, comparing whole blocks beats a binary search for each draw
_COMPARED = 1024
# with so many nodes of the root for each draw, most batches of strata lie below different ones
_APART = 64
_MAX_MASS = Counter.MAX_MASS
# a product with it adds up the eight bytes of a word in the highest one
_SUM_OF_BYTES = np.uint64(0x0101010101010101)
_TOP_BYTE = np.uint64(56)


@lru_cache(maxsize=64)
def whole(number: int) -> np.ndarray:
    """A number without dimensions: as an operand an int costs as much again as the operation."""
    return np.array(number)


def sum_range(tree: MassTree, start: int, stop: int) -> None:
    """Give the ancestors of the slots from `start` to `stop` their sums, and mark the extremes of their blocks."""
    low, high = start // tree.fanout, -(-stop // tree.fanout)
    for extreme in tree.extremes:
        extreme[low:high] = DIRTY
    for below, above in tree.sums:
        np.add.reduce(below[low:high], axis=1, out=above[low:high])
        low, high = low // tree.fanout, -(-high // tree.fanout)


def set_range(tree: MassTree, start: int, stop: int, masses: int | np.ndarray) -> Iterator[object]:
    """What gives the slots from `start` to `stop` a mass, or one each, and their ancestors the sums, for `commit`."""
    if tree.order is not None:
        tree.order.note(start, stop)
    low, high, leaves = start // tree.fanout, -(-stop // tree.fanout), tree.arrays[0]
    writes: list[Write] = [(leaves, slice(start, stop), masses)]
    for extreme in tree.extremes:
        writes.append((extreme, slice(low, high), DIRTY))
    if high - low == 1 and isinstance(masses, int):
        # few slots, of one block: a number for each level
        change = masses * (stop - start) - sum(leaves[start:stop].tolist())
        for above in tree.arrays[1:]:
            writes.append((above, low, above.item(low) + change))
            low //= tree.fanout
        return starmap(setitem, writes)
    sums = []
    for below, above in tree.sums:
        sums.append((below[low:high], tree.ones, above[low:high]))
        low, high = low // tree.fanout, -(-high // tree.fanout)
    # a product with ones is a sum, and costs half of one
    return chain(starmap(setitem, writes), starmap(np.ndarray.dot, sums))


def update(
    tree: MassTree,
    keys: np.ndarray,
    priorities: np.ndarray,
    rule: Rule,
    first: int,
    added: int,
    counters: np.ndarray,
    sparse: bool,
) -> None:
    """Give live keys the masses of their (B,) priorities, as `MassTree.update` says."""
    stale = 0
    # finding the place of the smallest costs a fraction of a reduction at these sizes
    if keys.item(keys.argmin()) < first or keys.item(keys.argmax()) >= added:
        live = (keys >= first) & (keys < added)
        keys, priorities = keys[live], priorities[live]
        stale = live.size - keys.size
    slots = keys
    if slots.size:
        slots = np.remainder(keys, tree.count) if keys.size <= SMALL else slots_of(keys - first, first, tree.slots)
        if (
            not sparse
            and slots.size * _APART <= tree.arrays[-1].size
            and _give_apart(tree, slots, priorities, rule, stale, counters)
        ):
            return
        slots, priorities = _last_of_each(slots, priorities)
    if sparse and slots.size:
        held = tree.arrays[0].take(slots) > 0
        slots, priorities = slots[held], priorities[held]
    if slots.size == 0:
        counters[Counter.STALE] += stale
    else:
        _give(tree, slots, priorities, rule, stale, counters)


def _give_apart(
    tree: MassTree, slots: np.ndarray, priorities: np.ndarray, rule: Rule, stale: int, counters: np.ndarray
) -> bool:
    """As `_give`, where the slots ascend and lie below different nodes of the root; else false, and no change.

    That is most often so of few draws from many strata. Then no sum is changed twice, and none of them need be looked
    up again for the next.
    """
    nodes = slots >> tree.top
    rises = nodes[1:] > nodes[:-1]
    if rises.size and not rises.item(rises.argmin()):
        return False
    masses, largest, cut = rule.masses(priorities)
    leaves = tree.arrays[0]
    writes = _counted(counters, largest, stale, cut)
    if tree.order is not None:
        tree.order.note_slots(slots)
    if len(tree.arrays) > 1:
        change = masses - leaves[slots]
        node = slots
        for above in tree.arrays[1:-1]:
            node = node >> tree.up
            writes.append((above, node, above[node] + change))
        root = tree.arrays[-1]
        writes.append((root, nodes, root[nodes] + change))
    writes.append((leaves, slots, masses))
    if tree.extremes:
        node = slots >> tree.up
        writes += [(extreme, node, DIRTY) for extreme in tree.extremes]
    commit(writes, None)
    return True


def _give(
    tree: MassTree, slots: np.ndarray, priorities: np.ndarray, rule: Rule, stale: int, counters: np.ndarray
) -> None:
    """Give (B,) distinct slots the masses of their priorities; `stale` more keys were not live."""
    leaves = tree.arrays[0]
    masses, largest, cut = rule.masses(priorities)
    if tree.order is not None:
        tree.order.note_slots(slots)
    writes = _counted(counters, largest, stale, cut)
    writes.append((leaves, slots, masses))
    if len(tree.arrays) == 1 and not tree.extremes:
        return commit(writes, None)
    change, node, sums = masses - leaves[slots], slots, []
    for above in tree.arrays[1:]:
        node = node >> tree.up
        sums.append((above, node, change))
    if tree.extremes:
        node = slots >> tree.up
        writes += [(extreme, node, DIRTY) for extreme in tree.extremes]
    commit(writes, None, starmap(np.add.at, sums))


def _counted(counters: np.ndarray, largest: int, stale: int, cut: int) -> list[Write]:
    """What counts masses that were given, as writes."""
    writes: list[Write] = []
    if largest > counters.item(_MAX_MASS):
        writes.append((counters, _MAX_MASS, largest))
    if stale:
        writes.append((counters, Counter.STALE, counters.item(Counter.STALE) + stale))
    if cut:
        writes.append((counters, Counter.SATURATED, counters.item(Counter.SATURATED) + cut))
    return writes


def _last_of_each(slots: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct slots, each with its last number."""
    # a stratified draw comes back in ascending slots, mostly distinct
    rises = slots[1:] > slots[:-1]
    if not rises.size or rises.item(rises.argmin()):
        return slots, numbers
    if np.count_nonzero(slots[1:] < slots[:-1]):
        order = np.argsort(slots, kind="stable")
        slots, numbers = slots[order], numbers[order]
        rises = slots[1:] > slots[:-1]
    last = np.append(rises, True)
    return slots[last], numbers[last]


# draws


def draw(tree: MassTree, doubles: np.ndarray, stratified: bool, lowest: int) -> MassDraw:
    """Draw one slot for each of (B,) float64 in [0, 1); nothing where there is no mass.

    lowest: the mass that has the largest weight, or 0 for the smallest of the batch.
    """
    batch = doubles.size
    kept: _Descent | None = tree.kept
    if kept is None or kept.batch != batch:
        kept = _descent(tree, batch)
    np.add.accumulate(tree.arrays[-1], 0, None, kept.root)
    total = kept.root_prefix.item(-1)
    if total == 0:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing, nothing, nothing, 0
    targets = stratified_targets(total, doubles, kept.strata) if stratified else independent_ranks(total, doubles)
    if total <= kept.strata.fits:
        slots = _descend(tree, kept, kept.root_prefix, kept.root.searchsorted(targets, "right"), targets)
    else:
        slots = locate(tree, kept.root_prefix, targets)
    masses = tree.arrays[0][slots]
    # an operation that casts as well takes three times as long
    real = masses.astype(np.float64)
    ratio = np.array(float(lowest or masses.item(masses.argmin()))) / real
    real /= np.array(float(total))
    return slots, masses, real.astype(np.float32), ratio, total


class _Descent:
    """Arrays for draws of one size from one tree, since making them and their views would cost a third of a draw."""

    def __init__(self, tree: MassTree, batch: int) -> None:
        self.batch = batch
        # 0 and the inclusive prefix sums of the root
        self.root_prefix = np.zeros(tree.arrays[-1].size + 1, dtype=np.int64)
        self.root = self.root_prefix[1:]
        # the masses below the nodes of one level that the draws reached, and 0 and their inclusive prefix sums
        self.masses = np.empty((batch, tree.fanout), dtype=np.int64)
        self.flat = self.masses.reshape(-1)
        self.prefix = np.zeros(self.flat.size + 1, dtype=np.int64)
        self.sums, self.before = self.prefix[1:], self.prefix[: -1 : tree.fanout]
        # which child of its node each of them is, where that is looked up, and where those of each node begin
        few = batch < _COMPARED
        self.child = np.tile(np.arange(tree.fanout), batch) if few else None
        self.block_start = None if few else np.arange(0, self.flat.size, tree.fanout)
        self.strata = Strata(batch)


def _descent(tree: MassTree, batch: int) -> _Descent:
    kept: _Descent | None = tree.kept
    if kept is None or kept.batch != batch:
        kept = _Descent(tree, batch)
        # those of larger batches are soon made beside the work
        if batch < _COMPARED:
            tree.kept = kept
    return kept


def locate(tree: MassTree, root_prefix: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The slots on which (B,) targets fall; the targets are overwritten.

    root_prefix: 0 and the inclusive prefix sums of the root.

    A batch for which B * total passes 63 bits is done in parts.
    """
    batch, total = targets.size, root_prefix.item(-1)
    if batch * total >= 2**63 and batch > 1:
        most = (2**63 - 1) // total
        parts = np.split(targets, range(most, targets.size, most))
        return np.concatenate([locate(tree, root_prefix, part) for part in parts])
    node = root_prefix[1:].searchsorted(targets, "right")
    return _descend(tree, _descent(tree, batch), root_prefix, node, targets)


def _descend(
    tree: MassTree, kept: _Descent, root_prefix: np.ndarray, node: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """From (B,) nodes of the root, which become slots, to those on which the targets fall.

    One pass serves a whole level: the blocks that the draws reached are laid end to end, summed up together, and
    searched for the targets raised by the sum of all blocks before theirs. Those sums stay below B * total.
    """
    above, place = root_prefix, node
    for rows in tree.down:
        targets -= above[place]
        # nodes exist, so clipping changes none; it is the mode that writes straight into the masses
        rows.take(node, 0, kept.masses, "clip")
        np.add.accumulate(kept.flat, 0, None, kept.sums)
        targets += kept.before
        node <<= tree.up
        if kept.child is not None:
            place = kept.sums.searchsorted(targets, "right")
            node += kept.child[place]
        else:
            place = _reached(kept.sums.reshape(kept.masses.shape), targets)
            node += place
            place += kept.block_start
        above = kept.prefix
    return node


def _reached(prefix: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """How many of each row's 16 prefix sums the row's target has reached: (B,) int64."""
    reached = (prefix <= targets[:, None]).view(np.uint64)
    count = reached[:, 0] + reached[:, 1]
    count *= _SUM_OF_BYTES
    count >>= _TOP_BYTE
    return count.view(np.int64)
