# mypy: ignore-errors
# (types are what Numba infers)
"""The host's inner loops compiled by Numba: what takes `numpy_loops` dozens of array operations, in one call.

At small batches the cost of NumPy is that of calling it. Each public function does what its namesake there does, number
for number, and none of them rounds differently: what needs a logarithm stays with NumPy. All arrays are contiguous.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gpu_replay.ops import numpy_loops
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag
from gpu_replay.ops.frames import StackPlan
from gpu_replay.ops.mass_tree import DIRTY
from gpu_replay.ops.stratified_draw import MassDraw
from gpu_replay.ops.windows import Windows


def _compiled(function):
    try:
        return njit(cache=True, error_model="numpy")(function)
    except RuntimeError:
        # nowhere to keep compiled code: it is made anew in each process
        return njit(error_model="numpy")(function)


_inlined = njit(error_model="numpy", inline="always")
# less the steps of a window, as `StreamShape.deepest`
_DEEPEST = 2**31 - 1
_STALE, _SATURATED, _MAX_MASS, _ELIGIBLE = Counter.STALE, Counter.SATURATED, Counter.MAX_MASS, Counter.ELIGIBLE
_TERMINATED, _TRUNCATED, _FINAL = Flag.TERMINATED, Flag.TRUNCATED, Flag.FINAL


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
def _leaf_of(flat, starts, shift, node, rest):
    """The slot below a node of the root on which a target falls that is so far into the node's mass."""
    for level in range(starts.size - 3, -1, -1):
        place = starts[level] + (node << shift)
        while flat[place] <= rest:
            rest -= flat[place]
            place += 1
        node = place - starts[level]
    return node


@_compiled
def _draw(flat, starts, shift, doubles, stratified, lowest, slots, masses, probability, ratio):
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
        node = _leaf_of(flat, starts, shift, found, target - (prefix[found - 1] if found else 0))
        slots[row] = node
        masses[row] = flat[node]
        smallest = min(smallest, flat[node])
    if lowest == 0:
        lowest = smallest
    for row in range(batch):
        probability[row] = masses[row] / total
        ratio[row] = lowest / masses[row]
    return total


def draw(tree, doubles, stratified, lowest):
    batch = doubles.size
    slots, masses = np.empty(batch, dtype=np.int64), np.empty(batch, dtype=np.int64)
    probability, ratio = np.empty(batch, dtype=np.float32), np.empty(batch)
    outputs = slots, masses, probability, ratio
    total = _draw(*tree.compiled[:3], doubles, stratified, lowest, *outputs)
    return MassDraw(*outputs, total) if total else MassDraw(*(each[:0] for each in outputs), 0)


@_compiled
def _locate(flat, starts, shift, prefix, targets, slots):
    """Find the (B,) slots on which (B,) targets fall.

    prefix: 0 and the inclusive prefix sums of the root.
    """
    sums = prefix[1:]
    for row in range(targets.size):
        node = _node_of(sums, targets[row], 0)
        slots[row] = _leaf_of(flat, starts, shift, node, targets[row] - prefix[node])


def locate(tree, root_prefix, targets):
    slots = np.empty(targets.size, dtype=np.int64)
    _locate(*tree.compiled[:3], root_prefix, targets, slots)
    return slots


@_compiled
def _permuted_ranks(count, wide, high, words, ranks):
    """The first (B,) places of a random permutation of [0, count), as `uniform_draw` says; all numbers are uint64."""
    half = np.uint64(32)
    for start in range(ranks.size):
        place = np.uint64(start)
        while True:
            row = place // wide
            column = place - row * wide
            for at in range(0, words.size, 2):
                fixed = row if at % 4 == 0 else column
                side = wide if at % 4 == 0 else high
                moved = column if at % 4 == 0 else row
                moved += (((fixed * words[at] + words[at + 1]) >> half) * side) >> half
                if moved >= side:
                    moved -= side
                if at % 4 == 0:
                    column = moved
                else:
                    row = moved
            place = row * wide + column
            if place < count:
                break
        ranks[start] = place


def permuted_ranks(count, batch, wide, high, words):
    ranks = np.empty(batch, dtype=np.uint64)
    _permuted_ranks(np.uint64(count), np.uint64(wide), np.uint64(high), words, ranks)
    return ranks.view(np.int64)


@_compiled
def _count_draws(slots, added, capacity, times_sampled, keys):
    """Count the (B,) slots as sampled, a slot drawn twice twice, and find their (B,) keys."""
    head = added % capacity
    for row in range(slots.size):
        slot = slots[row]
        times_sampled[slot] += 1
        keys[row] = added - head + slot - (capacity if slot >= head else 0)


def count_draws(slots, added, capacity, times_sampled):
    keys = np.empty(slots.size, dtype=np.int64)
    _count_draws(slots, added, capacity, times_sampled, keys)
    return keys


@_compiled
def _update(keys, powers, limit, first, added, capacity, counters, sparse, flat, starts, shift, low, high):
    """Give live keys the masses of (B,) float64 powers, as `MassRule` says; the last of a repeated key wins.

    sparse:    whether slots without mass keep none.
    flat, starts, shift: the tree, and the logarithm of its fan-out. low, high: its extremes, or nothing.
    counters:  count the largest mass given, keys that were not live, and masses that were cut.
    """
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
        # the cast truncates, which is the floor of a positive number
        mass = max(np.int64(powers[row] * 1048576.0 + 0.5), 1)
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
            low[slot >> shift] = DIRTY
        if high.size:
            high[slot >> shift] = DIRTY
    counters[_STALE] += stale
    counters[_SATURATED] += cut
    counters[_MAX_MASS] = max(counters[_MAX_MASS], largest)


def update(tree, keys, priorities, rule, first, added, counters, sparse):
    if rule.ordered:
        return numpy_loops.update(tree, keys, priorities, rule, first, added, counters, sparse)
    given = rule.powers(priorities), rule.limit
    # one call, in which no signal is handled: an exception comes before all of it or after
    return _update(np.ascontiguousarray(keys), *given, first, added, tree.slots, counters, sparse, *tree.compiled)


@_compiled
def _sum_range(flat, starts, shift, low, high, start, stop):
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


def sum_range(tree, start, stop):
    _sum_range(*tree.compiled, start, stop)


@_compiled
def _set_range(flat, starts, shift, low, high, start, stop, mass):
    """Give the slots from `start` to `stop` a mass, and their ancestors the sums."""
    flat[start:stop] = mass
    _sum_range(flat, starts, shift, low, high, start, stop)


def set_range(tree, slots, mass):
    if tree.order is not None:
        tree.order.note(slots.start, slots.stop)
    return _set_range, (*tree.compiled, slots.start, slots.stop, mass)


@_compiled
def _windows(
    slots, flags, depth, lengths, sums, powers, num_envs, stack, next_step, hindsight, zero,
    plan, zero_padded, final_frame, reward, discount, terminated, truncated,
):  # fmt: skip
    """The windows of (B,) eligible starts, and where the frames of their stacks lie, before and after.

    flags, depth, lengths, sums: (slots,) of the ring and its windows. powers: of gamma.
    plan:        (2 * B, S) int64 slots of frames, those of `obs` first.
    zero_padded: int64, space for the flat positions in it of frames that are zeros if `zero`; else nothing.
    final_frame: (2 * B,) bool of stacks whose newest frame is a kept final observation; the slot before it stands in
                 its place.
    reward, discount: (B,) float32. terminated, truncated: (B,) bool.
    returns: how many frames are padded, and how many stacks end with a final observation.
    """
    batch, count = slots.size, flags.size
    padded, ending = 0, 0
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
        final_frame[row] = False
        final_frame[batch + row] = final
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
                    zero_padded[padded] = (side * batch + row) * stack + frame
                    padded += 1
    return padded, ending


def windows(store, starts):
    batch, shape = starts.size, store.shape
    plan = np.empty((2 * batch, shape.stack), dtype=np.int64)
    zero_padded = np.empty(plan.size if store.zero else 0, dtype=np.int64)
    final = np.empty(2 * batch, dtype=np.bool_)
    numbers = *np.empty((2, batch), dtype=np.float32), *np.empty((2, batch), dtype=np.bool_)
    settings = shape.num_envs, shape.stack, shape.next_step, shape.hindsight, store.zero
    padded, ending = _windows(starts, *store[2:], *settings, plan, zero_padded, final, *numbers)
    stacks = StackPlan(plan, zero_padded[:padded] if padded else None)
    return Windows(stacks, np.flatnonzero(final) if ending else None, *numbers)


@_compiled
def _gather_stacks(store, plan, out):
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


def gather_stacks(frames, plan, out):
    row_bytes = frames[:1].nbytes
    if plan.slots.shape[1] == 1 or len(plan.slots) % 2 or row_bytes % 8:
        numpy_loops.gather_stacks(frames, plan, out)
        return
    held = frames.reshape(len(frames), -1).view(np.int64)
    _gather_stacks(held, plan.slots, out.reshape(-1).view(np.int64).reshape(-1, row_bytes // 8))


@_compiled
def _extend_episodes(
    step, oldest, masses, initial, steps, num_envs, stack, depth, flags, pending, unit,
    flat, starts, shift, low, high, rewards, powers, sums, lengths, counters,
):  # fmt: skip
    """Add a step in which nothing ended, after one in which nothing did, as `numpy_loops.extend_episodes` says.

    depth, flags, rewards, sums, lengths: (slots,) of the ring. pending: (n_step + 1, num_envs).
    masses: (num_envs,) given with the step, or nothing. unit: whether the tree counts starts instead of their masses.
    counters: count the starts that can be drawn, and the largest given mass that came to count.
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
        behind = min(np.int64(depth[(row - 1) % steps * num_envs + env]) + 1, _DEEPEST - n)
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
            _sum_range(flat, starts, shift, low, high, slot, slot + num_envs)
    if granted:
        _sum_range(flat, starts, shift, low, high, begun * num_envs, (begun + 1) * num_envs)
    counters[_ELIGIBLE] += more
    counters[_MAX_MASS] = max(counters[_MAX_MASS], largest)


def extension(host, step, oldest, masses, initial):
    if host.compiled is None:
        (tree, unit), shape = host.trees[0], host.shape
        alone = len(host.trees) == 1 and tree.order is None
        ring = host.depth.reshape(-1), host.flags.reshape(-1), host.pending
        windows = host.rewards.reshape(-1), host.powers, host.reward, host.length
        sizes = shape.steps, shape.num_envs, shape.stack
        host.compiled = (*sizes, *ring, unit, *tree.compiled, *windows, host.counters) if alone else ()
    given = host.pending[0, :0] if masses is None else masses
    return (_extend_episodes, (step, oldest, given, initial, *host.compiled)) if host.compiled else None


# where it takes more than one call
extend_episodes = numpy_loops.extend_episodes
