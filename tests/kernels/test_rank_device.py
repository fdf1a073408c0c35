"""Draws by rank through kernels, against plain models of lists and against the host code: the same integers.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from guards import Guards
from interpreted import kernel_device as kernel_device
from launches import use_sizes_of_a_gpu

from gpu_replay.ops.counters import NO_MASS, Counter, HostWords, new_counters
from gpu_replay.ops.draw import DeviceDraws, digits_for, independent_ranks, plan_draw, stratified_targets
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.rank_draw import DeviceRanks, RankList
from gpu_replay.ops.ranks import cumulative_masses


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
        planned = plan_draw(
            "rank", self.counters, self.times_sampled, drawn, batch, self.slots, tree=self.tree, sums=sums, **form
        )
        return planned.launch(made)

    def targets(self, total: int, drawn: int, stratified: bool) -> list[int]:
        doubles = HostWords(self.seed).doubles(self.block, drawn)
        return (stratified_targets if stratified else independent_ranks)(total, doubles).tolist()


def some_codes(slots: int, seed: int, *, empty: float = 0.3, kinds: int = 5) -> list[int]:
    """Few different codes, so that many are equal, at both ends of what a code can be; some slots are empty."""
    generator = np.random.default_rng([slots, seed])
    values = np.array([1, 2, 2**52, 2**62 + 1, 0x7FF0000000000000])[:kinds]
    return np.where(generator.random(slots) < empty, 0, generator.choice(values, slots)).tolist()


# the list


def slots_of(ring: Ring, made: RankList) -> list[int]:
    """Those that are listed."""
    return [(ring.head + age) % ring.slots for age in made.ages[: int(made.listed)].tolist()]


def check_list(ring: Ring, made: RankList, skipped: int = 0) -> None:
    expected = ring.order(skipped)
    assert (int(made.listed), slots_of(ring, made)) == (len(expected), expected)
    # what comes after the end are ages too
    assert sorted(made.ages.tolist()) == list(range(ring.slots))
    assert int(ring.counters[Counter.TICKET]) == 0


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 40, 127, 128, 129, 1000])
def test_the_list_has_the_largest_code_first_and_equal_ones_by_age(slots: int, device: str, guards: Guards) -> None:
    for seed, head in enumerate((0, 1, slots // 2, slots - 1)):
        ring = Ring(some_codes(slots, seed), head % slots, device)
        ranks = DeviceRanks(slots, 0.7, ring.counters)
        check_list(ring, ranks.current(ring.tree, False))
        for skipped in {1, slots // 3, slots - 1} - {0}:
            check_list(ring, ranks.of(ring.tree, skipped), skipped)
    guards.check()


@pytest.mark.parametrize("stored", [0, 1, 1023, 1024, 1025, 2048, 2999, 3000])
def test_programs_count_together_what_can_be_drawn(stored: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_sizes_of_a_gpu(monkeypatch)
    codes = np.zeros(3000, dtype=np.int64)
    codes[np.random.default_rng(stored).permutation(3000)[:stored]] = 9
    ring = Ring(codes.tolist(), 1234, device)
    check_list(ring, DeviceRanks(3000, 0.7, ring.counters).current(ring.tree, False))


def test_a_list_is_sorted_anew_after_each_change_and_in_every_graph(device: str) -> None:
    ring = Ring(some_codes(40, 1), 3, device)
    ranks = DeviceRanks(40, 0.7, ring.counters)
    check_list(ring, ranks.current(ring.tree, False))
    before = ring.order()
    ring.codes[7] = 2**60
    ring.tree.masses[7] = 2**60
    # the host has heard of no change
    assert slots_of(ring, ranks.current(ring.tree, False)) == before
    check_list(ring, ranks.current(ring.tree, True))
    ring.codes[9] = 2**61
    ring.tree.masses[9] = 2**61
    ranks.changed(capturing=False)
    check_list(ring, ranks.current(ring.tree, False))
    # what a graph changes is seen by nobody, so that from then on every sample sorts
    ranks.changed(capturing=True)
    for code in (2**61 + 1, 2):
        check_list(ring, ranks.current(ring.tree, False))
        ring.codes[30] = code
        ring.tree.masses[30] = code
    check_list(ring, ranks.current(ring.tree, False))


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
) -> None:
    """Draw, and compare with the search of a plain list."""
    listed, sums = slots_of(ring, made), cumulative_masses(ring.slots, alpha)
    form = {"stratified": stratified, "lowest_of_all": lowest_of_all}
    found = ring.draw(torch.from_numpy(sums).to(made.ages.device), made, drawn, batch, **form)
    total = int(sums[len(listed) - 1])
    ranks = [int(np.searchsorted(sums, target, "right")) for target in ring.targets(total, drawn, stratified)]
    masses = [int(sums[rank] - (sums[rank - 1] if rank else 0)) for rank in ranks]
    keys = [ring.key(listed[rank]) for rank in ranks] + list(range(ring.added - batch + drawn, ring.added))
    assert (found.keys.tolist(), found.slots.tolist()) == (keys, [key % ring.slots for key in keys])
    assert found.value.tolist() == masses + [0] * (batch - drawn)
    chances = np.array([mass / total for mass in masses] + [1.0] * (batch - drawn)).astype(np.float32)
    assert found.probability.tolist() == chances.tolist()
    lowest = int(sums[len(listed) - 1] - (sums[len(listed) - 2] if len(listed) > 1 else 0))
    assert int(ring.counters[Counter.LOWEST]) == (lowest if lowest_of_all else min(masses))
    assert ring.times_sampled.tolist() == np.bincount(found.slots.cpu(), minlength=ring.slots).tolist()
    ring.times_sampled.zero_()
    ring.counters[Counter.LOWEST] = NO_MASS


@pytest.mark.parametrize("stratified", [True, False], ids=["stratified", "independent"])
@pytest.mark.parametrize("slots", [1, 2, 32, 33, 1024, 1025])
def test_draws_find_their_ranks(slots: int, stratified: bool, device: str, guards: Guards) -> None:
    for seed, alpha in enumerate((0.7, 40.0)):
        codes = some_codes(slots, seed)
        codes[seed % slots] = 5
        ring = Ring(codes, (17 * seed) % slots, device, seed=seed)
        made = DeviceRanks(slots, alpha, ring.counters).current(ring.tree, False)
        for drawn, newest in ((1, 0), (9, 1), (70, 0)):
            for lowest_of_all in (False, True):
                form = {"alpha": alpha, "stratified": stratified, "lowest_of_all": lowest_of_all}
                check_draws(ring, made, drawn, drawn + min(newest, slots), **form)
    guards.check()


def test_draws_by_programs_as_small_as_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_sizes_of_a_gpu(monkeypatch)
    ring = Ring(some_codes(3000, 0, empty=0.01), 2999, device)
    made = DeviceRanks(3000, 0.7, ring.counters).current(ring.tree, False)
    check_list(ring, made)
    for drawn, batch in ((8, 8), (16, 25), (33, 34)):
        check_draws(ring, made, drawn, batch, lowest_of_all=batch == 25)


@pytest.mark.parametrize("slots", [1, 31, 32, 33, 1024, 1025, 2**15, 2**15 + 1, 2**31 - 1])
def test_digits_cover_every_rank(slots: int) -> None:
    assert 32 ** (digits_for(slots) - 1) < slots or slots == 1
    assert slots <= 32 ** digits_for(slots)


@pytest.mark.parametrize("listed", [0, 6])
def test_draws_where_nothing_can_be_drawn_stay_inside(listed: int, device: str, guards: Guards) -> None:
    """Only a replayed graph can ask for them; they mean nothing, and must harm nothing."""
    ring = Ring([9] * listed + [0] * (40 - listed), 3, device)
    ranks = DeviceRanks(40, 0.7, ring.counters)
    made = ranks.current(ring.tree, False)
    assert made.listed.tolist() == [listed]
    ring.tree.clear()
    found = ring.draw(ranks.sums, made, 7, 9, stratified=True, lowest_of_all=True)
    assert 0 <= int(found.slots.min()) <= int(found.slots.max()) < 40
    assert int(ring.times_sampled.sum()) == 9
    assert bool(found.probability.isfinite().all())
    guards.check()
