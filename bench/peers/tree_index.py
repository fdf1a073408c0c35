"""The sum trees of other libraries alone: drawing slots by mass and changing masses, as their own buffers do it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from torch import Tensor

from gpu_replay.bench.subjects import EPS, FullSubject, Task

# float32 trees lose precision in long sums
_TOLERANCE = 1e-3


class TreeIndex(FullSubject):
    """A full tree. Draws are uniform over the whole mass, without strata, as all these libraries make them."""

    def __init__(self, task: Task) -> None:
        self._slots = task.capacity
        self._alpha = task.alpha
        self._random = np.random.default_rng(0)
        self.set(np.arange(self._slots), np.ones(self._slots))

    @abstractmethod
    def total(self) -> float:
        """The sum of all masses."""

    @abstractmethod
    def find(self, targets: np.ndarray) -> np.ndarray:
        """(B,) slots in which the prefix sums (B,) lie."""

    @abstractmethod
    def masses(self, slots: np.ndarray) -> np.ndarray:
        """(B,) masses of the slots."""

    @abstractmethod
    def set(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """Give the slots (B,) new masses."""

    def sample(self, batch: int) -> Any:
        """(batch,) slots and their masses."""
        slots = self.find(self._random.random(batch) * self.total())
        return slots, self.masses(slots)

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """Masses of these priorities at the sampled slots."""
        self.set(sampled[0], (priorities.numpy() + EPS) ** self._alpha)
        return None

    def wrong(self) -> list[str]:
        """What is wrong with the index: its total, or slots whose prefix interval does not hold their target."""
        masses = np.asarray(self.masses(np.arange(self._slots)), dtype=np.float64)
        sums = masses.cumsum()
        total = self.total()
        if not np.isclose(total, sums[-1], rtol=_TOLERANCE):
            return [f"the total mass is {total}, its leaves sum to {sums[-1]}"]
        targets = (np.arange(256) + 0.5) * (total / 256)
        slots = self.find(targets.copy())
        near = _TOLERANCE * total
        inside = (sums[slots] + near >= targets) & (sums[slots] - masses[slots] - near <= targets)
        return [] if inside.all() else ["slots are not drawn where their mass lies"]
