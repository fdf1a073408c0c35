"""Host: finds n-step windows by their starts: rewards, discounts, endings, and the plans of their stacks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpu_replay.loops import windows as loops
from gpu_replay.ops.eligibility import Streams
from gpu_replay.ops.steps import HostSteps


class Windows(NamedTuple):
    """n-step windows, one for each of (B,) starts, and the frames of the stacks before and after them.

    plan:     (2 * B, S) int64 as `loops/windows.py` says, those of `obs` first.
    reward:   (B,) float32, discounted.
    discount: (B,) float32, gamma ** m, 0 where terminated.
    terminated, truncated: (B,) bool, how the window ended.
    """

    plan: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray

    @classmethod
    def empty(cls, batch: int, stack: int) -> Windows:
        """To be filled."""
        plan = np.empty((2 * batch, stack), np.int64)
        return cls(plan, *np.empty((2, batch), np.float32), *np.empty((2, batch), np.bool_))


class HostWindows:
    """Looks up windows in one ring.

    rewards: (slots,) of the ring. powers: of gamma. zero: whether stacks are padded with zeros.
    """

    def __init__(
        self, streams: Streams, steps: HostSteps, rewards: np.ndarray, powers: np.ndarray, *, zero: bool
    ) -> None:
        self._shape = shape = streams.shape
        self._windows = loops.windows.ready()
        self._lengths, self._sums, self._rewards, self._powers = steps.lengths, steps.sums, rewards, powers
        self._flags, depth, final = (each.numpy() for each in (streams.flags, streams.depth, streams.final))
        settings = shape.num_envs, shape.next_step
        self._of_starts = self._flags, depth, steps.lengths, steps.sums, final, powers, *settings, shape.hindsight, zero
        self._of_steps = self._flags, depth, final, rewards, powers, *settings, zero

    def of_starts(self, starts: np.ndarray) -> Windows:
        """The windows of (B,) eligible starts."""
        windows = Windows.empty(starts.size, self._shape.stack)
        self._windows(starts, *self._of_starts, *windows)
        return windows

    def of_steps(self, steps: np.ndarray, left: np.ndarray) -> Windows:
        """The windows of (B,) stored steps, each followed by `left` stored ones: windows may be incomplete."""
        windows = Windows.empty(steps.size, self._shape.stack)
        loops.open_windows.ready()(steps, left, *self._of_steps, *windows)
        return windows

    def measure(self, masses: np.ndarray) -> None:
        """Find the windows of all starts with mass, (slots,), anew."""
        known = self._flags, self._rewards, self._powers, self._shape.num_envs
        loops.measure.ready()(masses, *known, self._lengths, self._sums)
