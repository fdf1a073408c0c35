"""The host's inner loops in NumPy, over whole batches: at these sizes the count of array operations is the cost.

`numba_loops` has the same functions with the same results, to the bit; `_backend.inner_loops` chooses between them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag
from gpu_replay.ops.eligibility_host import HostEligibility
from gpu_replay.ops.frames import StackPlan, plan_stacks
from gpu_replay.ops.mass import Rule
from gpu_replay.ops.mass_tree import DIRTY, MassTree
from gpu_replay.ops.rank_order import RankOrder as RankOrder
from gpu_replay.ops.rank_order import order_bytes as order_bytes
from gpu_replay.ops.ring import Write, commit
from gpu_replay.ops.stratified_draw import MassDraw, stratified_targets
from gpu_replay.ops.threads import take_rows
from gpu_replay.ops.uniform_draw import SMALL, independent_ranks, slots_of
from gpu_replay.ops.windows import StoredWindows, Windows, sum_in_order, wrapped

# from this many draws on, comparing whole blocks beats a binary search for each draw
_COMPARED = 1024
# a product with it adds up the eight bytes of a word in the highest one
_SUM_OF_BYTES = np.uint64(0x0101010101010101)
_TOP_BYTE = np.uint64(56)
_HALF = np.array(32, dtype=np.uint64)


# the mass tree


def sum_range(tree: MassTree, start: int, stop: int) -> None:
    """Give the ancestors of the slots from `start` to `stop` their sums, and mark the extremes of their blocks."""
    low, high = start // tree.fanout, -(-stop // tree.fanout)
    for extreme in tree.extremes:
        extreme[low:high] = DIRTY
    for below, above in zip(tree.rows, tree.arrays[1:], strict=False):
        np.add.reduce(below[low:high], axis=1, out=above[low:high])
        low, high = low // tree.fanout, -(-high // tree.fanout)


def set_range(tree: MassTree, slots: slice, mass: int) -> None:
    """There is no single function that gives a range of slots a mass, and their ancestors the sums."""


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
    ages, stale = keys - np.array(first), 0
    # seen as unsigned, a negative age is a large one
    unsigned = ages.view(np.uint64)
    if unsigned.item(unsigned.argmax()) >= added - first:
        live = (ages >= 0) & (ages < added - first)
        ages, priorities = ages[live], priorities[live]
        stale = live.size - ages.size
    slots = ages
    if slots.size:
        slots, priorities = _last_of_each(slots_of(ages, first, tree.slots), priorities)
    if sparse and slots.size:
        held = tree.arrays[0].take(slots) > 0
        slots, priorities = slots[held], priorities[held]
    if slots.size == 0:
        counters[Counter.STALE] += stale
    else:
        _give(tree, slots, priorities, rule, stale, counters)


def _give(
    tree: MassTree, slots: np.ndarray, priorities: np.ndarray, rule: Rule, stale: int, counters: np.ndarray
) -> None:
    """Give (B,) distinct slots the masses of their priorities; `stale` more keys were not live."""
    leaves = tree.arrays[0]
    masses, largest, cut = rule.masses(priorities)
    if tree.order is not None:
        tree.order.note_slots(slots)
    writes: list[Write] = []
    if largest > counters.item(Counter.MAX_MASS):
        writes.append((counters, Counter.MAX_MASS, largest))
    for counter, more in ((Counter.STALE, stale), (Counter.SATURATED, cut)):
        if more:
            writes.append((counters, counter, counters.item(counter) + more))
    node = slots >> tree.shift if len(tree.arrays) > 1 or tree.extremes else slots
    for extreme in tree.extremes:
        extreme[node] = DIRTY
    if len(tree.arrays) == 1:
        return commit([(leaves, slots, masses), *writes], None)
    before = leaves.take(slots)
    change = masses - before
    try:
        leaves[slots] = masses
        for above in tree.arrays[1:]:
            np.add.at(above, node, change)
            node = node >> tree.shift
        return commit(writes, None)
    except BaseException:
        leaves[slots] = before
        tree.build()
        raise


def _last_of_each(slots: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct slots, each with its last number."""
    # a stratified draw comes back in ascending slots, mostly distinct
    rises = slots[1:] > slots[:-1]
    if np.count_nonzero(rises) == rises.size:
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
    root = tree.arrays[-1]
    prefix = np.empty(root.size + 1, dtype=np.int64)
    prefix[0] = 0
    np.add.accumulate(root, 0, None, prefix[1:])
    total = prefix.item(root.size)
    if total == 0:
        nothing = np.empty(0, dtype=np.int64)
        return MassDraw(nothing, nothing, nothing, nothing, 0)
    targets = stratified_targets(total, doubles) if stratified else independent_ranks(total, doubles)
    slots = locate(tree, prefix, targets)
    masses = tree.arrays[0].take(slots)
    # finding the place of the smallest costs half of a reduction at these sizes
    ratio = np.true_divide(np.array(lowest or masses.item(masses.argmin())), masses)
    return MassDraw(slots, masses, (masses / total).astype(np.float32), ratio, total)


def locate(tree: MassTree, root_prefix: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The slots on which (B,) targets fall; the targets are overwritten.

    root_prefix: 0 and the inclusive prefix sums of the root.

    One pass serves a whole level: the blocks that the draws reached are laid end to end, summed up together, and
    searched for the targets raised by the sum of all blocks before theirs. Those sums stay below B * total, so a batch
    for which that passes 63 bits is done in parts.
    """
    most = max(1, (2**63 - 1) // root_prefix.item(root_prefix.size - 1))
    if targets.size > most:
        parts = np.split(targets, range(most, targets.size, most))
        return np.concatenate([locate(tree, root_prefix, part) for part in parts])
    fanout, batch = tree.fanout, targets.size
    width = np.array(fanout)
    node = root_prefix[1:].searchsorted(targets, "right")
    if len(tree.rows) == 1:
        return node
    targets -= root_prefix.take(node)
    masses = np.empty((batch, fanout), dtype=np.int64)
    flat = masses.reshape(-1)
    # the sum before each of the masses, and of all
    prefix = np.empty(flat.size + 1, dtype=np.int64)
    prefix[0] = 0
    block_start = np.arange(0, flat.size, fanout)
    for level in range(len(tree.rows) - 2, -1, -1):
        # nodes exist, so clipping changes none; it is the mode that writes straight into `masses`
        tree.rows[level].take(node, 0, masses, "clip")
        np.add.accumulate(flat, 0, None, prefix[1:])
        targets += prefix[:-1:fanout]
        if batch < _COMPARED:
            place = prefix[1:].searchsorted(targets, "right")
            child = place - block_start
        else:
            child = _reached(prefix[1:].reshape(batch, fanout), targets)
            place = child + block_start
        np.multiply(node, width, node)
        np.add(node, child, node)
        if level:
            targets -= prefix.take(place)
    return node


def _reached(prefix: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """How many of each row's 16 prefix sums the row's target has reached: (B,) int64."""
    reached = (prefix <= targets[:, None]).view(np.uint64)
    count = reached[:, 0] + reached[:, 1]
    count *= _SUM_OF_BYTES
    count >>= _TOP_BYTE
    return count.view(np.int64)


def permuted_ranks(count: int, batch: int, wide: int, high: int, words: np.ndarray) -> np.ndarray:
    """The first `batch` places of a random permutation of [0, count), as `uniform_draw.permuted_ranks` says.

    wide, high: sides of the rectangle that covers them. words: two for each round.
    """
    ranks = _permute(np.arange(batch, dtype=np.uint64), wide, high, words)
    outside = np.flatnonzero(ranks >= count)
    while outside.size:
        walked = _permute(ranks[outside], wide, high, words)
        ranks[outside] = walked
        outside = outside[walked >= count]
    return ranks.view(np.int64)


def _permute(places: np.ndarray, wide: int, high: int, words: np.ndarray) -> np.ndarray:
    """A permutation of [0, wide * high): the column is shifted by a hash of the row, then the other way round."""
    # arrays without dimensions: at these sizes a scalar operand costs as much again as the operation
    sides = np.array(wide, dtype=np.uint64), np.array(high, dtype=np.uint64)
    numbers = [words[at, ...] for at in range(words.size)]
    row, column = np.divmod(places, sides[0])
    shift = np.empty_like(row)
    for at in range(0, words.size, 2):
        # the even rounds move the column, the odd ones the row
        moved, fixed, side = (column, row, sides[0]) if at % 4 == 0 else (row, column, sides[1])
        np.multiply(fixed, numbers[at], shift)
        np.add(shift, numbers[at + 1], shift)
        np.right_shift(shift, _HALF, shift)
        np.multiply(shift, side, shift)
        np.right_shift(shift, _HALF, shift)
        np.add(moved, shift, moved)
        # a place that did not go round wraps to a huge one here, which is not the smaller
        np.subtract(moved, side, shift)
        np.minimum(moved, shift, out=moved)
    np.multiply(row, sides[0], row)
    np.add(row, column, row)
    return row


@lru_cache(maxsize=64)
def _ones(count: int) -> np.ndarray:
    return np.ones(count, dtype=np.int32)


def count_draws(slots: np.ndarray, added: int, capacity: int, times_sampled: np.ndarray) -> np.ndarray:
    """Count the (B,) slots as sampled, a slot drawn twice twice; returns the (B,) live keys in them."""
    # an indexed += would count a slot drawn twice once
    np.add.at(times_sampled, slots, _ones(slots.size))
    if slots.size > SMALL:
        lap, head = divmod(added, capacity)
        keys = slots + lap * capacity
        keys -= (slots >= head) * capacity
        return keys
    # slots from the oldest transition on, counted round the ring
    keys = slots - np.array(added)
    np.remainder(keys, np.array(capacity), keys)
    return np.add(keys, np.array(added - capacity), keys)


# windows and stacks of a trajectory buffer


def windows(store: StoredWindows, starts: np.ndarray) -> Windows:
    """The windows of (B,) eligible starts, and where the frames of the stacks before and after them lie."""
    shape, powers = store.shape, store.powers
    length = store.lengths.take(starts).astype(np.int64)
    reward = store.sums.take(starts)
    last = wrapped(starts + (length - 1) * shape.num_envs, shape.slots)
    flags = store.flags.take(last)
    depth = store.depth.take(starts)
    final = None
    if not np.count_nonzero(flags):
        # full windows in which no episode ended, as most are
        terminated, truncated = np.zeros((2, starts.size), dtype=bool)
        discount = np.full(starts.size, powers.item(shape.n_step), np.float32)
        after = wrapped(last + shape.num_envs, shape.slots)
        after_depth = depth + np.int32(shape.n_step)
    else:
        terminated = flags & Flag.TERMINATED != 0
        truncated = flags & Flag.TRUNCATED != 0
        discount = powers.take(length)
        discount *= ~terminated
        stays = terminated
        # a transition with another goal may go on after its ending: it needs the final observation if it is there
        known = flags & Flag.FINAL != 0 if shape.hindsight else None
        if shape.next_step and known is not None:
            stays = terminated & ~known
        if not shape.next_step:
            final = truncated & ~terminated
            if known is not None:
                final |= known
            stays = terminated | final
            final = np.concatenate((np.zeros_like(final), final)) if np.logical_or.reduce(final) else None
        after = wrapped(last + shape.num_envs * ~stays, shape.slots)
        after_depth = depth + (length - stays).astype(np.int32)
    plan = plan_stacks(
        np.concatenate((starts, after)),
        np.concatenate((depth, after_depth)),
        shape.stack,
        shape.num_envs,
        shape.slots,
        zero=store.zero,
        final_frame=final,
    )
    rows = None if final is None else np.flatnonzero(final)
    return Windows(plan, rows, reward, discount.astype(np.float32, copy=False), terminated, truncated)


def gather_stacks(frames: np.ndarray, plan: StackPlan, out: np.ndarray) -> None:
    """Copy frames to `out`, (rows * S, ...), row upon row of the plan."""
    take_rows(frames, plan.slots.reshape(-1), out)


def extension(host: HostEligibility, step: int, oldest: int, masses: np.ndarray | None, initial: int) -> None:
    """There is no such function: it takes several operations."""


def extend_episodes(
    host: HostEligibility, step: int, oldest: int, masses: np.ndarray | None, initial: int
) -> tuple[int, int]:
    """Add a step in which nothing ended, after one in which nothing did, as `HostEligibility.add_step` says.

    returns: how many starts more can be drawn, and the largest given mass that came to count.
    """
    shape = host.shape
    row = step % shape.steps
    begun, end = (row - shape.n_step) % shape.steps, row + shape.stack
    lost = None
    if step >= shape.steps:
        if end > shape.steps:
            host.revoke(row, step)
        else:
            lost = host.leaves[0][row:end] > 0
            lost &= host.depth[row:end] >= host.ages
    depth = np.add(host.depth[row - 1], 1, out=host.depth[row])
    if step >= shape.deepest:
        # past the last 32-bit number the sum is negative
        np.copyto(depth, shape.deepest, where=(depth < 0) | (depth > shape.deepest))
    host.flags[row] = 0
    host.pending[step % (shape.n_step + 1)] = 0 if masses is None else masses
    chosen, largest = _complete_windows(host, step, begun, depth, oldest, initial)
    count = 0 if lost is None else int(np.count_nonzero(lost))
    if lost is not None and count:
        for leaves in host.leaves:
            np.copyto(leaves[row:end], 0, where=lost)
    _sum_rows(host, begun, chosen > 0, row, lost if count else None)
    return chosen - count, largest


def _sum_rows(host: HostEligibility, begun: int, chosen: bool, row: int, lost: np.ndarray | None) -> None:
    """Sum up the row `begun` if starts were chosen there, and the rows from `row` on that lost some.

    lost: (stack, num_envs) bool.
    """
    envs, end = host.shape.num_envs, row + host.shape.stack
    for tree, _ in host.trees:
        if chosen and lost is not None and begun < row and host.together:
            tree.sum_range(begun * envs, end * envs)
            continue
        if chosen:
            tree.sum_range(begun * envs, (begun + 1) * envs)
        if lost is not None:
            rows = np.flatnonzero(np.logical_or.reduce(lost, axis=1))
            tree.sum_range((row + rows.item(0)) * envs, (row + rows.item(-1) + 1) * envs)


def _complete_windows(
    host: HostEligibility, step: int, row: int, depth: np.ndarray, oldest: int, initial: int
) -> tuple[int, int]:
    """Store the windows that began `n_step` steps ago in `row` of the ring, and the masses of their starts.

    returns: how many there are, and the largest given mass.
    """
    shape, n = host.shape, host.shape.n_step
    start = step - n
    if start < oldest:
        return 0, 0
    chosen = depth >= n
    if start - shape.stack + 1 < oldest:
        # as 32-bit numbers: steps are counted further
        chosen &= np.minimum(depth - n, shape.stack - 1) <= start - oldest
    count = int(np.count_nonzero(chosen))
    if not count:
        return 0, 0
    given, largest = host.pending[start % (n + 1)], 0
    entering: int | np.ndarray = initial
    if np.count_nonzero(given):
        largest = int(np.maximum.reduce(given * chosen))
        entering = np.where(given > 0, given, initial)
    rewards, powers = host.rewards, host.powers[:n, None]
    if n == 1:
        sums = rewards[row]
    elif row + n <= shape.steps:
        sums = sum_in_order(rewards[row : row + n] * powers)
    else:
        sums = sum_in_order(rewards[np.arange(row, row + n) % shape.steps] * powers)
    everywhere = True if count == shape.num_envs else chosen
    for (_, unit), leaves in zip(host.trees, host.leaves, strict=True):
        np.copyto(leaves[row], 1 if unit else entering, where=everywhere)
    np.copyto(host.sums[row], sums, "same_kind", everywhere)
    np.copyto(host.lengths[row], n, "unsafe", everywhere)
    return count, largest
