"""Ranks on the host and their masses: what they say, and that the order stays exact through changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from model import by_rank
from pairs import Both, RowPair, StepPair, live_through

from gpu_replay import Field, RankBased
from gpu_replay.ops import ranks
from gpu_replay.ops.counters import Counter as Count
from gpu_replay.ops.ranks import HostRanks, cumulative_masses

# priorities from the smallest to the largest, next to each other in their last bit and far apart
BITS = [0, 1, 2, 2**20, 2**20 + 1, 2**52, 2**62, 2**62 + 1, 2**62 + 2**60]
PRIORITIES = np.array(BITS).view(np.float64).tolist()
# all ranks are drawn alike, so that as many draws as there are ranks show their order
ALL_RANKS = RankBased(alpha=0.0)
FIELDS = {name: Field((), torch.int64) for name in ("obs", "action")}


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


def check(pair: Both) -> None:
    """Compare all ranks: each is drawn by the first or the last of its targets."""
    expected = [key % pair.model.capacity for key in by_rank(pair.model.held.items())]
    if expected:
        rows = pair.buffer._sampling.draw_by_rank((np.arange(len(expected)) % 2) * 0.999, stratified=True)
        assert rows.slots.tolist() == expected
        assert rows.total == len(expected) * rows.last
        assert rows.masses.tolist() == [rows.last] * len(expected)
        middles = (np.arange(len(expected)) + 0.5) / len(expected)
        assert pair.buffer._sampling.draw_by_rank(middles, stratified=False).slots.tolist() == expected


def change(pair: Both, add: Callable[[], object], draw: random.Random, kinds: int, turns: int) -> None:
    """Adds, and updates of up to a third of the slots; compared after most of them.

    kinds: how many different priorities there are; 0 for such that are nearly never the same.
    """
    for _ in range(turns):
        keys = draw.choices(pair.model.live() or [0], k=draw.randrange(1, max(2, pair.model.capacity // 3)))
        if draw.random() < 0.4:
            add()
        else:
            pair.update(keys, [priority(draw, kinds) for _ in keys])
        if draw.random() < 0.7:
            check(pair)
    check(pair)


def priority(draw: random.Random, kinds: int) -> float:
    return draw.choice(PRIORITIES[:kinds]) if kinds else 2.0 ** draw.uniform(-400, 400)


def rows(slots: int) -> RowPair:
    return RowPair(slots, ALL_RANKS, fields={"action": FIELDS["action"]})


@pytest.mark.parametrize("kinds", [1, 3, len(BITS), 0])
def test_the_order_is_exact_through_random_changes(
    kinds: int, monkeypatch: pytest.MonkeyPatch, work: Counter[str]
) -> None:
    """New rows push out others; steps come to be ranked and go, at the ends of episodes and of the ring."""
    # sorted anew only where more has changed than there are slots
    monkeypatch.setattr(ranks, "_CHANGED", 1)
    draw = random.Random(kinds)
    for slots in (1, 2, 3, 8, 9, 31, 40, 150, 600):
        pair = rows(slots)

        def add(pair: RowPair = pair, most: int = max(2, slots // 4)) -> None:
            pair.add(count := draw.randrange(1, most), [priority(draw, kinds) for _ in range(count)])

        change(pair, add, draw, kinds, 25 if slots <= 40 else 100)
    steps = StepPair(600, 30, sampler=ALL_RANKS, fields=FIELDS, stack=2, n_step=2)
    change(steps, lambda: live_through(steps, 2, draw.randrange(1000)), draw, kinds, 40)
    assert work["filled"] > work["sorted"]


@pytest.mark.parametrize("falling", [False, True])
def test_new_slots_that_all_come_to_one_end(falling: bool, work: Counter[str]) -> None:
    """A ring that goes round many times, each new slot before or after all others: empty blocks are used again."""
    pair = rows(700)
    pair.add(700, [1000.0] * 700)
    check(pair)
    for turn in range(300):
        pair.add(7, [1000.0 - turn if falling else 1000.0 + turn] * 7)
        if turn % 50 == 0:
            check(pair)
        else:
            pair.buffer.sample(1)
    check(pair)
    assert work["sorted"] == 1
    assert work["filled"] > 1
    # many changes are sorted anew
    pair.add(350)
    check(pair)
    assert work["sorted"] == 2


def test_a_new_key_is_seen_though_its_slot_keeps_its_code(monkeypatch: pytest.MonkeyPatch, work: Counter[str]) -> None:
    monkeypatch.setattr(ranks, "_CHANGED", 1)
    counters = np.zeros(Count.COUNT, dtype=np.int64)
    order = HostRanks(np.ones(9, dtype=np.int64), counters, 0.0)
    for count, added in ((9, 9), (1, 10), (4, 14)):
        counters[Count.ADDED] = added
        # as the loops record every slot that gets another key
        order.changed_slots[: count + 1] = count, *(np.arange(added - count, added) % 9)
        slots = order.draw_ranks(np.zeros(9), stratified=True).slots
        assert slots.tolist() == [(added + number) % 9 for number in range(9)]
    assert work["sorted"] == 1
