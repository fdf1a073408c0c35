"""The ring of transitions on CPU tensors: rows in, rows out; what is drawn is up to `HostSampler`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host_compiled import compiled_transitions
from gpu_replay.engines.host_sampler import HostDraw, HostSampler
from gpu_replay.engines.storage import Storage, not_readable
from gpu_replay.ops.batch_memory import BatchMemory
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.frames import rows_as_sampled
from gpu_replay.ops.ring import Write, as_numpy, commit, parts_of, taken
from gpu_replay.ops.threads import take_rows, threads_for
from gpu_replay.ops.uniform_draw import slots_of

# bytes up to which room for records is kept: larger ones are soon made beside the work
_KEPT = 2**17
# looked up once
_from_numpy = torch.from_numpy


class _Together(NamedTuple):
    """Room for so many records.

    batch: B. source: (capacity, words) of all records. words: (B, words) of those taken. views: of these, by field.
    """

    batch: int
    source: np.ndarray
    words: np.ndarray
    views: dict[str, np.ndarray]

    @classmethod
    def of(cls, records: np.ndarray, count: int) -> _Together:
        """For `count` of these records, which are moved as words: of a record NumPy would ask what it is each time."""
        word = np.dtype(f"u{records.dtype.alignment}")
        taken = np.empty(count, dtype=records.dtype)
        views = {name: taken[name] for name in records.dtype.names or ()}
        # counted here, since nothing says how many words none have
        each = records.dtype.itemsize // word.itemsize
        return cls(count, records.view(word).reshape(-1, each), taken.view(word).reshape(count, each), views)


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
        # in the order of the fields: those in records are taken from them, and some as they are
        self._fields = [
            (name, field, name in together, not field.converts and field.dtype != torch.bfloat16)
            for name, field in storage.fields.items()
        ]
        # what all rows are drawn from, where they are drawn by mass
        plan = draws.state.plan
        self._strata = draws.state.tree if plan.kind == "mass" and not plan.newest else None
        self._stores = [self._rows[name] for name in storage.fields]
        self._together: _Together | None = None
        self._memory = BatchMemory()
        self._compiled = compiled_transitions(storage, draws, self._memory)
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
        counters, times_sampled = draws.counters, draws.times_sampled
        added = counters.item(Counter.ADDED)
        writes: list[Write] = [(counters, Counter.ADDED, added + rows)]
        masses: int | np.ndarray = 0
        if priorities is None:
            masses = draws.initial_mass()
        elif tree is not None:
            masses, largest, saturated = draws.state.rule.masses(priorities)
            writes += draws.given(largest, saturated)
        keys = _from_numpy(np.arange(added, added + rows))
        start = added % capacity
        if start + rows <= capacity:
            slots = slice(start, start + rows)
            writes.append((times_sampled, slots, 0))
            # values come in the order of the fields
            writes += zip(self._stores, repeat(slots), values.values(), strict=False)
            if tree is None:
                return commit(writes, keys)
            return commit(writes, keys, tree.loops.set_range(tree, start, start + rows, masses))
        skipped = rows - capacity if rows > capacity else 0
        parts, sums = parts_of((added + skipped) % capacity, rows - skipped, capacity, skipped), []
        if len(parts) > 1 and isinstance(masses, int):
            # a sum may be of slots of both, so none can be known before they are written
            masses = np.full(rows, masses)
        for slots, some in parts:
            writes.append((times_sampled, slots, 0))
            writes += zip(self._stores, repeat(slots), [value[some] for value in values.values()], strict=False)
            if tree is not None:
                own = masses if isinstance(masses, int) else masses[some]
                sums.append(tree.loops.set_range(tree, slots.start, slots.stop, own))
        return commit(writes, keys, *sums)

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` transitions: fields, key, probability and weight."""
        if self._ahead is None and self._compiled is not None and self._compiled.samples:
            found = self._compiled.sample(batch, beta)
            if found is not None:
                return found
        draws = self.draws
        if self._strata is None or self._ahead is not None:
            return self.gather(draws.draw(batch, beta))
        # the same with fewer calls in between
        slots, probability, weight = draws.draw_by_mass(self._strata, batch, beta)
        tensors = self._rows_at(slots)
        return draws.named_in(tensors, slots, probability, weight)

    def gather(self, drawn: HostDraw) -> dict[str, Tensor]:
        """What `sample` gives for rows that `draws` has drawn."""
        return self.draws.named_in(self._gather(drawn.slots), *drawn)

    def _gather(self, slots: np.ndarray) -> dict[str, Tensor]:
        if self._ahead is None:
            return self._rows_at(slots)
        with self._ahead.reading(slots):
            return self._rows_at(slots)

    def _rows_at(self, slots: np.ndarray) -> dict[str, Tensor]:
        kept, tensors, tensor = self._together, {}, _from_numpy
        if self._records is not None:
            if kept is None or kept.batch != slots.size:
                kept = _Together.of(self._records, slots.size)
                if kept.words.nbytes < _KEPT:
                    self._together = kept
            if threads_for(kept.words.nbytes) == 1:
                # slots exist, so clipping changes none; it is the mode that writes straight into the words
                kept.source.take(slots, 0, kept.words, "clip")
            else:
                take_rows(kept.source, slots, kept.words)
        for name, field, packed, plain in self._fields:
            if kept is not None and packed:
                rows = kept.views[name].copy()
            else:
                rows = taken(self._rows[name], slots, self._memory, name)
            tensors[name] = tensor(rows) if plain else rows_as_sampled(rows, field, self._memory, name)
        return tensors

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
