"""Ranks on the host and their masses: what they say, and that the order stays exact through changes."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from gpu_replay.loops import masses
from gpu_replay.ops import ranks
from gpu_replay.ops.counters import Counter as Count
from gpu_replay.ops.ranks import HostRanks, cumulative_masses

# codes of priorities from the smallest to the largest, next to each other and far apart
CODES = [1, 2, 3, 2**20, 2**20 + 1, 2**52, 2**62, 2**62 + 1, 0x7FF0000000000000]


# masses


@pytest.mark.parametrize("alpha, slots", [(0.0, 2), (0.3, 97), (0.7, 10_007), (1.0, 1), (50.0, 1000), (0.7, 1_000_003)])
def test_masses_of_ranks_fall_as_a_power_of_the_rank(slots: int, alpha: float) -> None:
    sums = cumulative_masses(slots, alpha)
    masses = np.diff(sums, prepend=0)
    assert masses.dtype == np.int64
    assert masses.min() >= 1
    # sums that all stay below 63 bits are exact
    assert 0 < sums.min() <= sums.max() == sums[-1] < 2**62
    # as fine as a double: no probability is further off than a float32 shows
    assert masses[0] >= 2**36
    assert bool((np.diff(masses) <= 0).all())
    for rank in {1, 2, 3, 5, 50, slots // 2, slots} & set(range(1, slots + 1)):
        ratio = masses[rank - 1] / masses[0]
        # one rounded power, and at most half a unit
        assert ratio == pytest.approx(rank**-alpha, rel=1e-12, abs=1 / masses[0])


# the order


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the order was sorted anew, and how often all blocks were made anew, with or without a sort."""
    done: Counter[str] = Counter()
    renew, fill = HostRanks._renew, HostRanks._fill

    def renewed(order: HostRanks, changed: np.ndarray | None, *given: int) -> None:
        done["sorted"] += changed is None
        renew(order, changed, *given)

    def filled(order: HostRanks, *given: np.ndarray) -> None:
        done["filled"] += 1
        fill(order, *given)

    monkeypatch.setattr(HostRanks, "_renew", renewed)
    monkeypatch.setattr(HostRanks, "_fill", filled)
    return done


class Ring:
    """Codes of a ring of slots, the order under test, and random changes of which it hears.

    kinds: how many codes there are; 0 for codes that are nearly never the same.
    """

    def __init__(self, slots: int, seed: str, kinds: int) -> None:
        self.slots, self.kinds = slots, kinds
        self.random = random.Random(seed)
        self.codes, self.counters = np.zeros(slots, dtype=np.int64), np.zeros(Count.COUNT, dtype=np.int64)
        # so many slots by so much that keys need more than 32 bits
        self.counters[Count.ADDED] = self.random.choice((0, 2**40))
        # with alpha 0 all ranks are drawn alike
        self.order = HostRanks(self.codes, self.counters, 0.0)

    @property
    def added(self) -> int:
        return self.counters.item(Count.ADDED)

    def code(self) -> int:
        """A code, or none."""
        if self.random.random() < 0.05:
            return 0
        return self.random.choice(CODES[: self.kinds]) if self.kinds else self.random.randrange(1, 2**63 - 2**52)

    def give(self, slots: list[int], code: int | None = None) -> None:
        """Give these slots a code, as loops do."""
        for slot in slots:
            given = self.code() if code is None else code
            if given != self.codes[slot]:
                self.codes[slot] = given
                masses.mark_changed(self.order.changed_slots, slot, slot + 1)

    def add(self, count: int, code: int | None = None) -> None:
        """New keys, some of which may push out others that were new."""
        self.give([(self.added + number) % self.slots for number in range(count)], code)
        self.counters[Count.ADDED] += count

    def change(self, turns: int, *, most: int) -> None:
        """Adds, and updates of up to so many slots; compared after most of them."""
        for _ in range(turns):
            if self.random.random() < 0.4:
                self.add(self.random.randrange(1, max(2, self.slots // 4)))
            else:
                self.give(self.random.choices(range(self.slots), k=self.random.randrange(1, max(2, most))))
            if self.random.random() < 0.7:
                self.check()
        self.check()

    def check(self) -> None:
        """Compare all ranks."""
        self._check(self.order, self.codes)

    def _check(self, order: HostRanks, codes: np.ndarray) -> None:
        oldest = [(self.added + number) % self.slots for number in range(self.slots)]
        expected = sorted((slot for slot in oldest if codes[slot]), key=lambda slot: -int(codes[slot]))
        if not expected:
            return
        rows = order.draw_ranks((np.arange(len(expected)) % 2) * 0.999, stratified=True)
        assert rows.slots.tolist() == expected
        assert rows.total == len(expected) * rows.last
        assert rows.masses.tolist() == [rows.last] * len(expected)
        numbers = [self.random.randrange(len(expected)) for _ in range(7)]
        rows = order.draw_ranks((np.array(numbers) + 0.5) / len(expected), stratified=False)
        assert rows.slots.tolist() == [expected[number] for number in numbers]


@pytest.mark.parametrize("kinds", [1, 3, len(CODES), 0])
def test_the_order_is_exact_through_random_changes(
    kinds: int, monkeypatch: pytest.MonkeyPatch, work: Counter[str]
) -> None:
    # sorted anew only where more has changed than there are slots
    monkeypatch.setattr(ranks, "_CHANGED", 1)
    for slots in (1, 2, 3, 8, 9, 31, 40, 150, 600):
        Ring(slots, f"{kinds} {slots}", kinds).change(25 if slots <= 40 else 100, most=slots // 3)
    assert work["filled"] > work["sorted"]


@pytest.mark.parametrize("falling", [False, True])
def test_new_slots_that_all_come_to_one_end(falling: bool, work: Counter[str]) -> None:
    """A ring that goes round many times, each new slot before or after all others: empty blocks are used again."""
    ring = Ring(700, "end", 0)
    ring.add(700, 2**40)
    ring.check()
    for turn in range(300):
        ring.add(7, 2**40 - turn if falling else 2**40 + turn)
        if turn % 50 == 0:
            ring.check()
        else:
            ring.order.draw_ranks(np.zeros(1), stratified=True)
    ring.check()
    assert work["sorted"] == 1
    assert work["filled"] > 1
    # many changes are sorted anew
    ring.add(350)
    ring.check()
    assert work["sorted"] == 2
