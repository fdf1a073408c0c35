"""Proportional sampling: what is drawn is the stated distribution, exactly, at every scale of the masses.

Draws are compared with the plain-Python oracle where both must agree bit for bit, and with exact probabilities by
chi-square tests (one in a million is the stated rate of false alarms of each).
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from distribution import check_counts
from model import UNIT, stratum
from transitions import EXACT, NUMBER, make, with_masses

from gpu_replay import LinearSchedule, Proportional, ReplayBuffer

pytestmark = pytest.mark.contract

INDEPENDENT = Proportional(alpha=1.0, beta=1.0, eps=0.0, stratified=False)


def spread_masses(count: int, seed: int, decades: float) -> list[int]:
    """Masses log-uniform over so many decades, the smallest about 1,000."""
    generator = random.Random(seed)
    return [int(1000 * 10 ** generator.uniform(0, decades)) for _ in range(count)]


@pytest.mark.parametrize("settings", [EXACT, INDEPENDENT], ids=["stratified", "independent"])
def test_frequencies_are_the_exact_probabilities(settings: Proportional, device: str) -> None:
    masses = spread_masses(97, 5, 3.0)
    buffer = with_masses(masses, settings, device=device, seed=11)
    keys = torch.cat([buffer.sample(scale(4096, 1024)).key for _ in range(scale(250, 10))])
    check_counts(Counter(keys.tolist()), dict(enumerate(masses)))


def test_every_row_of_a_stratified_batch_follows_its_own_stratum(device: str) -> None:
    masses = [3 * UNIT, UNIT, 5 * UNIT, UNIT // 2, 2 * UNIT, 4 * UNIT, 3 * UNIT, UNIT]
    buffer = with_masses(masses, device=device, seed=2)
    rows = [buffer.sample(4).key.tolist() for _ in range(scale(4000, 60))]
    ends = list(accumulate(masses))
    for part, keys in enumerate(zip(*rows, strict=True)):
        low, high = stratum(part, 4, ends[-1])
        overlap = {
            slot: max(0, min(high, end) - max(low, end - mass))
            for slot, (mass, end) in enumerate(zip(masses, ends, strict=True))
        }
        check_counts(Counter(keys), overlap)


def test_independent_draws_of_one_call_do_not_depend_on_each_other(device: str) -> None:
    masses = [UNIT, 2 * UNIT, 3 * UNIT]
    buffer = with_masses(masses, INDEPENDENT, device=device, seed=9)
    keys = torch.cat([buffer.sample(256).key for _ in range(scale(100, 8))]).tolist()
    expected = {(one, two): masses[one] * masses[two] for one in range(3) for two in range(3)}
    check_counts(Counter(zip(keys[::2], keys[1::2], strict=True)), expected)


# a mass of 1 puts every target on a border between two slots
@pytest.mark.parametrize("mass", [1, 3, UNIT])
@pytest.mark.parametrize("size", scale([1, 2, 127, 128, 129, 4095, 4096, 4097, 70_001], [1, 129, 4097]))
def test_every_slot_from_first_to_last_is_reachable(size: int, mass: int, device: str) -> None:
    buffer = with_masses([mass] * size, device=device)
    assert buffer.sample(size).key.tolist() == list(range(size))


def test_last_of_100_003_equal_masses_is_reachable(device: str) -> None:
    size = 100_003
    buffer = ReplayBuffer(size, NUMBER, sampler=EXACT, device=device, seed=1)
    buffer.add(number=torch.arange(size, device=device))
    assert buffer.total_mass() == size * UNIT
    # as many equal parts as equal masses: each part is one slot
    assert torch.equal(buffer.sample(size).key.cpu(), torch.arange(size))
    # 97 parts: the last of them holds the last 1,030 slots
    last = [buffer.sample(97).key[-1].item() for _ in range(scale(200, 4))]
    assert min(last) >= size - 1031
    assert max(last) < size


@pytest.mark.parametrize("size, times", [(8, 1023), (300, 63), (5000, 1)])
def test_tiny_masses_behind_a_huge_one(size: int, times: int, device: str) -> None:
    # an odd number that single precision cannot add to the huge mass
    tiny, rest = UNIT + 1, size - 1
    masses = [times * tiny * rest] + [tiny] * rest
    buffer = with_masses(masses, device=device, seed=size)
    # as many equal parts as tiny masses would fill: the last of them are one tiny slot each
    keys = buffer.sample((times + 1) * rest).key
    assert keys[: times * rest].eq(0).all()
    assert keys[times * rest :].tolist() == list(range(1, size))


def test_huge_mass_behind_tiny_ones(device: str) -> None:
    masses = [1] * 999 + [2**50]
    buffer = with_masses(masses, device=device, seed=6)
    assert buffer.total_mass() == 2**50 + 999
    batch = buffer.sample(512)
    assert set(batch.key.tolist()) <= set(range(1000))
    assert batch.key[1:].eq(999).all()


def test_mass_of_one_beside_the_largest_is_counted_exactly(device: str) -> None:
    buffer = with_masses([2**60, 1], device=device)
    assert buffer.total_mass() == 2**60 + 1
    assert set(buffer.sample(1000).key.tolist()) <= {0, 1}
    buffer.update_priorities(torch.tensor([0], device=device), torch.tensor([1 / UNIT], device=device))
    assert (buffer.total_mass(), buffer.sample(2).key.tolist()) == (2, [0, 1])


def test_nothing_is_left_of_a_huge_mass_that_shrank(device: str) -> None:
    size = 1000
    buffer = with_masses([UNIT] * size, device=device)
    for slot in (0, 499, 999):
        key = torch.tensor([slot], device=device)
        buffer.update_priorities(key, torch.tensor([2.0**31], device=device))
        assert buffer.total_mass() == 2**51 + (size - 1) * UNIT
        assert buffer.sample(4096).key.eq(slot).sum() >= 4090
        buffer.update_priorities(key, torch.tensor([1.0], device=device))
        assert (buffer.total_mass(), buffer.sample(size).key.tolist()) == (size * UNIT, list(range(size)))


def test_total_is_the_exact_sum_after_many_updates_over_ten_orders_of_magnitude(device: str) -> None:
    size, rounds, width = 1009, scale(200, 12), 500
    buffer = make(size, EXACT, device=device, **NUMBER)
    buffer.add(number=torch.arange(size, device=device))
    generator, exact = torch.Generator().manual_seed(0), [UNIT] * size
    for _ in range(rounds):
        keys = torch.randint(0, size, (width,), generator=generator)
        exponents = torch.rand(width, generator=generator, dtype=torch.float64) * 10 - 5
        masses = (10**exponents * UNIT).round().long().clamp(min=1)
        buffer.update_priorities(keys.to(device), (masses.double() / UNIT).to(device))
        for key, mass in zip(keys.tolist(), masses.tolist(), strict=True):
            exact[key] = mass
        assert buffer.total_mass() == sum(exact)
    assert buffer.masses().tolist() == exact
    buffer.update_priorities(torch.arange(size, device=device), torch.ones(size, device=device))
    assert (buffer.total_mass(), buffer.sample(size).key.tolist()) == (size * UNIT, list(range(size)))


@pytest.mark.parametrize("start, end", [(0.4, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("step, share", [(0, 0), (1, 0.25), (2, 0.5), (4, 1), (5, 1), (10**9, 1)])
def test_schedule_goes_from_start_to_end_and_stays(step: int, share: float, start: float, end: float) -> None:
    assert LinearSchedule(start, end, steps=4)(step) == pytest.approx(start + (end - start) * share)
