"""The ring of transitions on CPU tensors: rows in, rows out; what is drawn is up to `HostSampler`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host_compiled import compiled_transitions
from gpu_replay.engines.host_sampler import HostDraw, HostSampler
from gpu_replay.engines.storage import Storage, not_readable
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.ring import Write, as_numpy, as_sampled, commit, gather_rows, parts_of, taken
from gpu_replay.ops.uniform_draw import slots_of


def nothing_stored(lock: AbstractContextManager[Any], given: dict[str, Any]) -> tuple[()]:
    """Stands for `CompiledTransitions.append` where there is none."""
    return ()


class HostEngine:
    """Appends, samples and reads the transitions of one buffer whose tensors are on the CPU.

    The buffer has checked all arguments and holds the lock.
    """

    scratch_bytes = 0

    def __init__(self, storage: Storage, draws: HostSampler) -> None:
        self.draws = draws
        self.count_at_least = draws.count_at_least
        self._capacity = storage.capacity
        self._rows = {name: as_numpy(tensor) for name, tensor in storage.tensors.items()}
        self._records = storage.records
        self._ahead = storage.read_ahead()
        together = () if storage.records is None else storage.records.dtype.names or ()
        # in the order of the fields: those in records are taken from them
        self._fields = [(name, field, name in together) for name, field in storage.fields.items()]
        self._compiled = compiled_transitions(storage, draws)
        # stores values as users give them and returns their keys; nothing where they must be looked at first
        self.append_given = nothing_stored if self._compiled is None else self._compiled.append

    def on_clear(self) -> None:
        """Reset host state after `clear`: there is none."""

    def on_replay(self, rows: int) -> None:
        """Count what a replayed graph added; there are none on a CPU."""

    def rebuild(self, seed: int) -> None:
        """Take over a restored state and draw from this seed."""
        self.draws.reseed(seed)

    def append(self, values: dict[str, np.ndarray], rows: int, priorities: np.ndarray | None) -> Tensor:
        """Store `rows` transitions and return their (rows,) keys."""
        draws, capacity, tree = self.draws, self._capacity, self.draws.state.tree
        counters, stores, times_sampled = draws.counters, self._rows, draws.times_sampled
        added = counters.item(Counter.ADDED)
        writes: list[Write] = [(counters, Counter.ADDED, added + rows)]
        masses: int | np.ndarray = 0
        if priorities is None:
            masses = draws.initial_mass()
        elif tree is not None:
            masses, largest, saturated = draws.state.rule.masses(priorities)
            writes += draws.given(largest, saturated)
        skipped = rows - capacity if rows > capacity else 0
        parts = parts_of((added + skipped) % capacity, rows - skipped, capacity, skipped)
        for slots, some in parts:
            writes.append((times_sampled, slots, 0))
            # values come in the order of the fields
            part = values.values() if some is None else [value[some] for value in values.values()]
            writes += zip(stores.values(), repeat(slots), part, strict=False)
        keys = torch.from_numpy(np.arange(added, added + rows))
        if tree is None:
            return commit(writes, keys)
        if len(parts) == 1 and isinstance(masses, int):
            extension = tree.loops.set_range(tree, parts[0][0], masses)
            if extension is not None:
                return commit(writes, keys, extension)
        leaves = tree.arrays[0]
        before = [leaves[slots].copy() for slots, _ in parts]
        try:
            for slots, some in parts:
                own = masses if some is None or isinstance(masses, int) else masses[some]
                tree.set_range(slots.start, slots.stop, own)
            return commit(writes, keys)
        except BaseException:
            for (slots, _), held in zip(parts, before, strict=True):
                leaves[slots] = held
            tree.build()
            raise

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` transitions: fields, key, probability and weight."""
        if self._ahead is None and self._compiled is not None and self._compiled.samples:
            found = self._compiled.sample(batch, beta)
            if found is not None:
                return found
        return self.gather(self.draws.draw(batch, beta))

    def gather(self, drawn: HostDraw) -> dict[str, Tensor]:
        """What `sample` gives for rows that `draws` has drawn."""
        tensors = self._gather(drawn.slots)
        tensors.update(self.draws.named(drawn))
        return tensors

    def _gather(self, slots: np.ndarray) -> dict[str, Tensor]:
        if self._ahead is None:
            return self._rows_at(slots)
        with self._ahead.reading(slots):
            return self._rows_at(slots)

    def _rows_at(self, slots: np.ndarray) -> dict[str, Tensor]:
        if self._records is None:
            return {name: gather_rows(self._rows[name], field, slots) for name, field, _ in self._fields}
        records = taken(self._records, slots)
        return {
            name: as_sampled(records[name].copy(), field) if packed else gather_rows(self._rows[name], field, slots)
            for name, field, packed in self._fields
        }

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The stored transitions of these keys; KeyError naming the first that is not live."""
        array = keys.numpy()
        first, added = self.draws.span()
        dead = np.flatnonzero((array < first) | (array >= added))
        if dead.size:
            raise not_readable(int(array[dead[0]]), first, added)
        return self._gather(slots_of(array - first, first, self._capacity))

    # all that is stored can be read
    stored = read
