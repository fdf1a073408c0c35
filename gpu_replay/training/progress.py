"""How far a run is, and where its time goes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch

# on a GPU one step in so many is timed
SAMPLED = 64
Part = Literal["env", "act", "replay", "learn"]


class Stopwatch:
    """Attributes the time since the last lap to a part of the loop.

    On the CPU every step is timed. On CUDA one step in 64 is, made of calls instead of graphs and synchronised at each
    lap, so that work is attributed to the part that launched it; overlap between parts is lost in such a step.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[Part, float] = {"env": 0.0, "act": 0.0, "replay": 0.0, "learn": 0.0}
        self._cuda = device if device.type == "cuda" else None
        self._steps = 0
        self._timing = False

    @property
    def looks_inside(self) -> bool:
        """Whether this step is one of a GPU that is timed, so that no graph may hide its parts."""
        return self._timing and self._cuda is not None

    def begin(self) -> None:
        """Start a step of the loop."""
        self._steps += 1
        self._timing = self._cuda is None or self._steps % SAMPLED == 0
        if self._timing:
            self._last = self._now()

    def lap(self, part: Part) -> None:
        """Attribute the time since the last lap, or the start of the step, to `part`."""
        if self._timing:
            now = self._now()
            self.seconds[part] += now - self._last
            self._last = now

    def shares(self) -> dict[Part, float]:
        """Share of each part in the time so far."""
        total = sum(self.seconds.values())
        return {part: seconds / total if total else 0.0 for part, seconds in self.seconds.items()}

    def _now(self) -> float:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        return time.perf_counter()


@dataclass
class Progress:
    """How far a run is.

    step:    of all environments together, of all ranks.
    added:   steps that this process added to the buffer, `lost` those of them whose windows a reset cut off.
    owed:    steps of actors that are stored and not yet learned from.
    evaluated, logged: the last step at which that was done; `next_evaluation`, `next_row` when it is due again.
    seconds: of the run so far, evaluations and checkpoints included; `checkpoint_seconds` of the latter.
    mark:    step, updates and seconds of the learning loop at the last row.
    evaluation: the one that belongs to the next row, if there was one.
    """

    next_evaluation: int
    next_row: int
    step: int = 0
    added: int = 0
    lost: int = 0
    owed: int = 0
    evaluated: int = 0
    logged: int = 0
    solved: bool = False
    resumed: int = 0
    seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    mark: tuple[int, int, float] = (0, 0, 0.0)
    evaluation: dict[str, float] | None = None
