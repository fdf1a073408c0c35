"""The ring of transitions on CPU tensors: rows in, rows out; what is drawn is up to `HostSampler`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host_sampler import HostSampler
from gpu_replay.engines.storage import Storage, not_readable
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.ring import as_numpy, as_sampled, gather_rows, write_rows
from gpu_replay.ops.uniform_draw import slots_of


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
        together = () if storage.records is None else storage.records.dtype.names or ()
        # in the order of the fields: those in records are taken from them
        self._fields = [(name, field, name in together) for name, field in storage.fields.items()]

    def on_clear(self) -> None:
        """Reset host state after `clear`: there is none."""

    def on_replay(self, rows: int) -> None:
        """Count what a replayed graph added; there are none on a CPU."""

    def rebuild(self, seed: int) -> None:
        """Take over a restored state and draw from this seed."""
        self.draws.reseed(seed)

    def append(self, values: dict[str, Tensor | np.ndarray], rows: int, priorities: np.ndarray | None) -> Tensor:
        """Store `rows` transitions and return their (rows,) keys."""
        draws, capacity, tree = self.draws, self._capacity, self.draws.state.tree
        masses: int | np.ndarray = 0
        if priorities is None:
            masses = draws.initial_mass()
        elif tree is not None:
            masses, largest, saturated = draws.state.rule.masses(priorities)
            draws.count_given(largest, saturated)
        added = draws.counters.item(Counter.ADDED)
        skipped = max(0, rows - capacity)
        kept = rows - skipped
        start = (added + skipped) % capacity
        write_rows(self._rows, values, start, skipped)
        head = min(kept, capacity - start)
        draws.times_sampled[start : start + head] = 0
        if head < kept:
            draws.times_sampled[: kept - head] = 0
        if tree is not None:
            seam = skipped + head
            tree.set_range(start, start + head, masses if isinstance(masses, int) else masses[skipped:seam])
            if head < kept:
                tree.set_range(0, kept - head, masses if isinstance(masses, int) else masses[seam:])
        draws.counters[Counter.ADDED] = added + rows
        return torch.from_numpy(np.arange(added, added + rows))

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` transitions: fields, key, probability and weight."""
        drawn = self.draws.draw(batch, beta)
        tensors = self._gather(drawn.slots)
        tensors.update(self.draws.named(drawn))
        return tensors

    def _gather(self, slots: np.ndarray) -> dict[str, Tensor]:
        if self._records is None:
            return {name: gather_rows(self._rows[name], field, slots) for name, field, _ in self._fields}
        records = self._records.take(slots)
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
