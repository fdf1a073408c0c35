"""The buffer's work on CPU tensors: NumPy over whole batches, on views of the tensors' own memory.

At these sizes the count of array operations is the cost, so one call makes as few as it can and none per transition.
`device.py` does the same with kernels; both leave the same integers behind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.storage import Storage, base_sampler
from gpu_replay.ops import _backend
from gpu_replay.ops.batch_memory import Outputs
from gpu_replay.ops.counters import Counter, HostWords, blocks_for
from gpu_replay.ops.mass import Rule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.rank_draw_host import HostRanks
from gpu_replay.ops.ring import as_numpy, as_sampled, gather_rows, write_rows
from gpu_replay.ops.stratified_draw import draw_by_mass, importance_weights, smallest
from gpu_replay.ops.uniform_draw import PERMUTATION_WORDS, independent_ranks, permuted_ranks, slots_of
from gpu_replay.samplers import PRIORITIZED, Combined, Latest, Proportional, RankBased, Sampler, Uniform

_NOTHING = np.empty(0, dtype=np.int64)


class HostEngine:
    """Appends, draws and updates for one buffer whose tensors are on the CPU.

    The buffer has checked all arguments and holds the lock.
    """

    # whether stored slots without mass exist, which no update may wake
    sparse = False

    def __init__(
        self, storage: Storage, sampler: Sampler, tree: MassTree | None, rule: Rule, counters: Tensor, seed: int
    ) -> None:
        self._capacity = storage.capacity
        self._rows = {name: as_numpy(tensor) for name, tensor in storage.tensors.items()}
        self._columns = [(name, self._rows[name], field) for name, field in storage.fields.items()]
        self._records = storage.records
        together = () if storage.records is None else storage.records.dtype.names or ()
        # in the order of the fields: those that lie in records are taken from them
        self._packed = [(name, field, name in together) for name, field in storage.fields.items()]
        self._times_sampled = storage.times_sampled.numpy()
        self._sampler = sampler
        self._base = base_sampler(sampler)
        self._tree = tree
        self._rule = rule
        self._loops: Any = _backend.inner_loops()
        self._counters = counters.numpy()
        self._ranks: HostRanks | None = None
        if tree is not None and isinstance(self._base, RankBased):
            self._ranks = HostRanks(tree, self._counters, self._base.alpha, self._base.resort_every)
        self._outputs = Outputs()
        # the mass of new transitions before any priority was given
        self._first_mass = rule.mass(1.0)
        self.reseed(seed)

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside storage, tree and counters."""
        return 0 if self._ranks is None else self._ranks.nbytes

    @property
    def ranked(self) -> Tensor | None:
        """(capacity,) int32 slots in order of their ranks, where the order must outlive a call."""
        return None if self._ranks is None else self._ranks.list

    def reseed(self, seed: int) -> None:
        """Draw from the stream of this seed, from the counter's position on."""
        self._words = HostWords(seed)

    def span(self) -> tuple[int, int]:
        """The smallest live key and the next key."""
        added = self._counters.item(Counter.ADDED)
        return max(self._counters.item(Counter.FIRST), added - self._capacity), added

    def size_at_least(self, wanted: int) -> int:
        """Stored transitions; an engine that would have to wait to be exact may stop at `wanted`."""
        first, added = self.span()
        return added - first

    def forget(self) -> None:
        """Follow a `clear`."""

    def replayed(self, rows: int) -> None:
        """Follow the replay of a graph; there are none on a CPU."""

    # add

    def append(self, values: dict[str, Tensor | np.ndarray], rows: int, priorities: np.ndarray | None) -> Tensor:
        """Store `rows` transitions and return their (rows,) keys."""
        counters, capacity = self._counters, self._capacity
        masses = self._entry_masses(priorities)
        added = counters.item(Counter.ADDED)
        skipped = max(0, rows - capacity)
        kept = rows - skipped
        start = (added + skipped) % capacity
        for name, value in values.items():
            source = as_numpy(value)
            write_rows(self._rows[name], source[skipped:] if skipped else source, start)
        head = min(kept, capacity - start)
        self._times_sampled[start : start + head] = 0
        if head < kept:
            self._times_sampled[: kept - head] = 0
        if self._tree is not None:
            turn = skipped + head
            self._tree.set_range(start, start + head, masses if isinstance(masses, int) else masses[skipped:turn])
            if head < kept:
                self._tree.set_range(0, kept - head, masses if isinstance(masses, int) else masses[turn:])
        counters[Counter.ADDED] = added + rows
        return torch.from_numpy(np.arange(added, added + rows))

    def _entry_masses(self, priorities: np.ndarray | None) -> int | np.ndarray:
        """The mass of new transitions: what `initial` says, or of their own priorities."""
        if priorities is not None:
            if self._tree is None:
                return 0
            masses, largest, saturated = self._rule.masses(priorities)
            self._given(largest, saturated)
            return masses
        if self._tree is None or not isinstance(self._base, PRIORITIZED):
            return 0
        if self._base.initial == "running":
            return self._counters.item(Counter.MAX_MASS) or self._first_mass
        if self._base.initial == "stored":
            return self._tree.highest() or self._first_mass
        return self._rule.mass(float(self._base.initial))

    def _given(self, largest: int, saturated: int) -> None:
        counters = self._counters
        if largest > counters.item(Counter.MAX_MASS):
            counters[Counter.MAX_MASS] = largest
        if saturated:
            counters[Counter.SATURATED] += saturated

    # sample

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` transitions: fields, key, probability and weight."""
        newest = self._sampler.newest if isinstance(self._sampler, Combined) else 0
        if isinstance(self._base, Latest):
            newest = batch
        drawn = batch - newest
        slots, probability, weight = self._draw(drawn, beta)
        if newest:
            added = self._counters.item(Counter.ADDED)
            last = np.arange(added - newest, added)
            sure = np.ones(newest, dtype=np.float32)
            slots = np.concatenate((slots, last % self._capacity))
            probability = np.concatenate((probability, sure))
            weight = np.concatenate((weight, sure))
        self._counters[Counter.STEP] += 1
        keys = self._noted(slots)
        tensors = self._gather(slots)
        tensors["key"] = torch.from_numpy(keys)
        tensors["probability"] = torch.from_numpy(probability)
        tensors["weight"] = torch.from_numpy(weight)
        return tensors

    def _noted(self, slots: np.ndarray) -> np.ndarray:
        """Count the slots as sampled; returns the keys in them."""
        added = self._counters.item(Counter.ADDED)
        keys: np.ndarray = self._loops.count_draws(slots, added, self._capacity, self._times_sampled)
        return keys

    def _draw(self, drawn: int, beta: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, probabilities and weights of the rows that the base sampler draws."""
        base = self._base
        if drawn == 0:
            nothing = np.empty(0, dtype=np.float32)
            return _NOTHING, nothing, nothing
        if isinstance(base, Proportional) and self._tree is not None:
            return draw_by_mass(
                self._tree,
                self._words.doubles(self._blocks(drawn), drawn),
                beta if beta is not None else self._scheduled(base),
                stratified=base.stratified,
                lowest_of_all=base.normalize == "buffer",
            )
        if isinstance(base, RankBased):
            return self._by_rank(base, drawn, beta)
        first, added = self.span()
        size = added - first
        if isinstance(base, Uniform) and not base.replacement:
            words = self._words.words(self._blocks(PERMUTATION_WORDS), PERMUTATION_WORDS)
            ranks = permuted_ranks(size, drawn, words)
        else:
            ranks = independent_ranks(size, self._words.doubles(self._blocks(drawn), drawn))
        return slots_of(ranks, first, self._capacity), np.full(drawn, 1 / size, np.float32), np.ones(drawn, np.float32)

    def _by_rank(
        self, base: RankBased, drawn: int, beta: float | None, skipped: int = 0, *, exact: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, probabilities and weights of draws by rank; `skipped` and `exact` as in `HostRanks.draw`."""
        if self._ranks is None:
            raise RuntimeError(f"{self._sampler} keeps no ranks.")
        doubles = self._words.doubles(self._blocks(drawn), drawn)
        rows = self._ranks.draw(doubles, stratified=base.stratified, skipped=skipped, exact=exact)
        lowest = smallest(rows.masses) if base.normalize == "batch" else rows.last
        exponent = beta if beta is not None else self._scheduled(base)
        probability = (rows.masses / rows.total).astype(np.float32)
        return rows.slots, probability, importance_weights(rows.masses, lowest, exponent)

    def _scheduled(self, base: Proportional | RankBased) -> float:
        return base.beta if isinstance(base.beta, (int, float)) else base.beta(self._counters.item(Counter.STEP))

    def _blocks(self, words: int) -> int:
        """The block from which so many words are drawn; the stream moves on past them."""
        block = self._counters.item(Counter.RANDOM)
        self._counters[Counter.RANDOM] = block + blocks_for(words)
        return block

    def _gather(self, slots: np.ndarray) -> dict[str, Tensor]:
        if self._records is None:
            return {name: gather_rows(rows, field, slots) for name, rows, field in self._columns}
        records = self._records.take(slots)
        return {
            name: as_sampled(records[name].copy(), field) if packed else gather_rows(self._rows[name], field, slots)
            for name, field, packed in self._packed
        }

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The stored transitions of these keys; KeyError naming the first that is not live."""
        array = keys.numpy()
        first, added = self.span()
        dead = np.flatnonzero((array < first) | (array >= added))
        if dead.size:
            held = f"the keys from {first} to {added - 1}" if added > first else "no transitions"
            raise KeyError(f"key {array[dead[0]]} is not live; the buffer holds {held}.")
        return self._gather(slots_of(array - first, first, self._capacity))

    # update

    def update(self, keys: Tensor, numbers: np.ndarray) -> None:
        """Give live keys their new masses; the last of a repeated key wins, keys that are not live are counted."""
        (first, added), array = self.span(), keys.numpy()
        if not array.size:
            return
        if self._tree is None:
            stale = int(np.count_nonzero((array < first) | (array >= added)))
        else:
            largest, stale, cut = self._tree.update(array, numbers, self._rule, first, added, sparse=self.sparse)
            self._given(largest, cut)
        if stale:
            self._counters[Counter.STALE] += stale
