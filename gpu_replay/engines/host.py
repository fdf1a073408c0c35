"""Transitions on CPU tensors: loops over views of the tensors' own memory.

`HostSampler` draws the rows of a sample and updates priorities; `device.py` does the same with kernels, and both leave
the same integers behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat, starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.state import SamplerState
from gpu_replay.engines.storage import Storage
from gpu_replay.fields import as_numpy
from gpu_replay.loops import masses as tree_loops
from gpu_replay.loops import ring as loops
from gpu_replay.ops.counters import NO_KEY, Counter, HostWords
from gpu_replay.ops.draw import DrawRange, slots_in
from gpu_replay.ops.masses import MassTree
from gpu_replay.ops.ranks import HostRanks, RankedRows, host_ranks_bytes
from gpu_replay.ops.ring import LARGE, BatchMemory, as_torch, commit, contiguous, convert, gather_rows, parts_of, put
from gpu_replay.samplers import HostDraw, Sampler
from gpu_replay.validation import as_tensor

_NONE = np.zeros(0, dtype=np.int64)
# as `Streams.waiting_arrays`, where everything stored can be drawn
_NOTHING_WAITS = tuple([np.zeros(0, dtype=dtype) for dtype in (np.int64, np.uint8, np.int32, np.int64)])


class HostSampler:
    """Trees, ranks, random words and counters of one buffer on the host: draws from them, and updates of priorities.

    The buffer has checked all arguments and holds the lock. A draw changes nothing until `finish` counts it.

    arrays: counters, times sampled, and the tree of masses as `loops/masses.py` takes it, or nothing.

    What samplers draw from is as in `HostState`.
    """

    draw_by_mass: Callable[..., int]
    draw_by_rank: Callable[..., RankedRows]

    def __init__(self, state: SamplerState, storage: Storage, seed: int) -> None:
        self.state = state
        self.counters = state.counters.numpy()
        self.times_sampled, self._storage = storage.times_sampled.numpy(), storage
        self._base, self.masses, self.capacity = state.base, state.tree, state.slots
        self.starts = None if state.streams is None else state.eligible
        # None where no row of a batch is one of the newest
        newest_of = state.sampler.newest_of
        self._newest_of = None if type(state.sampler).newest_of is Sampler.newest_of else newest_of
        self._ranks: HostRanks | None = None
        if state.summed is not None:
            self.draw_by_mass = partial(tree_loops.draw.compiled(), *state.summed.host[:2])
        elif (codes := state.tree) is not None:
            self._ranks = HostRanks(codes.masses.numpy(), self.counters, self._base.alpha)
            codes.host = codes.host._replace(changed_slots=self._ranks.changed_slots)
            self.draw_by_rank = self._ranks.draw_ranks
        tree = (_NONE,) * 3 if state.tree is None else state.tree.host
        self.arrays = self.counters, self.times_sampled, *tree
        rule, waiting = state.rule, _NOTHING_WAITS if state.streams is None else state.streams.waiting_arrays()
        self._update_arguments = rule.ordered, rule.limit, self.capacity, self.counters, *tree, *waiting
        self._count_sample = loops.count_sample.compiled()
        if state.tree is not None:
            self._update = tree_loops.update.compiled()
        self._postponed: list[Callable[[], object]] | None = None
        self.rebuild(seed)

    @property
    def scratch_bytes(self) -> int:
        """Bytes used in addition to the state's."""
        return 0 if self._ranks is None else host_ranks_bytes(self.capacity)

    def rebuild(self, seed: int) -> None:
        """Take over a restored state and draw from the stream of this seed, from the counter's position on."""
        self.random, self.chances_checked = HostWords(seed), False

    def on_clear(self) -> None:
        """Reset host state after `clear`: there is none."""

    def count_added(self, rows: int) -> None:
        """Count what a replayed graph added; there are none on a CPU."""

    def span(self) -> tuple[int, int]:
        """The smallest live key and the next key."""
        added = self.counters.item(Counter.ADDED)
        return max(self.counters.item(Counter.FIRST), added - self.capacity), added

    def counts(self) -> list[int]:
        """The counters."""
        counts: list[int] = self.counters.tolist()
        return counts

    def count_at_least(self, needed: int) -> int:
        """Count the rows that can be drawn."""
        if self.starts is not None:
            return self.counters.item(Counter.ELIGIBLE)
        added = self.counters.item(Counter.ADDED)
        stored = min(added - self.counters.item(Counter.FIRST), self.capacity)
        return self.state.left(stored, needed) if self.state.excluded else stored

    def range(self, tree: MassTree) -> DrawRange:
        """All mass of a tree, so that targets ascend with keys instead of slots: the slots from that of the next key on
        hold the oldest.
        """
        total, head = tree.total(), self.counters.item(Counter.ADDED) % self.capacity
        return DrawRange(total, tree_loops.mass_before.compiled()(*tree.host[:2], head) % max(total, 1))

    # sampling

    def draw(self, batch: int, beta: float | None) -> HostDraw:
        """Draw `batch` slots by `random` from the counter's block on."""
        self.random.block = self.counters.item(Counter.RANDOM)
        if self._newest_of is None or not (newest := self._newest_of(batch)):
            return self._base.draw(self, batch, beta)
        slots, sure = self._newest(newest), np.ones(newest, dtype=np.float32)
        if newest == batch:
            return slots, sure, sure.copy()
        drawn = self._base.draw(self, batch - newest, beta)
        first, second, third = map(np.concatenate, zip(drawn, (slots, sure, sure), strict=True))
        return first, second, third

    def count_sample(self, tensors: dict[str, Tensor], draw: HostDraw) -> dict[str, Tensor]:
        """Commit a draw: advance the random stream and the sample counts. Returns the tensors of the sample with its
        keys, probabilities and weights.
        """
        (slots, probability, weight), keys = draw, np.empty(draw[0].size, np.int64)
        tensors["key"] = torch.from_numpy(keys)
        tensors["probability"] = torch.from_numpy(probability)
        tensors["weight"] = torch.from_numpy(weight)
        if self._postponed is not None:
            place = slots, self.random.block, self.counters, self.times_sampled, keys
            self._postponed.append(partial(self._count_sample, *place))
            return tensors
        # no signal is handled within this one call, so an exception comes before or after all of it
        self._count_sample(slots, self.random.block, self.counters, self.times_sampled, keys)
        return tensors

    @contextmanager
    def postponing(self) -> Iterator[list[Callable[[], object]]]:
        """Within it a sample is drawn and not counted: what counts it, and fills its keys, comes into the list."""
        self._postponed = []
        try:
            yield self._postponed
        finally:
            self._postponed = None

    def _newest(self, count: int) -> np.ndarray:
        """The slots of the `count` newest keys that can be drawn."""
        if self.starts is None:
            (first, added), width = self.span(), count
            while True:
                slots = np.arange(max(first, added - width), added) % self.capacity
                found = slots[self.arrays[2][slots] > 0] if self.state.excluded else slots
                if found.size >= count or slots.size < width:
                    return found[-count:]
                # some of these were excluded
                width *= 4
        within = self.range(self.starts)
        return slots_in(self.starts, within, np.arange(within.total - count, within.total))

    # update

    def update(self, keys: np.ndarray, priorities: np.ndarray, ready: bool) -> None:
        """Give live keys the masses of their priorities; the last of a repeated key wins, others are counted."""
        if not keys.size:
            return
        # the last line of each branch changes all that changes: an exception comes before it or after
        if self.masses is None:
            first, added = self.span()
            self.counters[Counter.STALE] += np.count_nonzero(((keys < first) | (keys >= added)) & (keys != NO_KEY))
        else:
            array, numbers = contiguous(keys), self.state.rule.numbers(priorities)
            self._update(array, numbers, *self._update_arguments)

    def exclude(self, keys: Tensor) -> None:
        """Let the rows of (m,) live keys never be drawn again."""
        self.state.exclude(keys)

    def write(self, keys: Tensor, values: dict[str, np.ndarray]) -> None:
        """Store rows of some fields under (m,) live keys; the last of a repeated key wins, others are counted."""
        stores = self._storage.tensors
        rows = {name: as_tensor(name, value, keys.device).view(stores[name].dtype) for name, value in values.items()}
        self.state.write(stores, keys, rows)


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
        # in the order of the fields: rows, the dtype of one out of a record, and what makes a tensor of them
        self._fields = [
            (name, field, rows[name], self._row_dtype(name, rows[name]), as_torch(field))
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
        return self.sampling.count_sample(self._rows_at(drawn[0]), drawn)

    def _rows_at(self, slots: np.ndarray) -> dict[str, Tensor]:
        tensors, memory, records, ahead = {}, self._memory, self._records, self._ahead
        if ahead is not None:
            ahead.begin(slots)
        if records.size:
            records = gather_rows(records, slots, memory, "")
        small = records.nbytes < LARGE
        for name, field, stored, row, view in self._fields:
            if row is None:
                rows = gather_rows(stored, slots, memory, name)
            else:
                rows = (records[name].copy() if small else memory.copy(name, records[name])).view(row)
            tensors[name] = tensor = view(rows)
            if field.converts:
                large = rows.size * field.output_dtype.itemsize >= LARGE
                out = memory.tensor(f"{name} as sampled", rows.shape, field.output_dtype) if large else None
                tensors[name] = convert(tensor, field, out)
        if ahead is not None:
            ahead.end()
        return tensors

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """The transitions that are stored in these slots."""
        return self._rows_at(slots.numpy())

    # all that is stored can be read
    stored = read
