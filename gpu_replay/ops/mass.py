"""Priorities become masses: integers, so that sums are exact on every device.

mass = clamp(floor(min(|priority| + eps, clip) ** alpha * 2**20 + 0.5), 1, limit), limit = 2**62 // slots: the total of
all slots fits 63 bits whatever is given. A slot that must not be drawn has mass 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

UNIT = float(2**20)
# priorities below this count as this: log2 of zero has no value
TINY = 1e-300
# exponents above this give more than 2**62, beyond any limit, and still fit an int64
TOP_EXPONENT = 42.5
# as arrays without dimensions: a scalar operand costs as much again as an operation on a small batch
_UNIT, _HALF, _TOP_EXPONENT, _ONE = np.array(UNIT), np.array(0.5), np.array(TOP_EXPONENT), np.array(1)


@dataclass(frozen=True)
class MassRule:
    """How one buffer turns priorities into masses.

    limit: largest mass of one slot.
    """

    ordered: ClassVar[bool] = False

    alpha: float
    eps: float
    clip: float
    limit: int

    @classmethod
    def for_slots(cls, slots: int, alpha: float, eps: float, clip: float | None) -> MassRule:
        """The rule for a buffer of so many slots; `clip=None` cuts nothing."""
        return cls(alpha, eps, math.inf if clip is None else clip, 2**62 // slots)

    @cached_property
    def _operands(self) -> tuple[np.ndarray, np.ndarray, bool]:
        """As arrays what is added and the exponent, and whether nothing is cut off the sum at either end."""
        return np.array(self.eps), np.array(self.alpha), self.clip == math.inf and not self.least

    @cached_property
    def _far_from_zero(self) -> bool:
        """Whether a priority of 0 has a mass well above 1, so that no mass need be raised to it."""
        return min(self.eps, self.clip) ** self.alpha * UNIT > 2.0

    def masses(self, priorities: np.ndarray) -> tuple[np.ndarray, int, int]:
        """The (B,) int64 masses of (B,) finite float64 priorities, the largest of them, and how many were cut.

        B is at least 1.
        """
        x = self.powers(priorities)
        x *= _UNIT
        x += _HALF
        # the cast truncates, which is the floor of a positive number
        masses = x.astype(np.int64)
        if not self._far_from_zero:
            np.maximum(masses, _ONE, out=masses)
        # finding its place costs half of a reduction at these sizes
        largest = int(masses.item(masses.argmax()))
        saturated = 0
        if largest > self.limit:
            largest, saturated = self.limit, int(np.count_nonzero(masses > self.limit))
            np.minimum(masses, self.limit, out=masses)
        return masses, largest, saturated

    def powers(self, priorities: np.ndarray) -> np.ndarray:
        """(B,) float64: min(|priority| + eps, clip) ** alpha of (B,) finite float64 priorities, no more than 2**42.5.

        Written as exp2(log2(x) * alpha) because the kernels have these two functions, not `pow`.
        """
        eps, _, uncut = self._operands
        x = np.abs(priorities)
        x += eps
        if not uncut:
            np.minimum(x, self.clip, out=x)
            np.maximum(x, self.least, out=x)
        return self.raised(x)

    @property
    def least(self) -> float:
        """What priorities count at least as; 0 where `eps` makes all of them larger."""
        return TINY if self.eps < TINY else 0.0

    def raised(self, x: np.ndarray) -> np.ndarray:
        """(B,) float64 above 0 to the power of alpha, no more than 2**42.5, in their place."""
        np.log2(x, x)
        x *= self._operands[1]
        np.minimum(x, _TOP_EXPONENT, out=x)
        return np.exp2(x, x)

    def mass(self, priority: float) -> int:
        """The mass of one priority."""
        return self.masses(np.array([priority], dtype=np.float64))[1]

    def priorities(self, masses: np.ndarray) -> np.ndarray:
        """The priorities that these masses stand for, to the resolution of a mass; nan when alpha is 0."""
        if self.alpha == 0:
            return np.full(masses.shape, math.nan)
        return np.maximum((masses / UNIT) ** (1 / self.alpha) - self.eps, 0.0)


@dataclass(frozen=True)
class OrderRule:
    """How priorities become order codes, where their order is all that counts: the numbers of `MassRule`, unused.

    code = bits of the float64 |priority|, plus 1: the bits of numbers that are not negative ascend with them, so codes
    compare as priorities do, exactly. A slot that must not be drawn has code 0. Sums of codes mean nothing.
    """

    ordered: ClassVar[bool] = True

    alpha: ClassVar[float] = 0.0
    eps: ClassVar[float] = 0.0
    clip: ClassVar[float] = math.inf
    limit: ClassVar[int] = 2**63 - 1
    least: ClassVar[float] = 0.0

    def masses(self, priorities: np.ndarray) -> tuple[np.ndarray, int, int]:
        """The (B,) int64 codes of (B,) finite float64 priorities, the largest of them, and 0: none is ever cut."""
        codes = np.abs(priorities).view(np.int64)
        codes += 1
        return codes, int(codes.item(codes.argmax())), 0

    def mass(self, priority: float) -> int:
        """The code of one priority."""
        return self.masses(np.array([priority], dtype=np.float64))[1]

    def priorities(self, codes: np.ndarray) -> np.ndarray:
        """The (B,) float64 priorities of (B,) int64 codes above 0, exactly."""
        return (codes - 1).view(np.float64)


Rule = MassRule | OrderRule
