"""The order of the host code and the masses of ranks: what they say, and that the order stays exact through changes."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from gpu_replay.ops import _backend, rank_order
from gpu_replay.ops.rank_order import RankOrder, order_bytes, sorted_ages
from gpu_replay.ops.rank_table import cumulative_masses

# codes of priorities from the smallest to the largest, next to each other and far apart
CODES = [1, 2, 3, 2**20, 2**20 + 1, 2**52, 2**62, 2**62 + 1, 0x7FF0000000000000]


def expected_order(codes: np.ndarray, head: int) -> list[int]:
    """The slots with a code by rank, in a ring whose oldest slot is `head`."""
    slots = [slot for slot in range(codes.size) if codes[slot]]
    return sorted(slots, key=lambda slot: (-int(codes[slot]), (slot - head) % codes.size))


# masses


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0, 2.0, 30.0])
@pytest.mark.parametrize("slots", [1, 2, 3, 97, 10_007])
def test_masses_of_ranks_fall_as_a_power_of_the_rank(slots: int, alpha: float) -> None:
    masses = np.diff(cumulative_masses(slots, alpha), prepend=0)
    assert masses.dtype == np.int64
    assert masses.min() >= 1
    assert bool((np.diff(masses) <= 0).all())
    for rank in {1, 2, 3, 5, 50, slots // 2, slots} & set(range(1, slots + 1)):
        ratio = masses[rank - 1] / masses[0]
        # one rounded power, and at most half a unit
        assert ratio == pytest.approx(rank**-alpha, rel=1e-12, abs=1 / masses[0])


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 50.0])
@pytest.mark.parametrize("slots", [1, 1000, 3_000_001])
def test_sums_of_masses_are_exact_and_stay_below_63_bits(slots: int, alpha: float) -> None:
    sums = cumulative_masses(slots, alpha)
    masses = np.diff(sums, prepend=0)
    assert sum(masses.tolist()) == int(sums[-1]) < 2**62
    # as fine as a double: no probability is further off than a float32 shows
    assert masses[0] >= 2**36


# sorting


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1000])
@pytest.mark.parametrize("kinds", [1, 3, len(CODES), 0])
def test_sorted_ages(size: int, kinds: int) -> None:
    generator = np.random.default_rng(size + kinds)
    choices = CODES[:kinds] if kinds else generator.integers(1, 2**63 - 1, 10_000)
    codes = np.where(generator.random(size) < 0.2, 0, generator.choice(choices, size))
    given = codes.copy()
    assert sorted_ages(codes).tolist() == expected_order(codes, 0)
    assert codes.tolist() == given.tolist()


@pytest.mark.parametrize("size", [2, 3, 100, 5000])
def test_codes_that_differ_only_in_their_lowest_bits_are_told_apart(size: int) -> None:
    generator = np.random.default_rng(size)
    # pairs of groups whose high bits are the same
    codes = (generator.integers(1, 3, size) << 40) + generator.integers(0, 3, size)
    assert sorted_ages(codes).tolist() == expected_order(codes, 0)


def test_nothing_is_sorted_where_nothing_has_a_code() -> None:
    assert sorted_ages(np.zeros(5, dtype=np.int64)).size == 0


# the order


def slots_at(order: Any, ranks: np.ndarray) -> list[int]:
    """The slots at these ranks; a compiled order draws them, where each rank has the same mass."""
    if isinstance(order, RankOrder):
        return order.at(ranks).tolist()
    sums = np.full(-(-order._slots // 64) * 64, 2**63 - 1)
    sums[: order._slots] = np.arange(1, order._slots + 1)
    order.draw_by(sums, sums[63::64].copy())
    slots, masses, total = order.draw((ranks + 0.5) / order.count, False)
    assert total == order.count
    assert masses.tolist() == [1] * ranks.size
    return slots.tolist()


class Ring:
    """Codes of a ring of slots, and the order under test, which hears of every change."""

    def __init__(self, slots: int, seed: str, kinds: int, kind: Any = RankOrder) -> None:
        self.slots, self.kinds, self.added = slots, kinds, 0
        self.random = random.Random(seed)
        self.codes = np.zeros(slots, dtype=np.int64)
        self.order = kind(self.codes, slots)

    def code(self) -> int:
        """A code, one of few or nearly never the same again, or none."""
        if self.random.random() < 0.05:
            return 0
        return self.random.choice(CODES[: self.kinds]) if self.kinds else self.random.randrange(1, 2**63 - 2**52)

    def add(self, count: int, code: int | None = None) -> None:
        """New keys, in two pieces where the ring wraps."""
        start = self.added % self.slots
        for begin, end in ((start, min(start + count, self.slots)), (0, start + count - self.slots)):
            if begin < end:
                self.codes[begin:end] = [self.code() if code is None else code for _ in range(begin, end)]
                self.order.note(begin, end)
        self.added += count

    def update(self, count: int) -> None:
        for _ in range(self.random.randrange(1, 3)):
            slots = np.array(self.random.sample(range(self.slots), min(count, self.slots)), dtype=np.int64)
            self.codes[slots] = [self.code() for _ in slots]
            self.order.note_slots(slots)

    def change(self, turns: int, *, most: int, checked: float) -> None:
        """Adds, updates of up to so many slots and, seldom, a clearing; compared after this share of them."""
        for _ in range(turns):
            chance = self.random.random()
            if chance < 0.4:
                self.add(self.random.randrange(1, max(2, self.slots // 4)))
            elif chance < 0.9:
                self.update(self.random.randrange(1, max(2, most)))
            elif chance < 0.92:
                self.codes[:] = 0
                self.order.invalidate()
            if self.random.random() < checked:
                self.check()
        self.check()

    def go_round(self, turns: int, falling: bool, *, every: int, hide: float = 0.3) -> None:
        """New entries, each before or after all others."""
        self.add(self.slots, 2**40)
        self.check(hide=hide)
        for turn in range(turns):
            self.add(7, 2**40 - turn if falling else 2**40 + turn)
            self.order.sort_changes(self.added)
            assert self.order.count == self.slots
            if turn % every == 0:
                self.check(hide=hide)
        self.check(hide=hide)

    def check(self, *, hide: float = 0.3) -> None:
        """Compare all ranks; sometimes also with some slots hidden."""
        self.order.sort_changes(self.added)
        self._check(set())
        if self.random.random() < hide:
            hidden = self.random.sample(range(self.slots), self.random.randrange(self.slots))
            self.order.hide(np.array(hidden, dtype=np.int64))
            self._check(set(hidden))

    def _check(self, hidden: set[int]) -> None:
        expected = [slot for slot in expected_order(self.codes, self.added % self.slots) if slot not in hidden]
        assert self.order.count == len(expected)
        if expected:
            assert slots_at(self.order, np.arange(len(expected))) == expected
            ranks = np.array(self.random.choices(range(len(expected)), k=7))
            assert slots_at(self.order, ranks) == [expected[rank] for rank in ranks]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the order divided blocks, gained rows by putting some together, and sorted everything."""
    done: Counter[str] = Counter()
    for name in ("_divide", "_spare_rows", "_sort"):
        method = getattr(RankOrder, name)

        def counted(order: RankOrder, *given: np.ndarray, name: str = name, method: object = method) -> object:
            done[name] += 1
            return method(order, *given)  # type: ignore[operator]

        monkeypatch.setattr(RankOrder, name, counted)
    return done


@pytest.mark.parametrize("kinds", [1, 3, len(CODES), 0])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_the_order_is_exact_through_random_changes(
    width: int, kinds: int, monkeypatch: pytest.MonkeyPatch, work: Counter[str]
) -> None:
    monkeypatch.setattr(rank_order, "width_for", lambda slots: width)
    # sorted anew only when nearly everything has changed
    monkeypatch.setattr(rank_order, "_CHANGED", 1)
    for slots in (*range(1, 41), 150):
        Ring(slots, f"{width} {kinds} {slots}", kinds).change(25 if slots <= 40 else 200, most=slots // 3, checked=0.7)
    assert work["_divide"] > 100
    assert work["_spare_rows"] > 0


@pytest.mark.parametrize("falling", [False, True])
def test_new_entries_that_all_come_to_one_end(falling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that goes round many times, each new entry before or after all others: empty blocks are used again."""
    monkeypatch.setattr(rank_order, "width_for", lambda slots: 8)
    Ring(300, "end", 0).go_round(200, falling, every=10)


def test_few_changes_sort_nothing_anew(work: Counter[str]) -> None:
    ring = Ring(20_000, "few", 0)
    ring.add(20_000)
    ring.check()
    for _ in range(40):
        ring.update(64)
        ring.add(8, CODES[3])
        ring.check(hide=0)
    assert work["_sort"] == 1


def test_many_changes_are_sorted_anew(work: Counter[str]) -> None:
    ring = Ring(20_000, "many", 0)
    ring.add(10_000)
    ring.check()
    for _ in range(10):
        ring.add(1000)
    ring.check()
    assert work["_sort"] == 2


def test_what_nobody_asked_for_costs_nothing(work: Counter[str]) -> None:
    ring = Ring(1000, "nothing", 0)
    for _ in range(50):
        ring.add(100)
        ring.update(50)
    assert not work


@pytest.mark.parametrize("slots", [1, 64, 1000, 100_003])
def test_bytes(slots: int) -> None:
    order = RankOrder(np.zeros(slots, dtype=np.int64), slots)
    arrays = [value for value in vars(order).values() if isinstance(value, np.ndarray) and value.base is None]
    order.sort_changes(0)
    held = sum(array.nbytes for array in arrays) - order._leaves.nbytes
    # what grows and shrinks is counted in full
    assert held <= order.nbytes == order_bytes(slots)
    assert order.nbytes <= held + 40 * (math.ceil(slots / 32) + 2)


# the order in compiled loops


@pytest.fixture(name="compiled")
def compiled_fixture(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Counter[str]]:
    """The compiled order with groups of four blocks, and how often it divided one, filled blocks up, and sorted."""
    pytest.importorskip("numba")
    from gpu_replay.ops import numba_rank_order

    monkeypatch.setattr(numba_rank_order, "fan_for", lambda slots: 4)
    done: Counter[str] = Counter()
    for name in ("_divide_group", "_slots_in_order", "_sort"):
        method = getattr(numba_rank_order.RankOrder, name)

        def counted(order: Any, *given: Any, name: str = name, method: Any = method) -> Any:
            done[name] += 1
            return method(order, *given)

        monkeypatch.setattr(numba_rank_order.RankOrder, name, counted)
    return numba_rank_order.RankOrder, done


@pytest.mark.parametrize("kinds", [1, 3, len(CODES), 0])
def test_the_compiled_order_is_exact_through_random_changes(
    kinds: int, compiled: tuple[Any, Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # sorted anew only when nearly everything has changed
    monkeypatch.setattr(rank_order, "_CHANGED", 1)
    order, done = compiled
    for slots in (1, 2, 31, 32, 33, 150, 600):
        Ring(slots, f"{kinds} {slots}", kinds, order).change(25, most=slots // 6, checked=0.5)
    assert done["_divide_group"] > 0


@pytest.mark.parametrize("falling", [False, True])
def test_new_entries_that_all_come_to_one_end_of_the_compiled_order(
    falling: bool, compiled: tuple[Any, Counter[str]]
) -> None:
    order, done = compiled
    Ring(700, "end", 0, order).go_round(300, falling, every=50, hide=0)
    # empty blocks are used again without sorting
    assert done["_sort"] == 1
    assert done["_slots_in_order"] > 1


def test_the_compiled_order_sorts_few_changes_into_place_and_many_anew(compiled: tuple[Any, Counter[str]]) -> None:
    order, done = compiled
    ring = Ring(2000, "few", 0, order)
    ring.add(2000)
    for _ in range(20):
        ring.update(64)
        ring.add(8, CODES[3])
        ring.order.sort_changes(ring.added)
    assert done["_sort"] == 1
    ring.check()
    for _ in range(4):
        ring.add(200)
    ring.check(hide=1)
    assert done["_sort"] == 2


def test_more_changes_than_are_looked_up_at_once(compiled: tuple[Any, Counter[str]]) -> None:
    from gpu_replay.ops import numba_rank_loops

    ring = Ring(12_000, "many", 3, compiled[0])
    ring.add(12_000)
    ring.order.sort_changes(ring.added)
    slots = np.arange(0, ring.slots, 8)
    ring.codes[slots] = [ring.code() for _ in slots]
    ring.order.note_slots(slots)
    assert ring.order._state[numba_rank_loops.NOTED] > numba_rank_loops._KNOWN
    ring.check(hide=0)
    assert compiled[1]["_sort"] == 1


@pytest.mark.parametrize("slots", [1, 64, 1000, 100_003])
def test_bytes_of_the_compiled_order(slots: int) -> None:
    pytest.importorskip("numba")
    from gpu_replay.ops import numba_rank_order

    order = numba_rank_order.RankOrder(np.zeros(slots, dtype=np.int64), slots)
    held = sum(array.nbytes for array in (*order.arrays, order._changed, order._guide))
    assert held == order.nbytes == numba_rank_order.order_bytes(slots)


def test_the_loops_decide_which_order_a_buffer_has() -> None:
    loops = _backend.inner_loops()
    slots = 1000
    assert loops.RankOrder(np.zeros(slots, dtype=np.int64), slots).nbytes == loops.order_bytes(slots)
