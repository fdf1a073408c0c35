"""Host: finds n-step windows by their starts: rewards, discounts, endings, and where the frames of their stacks lie."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from gpu_replay.loops import windows as loops
from gpu_replay.ops.eligibility import Streams

# steps left from starts whose windows are whole
_WHOLE = np.zeros(0, dtype=np.int64)


class SequenceRule(NamedTuple):
    """The sequences that may be drawn: of `length` steps that are stored, in one episode if `strict`, from a step whose
    number is a multiple of `stride`.
    """

    length: int
    strict: bool = False
    stride: int = 1

    @property
    def restricts(self) -> bool:
        """Whether starts must be looked at, and not only their keys."""
        return self.strict or self.stride > 1


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

    def at(self, steps: np.ndarray, left: np.ndarray = _WHOLE) -> Windows:
        """The windows of (B,) eligible starts, or of stored steps from each of which on `left` are stored: these
        windows may be incomplete.
        """
        frame_slots = np.empty((2 * steps.size, self._shape.stack), np.int64)
        reward, discount = np.empty((2, steps.size), np.float32)
        terminated, truncated = np.empty((2, steps.size), np.bool_)
        windows = Windows(frame_slots, reward, discount, terminated, truncated)
        self._windows(steps, left, *windows)
        return windows

    def fit(self, rule: SequenceRule, added: int, starts: np.ndarray) -> np.ndarray:
        """Which of (B,) eligible starts may begin a sequence, as bool; added: the next key."""
        fits, envs = np.empty(starts.size, np.bool_), self._shape.num_envs
        loops.fitting.compiled()(
            starts, self._flags, self._depth, added, envs, rule.length, rule.strict, rule.stride, fits
        )
        return fits
