"""The ring of transitions on CPU tensors: rows in, rows out; what is drawn is up to `HostSampler`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat, starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host_sampler import HostDraw, HostSampler
from gpu_replay.engines.storage import Storage, not_readable
from gpu_replay.loops import ring as loops
from gpu_replay.ops.batch_memory import BatchMemory
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.draw import slots_of
from gpu_replay.ops.frames import rows_as_sampled
from gpu_replay.ops.ring import Write, as_numpy, commit, parts_of, taken
from gpu_replay.ops.threads import take_rows

# numbers as which short rows are moved, by their bytes: NumPy moves each of these at once
_NUMBERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
# looked up once
_from_numpy = torch.from_numpy


class HostEngine:
    """Appends, samples and reads the transitions of one buffer whose tensors are on the CPU.

    The buffer has checked all arguments and holds the lock.
    """

    scratch_bytes = 0

    def __init__(self, storage: Storage, draws: HostSampler) -> None:
        self.draws = draws
        self.count_at_least = draws.count_at_least
        self._capacity = storage.capacity
        rows = {name: as_numpy(tensor) for name, tensor in storage.tensors.items()}
        self._stores = [rows[name] for name in storage.fields]
        self._ahead = storage.read_ahead()
        self._memory = BatchMemory()
        self._append, self._known = loops.append.ready(), (*draws.initial, *draws.arrays)
        # small fields lie in records, which are gathered as words: of a record NumPy would ask what it is each time
        self._records: tuple[np.ndarray, np.dtype[Any]] | None = None
        apart = dict(rows)
        if storage.records is not None:
            dtype = storage.records.dtype
            words = storage.records.view(f"u{dtype.alignment}").reshape(self._capacity, -1)
            names = dtype.names or ()
            places: Any = [dtype.fields[name] for name in names] if dtype.fields else []
            layout: Any = {"names": names, "itemsize": dtype.itemsize, "offsets": [at for _, at, *_ in places]}
            layout["formats"] = [_NUMBERS.get(part.itemsize, part) for part, *_ in places]
            self._records = words, np.dtype(layout)
            apart = {name: each for name, each in rows.items() if name not in names}
        # in the order of the fields: rows, whether they lie apart, and whether they leave as they are
        self._fields = [
            (name, field, rows[name], name in apart, not field.converts and field.dtype != torch.bfloat16)
            for name, field in storage.fields.items()
        ]

    def on_clear(self) -> None:
        """Reset host state after `clear`: there is none."""

    def on_replay(self, rows: int) -> None:
        """Count what a replayed graph added; there are none on a CPU."""

    def rebuild(self, seed: int) -> None:
        """Take over a restored state and draw from this seed."""
        self.draws.reseed(seed)

    def append(self, values: dict[str, np.ndarray], rows: int, priorities: np.ndarray | None) -> Tensor:
        """Store `rows` transitions, their values in the order of the fields, and return their (rows,) keys."""
        draws, capacity = self.draws, self._capacity
        added = draws.counters.item(Counter.ADDED)
        keys, count = _from_numpy(np.arange(added, added + rows)), (rows, *draws.masses_of(priorities), *self._known)
        start = added % capacity
        writes: Iterable[Write] = zip(self._stores, repeat(slice(start, start + rows)), values.values(), strict=False)
        if start + rows > capacity:
            skipped = max(0, rows - capacity)
            parts = parts_of((added + skipped) % capacity, rows - skipped, capacity, skipped)
            writes = [
                (store, slots, value[some])
                for slots, some in parts
                for store, value in zip(self._stores, values.values(), strict=True)
            ]
        return commit(writes, keys, starmap(self._append, (count,)))

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` transitions: fields, key, probability and weight."""
        return self.gather(self.draws.draw(batch, beta))

    def gather(self, drawn: HostDraw) -> dict[str, Tensor]:
        """What `sample` gives for rows that `draws` has drawn."""
        return self.draws.finish(self._rows_at(drawn.slots), drawn)

    def _rows_at(self, slots: np.ndarray) -> dict[str, Tensor]:
        if self._ahead is None:
            return self._gather(slots)
        with self._ahead.reading(slots):
            return self._gather(slots)

    def _gather(self, slots: np.ndarray) -> dict[str, Tensor]:
        tensors, memory, records = {}, self._memory, None
        if self._records is not None:
            words, dtype = self._records
            found = memory.array("", (slots.size, words.shape[1]), words.dtype)
            take_rows(words, slots, found)
            records = found.view(dtype)[:, 0]
        for name, field, stored, apart, plain in self._fields:
            if apart or records is None:
                rows = taken(stored, slots, memory, name)
            else:
                rows = memory.copy(name, records[name]).view(stored.dtype)
                if stored.ndim > 1:
                    rows = rows.reshape(-1, *stored.shape[1:])
            tensors[name] = _from_numpy(rows) if plain else rows_as_sampled(rows, field, memory, name)
        return tensors

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The stored transitions of these keys; KeyError naming the first that is not live."""
        array = keys.numpy()
        first, added = self.draws.span()
        dead = np.flatnonzero((array < first) | (array >= added))
        if dead.size:
            raise not_readable(int(array[dead[0]]), first, added)
        return self._rows_at(slots_of(array - first, first, self._capacity))

    # all that is stored can be read
    stored = read
