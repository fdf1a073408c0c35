"""Kernels that draw and weigh, and trees, against the host code: integers are equal, nothing is written outside.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from guards import Guards
from interpreted import kernel_device as kernel_device
from tolerances import close
from trees import check_sums, random_masses

from gpu_replay import LinearSchedule
from gpu_replay.kernels.division import divided
from gpu_replay.kernels.random import floor_of_product
from gpu_replay.ops.counters import NO_MASS, Counter, HostWords, new_counters
from gpu_replay.ops.draw import (
    PERMUTATION_WORDS,
    DeviceDraws,
    draw_by_mass,
    importance_weights,
    independent_ranks,
    permuted_ranks,
    plan_draw,
    reciprocal,
)
from gpu_replay.ops.mass_tree import DIRTY, MassTree
from gpu_replay.ops.ring import plan_gather
from gpu_replay.ops.weights import pending_weights

CPU = torch.device("cpu")
SIZES = (1, 2, 127, 128, 129, 4095)


# the tree, and draws from it


def tree_of(masses: np.ndarray, device: str = "", **edges: bool) -> MassTree:
    """A tree of the kernels on a device, or of the host."""
    tree = MassTree(masses.size, torch.device(device or "cpu"), "triton" if device else "host", **edges)
    tree.masses.copy_(torch.from_numpy(masses))
    tree.build()
    return tree


def memory_of(slots: int, device: str, *, seed: int = 0, **values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counters with these values, and how often each slot was drawn."""
    counters = new_counters(torch.device(device), seed)
    for name, value in values.items():
        counters[getattr(Counter, name)] = value
    return counters, torch.zeros(slots, dtype=torch.int32, device=device)


def at(counters: torch.Tensor, *names: str) -> list[int]:
    return [int(counters[getattr(Counter, name)]) for name in names]


@pytest.mark.parametrize("slots", [*SIZES, 20_000, 100_003])
def test_building_a_tree(slots: int, device: str, guards: Guards) -> None:
    tree = tree_of(random_masses(slots, slots, 2**62 // slots), device, low=True, high=True)
    assert len(guards) > len(tree.levels)
    check_sums(tree)


def by_mass(
    tree: MassTree, counters: torch.Tensor, times_sampled: torch.Tensor, drawn: int, batch: int, **how: bool
) -> DeviceDraws:
    return plan_draw("mass", counters, times_sampled, drawn, batch, tree.slots, tree=tree, **how).launch()


@pytest.mark.parametrize("stratified", [True, False], ids=["stratified", "independent"])
@pytest.mark.parametrize(
    "slots, batch, drawn",
    [(1, 1, 1), (1, 129, 128), (2, 5, 5), (127, 128, 127), (129, 129, 129), (4095, 33, 30), (100_003, 257, 257)],
)
def test_draws_by_mass(slots: int, batch: int, drawn: int, stratified: bool, device: str, guards: Guards) -> None:
    masses = random_masses(slots, slots + batch, 2**62 // slots)
    tree = tree_of(masses, device, low=True)
    added, block = 3 * slots + max(slots // 3, batch), 7
    counters, times_sampled = memory_of(slots, device, seed=-9, ADDED=added, RANDOM=block)
    doubles = HostWords(-9).doubles(block, drawn)
    expected, *_, total = draw_by_mass(tree_of(masses), doubles, stratified=stratified)
    drawn_masses = masses[expected]
    newest = np.arange(added - (batch - drawn), added)
    slots_expected = np.concatenate((expected, newest % slots))

    for lowest_of_all in (False, True):
        counters[Counter.LOWEST] = NO_MASS
        times_sampled.zero_()
        found_slots, keys, probability, found_masses, *_ = by_mass(
            tree, counters, times_sampled, drawn, batch, stratified=stratified, lowest_of_all=lowest_of_all
        )
        assert found_slots.tolist() == slots_expected.tolist()
        live = np.arange(added - slots, added)
        assert keys.tolist() == [*(int(live[live % slots == slot][0]) for slot in expected), *newest.tolist()]
        assert found_masses.tolist() == [*drawn_masses.tolist(), *[0] * (batch - drawn)]
        assert close(probability, [*(drawn_masses / total).tolist(), *[1.0] * (batch - drawn)], "probability")
        assert times_sampled.tolist() == np.bincount(slots_expected, minlength=slots).tolist()
        lowest = masses[masses > 0].min() if lowest_of_all else drawn_masses.min()
        assert int(counters[Counter.LOWEST]) == lowest
        # the position of the stream moves on with the weights
        assert int(counters[Counter.RANDOM]) == block
    check_sums(tree)
    assert not (tree.low == DIRTY).any()


@pytest.mark.parametrize("batch", [1, 7, 360, 450, 1000])
def test_targets_on_the_very_first_and_last_unit_of_a_slot(batch: int, device: str, guards: Guards) -> None:
    """With as many draws as there is mass, every unit is a target once; with 360, 90 strata have a unit more."""
    masses = np.tile([0, 1, 0, 0, 2], 150)
    tree = tree_of(masses, device)
    counters, times_sampled = memory_of(masses.size, device, ADDED=masses.size)
    found, *_ = by_mass(tree, counters, times_sampled, batch, batch)
    expected = draw_by_mass(tree_of(masses), HostWords(0).doubles(0, batch), stratified=True).slots
    assert found.tolist() == expected.tolist()
    if batch == masses.sum():
        assert times_sampled.tolist() == masses.tolist()


@triton.jit
def floor_kernel(words_ptr, widths_ptr, out_ptr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, floor_of_product(tl.load(words_ptr + place), tl.load(widths_ptr + place)))


def test_a_point_in_a_width_stays_below_it_whatever_is_rounded(device: str) -> None:
    words = [0, 2**64 - 1, 2**63, 2**11 - 1, 2**11, 12345678901234567890, 2**64 - 2**11, 2**64 - 1]
    widths = [2**62, 2**62, 2**61 + 1, 2**62, 2**53, 10**18, 2**55 - 1, 0]
    out = torch.empty(8, dtype=torch.int64, device=device)
    given = torch.from_numpy(np.array(words, dtype=np.uint64)).to(device)
    floor_kernel[(1,)](given, torch.tensor(widths, device=device), out, COUNT=8)
    expected = [
        max(0, min(math.floor((word >> 11) * 2.0**-53 * width), width - 1))
        for word, width in zip(words, widths, strict=True)
    ]
    assert out.tolist() == expected


@triton.jit
def division_kernel(numbers_ptr, divisors_ptr, reciprocals_ptr, out_ptr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    number, divisor = tl.load(numbers_ptr + place), tl.load(divisors_ptr + place)
    quotient, rest = divided(number, divisor, tl.load(reciprocals_ptr + place))
    tl.store(out_ptr + place, quotient)
    tl.store(out_ptr + COUNT + place, rest)


def test_division_by_a_reciprocal_is_exact(device: str) -> None:
    """All small numbers, and those around multiples of divisors up to the largest."""
    most = 2**63 - 1
    divisors = [1, 2, 3, 7, 127, 1000, 2**31 - 1, 2**31, 2**32 + 1, 10**12 + 39, 2**62 - 1, 2**62, most - 1, most]
    pairs = [(number, divisor) for divisor in range(1, 33) for number in range(128)]
    for divisor in divisors:
        laps = {0, 1, 2, 3, 2**20, 2**31, most // divisor // 2, most // divisor - 1, most // divisor}
        near = {lap * divisor + by for lap in laps for by in (-2, -1, 0, 1, 2)} | {most, most - 1, 2**62, 2**53 + 1}
        pairs += [(number, divisor) for number in sorted(near) if 0 <= number <= most]
    count = 1 << (len(pairs) - 1).bit_length()
    pairs += [(0, 1)] * (count - len(pairs))
    numbers, by = torch.tensor(pairs, device=device).T.contiguous()
    reciprocals = torch.tensor([reciprocal(divisor) for _, divisor in pairs], device=device)
    out = torch.empty(2 * count, dtype=torch.int64, device=device)
    division_kernel[(1,)](numbers, by, reciprocals, out, COUNT=count)
    assert out[:count].tolist() == [number // divisor for number, divisor in pairs]
    assert out[count:].tolist() == [number % divisor for number, divisor in pairs]


def test_only_blocks_that_changed_are_looked_at_again(device: str, guards: Guards) -> None:
    masses = np.full(1000, 50, dtype=np.int64)
    tree = tree_of(masses, device, low=True)
    counters, times_sampled = memory_of(1000, device)
    draw = {"drawn": 3, "batch": 3, "stratified": True, "lowest_of_all": True}
    by_mass(tree, counters, times_sampled, **draw)
    assert (int(counters[Counter.LOWEST]), tree.low.tolist()) == (50, [50] * 8)
    # changed behind the tree's back: seen only where a mark says so
    tree.masses[130], tree.masses[700] = 3, 2
    tree.low[130 // 128] = DIRTY
    counters[Counter.LOWEST] = NO_MASS
    by_mass(tree, counters, times_sampled, **draw)
    assert (int(counters[Counter.LOWEST]), tree.low.tolist()) == (3, [50, 3, *[50] * 6])


@pytest.mark.parametrize("slots", [1, 129, 20_000])
def test_draws_from_a_tree_without_mass_stay_inside(slots: int, device: str, guards: Guards) -> None:
    """Only a replayed graph can ask for them; they mean nothing, and must harm nothing."""
    tree = tree_of(np.zeros(slots, dtype=np.int64), device)
    counters, times_sampled = memory_of(slots, device)
    found, *_ = by_mass(tree, counters, times_sampled, 9, 12)
    assert int(found.min()) >= 0
    assert int(found.max()) < slots
    assert int(times_sampled.sum()) == 12


def weights(
    masses: torch.Tensor, counters: torch.Tensor, schedule: torch.Tensor | None, beta: float, drawn: int
) -> torch.Tensor:
    """The weights that a gather of nothing makes."""
    weighing = pending_weights(masses, counters, schedule, beta, drawn)
    gather = plan_gather({}, {}, masses.numel(), masses.device, weighed=True)
    assert gather(masses, weighing) == {}
    return weighing.weight


@pytest.mark.parametrize("batch", SIZES)
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, 1 / 3, 1e35])
def test_weights(beta: float, batch: int, device: str, guards: Guards) -> None:
    masses = random_masses(batch, batch, 2**40)
    lowest = int(masses[masses > 0].min())
    counters, _ = memory_of(0, device, LOWEST=lowest)
    weight = weights(torch.from_numpy(masses).to(device), counters, None, beta, batch)
    drawn, expected = masses > 0, np.ones(batch, dtype=np.float32)
    with np.errstate(under="ignore", over="ignore"):
        expected[drawn] = importance_weights(masses[drawn], lowest, beta)
    assert close(weight, expected.tolist(), "weight")
    assert at(counters, "STEP", "TICKET", "LOWEST", "RANDOM") == [1, 0, NO_MASS, -(-batch // 4)]


def test_weights_have_more_than_the_digits_of_a_float32_beta(device: str) -> None:
    beta, ratio = 0.3, 2.0**-40
    counters, _ = memory_of(0, device, LOWEST=1)
    weight = weights(torch.tensor([2**40], device=device), counters, None, beta, 1)
    # the nearest float32 to 0.3 would give this off by 2.2e-7
    assert abs(float(weight[0]) / ratio**beta - 1) < 6.1e-8


def test_the_schedule_is_that_of_the_settings(device: str) -> None:
    beta = LinearSchedule(0.25, 1.0, 6)
    schedule = torch.tensor([beta.start, beta.end - beta.start, 6.0], dtype=torch.float64, device=device)
    counters = new_counters(torch.device(device), seed=0)
    masses = torch.tensor([2**20, 1], device=device)
    for step in range(8):
        counters[Counter.LOWEST] = 1
        weight = weights(masses, counters, schedule, 0.0, 2)
        assert close(weight, [2.0 ** (-20 * beta(step)), 1.0], "weight")


# uniform draws


@pytest.mark.parametrize("replacement", [False, True], ids=["distinct", "replacement"])
@pytest.mark.parametrize(
    "count, capacity, drawn, batch",
    [
        *((count, count, count, count) for count in (1, 2, 3, 5, 62, 63, 64, 65, 127, 128, 129)),
        (129, 4095, 100, 128),
        (4095, 4095, 129, 130),
        (100_003, 100_003, 127, 127),
        (3_000_001, 3_000_001, 4095, 4095),
    ],
)
def test_uniform_draws(
    count: int, capacity: int, drawn: int, batch: int, replacement: bool, device: str, guards: Guards
) -> None:
    added, block = 5 * capacity + 1, 3
    counters, times_sampled = memory_of(
        capacity, device, seed=2**63 + 5, ADDED=added, FIRST=added - count, RANDOM=block
    )
    slots, keys, probability, weight, *_ = plan_draw(
        "uniform", counters, times_sampled, drawn, batch, capacity, replacement=replacement
    ).launch()
    random_bits = HostWords(2**63 + 5)
    if replacement:
        ranks = independent_ranks(count, random_bits.doubles(block, drawn))
    else:
        ranks = permuted_ranks(count, drawn, random_bits.words(block, PERMUTATION_WORDS))
    expected = np.concatenate((added - count + ranks, np.arange(added - (batch - drawn), added)))
    assert (keys.tolist(), slots.tolist()) == (expected.tolist(), (expected % capacity).tolist())
    assert close(probability, [*[1 / count] * drawn, *[1.0] * (batch - drawn)], "probability")
    assert weight.tolist() == [1.0] * batch
    assert times_sampled.tolist() == np.bincount(expected % capacity, minlength=capacity).tolist()
    used = drawn if replacement else PERMUTATION_WORDS
    assert at(counters, "STEP", "TICKET", "RANDOM") == [1, 0, block + -(-used // 4)]


@pytest.mark.parametrize("count", [0, 1, 3, 70])
def test_more_distinct_draws_than_there_are_end_and_stay_inside(count: int, device: str, guards: Guards) -> None:
    """Only a graph replayed after a `clear` can ask for them."""
    counters, times_sampled = memory_of(129, device, seed=1, ADDED=200, FIRST=200 - count)
    slots, keys, *_ = plan_draw("uniform", counters, times_sampled, 120, 128, 129).launch()
    assert slots.tolist() == [key % 129 for key in keys.tolist()]
    assert set(keys.tolist()[:120]) == set(range(200 - count, 200) if count else [200 - 129])


def test_the_newest_of_a_buffer_younger_than_a_replayed_batch_stay_inside(device: str, guards: Guards) -> None:
    counters, times_sampled = memory_of(50, device, seed=1, ADDED=5)
    slots, keys, *_ = plan_draw("uniform", counters, times_sampled, 0, 9, 50).launch()
    assert slots.tolist() == keys.tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4]


def test_what_the_guards_see(device: str) -> None:
    from gpu_replay.kernels.prefix_sum import scan_kernel

    guards, values = Guards(), torch.zeros(256, dtype=torch.int64, device=device)
    sums = guards.allocate((4,), torch.int64, device, "sums")
    sizes = {"EVERY": 32, "BLOCK": 256, "WINDOW": 0, "LOOKS": 1}
    scan_kernel[(1,)](values, values, sums, 128, **sizes)
    guards.check()
    # the kernel is told of more values than there is room for sums of
    scan_kernel[(1,)](values, values, sums, 160, **sizes)
    with pytest.raises(AssertionError, match=r"written outside of \['sums'\]"):
        guards.check()
