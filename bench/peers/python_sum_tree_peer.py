"""The sum tree that most tutorials write: Python loops over a flat list, one row at a time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from torch import Tensor

from gpu_replay.bench.peers_suite import Sampled, Task
from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import EPS, Subject, tensors


def make(task: Task) -> Subject:
    """A binary tree in a list of floats, transitions as tuples in a second list."""
    leaves = 1 << (task.capacity - 1).bit_length()
    tree = [0.0] * (2 * leaves)
    stored: list[Any] = [None] * task.capacity
    draws = random.Random(0)
    added, top = 0, 1.0

    def change(slot: int, mass: float) -> None:
        node = slot + leaves
        difference = mass - tree[node]
        while node:
            tree[node] += difference
            node >>= 1

    def find(target: float) -> int:
        node = 1
        while node < leaves:
            node *= 2
            if target >= tree[node]:
                target -= tree[node]
                node += 1
        return min(node - leaves, min(added, task.capacity) - 1)

    def inputs(rows: Rows) -> Any:
        return [tuple(rows[name][i] for name in task.dtypes) for i in range(rows["obs"].shape[0])]

    def add(rows: Any) -> None:
        nonlocal added
        for row in rows:
            slot = added % task.capacity
            stored[slot] = row
            # with the largest mass so far
            change(slot, top)
            added += 1

    def sample(batch: int) -> Sampled:
        total = tree[1]
        part = total / batch
        slots = [find((i + draws.random()) * part) for i in range(batch)]
        masses = np.array([tree[slot + leaves] for slot in slots])
        weight = (masses / total * min(added, task.capacity)) ** -task.beta
        columns = zip(*(stored[slot] for slot in slots), strict=True)
        kinds = task.dtypes.items()
        found = {name: np.array(column, dtype) for (name, (_, dtype)), column in zip(kinds, columns, strict=True)}
        return slots, tensors({**found, "weight": (weight / weight.max()).astype(np.float32)})

    def update(slots: Any, priorities: Tensor) -> None:
        nonlocal top
        for slot, priority in zip(slots, priorities.tolist(), strict=True):
            mass = (priority + EPS) ** task.alpha
            top = max(top, mass)
            change(slot, mass)

    return task.subject(add, sample, update, inputs)
