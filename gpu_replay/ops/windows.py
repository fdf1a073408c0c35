"""From the start of an n-step window to what stands in the batch: reward, discount, endings, and the slot after it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpu_replay.ops.eligibility import Flag, StreamShape
from gpu_replay.ops.frames import StackPlan, plan_stacks


class StoredWindows(NamedTuple):
    """What is known of the windows of all eligible starts of a ring, on the host.

    zero:    whether stacks are padded with zeros before the first frame of an episode.
    flags, depth: (slots,) as in `Streams`.
    lengths, sums: (slots,) integers and float32: steps of the windows and their discounted rewards.
    powers:  of gamma, as `powers_of` gives them.
    """

    shape: StreamShape
    zero: bool
    flags: np.ndarray
    depth: np.ndarray
    lengths: np.ndarray
    sums: np.ndarray
    powers: np.ndarray


class Windows(NamedTuple):
    """n-step windows, one for each of (B,) starts, and the frames of the stacks before and after them.

    plan:     of (2 * B, S) frames, those of `obs` first.
    final:    (k,) rows of the plan that end with a kept final observation, or None where none does; in its place stands
              the slot of the window's last step.
    reward:   (B,) float32, discounted.
    discount: (B,) float32, gamma ** m, 0 where terminated.
    terminated, truncated: (B,) bool, how the window ended.
    """

    plan: StackPlan
    final: np.ndarray | None
    reward: np.ndarray
    discount: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


def wrapped(slots: np.ndarray, count: int) -> np.ndarray:
    """Slots from [0, 2 * count) brought into [0, count), in place."""
    # few batches reach over the seam of the ring; finding the place of the largest costs half of a reduction
    if slots.size and slots.item(slots.argmax()) >= count:
        slots -= (slots >= count) * count
    return slots


def powers_of(gamma: float, n_step: int) -> np.ndarray:
    """(n_step + 1,) float64: gamma ** 0 to gamma ** n_step, each the product of the one before and gamma."""
    powers = np.full(n_step + 1, gamma)
    powers[0] = 1.0
    return np.multiply.accumulate(powers)


def sum_in_order(rows: np.ndarray) -> np.ndarray:
    """(B,) sums of (n, B) numbers, row upon row: the order is that of the steps."""
    # of a single column NumPy would add up eight partial sums
    return np.add.reduce(rows, axis=0) if rows.shape[1] > 1 else np.add.accumulate(rows, axis=0)[-1]


def measured(
    shape: StreamShape, flags: np.ndarray, rewards: np.ndarray, powers: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Host: lengths, int64, and discounted rewards, float64, of the windows of (B,) eligible start slots.

    flags, rewards: (slots,) of the ring. powers: of gamma, as `powers_of` gives them.
    """
    n, batch = shape.n_step, starts.size
    steps = np.arange(n, dtype=np.int64)[:, None]
    slots = starts + steps * shape.num_envs  # (n, B)
    # a window longer than the ring ends early, but its row of slots goes round more than once
    slots = wrapped(slots, shape.slots) if n <= shape.steps else slots % shape.slots
    rewarded = rewards.take(slots) * powers[:n, None]
    over = flags.take(slots) & (Flag.TERMINATED | Flag.TRUNCATED) != 0
    length = np.full(batch, n)
    # most batches hold few windows that end early, many none
    if n > 1 and np.logical_or.reduce(over[:-1], axis=None):
        length = np.where(np.logical_or.reduce(over), over.argmax(axis=0) + 1, n)
        np.copyto(rewarded, 0.0, where=steps >= length)
    return length, sum_in_order(rewarded)


def open_windows(store: StoredWindows, rewards: np.ndarray, starts: np.ndarray, left: np.ndarray) -> Windows:
    """Host: the windows of (B,) stored steps, which need not be whole: they end with the newest step at the latest.

    rewards: (slots,) of the ring. left: (B,) steps that are stored from each on.

    Where the observation after a window is not there, since it ends with the newest step, an ending whose final
    observation was not given or a broken stream, the last one stands in its place.
    """
    shape = store.shape
    length, last, flags = np.zeros(starts.size, np.int64), starts, np.zeros(starts.size, np.uint8)
    reward, running = np.zeros(starts.size), np.ones(starts.size, dtype=bool)
    for age in range(shape.n_step):
        running &= age < left
        slots = (starts + min(age, shape.steps - 1) * shape.num_envs) % shape.slots
        found = store.flags.take(slots)
        # by an array: NumPy 1 multiplies float32 by a scalar in float32
        reward += np.where(running, rewards.take(slots), 0.0) * store.powers[age : age + 1]
        length += running
        last, flags = np.where(running, slots, last), np.where(running, found, flags)
        running &= found & (Flag.TERMINATED | Flag.TRUNCATED | Flag.CUT | Flag.DEAD) == 0
        if not np.logical_or.reduce(running):
            break
    terminated, truncated = flags & Flag.TERMINATED != 0, flags & Flag.TRUNCATED != 0
    stays, final = terminated | (flags & (Flag.CUT | Flag.DEAD) != 0) | (length >= left), None
    if not shape.next_step:
        stays |= truncated
        kept = truncated & ~terminated & (flags & Flag.FINAL != 0)
        final = np.concatenate((np.zeros_like(kept), kept)) if np.logical_or.reduce(kept) else None
    depth = store.depth.take(starts)
    plan = plan_stacks(
        np.concatenate((starts, wrapped(last + shape.num_envs * ~stays, shape.slots))),
        np.concatenate((depth, depth + (length - stays).astype(np.int32))),
        shape.stack,
        shape.num_envs,
        shape.slots,
        zero=store.zero,
        final_frame=final,
    )
    discount = store.powers.take(length) * ~terminated
    rows = None if final is None else np.flatnonzero(final)
    return Windows(plan, rows, reward.astype(np.float32), discount.astype(np.float32), terminated, truncated)
