"""The sum tree that most tutorials write: Python loops over a flat list, one row at a time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import PeerSubject, Task


class PythonSumTree(PeerSubject):
    """A binary tree in a list of floats, transitions as tuples in a second list."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        capacity = task.capacity
        self._leaves = 1 << (capacity - 1).bit_length()
        self._tree = [0.0] * (2 * self._leaves)
        self._rows: list[Any] = [None] * capacity
        self._dtypes = task.dtypes
        self._capacity, self._alpha, self._beta = capacity, task.alpha, task.beta
        self._added = 0
        self._top = 1.0
        self._random = random.Random(0)

    def inputs(self, rows: Rows) -> Any:
        """See Subject."""
        return [tuple(rows[name][i] for name in self._dtypes) for i in range(rows["obs"].shape[0])]

    def add(self, rows: Any) -> object:
        """See Subject."""
        for row in rows:
            slot = self._added % self._capacity
            self._rows[slot] = row
            self._set(slot, self._top)
            self._added += 1
        return None

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
        return min(self._added, self._capacity)

    def sample(self, batch: int) -> Any:
        """See Subject."""
        total = self._tree[1]
        part = total / batch
        slots = [self._find((i + self._random.random()) * part) for i in range(batch)]
        masses = np.array([self._tree[slot + self._leaves] for slot in slots])
        weight = (masses / total * len(self)) ** -self._beta
        columns = zip(*(self._rows[slot] for slot in slots), strict=True)
        tensors = {
            name: torch.from_numpy(np.array(column, dtype=dtype))
            for (name, (_, dtype)), column in zip(self._dtypes.items(), columns, strict=True)
        }
        tensors["weight"] = torch.from_numpy((weight / weight.max()).astype(np.float32))
        return slots, tensors

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """See Subject."""
        for slot, priority in zip(sampled[0], priorities.tolist(), strict=True):
            mass = (priority + 1e-6) ** self._alpha
            self._top = max(self._top, mass)
            self._set(slot, mass)
        return None


def make(task: Task) -> PythonSumTree:
    """An empty buffer."""
    return PythonSumTree(task)
