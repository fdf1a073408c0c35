"""A number that changes with the count of samples drawn: how beta is annealed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpu_replay.validation import number, whole


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
        number("LinearSchedule start", self.start, -math.inf)
        number("LinearSchedule end", self.end, -math.inf)
        whole("LinearSchedule steps", self.steps, 1)

    def __call__(self, step: int) -> float:
        """The value after `step` samples."""
        return self.start + (self.end - self.start) * min(step, self.steps) / self.steps
