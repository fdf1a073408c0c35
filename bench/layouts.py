"""Ways of keeping transitions: the containers that tutorials use, and this package's buffer.

All hold the last `capacity` rows of `rows.py`, and give a batch of uniformly drawn ones as five torch tensors. Each
takes single transitions and blocks in the form that suits it best; making that form is not measured.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field, ReplayBuffer, Uniform

from .rows import DTYPES, Rows

Transition = tuple[np.ndarray, int, float, np.ndarray, bool]
Fields = dict[str, Tensor]


class Layout(Protocol):
    """A ring of transitions."""

    def single(self, rows: Rows, row: int) -> Any:
        """One row in the form that `append` takes."""

    def append(self, single: Any) -> object:
        """Store one transition."""

    def block(self, rows: Rows) -> Any:
        """Rows in the form that `extend` takes."""

    def extend(self, block: Any) -> object:
        """Store the transitions of a block."""

    def batch(self, size: int) -> Fields:
        """`size` transitions, drawn uniformly, as tensors."""


def _transition(rows: Rows, row: int) -> Transition:
    # arrays of their own, as an environment makes them at every step
    return (
        rows["obs"][row].copy(),
        int(rows["action"][row]),
        float(rows["reward"][row]),
        rows["next_obs"][row].copy(),
        bool(rows["terminated"][row]),
    )


def _collated(transitions: Iterable[Transition]) -> Fields:
    columns = zip(*transitions, strict=True)
    return {
        name: torch.from_numpy(np.array(column, dtype=DTYPES[name][1]))
        for name, column in zip(DTYPES, columns, strict=True)
    }


class Deque:
    """`collections.deque` of tuples: reaching into its middle walks from an end."""

    def __init__(self, capacity: int) -> None:
        self._held: deque[Transition] = deque(maxlen=capacity)
        self._random = random.Random(0)
        self.append = self._held.append
        self.extend = self._held.extend

    def single(self, rows: Rows, row: int) -> Transition:
        """See Layout."""
        return _transition(rows, row)

    def block(self, rows: Rows) -> list[Transition]:
        """See Layout."""
        return [_transition(rows, row) for row in range(len(rows["obs"]))]

    def batch(self, size: int) -> Fields:
        """See Layout."""
        return _collated(self._random.sample(self._held, size))


class ListRing:
    """A list of tuples with the place of the next one: every place is one step away."""

    def __init__(self, capacity: int) -> None:
        self._held: list[Transition] = []
        self._capacity = capacity
        self._next = 0
        self._random = random.Random(0)

    def single(self, rows: Rows, row: int) -> Transition:
        """See Layout."""
        return _transition(rows, row)

    def append(self, single: Transition) -> None:
        """See Layout."""
        if len(self._held) < self._capacity:
            self._held.append(single)
        else:
            self._held[self._next] = single
        self._next = (self._next + 1) % self._capacity

    def block(self, rows: Rows) -> list[Transition]:
        """See Layout."""
        return [_transition(rows, row) for row in range(len(rows["obs"]))]

    def extend(self, block: list[Transition]) -> None:
        """See Layout; a block that fits is one slice, one that wraps goes row by row."""
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
        return _collated(self._random.sample(self._held, size))


class _NumpyRing:
    """What the two rings of arrays share: places, and distinct random ones."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._added = 0
        self._random = np.random.default_rng(0)

    def _place(self) -> int:
        place = self._added % self._capacity
        self._added += 1
        return place

    def _places(self, count: int) -> np.ndarray:
        places = np.arange(self._added, self._added + count) % self._capacity
        self._added += count
        return places

    def _drawn(self, size: int) -> np.ndarray:
        # distinct with few draws from many, as a tutorial would draw
        return self._random.choice(min(self._added, self._capacity), size, replace=False, shuffle=False)


class FieldArrays(_NumpyRing):
    """One preallocated array for each field."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._arrays = {name: np.zeros((capacity, *shape), dtype) for name, (shape, dtype) in DTYPES.items()}

    def single(self, rows: Rows, row: int) -> Transition:
        """See Layout."""
        return _transition(rows, row)

    def append(self, single: Transition) -> None:
        """See Layout."""
        place = self._place()
        for array, value in zip(self._arrays.values(), single, strict=True):
            array[place] = value

    def block(self, rows: Rows) -> Rows:
        """See Layout."""
        return rows

    def extend(self, block: Rows) -> None:
        """See Layout."""
        places = self._places(len(block["obs"]))
        for name, array in self._arrays.items():
            array[places] = block[name]

    def batch(self, size: int) -> Fields:
        """See Layout."""
        places = self._drawn(size)
        return {name: torch.from_numpy(array[places]) for name, array in self._arrays.items()}


class RecordArray(_NumpyRing):
    """One preallocated array of records: all fields of a transition lie side by side."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._dtype = np.dtype([(name, dtype, shape) for name, (shape, dtype) in DTYPES.items()])
        self._array = np.zeros(capacity, dtype=self._dtype)

    def single(self, rows: Rows, row: int) -> Transition:
        """See Layout."""
        return _transition(rows, row)

    def append(self, single: Transition) -> None:
        """See Layout."""
        self._array[self._place()] = single

    def block(self, rows: Rows) -> Rows:
        """See Layout."""
        return rows

    def extend(self, block: Rows) -> None:
        """See Layout."""
        places = self._places(len(block["obs"]))
        records = np.empty(len(places), dtype=self._dtype)
        for name, values in block.items():
            records[name] = values
        self._array[places] = records

    def batch(self, size: int) -> Fields:
        """See Layout."""
        drawn = self._array[self._drawn(size)]
        # torch takes no array whose rows have gaps of odd size
        return {name: torch.from_numpy(np.ascontiguousarray(drawn[name])) for name in DTYPES}


class Replay:
    """This package's buffer on the CPU, with uniform draws."""

    def __init__(self, capacity: int) -> None:
        fields = {
            name: Field(shape, torch.from_numpy(np.empty(0, dtype)).dtype) for name, (shape, dtype) in DTYPES.items()
        }
        self._buffer = ReplayBuffer(capacity, fields, sampler=Uniform(), device="cpu", seed=0)

    def single(self, rows: Rows, row: int) -> Rows:
        """See Layout."""
        return {name: values[row : row + 1].copy() for name, values in rows.items()}

    def append(self, single: Rows) -> object:
        """See Layout."""
        return self._buffer.add(**single)

    def block(self, rows: Rows) -> Rows:
        """See Layout."""
        return rows

    def extend(self, block: Rows) -> object:
        """See Layout."""
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
