# mypy: ignore-errors
# (types are what Numba infers)
"""The host's inner loops compiled by Numba: what takes `numpy_loops` dozens of array operations, in one call.

At small batches the cost of NumPy is that of calling it. Each public function does what its namesake there does, number
for number, and none of them rounds differently: what needs a logarithm stays with NumPy. All arrays are contiguous.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, starmap
from operator import setitem

import numpy as np

from gpu_replay.ops import counters, eligibility, numba_memory, numba_rank_loops, numba_tree, numpy_loops
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag
from gpu_replay.ops.frames import StackPlan
from gpu_replay.ops.numba_memory import compiled, forget_older_code, inlined, move, prefetch
from gpu_replay.ops.numba_rank_order import RankOrder as RankOrder
from gpu_replay.ops.numba_rank_order import noted_by
from gpu_replay.ops.numba_rank_order import order_bytes as order_bytes
from gpu_replay.ops.threads import in_parts, threads_for
from gpu_replay.ops.windows import Windows

# nodes of the root of a tree: they are added up one by one
ROOT_LIMIT = 4096
# rows that are on their way from memory while one is worked on
_AHEAD = 16
# less the steps of a window, as `StreamShape.deepest`
_DEEPEST = 2**31 - 1
# bytes of a frame that are asked for ahead: more come by themselves, and would push others out of the caches
_WHOLE = 2**13
# bytes of frames of which more than one row is asked for ahead
_SMALL = 2**8
_MAX_MASS, _ELIGIBLE = Counter.MAX_MASS, Counter.ELIGIBLE
_TERMINATED, _TRUNCATED, _FINAL = Flag.TERMINATED, Flag.TRUNCATED, Flag.FINAL


def draw(tree, doubles, stratified, lowest):
    batch = doubles.size
    slots, masses = np.empty(batch, dtype=np.int64), np.empty(batch, dtype=np.int64)
    probability, ratio = np.empty(batch, dtype=np.float32), np.empty(batch)
    outputs = slots, masses, probability, ratio
    total = numba_tree.draw(*tree.compiled[:3], doubles, stratified, lowest, *outputs)
    return (*outputs, total) if total else (*(each[:0] for each in outputs), 0)


def locate(tree, root_prefix, targets):
    slots = np.empty(targets.size, dtype=np.int64)
    numba_tree.locate(*tree.compiled[:3], root_prefix, targets, slots)
    return slots


@compiled
def _permuted_ranks(count, wide, high, words, ranks):
    """The first (B,) places of a random permutation of [0, count), as `uniform_draw` says: int64; all others uint64."""
    half, one, left = np.uint64(32), np.uint64(1), ranks.size
    rows, columns = np.empty(left, dtype=np.uint64), np.empty(left, dtype=np.uint64)
    which = np.empty(left, dtype=np.int64)
    row, column = np.uint64(0), np.uint64(0)
    for start in range(left):
        rows[start], columns[start], which[start] = row, column, start
        column += one
        if column == wide:
            row, column = row + one, np.uint64(0)
    while left:
        # all places through a pair of rounds, then through the next: the processor works on several at once
        for at in range(0, words.size, 4):
            by, more, other, rest = words[at], words[at + 1], words[at + 2], words[at + 3]
            for place in range(left):
                row, column = rows[place], columns[place]
                column += (((row * by + more) >> half) * wide) >> half
                column = column - wide if column >= wide else column
                row += (((column * other + rest) >> half) * high) >> half
                rows[place], columns[place] = row - high if row >= high else row, column
        # those that fell outside are moved on
        outside = 0
        for place in range(left):
            found = rows[place] * wide + columns[place]
            ranks[which[place]] = np.int64(found)
            if found >= count:
                rows[outside], columns[outside], which[outside] = rows[place], columns[place], which[place]
                outside += 1
        left = outside


def permuted_ranks(count, batch, wide, high, words):
    ranks = np.empty(batch, dtype=np.int64)
    _permuted_ranks(np.uint64(count), np.uint64(wide), np.uint64(high), words, ranks)
    return ranks


@compiled
def _count_draws(slots, added, capacity, times_sampled, keys):
    """Count the (B,) slots as sampled, a slot drawn twice twice, and find their (B,) keys."""
    head = added % capacity
    for row in range(slots.size):
        slot = slots[row]
        times_sampled[slot] += 1
        keys[row] = added - head + slot - (capacity if slot >= head else 0)


def count_draws(slots, added, capacity, times_sampled):
    keys = np.empty(slots.size, dtype=np.int64)
    return keys, starmap(_count_draws, ((slots, added, capacity, times_sampled, keys),))


def update(tree, keys, priorities, rule, first, added, counters, sparse):
    if rule.ordered:
        codes = np.abs(priorities).view(np.int64)
        known = first, added, counters, sparse, *tree.compiled
        return numba_rank_loops.update(np.ascontiguousarray(keys), codes, *known, *noted_by(tree))
    numbers = np.empty(priorities.size)
    # as `MassRule.powers`, but in one pass up to the logarithm
    numba_tree.shifted(np.ascontiguousarray(priorities), rule.eps, rule.clip, rule.least, numbers)
    given = rule.raised(numbers), rule.limit
    # one call, in which no signal is handled: an exception comes before all of it or after
    return numba_tree.update(
        np.ascontiguousarray(keys), *given, first, added, tree.slots, counters, sparse, *tree.compiled
    )


def sum_range(tree, start, stop):
    numba_tree.sum_range(*tree.compiled, start, stop)


def set_range(tree, start, stop, masses):
    if tree.order is not None:
        tree.order.note(start, stop)
    if isinstance(masses, int):
        return starmap(numba_tree.set_range, ((*tree.compiled, start, stop, masses),))
    # compiled before anything is written
    numba_tree.sum_range(*tree.compiled, 0, 0)
    write, sums = (tree.arrays[0], slice(start, stop), masses), (*tree.compiled, start, stop)
    return chain(starmap(setitem, (write,)), starmap(numba_tree.sum_range, (sums,)))


@compiled
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
        later = slots[min(row + _AHEAD, batch - 1)]
        prefetch(flags.ctypes.data + later)
        prefetch(depth.ctypes.data + 4 * later)
        prefetch(lengths.ctypes.data + lengths.itemsize * later)
        prefetch(sums.ctypes.data + 4 * later)
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


@inlined
def _copy_stacks(origin, step, size, plan, out, begin, end):
    """Copy the frames of these rows to where the plan of (2 * B, S) slots says, those of both stacks of a row together.

    A frame that is in both is copied to both while it is in a close cache, and those of the next row, or of one further
    on where they are small, are on their way from memory meanwhile.

    origin, step, size: address of the first frame, bytes from one to the next, and bytes of one. out: address.
    """
    batch, stack = plan.shape[0] // 2, plan.shape[1]
    distance = _AHEAD if size <= _SMALL else 1
    for row in range(begin, end):
        later = min(row + distance, end - 1)
        for frame in range(stack + 1):
            ahead = plan[later, frame] if frame < stack else plan[batch + later, stack - 1]
            for line in range(0, min(size, _WHOLE), 64):
                prefetch(origin + step * ahead + line)
            if frame < stack:
                move(out + size * (row * stack + frame), origin + step * plan[row, frame], size)
            if frame > 0:
                place = (batch + row) * stack + frame - 1
                move(out + size * place, origin + step * plan[batch + row, frame - 1], size)


@compiled
def _gather_stacks(origin, step, size, plan, out, begin, end):
    """See `_copy_stacks`."""
    _copy_stacks(origin, step, size, plan, out, begin, end)


@partial(compiled, nogil=True)
def _gather_stacks_beside(origin, step, size, plan, out, begin, end):
    """The same, while other threads do other rows."""
    _copy_stacks(origin, step, size, plan, out, begin, end)


def gather_stacks(frames, plan, out):
    slots = plan.slots
    if len(slots) % 2 or not frames[:1].flags.c_contiguous:
        numpy_loops.gather_stacks(frames, plan, out)
        return
    threads, size = threads_for(out.nbytes), frames[:1].nbytes
    loop = _gather_stacks if threads == 1 else _gather_stacks_beside
    places = frames.__array_interface__["data"][0], frames.strides[0], size, slots, out.__array_interface__["data"][0]

    # the memory stays until the last thread is done, also where this one is interrupted
    def copy(begin, end, held=(frames, out)):
        loop(*places, begin, end)

    in_parts(copy, len(slots) // 2, threads)


@compiled
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
            numba_tree.sum_range(flat, starts, shift, low, high, slot, slot + num_envs)
    if granted:
        numba_tree.sum_range(flat, starts, shift, low, high, begun * num_envs, (begun + 1) * num_envs)
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
    return starmap(_extend_episodes, ((step, oldest, given, initial, *host.compiled),)) if host.compiled else None


# where it takes more than one call
extend_episodes = numpy_loops.extend_episodes


@compiled
def _choose_goals(
    slots, rows, doubles, last, episode, flags, depth, spans, parted, final, envs, steps, oldest, newest, finals,
    known, source, places,
):  # fmt: skip
    """Choose the goals of (K,) rows of a batch, as `hindsight.goals_from` says.

    slots: (B,) of the batch. last, episode: the strategies. oldest, newest: steps that are stored.
    known: (K,) bool. source, places: (K,) int64, the latter untouched where no final observations are kept.
    """
    last_line, count = newest % steps, rows.size
    for row in range(count):
        # on its way from memory meanwhile
        slot = slots[rows[min(row + _AHEAD, count - 1)]]
        prefetch(spans.ctypes.data + 4 * (slot - np.int64(depth[slot]) * envs))
        slot = slots[rows[row]]
        line, behind = slot // envs, np.int64(depth[slot])
        env, age = slot - line * envs, last_line - line
        age += steps if age < 0 else 0
        if behind < steps - age:
            # the first step of the episode has not been overwritten
            first = slot - behind * envs
            span = np.int64(spans[first + steps * envs if first < 0 else first])
        else:
            span = np.int64(parted[env])
        if span >= 0:
            ahead = min(span - 1 - behind, age)
        else:
            kept = flags[last_line * envs + env] & _FINAL != 0
            ahead = min(age - 1 + kept, age)
        known[row] = ahead >= 0
        chosen = ahead = max(ahead, 0)
        if not last:
            back = min(behind, max(newest - oldest - age, 0)) if episode else 0
            width = back + ahead + 1
            chosen = min(np.int64(doubles[row] * width), width - 1) - back
        line += chosen
        line += steps if line < 0 else -steps if line >= steps else 0
        place = line * envs + env
        pooled = finals and flags[place] & _FINAL != 0
        if finals:
            places[row] = final[place] if pooled else -1
        line += 0 if pooled else 1
        source[row] = (0 if line == steps else line) * envs + env


def choose_goals(streams, slots, rows, span, doubles, strategy):
    shape, count = streams.shape, rows.size
    known, (source, places) = np.empty(count, dtype=np.bool_), np.empty((2, count), dtype=np.int64)
    arrays = [each.numpy() for each in (streams.flags, streams.depth, streams.spans, streams.parted, streams.final)]
    stored = span[0] // shape.num_envs, span[1] // shape.num_envs - 1
    settings = shape.num_envs, shape.steps, *stored, shape.finals > 0
    chosen = strategy == "final", strategy == "episode"
    _choose_goals(slots, rows, doubles, *chosen, *arrays, *settings, known, source, places)
    return known, source, places


CONTAINED = (counters, eligibility, numba_memory, numba_tree, *numba_tree.CONTAINED)
forget_older_code(_windows, *CONTAINED)
