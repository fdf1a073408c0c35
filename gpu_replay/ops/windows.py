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
    slots -= (slots >= count) * count
    return slots


def powers_of(gamma: float, n_step: int) -> np.ndarray:
    """(n_step + 1,) float64: gamma ** 0 to gamma ** n_step, each the product of the one before and gamma."""
    powers = np.full(n_step + 1, gamma)
    powers[0] = 1.0
    return np.multiply.accumulate(powers)


def windows_from(
    shape: StreamShape,
    flags: np.ndarray,
    depth: np.ndarray,
    rewards: np.ndarray,
    powers: np.ndarray,
    starts: np.ndarray,
) -> Windows:
    """Host: the windows of (B,) eligible start slots.

    flags, depth, rewards: (slots,) of the ring. powers: of gamma, as `powers_of` gives them.

    The sum of rewards is made in float64, in order, and rounded once.
    """
    n, turn = shape.n_step, shape.slots
    batch = starts.size
    begun = depth.take(starts)
    slot = starts
    reward = rewards.take(starts).astype(np.float64)
    found = flags.take(starts)
    ended = found & (Flag.TERMINATED | Flag.TRUNCATED)
    last, length = starts, None
    if n > 1:
        # windows end early now and then; until one does, no masks are needed
        open_ = ended == 0
        length = np.ones(batch, dtype=np.int64)
        last = starts.copy()
        for k in range(1, n):
            slot = wrapped(slot + shape.num_envs, turn)
            length += open_
            np.copyto(last, slot, where=open_)
            reward += np.where(open_, rewards.take(slot), 0.0) * powers[k]
            np.copyto(found, flags.take(slot), where=open_)
            open_ &= found & (Flag.TERMINATED | Flag.TRUNCATED) == 0
    terminated = found & Flag.TERMINATED != 0
    truncated = found & Flag.TRUNCATED != 0
    discount = powers[1:].take(length - 1) if length is not None else np.full(batch, powers[1])
    discount *= ~terminated
    stays = terminated.copy()
    final = None
    if not shape.next_step:
        final = truncated & ~terminated
        stays |= final
        final = final if np.logical_or.reduce(final) else None
    after = wrapped(last + shape.num_envs * ~stays, turn)
    steps = (length if length is not None else 1) - stays
    return Windows(
        after,
        (begun + steps).astype(np.int32),
        final,
        reward.astype(np.float32),
        discount.astype(np.float32),
        terminated,
        truncated,
    )
