"""The index alone: drawing slots by mass and changing masses, without a ring of fields around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops.counters import HostWords
from gpu_replay.ops.mass import MassRule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.stratified_draw import draw_slots

from .rows import Rows, make_priorities
from .subjects import ALPHA


class IndexSubject:
    """The host's mass tree as the buffer uses it, full from the start."""

    add_size: int | None = None
    has_next_obs = True

    def __init__(self, capacity: int) -> None:
        self._rule = MassRule.for_slots(capacity, ALPHA, 1e-6, None)
        self._tree = MassTree(capacity, torch.device("cpu"), "host")
        self._tree.set_range(0, capacity, self._rule.mass(1.0))
        self._words = HostWords(seed=0)
        self._block = 0

    @property
    def tree(self) -> MassTree:
        """The masses and their sums."""
        return self._tree

    def inputs(self, rows: Rows) -> Any:
        """Nothing is added to an index."""
        return None

    def fill(self, rounds: int) -> None:
        """Spread the masses, which are there from the start."""
        random, batch = np.random.default_rng(0), min(4096, self._tree.slots)
        for _ in range(min(rounds, -(-2 * self._tree.slots // batch))):
            self.update(self.sample(batch), make_priorities(batch, random))

    def add(self, rows: Any) -> object:
        """Nothing is added to an index."""
        return None

    def sample(self, batch: int) -> Any:
        """(batch,) int64 slots, drawn by mass, and their masses."""
        doubles = self._words.doubles(self._block, batch)
        self._block += -(-batch // 4)
        slots, masses, _ = draw_slots(self._tree, doubles, stratified=True)
        return slots, masses

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """Masses of these priorities at the sampled slots, a repeated slot once."""
        slots, _ = sampled
        numbers = priorities.numpy().astype(np.float64)
        # slots are the keys of a ring in its first lap
        self._tree.update(slots, numbers, self._rule, 0, self._tree.slots)
        return None

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """An index has no fields."""
        return {}

    def wrong(self) -> list[str]:
        """What is wrong with the index: a total that is not the sum of its leaves."""
        total, leaves = self._tree.total(), int(self._tree.masses.sum())
        return [] if total == leaves else [f"the total mass is {total}, its leaves sum to {leaves}"]
