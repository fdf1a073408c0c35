"""Ways of keeping transitions: the containers that tutorials use, and this package's buffer.

All hold the last `capacity` rows of `rows.py`, and give a batch of uniformly drawn ones as five torch tensors. Each
takes single transitions and blocks in the form that suits it best; making that form is not measured.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import ReplayBuffer, Uniform

from .rows import DTYPES, Rows, buffer_fields

Fields = dict[str, Tensor]


class Layout(ABC):
    """A ring of transitions."""

    append: Callable[[Any], object]
    extend: Callable[[Any], object]

    def single(self, rows: Rows, row: int) -> Any:
        """One row in the form that `append` takes: a tuple with arrays of its own, as an environment makes them."""
        return (
            rows["obs"][row].copy(),
            int(rows["action"][row]),
            float(rows["reward"][row]),
            rows["next_obs"][row].copy(),
            bool(rows["terminated"][row]),
        )

    def block(self, rows: Rows) -> Any:
        """Rows in the form that `extend` takes."""
        return rows

    @abstractmethod
    def batch(self, size: int) -> Fields:
        """`size` transitions, drawn uniformly, as tensors."""


class ListRing(Layout):
    """A list of tuples with the position of the next one: constant-time access."""

    def __init__(self, capacity: int) -> None:
        self._held: Any = []
        self._capacity = capacity
        self._next = 0
        self._random = random.Random(0)

    def block(self, rows: Rows) -> list[Any]:
        """See Layout."""
        return [self.single(rows, row) for row in range(len(rows["obs"]))]

    def append(self, single: Any) -> None:
        """Store one transition."""
        if len(self._held) < self._capacity:
            self._held.append(single)
        else:
            self._held[self._next] = single
        self._next = (self._next + 1) % self._capacity

    def extend(self, block: list[Any]) -> None:
        """Store a block: one slice where it fits, row by row where it wraps."""
        end = self._next + len(block)
        if end > self._capacity:
            for single in block:
                self.append(single)
            return
        # past the end of a list that still grows, assigning to a slice appends
        self._held[self._next : end] = block
        self._next = end % self._capacity

    def batch(self, size: int) -> Fields:
        """See Layout."""
        columns = zip(*self._random.sample(self._held, size), strict=True)
        return {
            name: torch.from_numpy(np.array(column, dtype=dtype))
            for (name, (_, dtype)), column in zip(DTYPES.items(), columns, strict=True)
        }


class Deque(ListRing):
    """`collections.deque` of tuples: access to its middle walks from an end."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._held = deque(maxlen=capacity)
        self.append = self._held.append  # type: ignore[method-assign]
        self.extend = self._held.extend  # type: ignore[method-assign]


class FieldArrays(Layout):
    """One preallocated array for each field."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._added = 0
        self._random = np.random.default_rng(0)
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        self._arrays = {name: np.zeros((capacity, *shape), dtype) for name, (shape, dtype) in DTYPES.items()}

    def _next_slots(self, count: int) -> np.ndarray:
        slots = np.arange(self._added, self._added + count) % self._capacity
        self._added += count
        return slots

    def _drawn(self, size: int) -> np.ndarray:
        # distinct with few draws from many, as a tutorial would draw
        return self._random.choice(min(self._added, self._capacity), size, replace=False, shuffle=False)

    def append(self, single: Any) -> None:
        """Store one transition."""
        slot = self._added % self._capacity
        self._added += 1
        for array, value in zip(self._arrays.values(), single, strict=True):
            array[slot] = value

    def extend(self, block: Rows) -> None:
        """Store a block."""
        slots = self._next_slots(len(block["obs"]))
        for name, array in self._arrays.items():
            array[slots] = block[name]

    def batch(self, size: int) -> Fields:
        """See Layout."""
        slots = self._drawn(size)
        return {name: torch.from_numpy(array[slots]) for name, array in self._arrays.items()}


class RecordArray(FieldArrays):
    """One preallocated array of records: all fields of a transition lie side by side."""

    def _allocate(self, capacity: int) -> None:
        self._dtype = np.dtype([(name, dtype, shape) for name, (shape, dtype) in DTYPES.items()])
        self._array = np.zeros(capacity, dtype=self._dtype)

    def append(self, single: Any) -> None:
        """Store one transition."""
        self._array[self._added % self._capacity] = single
        self._added += 1

    def extend(self, block: Rows) -> None:
        """Store a block."""
        slots = self._next_slots(len(block["obs"]))
        records = np.empty(len(slots), dtype=self._dtype)
        for name, values in block.items():
            records[name] = values
        self._array[slots] = records

    def batch(self, size: int) -> Fields:
        """See Layout."""
        drawn = self._array[self._drawn(size)]
        # torch takes no array whose rows have gaps of odd size
        return {name: torch.from_numpy(np.ascontiguousarray(drawn[name])) for name in DTYPES}


class Replay(Layout):
    """This package's buffer on the CPU, with uniform draws."""

    def __init__(self, capacity: int) -> None:
        self._buffer = ReplayBuffer(capacity, buffer_fields(), sampler=Uniform(), device="cpu", seed=0)

    def single(self, rows: Rows, row: int) -> Rows:
        """See Layout."""
        return {name: values[row : row + 1].copy() for name, values in rows.items()}

    def append(self, single: Rows) -> object:
        """Store one transition."""
        return self._buffer.add(**single)

    def extend(self, block: Rows) -> object:
        """Store a block."""
        return self._buffer.add(**block)

    def batch(self, size: int) -> Fields:
        """See Layout."""
        drawn = self._buffer.sample(size)
        return {name: drawn[name] for name in DTYPES}


LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "gpu_replay": Replay,
    "deque": Deque,
    "list ring": ListRing,
    "NumPy array per field": FieldArrays,
    "NumPy array of records": RecordArray,
}
