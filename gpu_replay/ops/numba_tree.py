# mypy: ignore-errors
# (types are what Numba infers)
"""The masses of a tree in compiled loops: drawn by, changed, summed up. `numba_loops.py` calls them.

A tree comes as `MassTree.compiled` has it: all levels end to end, leaves first; where each begins, and where the last
one ends; the logarithm of the fan-out; and the extremes of its blocks, or nothing.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gpu_replay.ops import counters, mass_tree, numba_memory
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.mass_tree import DIRTY
from gpu_replay.ops.numba_memory import compiled, forget_older_code, inlined, prefetch

# put into the loop before it is compiled, which takes longer, and makes a draw a tenth faster
_merged = njit(error_model="numpy", inline="always")
# rows that are on their way from memory while one is worked on
_AHEAD = 16
# numbers that a cache close to the core holds
_NEAR = 2**17
# and those that one further away holds
_FAR = 2**19
_STALE, _SATURATED, _MAX_MASS = Counter.STALE, Counter.SATURATED, Counter.MAX_MASS


@_merged
def target_of(row, batch, whole, part, begin, double, stratified):
    """A target of a row, by its number in [0, 1), and where the next row's stratum begins.

    whole, part: of the total mass what each of `batch` strata has, and what is left over.
    begin: of the row's stratum; 0 without strata, where the target is anywhere.
    """
    end = (row + 1) * whole + (row + 1) * part // batch if stratified else batch * whole + part
    # a wide product may round up to the width; a stratum without width takes the unit it starts in
    width = end - begin
    return begin + max(min(np.int64(double * width), width - 1), 0), end if stratified else begin


@inlined
def sums_of_root(flat, starts):
    """The inclusive prefix sums of the root; the last is the total mass."""
    top = starts.size - 2
    prefix = np.empty(starts[top + 1] - starts[top], dtype=np.int64)
    total = np.int64(0)
    for node in range(prefix.size):
        total += flat[starts[top] + node]
        prefix[node] = total
    return prefix


@_merged
def _node_of(prefix, target, low):
    """The first node, from `low` on, whose inclusive prefix sum exceeds the target."""
    high = prefix.size - 1
    # targets of strata ascend: the next node is often near
    near = min(low + 4, high)
    while low < near and prefix[low] <= target:
        low += 1
    while low < high:
        middle = (low + high) >> 1
        if prefix[middle] <= target:
            low = middle + 1
        else:
            high = middle
    return low


@_merged
def _leaf_of(flat, starts, shift, node, rest):
    """The slot below a node of the root on which a target falls that is so far into the node's mass."""
    for level in range(starts.size - 3, -1, -1):
        place = starts[level] + (node << shift)
        while flat[place] <= rest:
            rest -= flat[place]
            place += 1
        node = place - starts[level]
    return node


@inlined
def _descend(flat, starts, shift, slots, rests, masses):
    """As `_leaf_of` for (B,) nodes of the root, which become slots; returns the smallest mass of these."""
    smallest = np.int64(2**63 - 1)
    for begin in range(0, slots.size, _AHEAD):
        end = min(begin + _AHEAD, slots.size)
        for level in range(starts.size - 3, -1, -1):
            address = flat.ctypes.data + 8 * starts[level]
            for row in range(begin, end):
                # two cache lines
                prefetch(address + (8 * slots[row] << shift))
                prefetch(address + (8 * slots[row] << shift) + 64)
            for row in range(begin, end):
                place, rest = starts[level] + (slots[row] << shift), rests[row]
                while flat[place] <= rest:
                    rest -= flat[place]
                    place += 1
                slots[row], rests[row] = place - starts[level], rest
        for row in range(begin, end):
            masses[row] = flat[slots[row]]
            smallest = min(smallest, masses[row])
    return smallest


@compiled
def draw(flat, starts, shift, doubles, stratified, lowest, slots, masses, probability, ratio):
    """Draw by mass; returns the total mass, and draws nothing where that is 0.

    flat, starts:  all levels of a tree, leaves first; where each begins, and where the last one ends.
    doubles:       (B,) float64 in [0, 1).
    lowest:        the mass that has the largest weight, or 0 for the smallest of the batch.
    slots, masses: (B,) int64. probability: (B,) float32. ratio: (B,) float64, `lowest` over the masses.
    """
    prefix = sums_of_root(flat, starts)
    total = prefix[-1]
    if total == 0:
        return total
    batch = doubles.size
    whole, part = total // batch, total % batch
    begin, smallest, found = np.int64(0), np.int64(2**63 - 1), 0
    # in a tree that no cache holds, each level is gone down for some rows at once, for whose nodes memory is then asked
    # at the same time
    far = flat.size > _FAR
    rests = np.empty(batch if far else 0, dtype=np.int64)
    for row in range(batch):
        target, begin = target_of(row, batch, whole, part, begin, doubles[row], stratified)
        if not stratified:
            found = 0
        found = _node_of(prefix, target, found)
        rest = target - (prefix[found - 1] if found else 0)
        if far:
            slots[row], rests[row] = found, rest
            continue
        node = _leaf_of(flat, starts, shift, found, rest)
        slots[row] = node
        masses[row] = flat[node]
        smallest = min(smallest, flat[node])
    if far:
        smallest = _descend(flat, starts, shift, slots, rests, masses)
    if lowest == 0:
        lowest = smallest
    for row in range(batch):
        probability[row] = masses[row] / total
        ratio[row] = lowest / masses[row]
    return total


@compiled
def locate(flat, starts, shift, prefix, targets, slots):
    """Find the (B,) slots on which (B,) targets fall.

    prefix: 0 and the inclusive prefix sums of the root.
    """
    sums = prefix[1:]
    for row in range(targets.size):
        node = _node_of(sums, targets[row], 0)
        slots[row] = _leaf_of(flat, starts, shift, node, targets[row] - prefix[node])


@compiled
def shifted(priorities, eps, clip, least, numbers):
    """min(|priority| + eps, clip), at least `least`, of (B,) priorities as float64; whether all are finite."""
    odd = 0
    # without a way out of the loop: several rows at once
    for row in range(priorities.size):
        number = abs(np.float64(priorities[row]))
        odd += not number < np.inf
        numbers[row] = max(min(number + eps, clip), least)
    return odd == 0


@inlined
def _settle(keys, masses, limit, first, added, capacity, counters, sparse, flat):
    """Of a repeated key let only the last mass count, the others become 0; cut masses, and count what `update` counts.

    It matters which rows count where one is cut, or is the largest ever.
    """
    batch = keys.size
    held = np.empty(batch, dtype=np.int64)
    slot_of = np.empty(batch, dtype=np.int64)
    largest, cut = np.int64(0), 0
    # a leaf holds the last row that would write it, as a negative number, until all rows are known
    for row in range(batch):
        key = keys[row]
        slot_of[row] = -1
        if key < first or key >= added:
            continue
        slot = key % capacity
        mass = flat[slot]
        if mass < 0:
            before = -mass - 1
            slot_of[before] = -1
            mass = held[before]
        elif sparse and mass == 0:
            continue
        held[row] = mass
        slot_of[row] = slot
        flat[slot] = -row - 1
    for row in range(batch):
        slot = slot_of[row]
        if slot < 0:
            masses[row] = 0
            continue
        flat[slot] = held[row]
        if masses[row] > limit:
            masses[row] = limit
            cut += 1
        largest = max(largest, masses[row])
    counters[_SATURATED] += cut
    counters[_MAX_MASS] = max(counters[_MAX_MASS], largest)


@inlined
def _sum_levels(flat, starts):
    """Give all nodes above the leaves the sums of their 16 children each."""
    for level in range(1, starts.size - 1):
        below, above = starts[level - 1], starts[level]
        for node in range((above - below) >> 4):
            total, place = np.int64(0), below + 16 * node
            for child in range(16):
                total += flat[place + child]
            flat[above + node] = total


@inlined
def _mass_of(power):
    """The mass of a power, uncut."""
    # the cast truncates, which is the floor of a positive number
    return max(np.int64(power * 1048576.0 + 0.5), 1)


@inlined
def _store_masses(keys, powers, first, added, begin, capacity, flat):
    """Give the leaves of live keys their masses, and nothing else; returns how many are live."""
    far, live = flat.size > _NEAR, 0
    for row in range(keys.size):
        if far:
            ahead = keys[min(row + _AHEAD, keys.size - 1)]
            if first <= ahead < added:
                ahead += begin
                ahead -= capacity if ahead >= capacity else 0
                prefetch(flat.ctypes.data + 8 * ahead)
        key = keys[row]
        if first <= key < added:
            slot = key + begin
            slot -= capacity if slot >= capacity else 0
            flat[slot] = _mass_of(powers[row])
            live += 1
    return live


@compiled
def update(keys, powers, limit, first, added, capacity, counters, sparse, flat, starts, shift, low, high):
    """Give live keys the masses of (B,) float64 powers, as `MassRule` says; the last of a repeated key wins.

    sparse:    whether slots without mass keep none.
    flat, starts, shift: the tree, and the logarithm of its fan-out. low, high: its extremes, or nothing.
    counters:  count the largest mass given, keys that were not live, and masses that were cut.
    """
    batch, levels = keys.size, starts.size - 1
    largest, stale = np.int64(0), 0
    for row in range(batch):
        largest = max(largest, _mass_of(powers[row]))
    settles = largest > limit or largest > counters[_MAX_MASS]
    # one row after the other, so that the last one wins
    begin = first % capacity - first
    # many rows: all sums made anew take less than the way up from each
    anew = shift == 4 and 2 * (levels - 1) * batch >= capacity
    if anew and not (settles or sparse or low.size or high.size):
        counters[_STALE] += batch - _store_masses(keys, powers, first, added, begin, capacity, flat)
        _sum_levels(flat, starts)
        return
    for row in range(batch):
        stale += keys[row] < first or keys[row] >= added
    counters[_STALE] += stale
    masses = np.empty(batch, dtype=np.int64)
    for row in range(batch):
        masses[row] = _mass_of(powers[row])
    if settles:
        _settle(keys, masses, limit, first, added, capacity, counters, sparse, flat)
    far = flat.size > _NEAR
    for row in range(batch):
        if far:
            ahead = keys[min(row + _AHEAD, batch - 1)]
            if first <= ahead < added:
                ahead += begin
                ahead -= capacity if ahead >= capacity else 0
                prefetch(flat.ctypes.data + 8 * ahead)
        key, mass = keys[row], masses[row]
        if key < first or key >= added or mass == 0:
            continue
        slot = key + begin
        slot -= capacity if slot >= capacity else 0
        held = flat[slot]
        if sparse and held == 0:
            continue
        flat[slot] = mass
        if low.size:
            low[slot >> shift] = DIRTY
        if high.size:
            high[slot >> shift] = DIRTY
        if not anew:
            node = slot
            for level in range(1, levels):
                node >>= shift
                flat[starts[level] + node] += mass - held
    if anew:
        _sum_levels(flat, starts)


@compiled
def sum_range(flat, starts, shift, low, high, start, stop):
    """Give the ancestors of the slots from `start` to `stop` their sums, and mark the extremes of their blocks."""
    fanout = 1 << shift
    begin, end = start >> shift, (stop + fanout - 1) >> shift
    if low.size:
        low[begin:end] = DIRTY
    if high.size:
        high[begin:end] = DIRTY
    for level in range(1, starts.size - 1):
        below, above = starts[level - 1], starts[level]
        for node in range(begin, end):
            total = np.int64(0)
            for child in range(below + (node << shift), below + ((node + 1) << shift)):
                total += flat[child]
            flat[above + node] = total
        begin, end = begin >> shift, (end + fanout - 1) >> shift


@compiled
def set_range(flat, starts, shift, low, high, start, stop, mass):
    """Give the slots from `start` to `stop` a mass, and their ancestors the sums."""
    flat[start:stop] = mass
    sum_range(flat, starts, shift, low, high, start, stop)


# loops and numbers of these are in the compiled code
CONTAINED = (counters, mass_tree, numba_memory)
forget_older_code(draw, *CONTAINED)
