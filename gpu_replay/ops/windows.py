"""From the start of an n-step window to what stands in the batch: reward, discount, endings, and the slot after it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpu_replay.ops.eligibility import Flag, StreamShape


class Windows(NamedTuple):
    """n-step windows, one for each start.

    after:       (B,) slots of the observations after the windows; of the last step where the ring holds none.
    after_depth: (B,) int32 steps between that observation and the first one of its episode.
    final:       (B,) bool where `next_obs` ends with a kept final observation, or None where none does.
    reward:      (B,) float32, discounted.
    discount:    (B,) float32, gamma ** m, 0 where terminated.
    terminated, truncated: (B,) bool, how the window ended.
    """

    after: np.ndarray
    after_depth: np.ndarray
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
    # row upon row, so that the order of the sum is that of the steps
    return length, np.add.reduce(rewarded, axis=0)


def _in_full(
    shape: StreamShape, depth: np.ndarray, reward: np.ndarray, powers: np.ndarray, starts: np.ndarray, last: np.ndarray
) -> Windows:
    """Host: windows of `n_step` steps in which no episode ended, as most are, whose last steps are in (B,) slots."""
    batch, n = starts.size, shape.n_step
    nothing = np.zeros((2, batch), dtype=bool)
    return Windows(
        wrapped(last + shape.num_envs, shape.slots),
        depth.take(starts) + np.int32(n),
        None,
        reward.astype(np.float32, copy=False),
        np.full(batch, powers.item(n), np.float32),
        nothing[0],
        nothing[1],
    )


def windows_from(
    shape: StreamShape,
    flags: np.ndarray,
    depth: np.ndarray,
    length: np.ndarray,
    reward: np.ndarray,
    powers: np.ndarray,
    starts: np.ndarray,
) -> Windows:
    """Host: the windows of (B,) eligible start slots, whose lengths, int64, and discounted rewards are known.

    flags, depth: (slots,) of the ring. powers: of gamma, as `powers_of` gives them.
    """
    last = wrapped(starts + (length - 1) * shape.num_envs, shape.slots)
    found = flags.take(last)
    if not np.count_nonzero(found):
        return _in_full(shape, depth, reward, powers, starts, last)
    terminated = found & Flag.TERMINATED != 0
    truncated = found & Flag.TRUNCATED != 0
    discount = powers.take(length)
    discount *= ~terminated
    stays, final = terminated, None
    # a transition with another goal may go on after its ending: it needs the final observation if it is there
    known = found & Flag.FINAL != 0 if shape.hindsight else None
    if shape.next_step and known is not None:
        stays = terminated & ~known
    if not shape.next_step:
        final = truncated & ~terminated
        if known is not None:
            final |= known
        stays = terminated | final
        final = final if np.logical_or.reduce(final) else None
    after = wrapped(last + shape.num_envs * ~stays, shape.slots)
    return Windows(
        after,
        depth.take(starts) + (length - stays).astype(np.int32),
        final,
        reward.astype(np.float32, copy=False),
        discount.astype(np.float32),
        terminated,
        truncated,
    )
