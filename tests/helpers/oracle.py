"""The prioritized buffer as plain Python lists and ints: slow, obvious, and written from the contract alone.

Random sequences of calls are played to this and to the real buffer, and everything integer is compared with `==`.
Transitions are represented by their keys; a test stores the key's number in the fields and compares that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.random import Philox

from gpu_replay import LinearSchedule, Proportional

UNIT = 2**20  # the mass of priority 1 with alpha 1


def mass_of(priority: float, settings: Proportional, capacity: int) -> int:
    """The integer mass of one priority, at least 1 and at most what keeps every sum below 2^62."""
    value = abs(priority) + settings.eps
    scaled = min(value, settings.clip if settings.clip is not None else math.inf) ** settings.alpha * UNIT + 0.5
    limit = 2**62 // capacity
    return limit if scaled >= limit else max(1, math.floor(scaled))


def stratum(part: int, parts: int, total: int) -> tuple[int, int]:
    """The half-open range of targets of one of `parts` equal parts of the total mass."""
    low, high = (i * (total // parts) + i * (total % parts) // parts for i in (part, part + 1))
    return low, high


def place(word: int, width: int) -> int:
    """A point in `[0, width)` from 64 random bits; 0 for an empty range."""
    return min(math.floor((word >> 11) * 2.0**-53 * width), max(width - 1, 0))


def draw(masses: Iterable[int], target: int) -> int:
    """The first slot whose inclusive prefix sum exceeds the target, by a linear scan."""
    return next(slot for slot, prefix in enumerate(accumulate(masses)) if prefix > target)


@dataclass
class Drawn:
    """What one `sample` should return, apart from the fields."""

    keys: list[int]
    probability: list[float]
    weight: list[float]


class OracleBuffer:
    """`ReplayBuffer` with a `Proportional` sampler, one list entry per slot."""

    def __init__(self, capacity: int, settings: Proportional, seed: int = 0) -> None:
        self.capacity, self.settings = capacity, settings
        self.added = self.forgotten = self.samples = self.stale = 0
        self.masses = [0] * capacity
        self.priorities = [0.0] * capacity
        self.running: float | None = None
        self.random = Philox(key=np.array([seed & (2**64 - 1), 0], dtype=np.uint64))

    def live_keys(self) -> range:
        return range(max(self.forgotten, self.added - self.capacity), self.added)

    def slot_keys(self) -> list[int]:
        """The key that lives in each slot, -1 for none."""
        slots = [-1] * self.capacity
        for key in self.live_keys():
            slots[key % self.capacity] = key
        return slots

    def add(self, count: int, priority: Sequence[float] | None = None) -> range:
        initial = self.settings.initial
        if initial == "running":
            value = 1.0 if self.running is None else self.running
        elif initial == "stored":
            value = max((self.priorities[key % self.capacity] for key in self.live_keys()), default=1.0)
        else:
            value = float(initial)
        first, self.added = self.added, self.added + count
        for key in range(first, self.added):
            self._store(key % self.capacity, value if priority is None else priority[key - first])
        if priority is not None:
            self._note(priority)
        return range(first, self.added)

    def update(self, keys: Sequence[int], priorities: Sequence[float]) -> None:
        live = self.live_keys()
        self.stale += sum(key not in live for key in keys)
        winners = {key: priority for key, priority in zip(keys, priorities, strict=True) if key in live}
        for key, priority in winners.items():
            self._store(key % self.capacity, priority)
        self._note(list(winners.values()))

    def sample(self, count: int, beta: float | None = None) -> Drawn:
        words = [int(word) for word in self.random.random_raw(-(-count // 4) * 4)[:count]]
        total = sum(self.masses)
        if self.settings.stratified:
            parts = [stratum(row, count, total) for row in range(count)]
            targets = [low + place(word, high - low) for (low, high), word in zip(parts, words, strict=True)]
        else:
            targets = [place(word, total) for word in words]
        keys = self.slot_keys()
        slots = [draw(self.masses, target) for target in targets]
        masses = [self.masses[slot] for slot in slots]
        lowest = min(masses if self.settings.normalize == "batch" else (mass for mass in self.masses if mass))
        schedule = self.settings.beta
        scheduled = schedule(self.samples) if isinstance(schedule, LinearSchedule) else schedule
        exponent = scheduled if beta is None else beta
        self.samples += 1
        weight = [(lowest / mass) ** exponent for mass in masses]
        return Drawn([keys[slot] for slot in slots], [mass / total for mass in masses], weight)

    def clear(self) -> None:
        self.forgotten = self.added
        self.masses = [0] * self.capacity

    def _store(self, slot: int, priority: float) -> None:
        self.masses[slot] = mass_of(priority, self.settings, self.capacity)
        self.priorities[slot] = abs(priority)

    def _note(self, given: Sequence[float]) -> None:
        """Keep the largest priority ever given."""
        known = [] if self.running is None else [self.running]
        self.running = max([abs(priority) for priority in given] + known, default=None)
