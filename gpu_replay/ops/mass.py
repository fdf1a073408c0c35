"""Priorities become masses: integers, so that sums are exact on every device.

mass = clamp(floor(min(|priority| + eps, clip) ** alpha * 2**20 + 0.5), 1, limit), limit = 2**62 // slots: the total of
all slots fits 63 bits whatever is given. A slot that must not be drawn has mass 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import numpy as np

from gpu_replay.loops import tree as loops
from gpu_replay.ops.ring import contiguous

UNIT = float(2**20)
# priorities below this count as this: log2 of zero has no value
TINY = 1e-300
# exponents above this give more than 2**62, beyond any limit, and still fit an int64
TOP_EXPONENT = 42.5


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

    def masses(self, priorities: np.ndarray) -> tuple[np.ndarray, int, int]:
        """The (B,) int64 masses of (B,) finite float32 or float64 priorities, the largest of them, and how many were
        cut. B is at least 1.
        """
        masses = loops.masses.compiled()(self.numbers(priorities), False)
        largest, saturated = int(masses.max()), 0
        if largest > self.limit:
            largest, saturated = self.limit, int(np.count_nonzero(masses > self.limit))
            np.minimum(masses, self.limit, out=masses)
        return masses, largest, saturated

    def numbers(self, priorities: np.ndarray) -> np.ndarray:
        """(B,) float64: min(|priority| + eps, clip) ** alpha of (B,) finite priorities, no more than about 2**42.5.

        Written as exp2(log2(x) * alpha) because the kernels have these two functions, not `pow`; NumPy's, since those
        of a compiler round otherwise.
        """
        x = np.empty(priorities.size)
        self._shifted(contiguous(priorities), x)
        np.log2(x, x)
        x *= self.alpha
        return np.exp2(x, x)

    @cached_property
    def _shifted(self) -> Callable[[np.ndarray, np.ndarray], None]:
        """The loop that makes what is raised to `alpha`; the power of the largest number reaches any limit."""
        top = 2 ** (TOP_EXPONENT / self.alpha) if self.alpha * 1024 > TOP_EXPONENT else sys.float_info.max
        return partial(loops.shifted.compiled(), self.eps, min(self.clip, top), TINY if self.eps < TINY else 0.0)

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
    """Turns priorities into order codes, for draws by rank; has the fields of `MassRule`, which it does not use.

    code = bits of the float64 |priority|, plus 1: the bits of numbers that are not negative ascend with them, so codes
    compare as priorities do, exactly. A slot that must not be drawn has code 0. Sums of codes mean nothing.
    """

    ordered: ClassVar[bool] = True

    alpha: ClassVar[float] = 0.0
    eps: ClassVar[float] = 0.0
    clip: ClassVar[float] = math.inf
    limit: ClassVar[int] = 2**63 - 1

    def numbers(self, priorities: np.ndarray) -> np.ndarray:
        """(B,) float64: |priority| of (B,) finite priorities, whose bits make the codes."""
        return np.abs(priorities, dtype=np.float64)

    def masses(self, priorities: np.ndarray) -> tuple[np.ndarray, int, int]:
        """The (B,) int64 codes of (B,) finite priorities, the largest of them, and 0: none is ever cut."""
        codes = loops.masses.compiled()(self.numbers(priorities), True)
        return codes, int(codes.max()), 0

    def mass(self, priority: float) -> int:
        """The code of one priority."""
        return self.masses(np.array([priority], dtype=np.float64))[1]

    def priorities(self, codes: np.ndarray) -> np.ndarray:
        """The (B,) float64 priorities of (B,) int64 codes above 0, exactly."""
        return (codes - 1).view(np.float64)


Rule = MassRule | OrderRule
