"""The sum tree that most tutorials write: Python loops over a flat list, one row at a time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from torch import Tensor

from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import EPS, Adapter, Sampled, Task, tensors


class PythonSumTree:
    """A binary tree in a list of floats, transitions as tuples in a second list."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._leaves = 1 << (task.capacity - 1).bit_length()
        self._tree = [0.0] * (2 * self._leaves)
        self._rows: list[Any] = [None] * task.capacity
        self._added = 0
        self._top = 1.0
        self._random = random.Random(0)

    def inputs(self, rows: Rows) -> Any:
        """Rows as tuples."""
        return [tuple(rows[name][i] for name in self._task.dtypes) for i in range(rows["obs"].shape[0])]

    def add(self, rows: Any) -> None:
        """Store rows, with the largest mass so far."""
        for row in rows:
            slot = self._added % self._task.capacity
            self._rows[slot] = row
            self._set(slot, self._top)
            self._added += 1

    def _set(self, slot: int, mass: float) -> None:
        node = slot + self._leaves
        change = mass - self._tree[node]
        while node:
            self._tree[node] += change
            node >>= 1

    def _find(self, target: float) -> int:
        node = 1
        while node < self._leaves:
            node *= 2
            if target >= self._tree[node]:
                target -= self._tree[node]
                node += 1
        return min(node - self._leaves, len(self) - 1)

    def __len__(self) -> int:
        return min(self._added, self._task.capacity)

    def sample(self, batch: int) -> Sampled:
        """Slots, one in each of so many parts of the mass, and their rows."""
        total = self._tree[1]
        part = total / batch
        slots = [self._find((i + self._random.random()) * part) for i in range(batch)]
        masses = np.array([self._tree[slot + self._leaves] for slot in slots])
        weight = (masses / total * len(self)) ** -self._task.beta
        columns = zip(*(self._rows[slot] for slot in slots), strict=True)
        found = {
            name: np.array(column, dtype=dtype)
            for (name, (_, dtype)), column in zip(self._task.dtypes.items(), columns, strict=True)
        }
        return slots, tensors({**found, "weight": (weight / weight.max()).astype(np.float32)})

    def update(self, slots: Any, priorities: Tensor) -> None:
        """New masses for slots."""
        for slot, priority in zip(slots, priorities.tolist(), strict=True):
            mass = (priority + EPS) ** self._task.alpha
            self._top = max(self._top, mass)
            self._set(slot, mass)


def make(task: Task) -> Adapter:
    """An empty one."""
    tree = PythonSumTree(task)
    return Adapter(tree.add, tree.sample, tree.update, tree.inputs)
