"""The ring of transitions on CPU tensors: stores and reads rows; `HostSampler` chooses the rows of a sample."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat, starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host_sampler import HostSampler
from gpu_replay.engines.storage import Storage, check_live
from gpu_replay.fields import as_numpy
from gpu_replay.loops import ring as loops
from gpu_replay.ops.batch_memory import LARGE, BatchMemory
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.draw import slots_of
from gpu_replay.ops.ring import as_torch, commit, convert, gather_rows, parts_of, put

# number types as which short rows are moved, by bytes: NumPy moves each of these at once
_NUMBERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
# masses that came with rows, the largest of them, and how many were cut
_NOT_GIVEN = np.zeros(0, dtype=np.int64), 0, 0


class HostEngine:
    """Appends, samples and reads the transitions of one buffer whose tensors are on the CPU.

    The buffer has checked all arguments and holds the lock.
    """

    def __init__(self, storage: Storage, sampling: HostSampler) -> None:
        self.sampling = sampling
        self.count_at_least = sampling.count_at_least
        self._capacity, self._counters = storage.capacity, sampling.counters
        rows = {name: as_numpy(tensor) for name, tensor in storage.tensors.items()}
        self._stores = [rows[name] for name in storage.fields]
        self._ahead = storage.read_ahead()
        self._memory = BatchMemory()
        self._append, self._append_arguments = loops.append.compiled(), (*sampling.state.initial, *sampling.arrays)
        # small fields lie in records; a field is moved as one number if a number has its size
        self._records = np.zeros(0, np.dtype([]))
        if storage.records is not None:
            dtype = storage.records.dtype
            places: Any = [dtype.fields[name] for name in dtype.names or ()] if dtype.fields else []
            layout: Any = {"names": dtype.names, "itemsize": dtype.itemsize, "offsets": [at for _, at, *_ in places]}
            layout["formats"] = [_NUMBERS.get(part.itemsize, part) for part, *_ in places]
            self._records = storage.records.view(np.dtype(layout))
        # in the order of the fields: rows, the dtype of one out of a record, and whether they leave as they are
        self._fields = [
            (
                name,
                field,
                rows[name],
                self._row_dtype(name, rows[name]),
                not field.converts and field.dtype != torch.bfloat16,
            )
            for name, field in storage.fields.items()
        ]

    def _row_dtype(self, name: str, stored: np.ndarray) -> np.dtype[Any] | None:
        if name not in (self._records.dtype.names or ()):
            return None
        row = np.dtype((stored.dtype, stored.shape[1:]))
        return row if row.itemsize in _NUMBERS else stored.dtype

    def append(self, values: dict[str, np.ndarray], rows: int, priorities: np.ndarray | None, bare: bool) -> Tensor:
        """Store `rows` transitions, their values in the order of the fields, and return their (rows,) keys.

        bare: whether they are one that comes without the axis of rows.
        """
        capacity, added = self._capacity, self._counters.item(Counter.ADDED)
        keys, start = torch.from_numpy(np.arange(added, added + rows)), added % capacity
        given, largest, cut = _NOT_GIVEN
        if priorities is not None and (state := self.sampling.state).tree is not None:
            given, largest, cut = state.rule.masses(priorities)
        counted = starmap(self._append, ((rows, given, largest, cut, *self._append_arguments),))
        if start + rows <= capacity:
            place = start if bare else slice(start, start + rows)
            writes: Iterable[None] = map(put, self._stores, repeat(place), values.values())
        else:
            skipped = max(0, rows - capacity)
            parts = parts_of((added + skipped) % capacity, rows - skipped, capacity, skipped)
            columns = list(zip(self._stores, values.values(), strict=True))
            writes = starmap(put, [(store, slots, value[some]) for slots, some in parts for store, value in columns])
        return commit(keys, writes, counted)

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Sample `batch` transitions: fields, key, probability and weight."""
        drawn = self.sampling.draw(batch, beta)
        return self.sampling.count_sample(self._rows_at(drawn.slots), drawn)

    def _rows_at(self, slots: np.ndarray) -> dict[str, Tensor]:
        if self._ahead is None:
            return self._gather(slots)
        with self._ahead.reading(slots):
            return self._gather(slots)

    def _gather(self, slots: np.ndarray) -> dict[str, Tensor]:
        tensors, memory, records = {}, self._memory, self._records
        if records.size:
            records = gather_rows(records, slots, memory, "")
        for name, field, stored, row, verbatim in self._fields:
            if row is None:
                rows = gather_rows(stored, slots, memory, name)
            else:
                rows = memory.copy(name, records[name]).view(row)
            if verbatim:
                tensors[name] = torch.from_numpy(rows)
                continue
            large = field.converts and rows.size * field.output_dtype.itemsize >= LARGE
            out = memory.tensor(f"{name} as sampled", rows.shape, field.output_dtype) if large else None
            tensors[name] = convert(as_torch(rows, field), field, out)
        return tensors

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The stored transitions of these keys; KeyError naming the first that is not live."""
        array, (first, added) = keys.numpy(), self.sampling.span()
        check_live(array, first, added)
        return self._rows_at(slots_of(array - first, first, self._capacity))

    # all that is stored can be read
    stored = read
