"""A number that changes with the count of samples drawn: how beta is annealed."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearSchedule:
    """Goes from `start` to `end` in `steps` equal steps, then stays at `end`.

    steps: number of `sample` calls from `start` to `end`, at least 1.

    The buffer counts the steps (one for each `sample`), so that the count is checkpointed and, on CUDA, lives on
    the device. Raises TypeError or ValueError for numbers that are not finite or `steps` below 1.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"LinearSchedule {name} must be a number; found {type(value).__name__}.")
            if not math.isfinite(value):
                raise ValueError(f"LinearSchedule {name} must be finite; found {value}.")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int):
            raise TypeError(f"LinearSchedule steps must be an int; found {type(self.steps).__name__}.")
        if self.steps < 1:
            raise ValueError(f"LinearSchedule steps must be at least 1; found {self.steps}.")

    def __call__(self, step: int) -> float:
        """The value after `step` samples."""
        return self.start + (self.end - self.start) * min(step, self.steps) / self.steps
