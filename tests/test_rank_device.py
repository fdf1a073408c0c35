"""Draws by rank through kernels, against plain models of lists and against the host code: the same integers.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from guards import Guards
from interpreted import kernel_device as kernel_device
from launches import use_sizes_of_a_gpu

from gpu_replay.ops import rank_merge
from gpu_replay.ops.counters import NO_MASS, Counter, HostWords, new_counters
from gpu_replay.ops.draws import DeviceDraws
from gpu_replay.ops.launch import Launch
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.rank_draw import DeviceRanks, RankList, plan_rank_draw
from gpu_replay.ops.rank_merge import digits_for
from gpu_replay.ops.rank_table import cumulative_masses
from gpu_replay.ops.stratified_draw import stratified_targets
from gpu_replay.ops.uniform_draw import independent_ranks


class Ring:
    """Order codes of a ring whose next key goes to the slot `head`, and who may be drawn in which order."""

    def __init__(self, codes: list[int], head: int, device: str, *, seed: int = 7) -> None:
        self.codes, self.head, self.slots = codes, head, len(codes)
        self.tree = MassTree(self.slots, torch.device(device), "triton", summed=False)
        self.tree.masses.copy_(torch.tensor(codes))
        self.seed, self.block = seed, 5
        self.counters = new_counters(torch.device(device), seed)
        self.counters[Counter.ADDED] = self.added = 3 * self.slots + head
        self.counters[Counter.RANDOM] = self.block
        self.times_sampled = torch.zeros(self.slots, dtype=torch.int32, device=device)

    def age(self, slot: int) -> int:
        """0 for the slot of the oldest key."""
        return (slot - self.head) % self.slots

    def order(self, skipped: int = 0) -> list[int]:
        """Slots by rank."""
        reached = [slot for slot in range(self.slots) if self.codes[slot] and self.age(slot) < self.slots - skipped]
        return sorted(reached, key=lambda slot: (-self.codes[slot], self.age(slot)))

    def key(self, slot: int) -> int:
        return self.added - self.slots + self.age(slot)

    def draw(self, sums: torch.Tensor, made: RankList, drawn: int, batch: int, **form: bool) -> DeviceDraws:
        tree, counters, times_sampled = self.tree, self.counters, self.times_sampled
        form["merged"] = made.merged
        return plan_rank_draw(sums, tree, None, counters, times_sampled, drawn, batch, **form)(made)

    def targets(self, total: int, drawn: int, stratified: bool) -> list[int]:
        doubles = HostWords(self.seed).doubles(self.block, drawn)
        return (stratified_targets if stratified else independent_ranks)(total, doubles).tolist()


def some_codes(slots: int, seed: int, *, empty: float = 0.3, kinds: int = 5) -> list[int]:
    """Few different codes, so that many are equal, at both ends of what a code can be; some slots are empty."""
    generator = np.random.default_rng([slots, seed])
    values = np.array([1, 2, 2**52, 2**62 + 1, 0x7FF0000000000000])[:kinds]
    return np.where(generator.random(slots) < empty, 0, generator.choice(values, slots)).tolist()


# the list


def sorted_list(ring: Ring, alpha: float) -> RankList:
    """A list of the moment, sorted since so much has changed."""
    ranks = DeviceRanks(ring.slots, alpha, 1, ring.counters)
    ranks.changed(ring.slots, capturing=False)
    return ranks.current(ring.tree, False)


def slots_of(made: RankList) -> list[int]:
    """Those that are listed."""
    begin = int(made.listed[1]) if made.merged else 0
    return made.slots[begin : begin + int(made.listed[0])].tolist()


def check_list(ring: Ring, made: RankList, skipped: int) -> None:
    expected = ring.order(skipped)
    assert (int(made.listed[0]), slots_of(made)) == (len(expected), expected)
    # what comes after the end are slots too
    assert set(made.slots.tolist()) <= set(range(ring.slots))


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 40, 127, 128, 129, 1000])
def test_the_list_has_the_largest_code_first_and_equal_ones_by_age(slots: int, device: str, guards: Guards) -> None:
    for seed, head in enumerate((0, 1, slots // 2, slots - 1)):
        ring = Ring(some_codes(slots, seed), head % slots, device)
        ranks = DeviceRanks(slots, 0.7, 1, ring.counters)
        # the first and third are merged with a list of nothing
        ranks.changed(slots * (seed % 2), capturing=False)
        check_list(ring, ranks.current(ring.tree, False), 0)
        for skipped in {1, slots // 3, slots - 1} - {0}:
            check_list(ring, ranks.exact(ring.tree, skipped, False), skipped)
        assert int(ring.counters[Counter.RANKED]) == int(ring.counters[Counter.SORTED]) == 0
    guards.check()


@pytest.mark.parametrize("stored", [0, 1, 1023, 1024, 1025, 2048, 2999, 3000])
def test_the_end_of_the_list_at_every_side_of_a_program(
    stored: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_sizes_of_a_gpu(monkeypatch)
    codes = np.zeros(3000, dtype=np.int64)
    codes[np.random.default_rng(stored).permutation(3000)[:stored]] = 9
    ring = Ring(codes.tolist(), 1234, device)
    ranks = DeviceRanks(3000, 0.7, 4, ring.counters)
    ring.counters[Counter.STEP], ring.counters[Counter.RANKED], ring.counters[Counter.SORTED] = 41, 77, 37
    check_list(ring, ranks.current(ring.tree, False), 0)
    assert (int(ring.counters[Counter.RANKED]), int(ring.counters[Counter.SORTED])) == (stored, 41)


# draws


def check_draws(
    ring: Ring,
    made: RankList,
    drawn: int,
    batch: int,
    *,
    alpha: float = 0.7,
    stratified: bool = True,
    lowest_of_all: bool = False,
    outdated: bool = False,
) -> None:
    """Draw, and compare with the search of a plain list."""
    listed, sums = slots_of(made), cumulative_masses(ring.slots, alpha)
    form = {"stratified": stratified, "lowest_of_all": lowest_of_all, "outdated": outdated}
    found = ring.draw(torch.from_numpy(sums).to(made.slots.device), made, drawn, batch, **form)
    total = int(sums[len(listed) - 1])
    ranks = [int(np.searchsorted(sums, target, "right")) for target in ring.targets(total, drawn, stratified)]
    masses = [int(sums[rank] - (sums[rank - 1] if rank else 0)) for rank in ranks]
    keys = [ring.key(drawable(ring, listed, rank)) for rank in ranks] + list(
        range(ring.added - batch + drawn, ring.added)
    )
    assert (found.keys.tolist(), found.slots.tolist()) == (keys, [key % ring.slots for key in keys])
    assert found.value.tolist() == masses + [0] * (batch - drawn)
    chances = np.array([mass / total for mass in masses] + [1.0] * (batch - drawn)).astype(np.float32)
    assert found.probability.tolist() == chances.tolist()
    lowest = int(sums[len(listed) - 1] - (sums[len(listed) - 2] if len(listed) > 1 else 0))
    assert int(ring.counters[Counter.LOWEST]) == (lowest if lowest_of_all else min(masses))
    assert ring.times_sampled.tolist() == np.bincount(found.slots.cpu(), minlength=ring.slots).tolist()
    ring.times_sampled.zero_()
    ring.counters[Counter.LOWEST] = NO_MASS


def drawable(ring: Ring, listed: list[int], rank: int) -> int:
    """The slot of the first rank from this one on that can be drawn, else the oldest slot that can."""
    turned = listed[rank:] + listed[:rank]
    return next((slot for slot in turned + sorted(range(ring.slots), key=ring.age) if ring.codes[slot]), 0)


@pytest.mark.parametrize("stratified", [True, False], ids=["stratified", "independent"])
@pytest.mark.parametrize("slots", [1, 2, 32, 33, 1024, 1025])
def test_draws_find_their_ranks(slots: int, stratified: bool, device: str, guards: Guards) -> None:
    for seed, alpha in enumerate((0.7, 40.0)):
        codes = some_codes(slots, seed)
        codes[seed % slots] = 5
        ring = Ring(codes, (17 * seed) % slots, device, seed=seed)
        made = sorted_list(ring, alpha)
        for drawn, newest in ((1, 0), (9, 1), (70, 0)):
            for lowest_of_all in (False, True):
                form = {"alpha": alpha, "stratified": stratified, "lowest_of_all": lowest_of_all}
                check_draws(ring, made, drawn, drawn + min(newest, slots), **form)
    guards.check()


def test_draws_by_programs_as_small_as_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_sizes_of_a_gpu(monkeypatch)
    ring = Ring(some_codes(3000, 0, empty=0.01), 2999, device)
    made = sorted_list(ring, 0.7)
    check_list(ring, made, 0)
    for drawn, batch in ((8, 8), (16, 25), (33, 34)):
        check_draws(ring, made, drawn, batch, lowest_of_all=batch == 25)


@pytest.mark.parametrize("slots", [1, 31, 32, 33, 1024, 1025, 2**15, 2**15 + 1, 2**31 - 1])
def test_digits_cover_every_rank(slots: int) -> None:
    assert 32 ** (digits_for(slots) - 1) < slots or slots == 1
    assert slots <= 32 ** digits_for(slots)


# lists that serve several samples


@pytest.mark.parametrize("gone", [0.1, 0.9, 1.0])
@pytest.mark.parametrize("slots", [2, 40, 200])
def test_slots_that_cannot_be_drawn_pass_their_draw_on(slots: int, gone: float, device: str, guards: Guards) -> None:
    for seed in range(2):
        ring = Ring(some_codes(slots, seed, empty=0.4), seed, device, seed=seed)
        # two that are not listed, of which at least one can be drawn later
        ring.codes[0] = ring.codes[slots - 1] = 0
        ring.codes[slots // 2] = ring.codes[slots // 2] or 3
        ring.tree.masses.copy_(torch.tensor(ring.codes))
        made = DeviceRanks(slots, 0.7, 50, ring.counters).current(ring.tree, False)
        check_list(ring, made, 0)
        listed = slots_of(made)
        for slot in np.random.default_rng(seed).permutation(listed)[: max(1, round(gone * len(listed)))]:
            ring.codes[slot] = 0
        ring.codes[slots - 1] = 8
        ring.codes[0] = 2 * (seed % 2)
        ring.tree.masses.copy_(torch.tensor(ring.codes))
        for stratified in (True, False):
            for drawn, batch in ((33, 33), (5, 6)):
                check_draws(ring, made, drawn, batch, stratified=stratified, outdated=True)
    guards.check()


@pytest.mark.parametrize("outdated", [False, True])
@pytest.mark.parametrize("listed", [0, 6])
def test_draws_where_nothing_can_be_drawn_stay_inside(listed: int, outdated: bool, device: str, guards: Guards) -> None:
    """Only a replayed graph can ask for them; they mean nothing, and must harm nothing."""
    ring = Ring([9] * listed + [0] * (40 - listed), 3, device)
    ranks = DeviceRanks(40, 0.7, 9, ring.counters)
    made = ranks.current(ring.tree, False)
    assert made.listed.tolist() == [listed]
    ring.tree.clear()
    found = ring.draw(ranks.sums, made, 7, 9, stratified=True, lowest_of_all=True, outdated=outdated)
    assert 0 <= int(found.slots.min()) <= int(found.slots.max()) < 40
    assert int(ring.times_sampled.sum()) == 9
    assert bool(found.probability.isfinite().all())
    guards.check()


# lists that are brought up to date


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few changes are compared with each other, two at a time, that others must be joined, four times."""
    monkeypatch.setattr(rank_merge, "_RUN", 4)
    monkeypatch.setattr(rank_merge, "_CHUNK", 2)
    monkeypatch.setattr(rank_merge, "_FAN", 2)
    monkeypatch.setattr(rank_merge, "_PROGRAMS", 3)


def change(ring: Ring, generator: np.random.Generator, added: int, updated: int) -> None:
    """Overwrite the oldest slots and give others new codes, of which some are 0 and some what they were."""
    values = np.array([0, 1, 2, 2, 2**52, 2**62 + 1, 0x7FF0000000000000])
    for slot in (ring.head + np.arange(added)) % ring.slots:
        ring.codes[slot] = int(generator.choice(values))
    for slot in generator.integers(0, ring.slots, updated):
        ring.codes[slot] = int(generator.choice(values))
    ring.added += added
    ring.head = ring.added % ring.slots
    ring.tree.masses.copy_(torch.tensor(ring.codes))
    ring.counters[Counter.ADDED] = ring.added


def check_merges(ring: Ring, counts: list[tuple[int, int]]) -> None:
    """Change so many, and compare each list with a plain one."""
    ranks, generator = DeviceRanks(ring.slots, 0.7, 1, ring.counters), np.random.default_rng(ring.slots)
    # as after a graph: the host knows nothing, and does not sort
    ranks._unsure = True
    for added, updated in counts:
        change(ring, generator, added, updated)
        made = ranks.current(ring.tree, False)
        check_list(ring, made, 0)
        assert ranks._merged.known.tolist() == ring.codes


@pytest.mark.parametrize("slots", [1, 2, *(pytest.param(many, marks=pytest.mark.slow) for many in (13, 33, 70))])
def test_a_list_is_brought_up_to_date(slots: int, device: str, guards: Guards, short_runs: None) -> None:
    few = max(1, slots // 8)
    counts = [(0, 0), (few, few), (0, 0), (0, 1), (1, 0), (slots // 2, slots), (2 * slots, 0)]
    check_merges(Ring(some_codes(slots, 0), slots // 3, device), counts)
    guards.check()


def test_as_many_changes_as_runs_hold(device: str, short_runs: None) -> None:
    ring, generator = Ring([5] * 40, 0, device), np.random.default_rng(0)
    ranks = DeviceRanks(40, 0.7, 1, ring.counters)
    ranks._unsure = True
    # runs of 4 are joined twice as long each time
    for changes in (40, 4, 8, 16, 32):
        for slot in generator.permutation(40)[:changes]:
            ring.codes[slot] += int(generator.integers(1, 3))
        ring.tree.masses.copy_(torch.tensor(ring.codes))
        check_list(ring, ranks.current(ring.tree, False), 0)


def test_a_graph_merges_however_much_the_host_has_seen_to_change(device: str) -> None:
    ring = Ring(some_codes(40, 1), 3, device)
    ranks = DeviceRanks(40, 0.7, 1, ring.counters)
    ranks.changed(40, capturing=False)
    for capturing in (True, False):
        made = ranks.current(ring.tree, capturing)
        check_list(ring, made, 0)
        # a merge writes the other half, a sort the first
        assert int(made.listed[1]) == 40 * capturing


@pytest.mark.slow
def test_a_list_of_programs_as_small_as_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_sizes_of_a_gpu(monkeypatch)
    monkeypatch.setattr(rank_merge, "_PROGRAMS", 5)
    check_merges(Ring(some_codes(2100, 1, empty=0.1), 2099, device), [(0, 0), (3, 40), (1030, 9)])


def interrupted(launch: Any) -> Any:
    """Launches of which the one that merges is never made."""

    def made(self: Launch, *given: Any, **named: Any) -> None:
        if self._kernel.__name__ == "merge_kernel":
            raise KeyboardInterrupt
        launch(self, *given, **named)

    return made


def test_what_a_list_is_merged_with_outlives_clear_sort_and_a_merge_that_is_broken_off(
    device: str, monkeypatch: pytest.MonkeyPatch, short_runs: None
) -> None:
    ring, generator = Ring(some_codes(40, 2), 3, device), np.random.default_rng(0)
    ranks = DeviceRanks(40, 0.7, 1, ring.counters)
    # nothing is listed at first, and the host has not seen the changes
    check_list(ring, ranks.current(ring.tree, False), 0)
    for time in range(4):
        change(ring, generator, 5, 3)
        ranks.changed(40 if time == 1 else 1, capturing=False)
        if time == 2:
            ring.codes = [0] * 40
            ring.tree.clear()
            ranks.on_clear(capturing=False)
        if time == 3:
            with monkeypatch.context() as patch:
                patch.setattr(Launch, "__call__", interrupted(Launch.__call__))
                with pytest.raises(KeyboardInterrupt):
                    ranks.current(ring.tree, True)
        made = ranks.current(ring.tree, capturing=time in (0, 3))
        check_list(ring, made, 0)
        if any(ring.codes):
            check_draws(ring, made, 9, 9)
        # a merge writes the other half, a sort the first
        assert int(made.listed[1]) == (40 if time == 3 else 0)
