"""Host: finds n-step windows by their starts: rewards, discounts, endings, and where the frames of their stacks lie."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from gpu_replay.loops import windows as loops
from gpu_replay.ops.eligibility import Streams


class Windows(NamedTuple):
    """n-step windows, one for each of (B,) starts, and the frames of the stacks before and after them.

    frame_slots: (2 * B, S) int64 as `loops/windows.py` says, those of `obs` first.
    reward:   (B,) float32, discounted.
    discount: (B,) float32, gamma ** m, 0 where terminated.
    terminated, truncated: (B,) bool, how the window ended.
    """

    frame_slots: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class HostWindows:
    """Looks up windows in one ring.

    rewards: (slots,) of the ring. powers: of gamma. zero: whether stacks are padded with zeros.
    """

    def __init__(self, streams: Streams, rewards: np.ndarray, powers: np.ndarray, *, zero: bool) -> None:
        shape = streams.shape
        self._shape = shape
        self._flags, self._depth, final = (each.numpy() for each in (streams.flags, streams.depth, streams.final))
        ring = self._flags, self._depth, final, rewards, powers, shape.num_envs, shape.next_step, zero
        self._windows = partial(loops.windows.compiled(), *ring)

    def at(self, steps: np.ndarray) -> Windows:
        """The windows of (B,) eligible starts, or of settled steps."""
        frame_slots = np.empty((2 * steps.size, self._shape.stack), np.int64)
        reward, discount = np.empty((2, steps.size), np.float32)
        terminated, truncated = np.empty((2, steps.size), np.bool_)
        windows = Windows(frame_slots, reward, discount, terminated, truncated)
        self._windows(steps, *windows)
        return windows
