"""Sampling by rank: who has which rank, how often each is drawn, and what the weights are.

Hand-worked cases and exact distributions; chi-square tests raise a false alarm once in a million (distribution.py).
Random sequences of calls are in test_programs.py.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import statistical
from distribution import check_counts
from model import rank_masses, stratum
from tolerances import close
from transitions import NUMBER, fill, make

from gpu_replay import RankBased, ReplayBuffer

pytestmark = pytest.mark.contract

GIVEN = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
RANKS = [5, 7, 4, 8, 3, 1, 6, 2]
ORDER = sorted(range(8), key=RANKS.__getitem__)
INDEPENDENT = RankBased(alpha=1.0, beta=1.0, stratified=False)


def given(settings: Any, device: str, priorities: list[float] = GIVEN, *, seed: int = 0) -> ReplayBuffer:
    """A full buffer of transitions with these priorities."""
    buffer = make(len(priorities), settings, device=device, seed=seed, **NUMBER)
    values = torch.tensor(priorities, dtype=torch.float64, device=device)
    buffer.add(number=torch.arange(len(priorities), device=device), priority=values)
    return buffer


def check_ranks(buffer: ReplayBuffer, order: list[int]) -> None:
    """Fail unless all that is stored are these keys, the first rank first; the buffer draws with alpha 1 by parts."""
    # so many draws that every transition is among them
    batch = buffer.sample(40 * len(order))
    ranks = [order.index(key) + 1 for key in batch.key.tolist()]
    assert set(batch.key.tolist()) == set(order)
    harmonic = sum(1 / rank for rank in range(1, len(order) + 1))
    assert close(batch.probability, [1 / rank / harmonic for rank in ranks], "probability")
    assert ranks == sorted(ranks)


def test_ranks_of_a_hand_worked_buffer(device: str) -> None:
    buffer = given(RankBased(alpha=1.0), device)
    check_ranks(buffer, ORDER)
    # key 1 becomes the first, key 5 equal to key 2, which stays before it
    buffer.update_priorities(torch.tensor([1, 5]), torch.tensor([10.0, -4.0]))
    check_ranks(buffer, [1, 7, 4, 2, 5, 0, 6, 3])


def test_equal_priorities_go_by_key_and_not_by_slot(device: str) -> None:
    buffer = make(5, RankBased(alpha=1.0), device=device)
    # keys 5 to 7 take the slots 0 to 2 and enter with the largest priority ever given
    for given, order in (([2, 1, 2, 2, 2], [0, 2, 3, 4, 1]), (None, [3, 4, 5, 6, 7]), ([2], [4, 5, 6, 7, 8])):
        fill(buffer, 3 if given is None else len(given), priority=given)
        check_ranks(buffer, order)


def test_every_number_that_is_a_priority_has_its_place(device: str) -> None:
    # the largest and the smallest number, neighbours in their last bit, and both zeros, which are equal
    largest = 1.7976931348623157e308
    priorities = [0.0, 5e-324, 1.0, largest, math.nextafter(1.0, 2.0), -0.0, 1e-300, -2.0]
    buffer = given(RankBased(alpha=1.0), device, priorities)
    check_ranks(buffer, [3, 7, 4, 2, 6, 1, 0, 5])
    stats = buffer.stats()
    assert (stats.min_priority, stats.max_priority, stats.saturated_priorities) == (0.0, largest, 0)
    stats = given(RankBased(), device, [largest] * 5).stats()
    assert (stats.mean_priority, stats.max_priority) == (pytest.approx(largest), largest)


def test_only_the_order_of_priorities_counts(device: str) -> None:
    draws = []
    for change in (float, lambda value: value**9, lambda value: 1e-12 * value, lambda value: value + 1e6):
        buffer = given(RankBased(), device, [change(value) for value in GIVEN], seed=3)
        batch = buffer.sample(50)
        draws.append((batch.key.tolist(), batch.probability.tolist(), batch.weight.tolist()))
    assert draws[1:] == draws[:1] * 3


@statistical
@pytest.mark.parametrize("stratified", [True, False], ids=["stratified", "independent"])
@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 2.0])
def test_frequencies_are_powers_of_the_rank(alpha: float, stratified: bool, device: str) -> None:
    # many are equal
    priorities = [float((7 * key) % 11) for key in range(50)]
    buffer = given(RankBased(alpha=alpha, stratified=stratified), device, priorities, seed=1)
    order = sorted(range(50), key=lambda key: (-priorities[key], key))
    keys = torch.cat([buffer.sample(1024).key for _ in range(100)])
    check_counts(Counter(keys.tolist()), {key: rank**-alpha for rank, key in enumerate(order, 1)})


@statistical
def test_every_row_of_a_stratified_batch_follows_its_own_part(device: str) -> None:
    buffer, masses = given(RankBased(alpha=1.0), device, seed=2), rank_masses(8, 1.0)
    ends, rows = list(accumulate(masses)), [buffer.sample(4).key.tolist() for _ in range(4000)]
    for part, keys in enumerate(zip(*rows, strict=True)):
        low, high = stratum(part, 4, ends[-1])
        spans = zip(ORDER, masses, ends, strict=True)
        overlap = {key: max(0, min(high, end) - max(low, end - mass)) for key, mass, end in spans}
        # the first rank fills more than the first part
        assert part or set(keys) == {5}
        if part:
            check_counts(Counter(keys), overlap)


@statistical
def test_independent_draws_of_one_call_do_not_depend_on_each_other(device: str) -> None:
    buffer = given(INDEPENDENT, device, [2.0, 3.0, 1.0], seed=9)
    keys = torch.cat([buffer.sample(256).key for _ in range(100)]).tolist()
    chances = {1: 1.0, 0: 1 / 2, 2: 1 / 3}
    expected = {(one, two): chances[one] * chances[two] for one in range(3) for two in range(3)}
    check_counts(Counter(zip(keys[::2], keys[1::2], strict=True)), expected)


@pytest.mark.parametrize("alpha, keys, chance", [(0.0, ORDER, 0.125), (50.0, [5] * 8, 1.0)])
def test_alpha_zero_is_uniform_and_a_large_one_is_greedy(
    alpha: float, keys: list[int], chance: float, device: str
) -> None:
    batch = given(RankBased(alpha=alpha), device).sample(8)
    assert (batch.key.tolist(), batch.probability.tolist(), batch.weight.tolist()) == (keys, [chance] * 8, [1.0] * 8)


# what it says about itself
