"""Draws and priority updates on CPU tensors: loops over views of the tensors' own memory.

`device_sampler.py` does the same with kernels; both leave the same integers behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import starmap

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.sampler_state import SamplerState
from gpu_replay.engines.storage import Storage
from gpu_replay.fields import as_numpy
from gpu_replay.loops import ring as ring_loops
from gpu_replay.loops import tree as tree_loops
from gpu_replay.ops.counters import NO_KEY, Counter, HostWords
from gpu_replay.ops.draw import DrawRange, draw_range, slots_in
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.ranks import HostRanks
from gpu_replay.ops.ring import commit, contiguous, put
from gpu_replay.samplers import HostDraw

_NONE = np.zeros(0, dtype=np.int64)


class HostSampler:
    """Trees, ranks, random words and counters of one buffer on the host: draws from them, and updates of priorities.

    The buffer has checked all arguments and holds the lock. A draw changes nothing until `finish` counts it.

    arrays: counters, times sampled, and the tree of masses as `loops/tree.py` takes it, or nothing.
    """

    def __init__(self, state: SamplerState, storage: Storage, seed: int) -> None:
        self.state = state
        self.counters = state.counters.numpy()
        self.times_sampled, self._storage = storage.times_sampled.numpy(), storage
        self._base, self._tree, self.capacity = state.base, state.tree, state.slots
        self._ranks: HostRanks | None = None
        if self._base.prioritized and not self._base.summed:
            codes = state.masses
            self._ranks = HostRanks(codes.arrays[0][: codes.slots], self.counters, self._base.alpha)
            codes.host = codes.host._replace(changed_slots=self._ranks.changed_slots)
        tree = (_NONE,) * 3 if state.tree is None else state.tree.host
        self.arrays = self.counters, self.times_sampled, *tree
        rule, waiting = state.rule, storage.waiting_arrays()
        self._update_arguments = rule.ordered, rule.limit, self.capacity, self.counters, *tree, *waiting
        self._count_sample = ring_loops.count_sample.compiled()
        self._postponed: list[Callable[[], object]] | None = None
        self.rebuild(seed)

    @property
    def scratch_bytes(self) -> int:
        """Bytes used in addition to the state's."""
        return 0 if self._ranks is None else self._ranks.nbytes

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
        first, added = self.span()
        return self.counters.item(Counter.ELIGIBLE) if self.state.tracks_eligibility else added - first

    # what samplers draw from

    @property
    def step(self) -> int:
        """Samples so far."""
        return self.counters.item(Counter.STEP)

    @property
    def masses(self) -> MassTree:
        """The tree of masses."""
        return self.state.masses

    @property
    def starts(self) -> MassTree | None:
        """The eligible starts; None where all stored slots can be drawn."""
        return self.state.eligible if self.state.tracks_eligibility else None

    @property
    def ranks(self) -> HostRanks:
        """The order of ranks."""
        if self._ranks is None:
            raise RuntimeError(f"{self.state.sampler} keeps no ranks.")
        return self._ranks

    def range(self, tree: MassTree) -> DrawRange:
        """The mass of a tree, counted from the oldest key."""
        return draw_range(tree, self.counters.item(Counter.ADDED) % self.capacity)

    # sampling

    def draw(self, batch: int, beta: float | None) -> HostDraw:
        """Draw `batch` slots by `random` from the counter's block on."""
        self.random.block = self.counters.item(Counter.RANDOM)
        newest = self.state.sampler.newest_of(batch)
        if not newest:
            return self._base.draw(self, batch, beta)
        slots, sure = self._newest(newest), np.ones(newest, dtype=np.float32)
        if newest == batch:
            return HostDraw(slots, sure, sure.copy())
        drawn = self._base.draw(self, batch - newest, beta)
        return HostDraw(*map(np.concatenate, zip(drawn, (slots, sure, sure), strict=True)))

    def count_sample(self, tensors: dict[str, Tensor], draw: HostDraw) -> dict[str, Tensor]:
        """Commit a draw: advance the random stream and the sample counts. Returns the tensors of the sample with its
        keys, probabilities and weights.
        """
        slots, tensor = draw.slots, torch.from_numpy
        keys = np.empty(slots.size, dtype=np.int64)
        tensors["key"] = tensor(keys)
        tensors["probability"] = tensor(draw.probability)
        tensors["weight"] = tensor(draw.weight)
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
        if not self.state.tracks_eligibility:
            added = self.counters.item(Counter.ADDED)
            return np.arange(added - count, added) % self.capacity
        within = self.range(self.state.eligible)
        return slots_in(self.state.eligible, within, np.arange(within.total - count, within.total))

    # update

    def update(self, keys: np.ndarray, priorities: np.ndarray, ready: bool) -> None:
        """Give live keys the masses of their priorities; the last of a repeated key wins, others are counted."""
        if not keys.size:
            return
        # the last line of each branch changes all that changes: an exception comes before it or after
        if self._tree is None:
            first, added = self.span()
            self.counters[Counter.STALE] += np.count_nonzero(((keys < first) | (keys >= added)) & (keys != NO_KEY))
        else:
            array, numbers = contiguous(keys), self.state.rule.numbers(priorities)
            tree_loops.update.compiled()(array, numbers, *self._update_arguments)

    def write(self, keys: Tensor, values: dict[str, np.ndarray]) -> None:
        """Store rows of some fields under (m,) live keys; the last of a repeated key wins, others are counted."""
        array, (first, added) = keys.numpy(), self.span()
        live = (array >= first) & (array < added)
        stale = self.counters.item(Counter.STALE) + np.count_nonzero(~live & (array != NO_KEY))
        # NumPy does not promise which of several values stays in one place
        backwards = np.flatnonzero(live)[::-1]
        slots, places = np.unique(array[backwards] % self.capacity, return_index=True)
        rows, stores = backwards[places], self._storage.tensors
        writes = [(as_numpy(stores[name]), slots, value[rows]) for name, value in values.items()]
        commit(None, starmap(put, [*writes, (self.counters, Counter.STALE, stale)]))
