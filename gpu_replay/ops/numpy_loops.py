"""The host's inner loops in NumPy, over whole batches: at these sizes the count of array operations is the cost.

`numba_loops` has the same functions with the same results, to the bit; `_backend.inner_loops` chooses between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import starmap

import numpy as np

from gpu_replay.ops.eligibility import Flag
from gpu_replay.ops.eligibility_host import HostEligibility
from gpu_replay.ops.frames import StackPlan, plan_stacks
from gpu_replay.ops.numpy_tree import ROOT_LIMIT as ROOT_LIMIT
from gpu_replay.ops.numpy_tree import draw as draw
from gpu_replay.ops.numpy_tree import locate as locate
from gpu_replay.ops.numpy_tree import set_range as set_range
from gpu_replay.ops.numpy_tree import sum_range as sum_range
from gpu_replay.ops.numpy_tree import update as update
from gpu_replay.ops.numpy_tree import whole
from gpu_replay.ops.rank_order import RankOrder as RankOrder
from gpu_replay.ops.rank_order import order_bytes as order_bytes
from gpu_replay.ops.threads import take_rows
from gpu_replay.ops.uniform_draw import SMALL
from gpu_replay.ops.windows import StoredWindows, Windows, sum_in_order, wrapped

_HALF = np.array(32, dtype=np.uint64)


# draws


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


def count_draws(
    slots: np.ndarray, added: int, capacity: int, times_sampled: np.ndarray
) -> tuple[np.ndarray, Iterator[object]]:
    """The (B,) live keys in (B,) slots, and what counts the slots as sampled, one drawn twice twice, for `commit`."""
    # an indexed += would count a slot drawn twice once
    counts = starmap(np.add.at, ((times_sampled, slots, _ones(slots.size)),))
    if slots.size > SMALL:
        lap, head = divmod(added, capacity)
        keys = slots + lap * capacity
        keys -= (slots >= head) * capacity
        return keys, counts
    # slots from the oldest transition on, counted round the ring
    keys = slots - np.array(added)
    np.remainder(keys, whole(capacity), keys)
    return np.add(keys, np.array(added - capacity), keys), counts


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
