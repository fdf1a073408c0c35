"""The calls of a buffer of transitions on the host, as one compiled loop each where Numba is installed.

In small batches a call costs more than its work. What the loops need to know of a buffer is put together once: where
the rows of each field begin, how far they are apart and how long they are. What a loop does not take, such as a list or
a dtype that needs a closer look, goes the way that it goes without Numba, and so does what must raise.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host_sampler import HostSampler
from gpu_replay.engines.storage import Storage
from gpu_replay.fields import Field
from gpu_replay.ops import _backend
from gpu_replay.ops.batch_memory import LARGE, BatchMemory
from gpu_replay.ops.counters import Counter, blocks_for
from gpu_replay.ops.frames import rows_as_sampled
from gpu_replay.ops.rank_order import RankOrder
from gpu_replay.ops.ring import as_numpy
from gpu_replay.ops.stratified_draw import weights_of
from gpu_replay.ops.threads import in_parts, threads_for
from gpu_replay.ops.uniform_draw import PERMUTATION_WORDS, rectangle
from gpu_replay.schedule import LinearSchedule

# numbers that a list may hold, as loops over one environment have them
_NUMBERS = frozenset((bool, int, float, np.bool_, np.float32, np.float64, np.int32, np.int64, np.uint8))
# bytes of a cache line
_LINE = 64
# orders of names that are kept
_ORDERS = 16
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
# looked up once
_ARRAY, _empty, _from_numpy = np.ndarray, np.empty, torch.from_numpy


def compiled_transitions(storage: Storage, draws: HostSampler, memory: BatchMemory) -> CompiledTransitions | None:
    """The compiled calls of a buffer, None where its loops are not compiled."""
    loops = _backend.whole_calls()
    return None if loops is None else CompiledTransitions(storage, draws, memory, loops)


class CompiledTransitions:
    """Appends and samples as `HostEngine` does, to the same bytes; what it cannot do it leaves undone.

    loops: the module `numba_transitions`. memory: where that of larger batches comes from.
    """

    def __init__(self, storage: Storage, draws: HostSampler, memory: BatchMemory, loops: Any) -> None:
        self._draws, self._loops = draws, loops
        self._capacity = storage.capacity
        self._fields = tuple(storage.fields.items())
        # the memory of the ring is that of these, as long as they are
        self._rings = {name: as_numpy(tensor) for name, tensor in storage.tensors.items()}
        self._table = np.array([self._line(name, field) for name, field in self._fields], dtype=np.int64)
        self._lines = _lines_of(self._table)
        self._no_fields = self._table[:0], self._lines[:0]
        self._row_bytes = int(self._table[:, 2].sum())
        self._outputs = [(field.shape, self._rings[name].dtype) for name, field in self._fields]
        self._memory = memory
        self._named = [(name, field, field.converts or field.dtype == torch.bfloat16) for name, field in self._fields]
        # the names of an add, in their order, to what the loop needs to know of values in that order
        self._orders: dict[tuple[str, ...], np.ndarray] = {}
        plan, tree = draws.state.plan, draws.state.tree
        self.samples = not plan.newest and plan.kind in ("mass", "uniform")
        # bfloat16 has no kind
        self._takes = bool((self._table[:, 3] >= 0).all()) and not draws.initial_is_stored
        self._ranked = None if tree is None else tree.order
        initial = -1 if draws.initial_runs else draws.first_mass, draws.first_mass
        none = np.zeros(0, dtype=np.int64)
        flat, starts, shift, low, high = (none, np.zeros(2, np.int64), 4, none, none) if tree is None else tree.compiled
        arrays = loops.ADDRESSES, draws.counters, draws.times_sampled, flat, starts, low, high
        # read by their addresses, so they must stay
        self._kept = arrays
        self._append = loops.append
        self._state = np.array([self._capacity, *initial, shift, *loops.places_of(*arrays)], dtype=np.int64)

    def _line(self, name: str, field: Field) -> tuple[int, int, int, int]:
        ring = self._rings[name]
        known = field.dtype != torch.bfloat16 and ring.dtype in self._loops.KINDS
        kind = self._loops.KINDS.index(ring.dtype) if known else -1
        # a ring of one slot may have any step
        return ring.__array_interface__["data"][0], ring.strides[0], field.row_bytes, kind

    # add

    def append(self, lock: AbstractContextManager[Any], given: dict[str, Any]) -> tuple[Tensor] | tuple[()]:
        """Store values and return their keys; nothing, having stored nothing, where they need a closer look.

        lock: of the buffer, taken while they are stored.
        """
        names = tuple(given)
        order = self._orders.get(names)
        if order is None:
            order = self._order(names)
            if order is None:
                return ()
        first = given[names[0]]
        if type(first) is not _ARRAY and type(first) is not list:
            return self._append_converted(lock, given)
        try:
            rows = len(first)
        except TypeError:
            # an array of no dimension
            return ()
        if not 0 < rows <= self._capacity:
            return ()
        keys = _empty(rows, _INT64)
        found, parts = (_from_numpy(keys),), (self._state, order, keys, *given.values())
        with lock:
            if self._ranked is not None:
                self._note(self._ranked, rows)
            return ((), found)[self._append(id(parts))] or self._append_converted(lock, given)

    def _append_converted(self, lock: AbstractContextManager[Any], given: dict[str, Any]) -> tuple[Tensor] | tuple[()]:
        """As `append`, of values some of which are not arrays yet; nothing where all are, or cannot be."""
        arrays = {name: value if type(value) is _ARRAY else _as_array(value) for name, value in given.items()}
        if any(array is None for array in arrays.values()) or all(map(is_, arrays.values(), given.values())):
            return ()
        return self.append(lock, arrays)

    def _note(self, ranked: RankOrder, rows: int) -> None:
        """Tell the order of ranks which slots are about to change."""
        head = self._draws.counters.item(Counter.ADDED) % self._capacity
        ranked.note(head, min(head + rows, self._capacity))
        if head + rows > self._capacity:
            ranked.note(0, head + rows - self._capacity)

    def _order(self, names: tuple[str, ...]) -> np.ndarray | None:
        """What the loop needs to know of values in this order; None where these are not the fields."""
        own = [name for name, _ in self._fields]
        if not self._takes or len(self._orders) == _ORDERS or sorted(names) != sorted(own):
            return None
        lines = [own.index(name) for name in names]
        shapes = [self._fields[line][1].shape for line in lines]
        starts_of = np.cumsum([0, *map(len, shapes)])
        parts = [len(lines)], self._table[lines].reshape(-1), starts_of, *shapes
        self._orders[names] = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        return self._orders[names]

    # sample

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor] | None:
        """Draw `batch` transitions as `HostEngine.sample` does; None, with nothing changed, where nothing has mass."""
        draws, plan, loops = self._draws, self._draws.state.plan, self._loops
        keys, slots = np.empty(batch, _INT64), np.empty(batch, _INT64)
        probability = np.empty(batch, _FLOAT32)
        size = batch * self._row_bytes
        if size < LARGE:
            arrays = tuple([np.empty((batch, *shape), dtype) for shape, dtype in self._outputs])
        else:
            forms = zip(self._rings, self._outputs, strict=True)
            arrays = tuple([self._memory.array(name, (batch, *shape), dtype) for name, (shape, dtype) in forms])
        threads = threads_for(size)
        fields = (self._table, self._lines) if threads == 1 else self._no_fields
        known = (draws.counters, draws.key, self._capacity, *fields, id(arrays), slots, keys, probability)
        tree = draws.state.tree
        if tree is None:
            words = batch if plan.replacement else PERMUTATION_WORDS
            weight, (wide, high) = np.empty(batch, _FLOAT32), (0, 0)
            if not plan.replacement:
                first, added = draws.span()
                wide, high = rectangle(added - first)
            loops.draw_uniformly(plan.replacement, wide, high, *known, weight)
        else:
            words = batch
            if beta is None:
                beta = (
                    plan.beta(draws.counters.item(Counter.STEP)) if isinstance(plan.beta, LinearSchedule) else plan.beta
                )
            ratio = np.empty(batch)
            lowest = tree.lowest() if plan.lowest_of_all else 0
            if not loops.draw_by_mass(*tree.compiled[:3], plan.stratified, lowest, *known, ratio):
                return None
            weight = weights_of(ratio, beta)
        if threads > 1:
            self._gather_in_parts(slots, arrays, threads)
        tensors = {
            name: rows_as_sampled(array, field, self._memory, name) if changes else torch.from_numpy(array)
            for (name, field, changes), array in zip(self._named, arrays, strict=True)
        }
        tensors["key"] = torch.from_numpy(keys)
        tensors["probability"] = torch.from_numpy(probability)
        tensors["weight"] = torch.from_numpy(weight)
        draws.counting(slots)
        return (loops.count_draw(slots, draws.times_sampled, draws.counters, blocks_for(words)), tensors)[1]

    def _gather_in_parts(self, slots: np.ndarray, arrays: tuple[np.ndarray, ...], threads: int) -> None:
        gather, known = self._loops.gather, (self._table, self._lines, id(arrays))

        # the memory stays until the last thread is done, also where this one is interrupted
        def copy(begin: int, end: int, held: Any = (arrays, self._rings)) -> None:
            gather(slots, begin, end, *known)

        in_parts(copy, slots.size, threads)


def _lines_of(table: np.ndarray) -> np.ndarray:
    """The cache lines that a row touches first: (K, 2) addresses of the first row, and steps from row to row.

    Long rows have only their first: the rest follows by itself.
    """
    lines: dict[int, int] = {}
    for address, step, size, _ in table.tolist():
        lines.setdefault(address // _LINE * _LINE, step)
        lines.setdefault((address + min(size, _LINE) - 1) // _LINE * _LINE, step)
    return np.array(list(lines.items()), dtype=np.int64)


def _as_array(value: Any) -> np.ndarray | None:
    """A list of one number, or a tensor, as an array; None for what needs a closer look."""
    if type(value) is list:
        return np.array(value) if len(value) == 1 and type(value[0]) in _NUMBERS else None
    if type(value) is not Tensor or value.requires_grad:
        return None
    try:
        found: np.ndarray = value.numpy()
    except (RuntimeError, TypeError):
        # NumPy has no such numbers, or they are not in memory as they are
        return None
    return found
