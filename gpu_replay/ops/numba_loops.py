# mypy: ignore-errors
# (types are what Numba infers)
"""The host's work as compiled loops, for those who have Numba: what NumPy does in dozens of operations, in one call.

At small batches the cost of NumPy is that of calling it. Each function here is what the NumPy code beside its caller
does, number for number, and none of them rounds differently: what needs a logarithm stays with NumPy. All arrays are
contiguous and as `HostEngine` and its like hold them; outputs are the caller's.
"""

from __future__ import annotations

import numpy as np
from numba import njit


def _compiled(function):
    try:
        return njit(cache=True, error_model="numpy")(function)
    except RuntimeError:
        # nowhere to keep compiled code: it is made anew in each process
        return njit(error_model="numpy")(function)


_inlined = njit(error_model="numpy", inline="always")
_STALE_EDGE = -1
_TERMINATED, _TRUNCATED, _FINAL = 1, 2, 8


@_inlined
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


@_inlined
def _leaf_of(flat, starts, fanout, node, rest):
    """The slot below a node of the root on which a target falls that is so far into the node's mass."""
    for level in range(starts.size - 3, -1, -1):
        place = starts[level] + node * fanout
        while flat[place] <= rest:
            rest -= flat[place]
            place += 1
        node = place - starts[level]
    return node


@_compiled
def draw(flat, starts, fanout, doubles, stratified, lowest, slots, masses, probability, ratio):
    """Draw by mass; returns the total mass, and draws nothing where that is 0.

    flat, starts:  all levels of a tree, leaves first; where each begins, and where the last one ends.
    doubles:       (B,) float64 in [0, 1).
    lowest:        the mass that has the largest weight, or 0 for the smallest of the batch.
    slots, masses: (B,) int64. probability: (B,) float32. ratio: (B,) float64, `lowest` over the masses.
    """
    top = starts.size - 2
    first, size = starts[top], starts[top + 1] - starts[top]
    prefix = np.empty(size, dtype=np.int64)
    total = np.int64(0)
    for node in range(size):
        total += flat[first + node]
        prefix[node] = total
    if total == 0:
        return total
    batch = doubles.size
    whole, part = total // batch, total % batch
    begin, width, smallest, found = np.int64(0), total, np.int64(2**63 - 1), 0
    for row in range(batch):
        if stratified:
            end = (row + 1) * whole + (row + 1) * part // batch
            width = end - begin
        # a wide product may round up to the width; a stratum without width takes the unit it starts in
        target = max(min(np.int64(doubles[row] * width), width - 1), 0)
        if stratified:
            target += begin
            begin = end
        else:
            found = 0
        found = _node_of(prefix, target, found)
        node = _leaf_of(flat, starts, fanout, found, target - (prefix[found - 1] if found else 0))
        slots[row] = node
        masses[row] = flat[node]
        smallest = min(smallest, flat[node])
    if lowest == 0:
        lowest = smallest
    for row in range(batch):
        probability[row] = masses[row] / total
        ratio[row] = lowest / masses[row]
    return total


@_compiled
def locate(flat, starts, fanout, prefix, targets, slots):
    """Find the (B,) slots on which (B,) targets fall.

    prefix: 0 and the inclusive prefix sums of the root.
    """
    sums = prefix[1:]
    for row in range(targets.size):
        node = _node_of(sums, targets[row], 0)
        slots[row] = _leaf_of(flat, starts, fanout, node, targets[row] - prefix[node])


@_compiled
def permuted_ranks(count, wide, high, words, ranks):
    """The first (B,) places of a random permutation of [0, count), as `uniform_draw` says; all numbers are uint64."""
    half = np.uint64(32)
    for start in range(ranks.size):
        place = np.uint64(start)
        while True:
            row = place // wide
            column = place - row * wide
            for turn in range(0, words.size, 2):
                fixed = row if turn % 4 == 0 else column
                side = wide if turn % 4 == 0 else high
                moved = column if turn % 4 == 0 else row
                moved += (((fixed * words[turn] + words[turn + 1]) >> half) * side) >> half
                if moved >= side:
                    moved -= side
                if turn % 4 == 0:
                    column = moved
                else:
                    row = moved
            place = row * wide + column
            if place < count:
                break
        ranks[start] = place


@_compiled
def note_draws(slots, added, capacity, times_sampled, keys):
    """Count the (B,) slots as sampled, a slot drawn twice twice, and find their (B,) keys."""
    head = added % capacity
    for row in range(slots.size):
        slot = slots[row]
        times_sampled[slot] += 1
        keys[row] = added - head + slot - (capacity if slot >= head else 0)


@_compiled
def set_masses(keys, masses, limit, first, added, capacity, sparse, flat, starts, shift, low, high):
    """What `update` does, with (B,) int64 masses."""
    batch = keys.size
    held = np.empty(batch, dtype=np.int64)
    slot_of = np.empty(batch, dtype=np.int64)
    stale, largest, cut = 0, np.int64(0), 0
    # a leaf that is written holds the row that wrote it, as a negative number, until all rows are known
    for row in range(batch):
        key = keys[row]
        slot_of[row] = -1
        if key < first or key >= added:
            stale += 1
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
    levels = starts.size - 1
    for row in range(batch):
        slot = slot_of[row]
        if slot < 0:
            continue
        mass = masses[row]
        if mass > limit:
            mass = limit
            cut += 1
        largest = max(largest, mass)
        flat[slot] = mass
        node = slot
        for level in range(1, levels):
            node >>= shift
            flat[starts[level] + node] += mass - held[row]
        if low.size:
            low[slot >> shift] = _STALE_EDGE
        if high.size:
            high[slot >> shift] = _STALE_EDGE
    return largest, stale, cut


@_compiled
def update(keys, powers, limit, first, added, capacity, sparse, flat, starts, shift, low, high):
    """Give live keys the masses of (B,) float64 powers, as `MassRule` says; the last of a repeated key wins.

    sparse:    whether slots without mass keep none.
    flat, starts, shift: the tree, and the logarithm of its fan-out. low, high: its extremes, or nothing.
    returns:   the largest mass given, how many keys were not live, and how many masses were cut.
    """
    masses = np.empty(keys.size, dtype=np.int64)
    for row in range(keys.size):
        # the cast truncates, which is the floor of a positive number
        masses[row] = max(np.int64(powers[row] * 1048576.0 + 0.5), 1)
    return set_masses(keys, masses, limit, first, added, capacity, sparse, flat, starts, shift, low, high)


@_compiled
def sum_range(flat, starts, fanout, start, stop, low, high):
    """Give the ancestors of the slots from `start` to `stop` their sums, and mark the extremes of their blocks."""
    begin, end = start // fanout, (stop + fanout - 1) // fanout
    if low.size:
        low[begin:end] = _STALE_EDGE
    if high.size:
        high[begin:end] = _STALE_EDGE
    for level in range(1, starts.size - 1):
        below, above = starts[level - 1], starts[level]
        for node in range(begin, end):
            total = np.int64(0)
            for child in range(below + node * fanout, below + (node + 1) * fanout):
                total += flat[child]
            flat[above + node] = total
        begin, end = begin // fanout, (end + fanout - 1) // fanout


@_compiled
def windows(
    slots, flags, depth, lengths, sums, powers, num_envs, stack, next_step, hindsight, zero,
    plan, absent, late, reward, discount, terminated, truncated,
):  # fmt: skip
    """The windows of (B,) eligible starts, and where the frames of their stacks lie, before and after.

    flags, depth, lengths, sums: (slots,) of the ring and its windows. powers: of gamma.
    plan:    (2 * B, S) int64 slots of frames, those of `obs` first.
    absent:  int64, room for the flat positions in it of frames that are zeros, where `zero` says so; else nothing.
    late:    (2 * B,) bool of stacks whose newest frame is a kept final observation, in whose place the slot before
             stands.
    reward, discount: (B,) float32. terminated, truncated: (B,) bool.
    returns: how many frames are absent and how many stacks late.
    """
    batch, count = slots.size, flags.size
    missing, ending = 0, 0
    for row in range(batch):
        slot = slots[row]
        length = np.int64(lengths[slot])
        last = slot + (length - 1) * num_envs
        if last >= count:
            last -= count
        flag = flags[last]
        over, cut, known = flag & _TERMINATED != 0, flag & _TRUNCATED != 0, hindsight and flag & _FINAL != 0
        stays, final = over, False
        if next_step:
            stays = over and not known
        else:
            final = (cut and not over) or known
            stays = over or final
        after = last if stays else last + num_envs
        if after >= count:
            after -= count
        reward[row] = sums[slot]
        discount[row] = 0.0 if over else powers[length]
        terminated[row] = over
        truncated[row] = cut
        late[row] = False
        late[batch + row] = final
        ending += final
        for side in range(2):
            newest = slot if side == 0 else after
            reach = np.int64(depth[slot]) + (0 if side == 0 else length - stays)
            for frame in range(stack):
                wanted = stack - 1 - frame
                if side == 1 and final and wanted > 0:
                    wanted -= 1
                place = newest - min(wanted, reach) * num_envs
                plan[side * batch + row, frame] = place + count if place < 0 else place
                if zero and wanted > reach:
                    absent[missing] = (side * batch + row) * stack + frame
                    missing += 1
    return missing, ending


@_compiled
def gather_stacks(store, plan, out):
    """Copy frames to where the plan of (2 * B, S) slots says: both stacks of a row together, since they share frames.

    store: (slots, W) int64 words of the frames. out: (2 * B * S, W), row upon row of the plan.
    """
    batch, stack, words = plan.shape[0] // 2, plan.shape[1], store.shape[1]
    for row in range(batch):
        for side in range(2):
            for frame in range(stack):
                slot = plan[side * batch + row, frame]
                place = (side * batch + row) * stack + frame
                for word in range(words):
                    out[place, word] = store[slot, word]


@_compiled
def follow_on(
    step, oldest, steps, num_envs, stack, depth, flags, pending, masses, initial, unit,
    flat, starts, fanout, low, high, rewards, powers, sums, lengths,
):  # fmt: skip
    """Take in a step in which nothing ended, after one in which nothing did, as `HostEligibility` says.

    depth, flags, rewards, sums, lengths: (slots,) of the ring. pending: (n_step + 1, num_envs).
    masses: (num_envs,) given with the step, or nothing. unit: whether the tree counts starts instead of their masses.
    returns: how many starts more can be drawn, and the largest given mass that came to count.
    """
    n = pending.shape[0] - 1
    row, begun, start = step % steps, (step - n) % steps, step - n
    more, largest, granted = 0, np.int64(0), False
    lost = np.zeros(stack, dtype=np.bool_)
    for env in range(num_envs):
        if step >= steps:
            for age in range(stack):
                slot = (row + age) % steps * num_envs + env
                # a deep stack lost its first frame steps ago
                if flat[slot] > 0 and depth[slot] >= age:
                    flat[slot] = 0
                    lost[age] = True
                    more -= 1
        slot = row * num_envs + env
        behind = np.int64(depth[(row - 1) % steps * num_envs + env]) + 1
        depth[slot] = behind
        flags[slot] = 0
        pending[step % (n + 1), env] = masses[env] if masses.size else 0
        if start < oldest or behind < n or start - min(behind - n, stack - 1) < oldest:
            continue
        slot = begun * num_envs + env
        given = pending[start % (n + 1), env]
        largest = max(largest, given)
        more += flat[slot] == 0
        flat[slot] = 1 if unit else given if given > 0 else initial
        granted = True
        # in the order of the steps
        total = rewards[slot] * powers[0]
        for later in range(1, n):
            total += rewards[(begun + later) % steps * num_envs + env] * powers[later]
        sums[slot] = total
        lengths[slot] = n
    for age in range(stack):
        if lost[age]:
            slot = (row + age) % steps * num_envs
            sum_range(flat, starts, fanout, slot, slot + num_envs, low, high)
    if granted:
        sum_range(flat, starts, fanout, begun * num_envs, (begun + 1) * num_envs, low, high)
    return more, largest
