"""The shard of one rank: a replay buffer that samples in several steps, between which ranks exchange messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.buffer import ReplayBuffer
from gpu_replay.fields import Field
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.draw import slots_at
from gpu_replay.ops.ring import convert
from gpu_replay.samplers import LinearSchedule


class Column:
    """Indices of the numbers that each rank sends to the others when a `sample` begins."""

    ADDED = 0  # transitions ever added to its shard
    SIZE = 1  # transitions stored
    TOTAL = 2  # sum of their masses
    LOG_SCALE = 3  # the bits of the float64 log2(g) of `local_draw`; unused in global mode
    LARGEST = 4  # largest mass ever given
    RANDOM = 5  # Philox blocks used
    STEP = 6  # samples drawn


class ShardDraw(NamedTuple):
    """Rows drawn from one shard.

    finish:  counts them and returns fields, key, and probability and weight within the shard, at most 1.
    chance:  the first `chance` rows were sampled at random; the others are the newest.
    log_scale:   float64 scalar, the log2(g) of `local_draw`.
    """

    finish: Callable[[], dict[str, Tensor]]
    chance: int
    log_scale: Tensor


class Shard(ReplayBuffer):
    """The transitions of one rank.

    total_slots: slots of all shards together; they set the largest allowed mass, so that no sum over shards overflows.
    """

    def __init__(self, capacity: int, fields: Mapping[str, Field], *, total_slots: int, **settings: Any) -> None:
        self._total_slots = total_slots
        super().__init__(capacity, fields, **settings)

    # numbers sent to the ranks

    def size(self) -> Tensor:
        """The number of stored transitions, an int64 scalar on the device."""
        counts = self._counters
        return counts[Counter.ADDED] - torch.maximum(counts[Counter.FIRST], counts[Counter.ADDED] - self._capacity)

    def total(self) -> Tensor:
        """The sum of the masses of all stored transitions, an int64 scalar; without masses each counts 1."""
        tree = self._state.summed
        return self.size() if tree is None else tree.levels[-1].sum()

    def row(self, log_scale: Tensor) -> Tensor:
        """The numbers that `Column` lists, (7,) int64, as they are now."""
        counts = self._counters
        later = (counts[place] for place in (Counter.MAX_MASS, Counter.RANDOM, Counter.STEP))
        return torch.stack([counts[Counter.ADDED], self.size(), self.total(), log_scale.view(torch.int64), *later])

    def lowest(self) -> Tensor:
        """The smallest stored mass, an int64 scalar."""
        return self._state.masses.lowest()

    def raise_largest(self, largest: Tensor) -> None:
        """Raise the initial mass to the largest that any rank was given, an int64 scalar."""
        counts = self._counters
        counts[Counter.MAX_MASS] = torch.maximum(counts[Counter.MAX_MASS], largest)

    # a draw from this shard alone

    def draw(self, batch: int, beta: float | None) -> ShardDraw:
        """Draw `batch` rows of this shard. Raises as `sample`."""
        self._check_enough(batch)
        chance = batch - self._sampler.newest_of(batch)
        step = self._counters[Counter.STEP].to(torch.float64)
        slots, probability, finish = self._engine.sample_unfinished(batch, beta)
        lowest = self._lowest_drawn(slots[:chance], probability[:chance])
        log_scale = self.total().to(torch.float64).log2() - self._exponent(step, beta) * lowest.log2()
        return ShardDraw(finish, chance, log_scale)

    def _exponent(self, step: Tensor, beta: float | None) -> Tensor | float:
        if beta is not None:
            return beta
        planned = self._sampler.base.beta
        if not isinstance(planned, LinearSchedule):
            return planned
        return planned.start + (planned.end - planned.start) * (step / planned.steps).clamp(max=1.0)

    def _lowest_drawn(self, slots: Tensor, probability: Tensor) -> Tensor:
        """The mass of the row with the largest weight, float64; with RankBased its probability times the size."""
        base = self._sampler.base
        if not base.prioritized or not slots.numel():
            return torch.ones((), dtype=torch.float64, device=self._device)
        if not base.summed:
            return probability.min().to(torch.float64) * self.size()
        tree = self._state.masses
        lowest = tree.lowest() if base.normalizes_over_buffer else tree.masses[slots].min()
        return lowest.to(torch.float64)

    # rows that were drawn for all ranks together

    def find(self, numbers: np.ndarray, added: int, size: int) -> Tensor:
        """(n,) slots for numbers: targets within the total mass, or indices among the live slots in ascending order."""
        places = torch.from_numpy(numbers).to(self._device)
        if self._state.summed is not None:
            return slots_at(self._state.summed, places)
        start = (added - size) % self._capacity
        # live slots in ascending order: those of the newest keys come first where the ring has wrapped
        wrapped = max(0, start + size - self._capacity)
        return torch.where(places < wrapped, places, places + start - wrapped)

    def masses_at(self, slots: Tensor) -> Tensor:
        """(n,) int64 masses of slots; 1 each without masses."""
        tree = self._state.summed
        return torch.ones_like(slots) if tree is None else tree.masses[slots]

    def stored_bytes(self, slots: Tensor) -> list[Tensor]:
        """(n, bytes) uint8 of each field at these slots, as it is stored."""
        parts = []
        for name, field in self._fields.items():
            tensor = self._storage.tensors[name]
            rows = tensor[slots.to(tensor.device)].to(self._device).reshape(slots.numel(), field.elements)
            parts.append(rows.view(torch.uint8).reshape(slots.numel(), field.row_bytes))
        return parts

    def from_bytes(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Split (n, bytes) rows of concatenated `stored_bytes` into the sampled fields and the bytes after them."""
        tensors, start = {}, 0
        for name, field in self._fields.items():
            stop = start + field.row_bytes
            raw = rows[:, start:stop].clone(memory_format=torch.contiguous_format).view(-1).view(field.dtype)
            tensors[name] = convert(raw.view(-1, *field.shape), field)
            start = stop
        return tensors, rows[:, start:]

    def keys_at(self, slots: Tensor, added: int) -> Tensor:
        """(n,) local keys that these slots store."""
        head = added % self._capacity
        return slots + (added - head) - self._capacity * (slots >= head)

    def count_draw(self, slots: Tensor, random: int, step: int) -> None:
        """Count these slots as sampled, and set the next Philox block and the step of the schedule."""
        self._storage.times_sampled.index_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
        self._counters[Counter.RANDOM] = random
        self._counters[Counter.STEP] = step
