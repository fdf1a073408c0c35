"""Every sampler draws what it says: exact distributions over rows, steps and windows, at every scale of the masses.

Chi-square tests raise a false alarm once in a million (see distribution.py); their seeds are fixed. That a buffer draws
the keys of its model bit for bit, whatever runs behind it, is in test_programs.py.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from devices import loops, scale, statistical, thinned
from distribution import check_counts
from model import UNIT, by_rank
from pairs import RowPair, StepPair, live_through, numbered
from programs import SAMPLERS
from tolerances import close
from transitions import NUMBER, fill, make, with_masses

from gpu_replay import Field, LinearSchedule, RankBased, Sequences

pytestmark = pytest.mark.contract

FEW = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
BY_CHANCE = ("uniform", "replacement", "proportional", "independent", "rank", "rank-independent")
SAMPLED = (*BY_CHANCE, "combined-proportional", "latest")


def lived(kind: str, sampler: Any, device: str, seed: int) -> tuple[Any, list[int]]:
    """A ring that was overwritten, and the keys that can be drawn from it; priorities go over two decades."""
    if kind == "rows":
        pair: Any = RowPair(29, sampler, seed, device, fields={"action": FEW["action"]})
        pair.add(38)
        keys = pair.model.eligible()
    else:
        autoreset = "same_step" if kind == "windows" else "next_step"
        settings: dict[str, Any] = {"stack": 3, "n_step": 2, "autoreset": autoreset, "fields": FEW}
        if kind == "windows":
            settings |= {"sequences": Sequences(4), "capacity": 70}
        settings = {"capacity": 46, "num_envs": 3} | settings
        with loops():
            pair = live_through(StepPair(**settings, sampler=sampler, device=device, seed=seed), 33, seed, end=0.08)
        pair.renew("state")
        keys = pair.model.eligible()
        assert 8 < len(keys) < len(pair.model.live())
    pair.update(keys, [(1 + 7 * key % 100) / 16 for key in keys])
    return pair, keys


def in_order(pair: Any, keys: Iterable[int]) -> dict[int, float]:
    """What the probability of each key is proportional to, in the order in which a draw goes through them."""
    base, held = pair.model.base, pair.model.held
    if pair.model.by_rank:
        order = by_rank((key, held[key]) for key in keys)
        return {key: rank**-base.alpha for rank, key in enumerate(order, 1)}
    slots = sorted(keys, key=lambda key: key % pair.model.capacity)
    return {key: held[key] if pair.model.by_mass else 1.0 for key in slots}


def part_of(weights: dict[int, float], row: int, rows: int) -> dict[int, float]:
    """How much of each weight lies in one of so many equal parts of them all."""
    total, ends = sum(weights.values()), itertools.accumulate(weights.values())
    low, high = row * total / rows, (row + 1) * total / rows
    shares = {key: min(high, end) - max(low, end - weights[key]) for key, end in zip(weights, ends, strict=True)}
    return {key: share if share > 1e-9 else 0.0 for key, share in shares.items()}


@statistical
@thinned("kind, name", ["rows", "steps", "windows"], SAMPLED)
def test_every_row_has_the_distribution_of_its_sampler(kind: str, name: str, device: str) -> None:
    pair, keys = lived(kind, SAMPLERS[name], device, seed=1)
    model, weights = pair.model, in_order(pair, keys)
    rows = 0 if name == "latest" else 4
    newest = model.newest if rows else 4
    count = rows + newest
    drawn = [pair.buffer.sample(count).key.tolist() for _ in range(800)]
    assert all(each[rows:] == keys[len(keys) - newest :] for each in drawn)
    for row, found in enumerate(list(zip(*drawn, strict=True))[:rows]):
        by_parts = getattr(model.base, "stratified", False)
        check_counts(Counter(found), part_of(weights, row, rows) if by_parts else weights)


@statistical
@thinned("kind, name", ["rows", "steps"], ["uniform", "replacement", "independent", "rank-independent"])
def test_rows_of_a_sample_and_of_the_next_do_not_depend_on_each_other(kind: str, name: str, device: str) -> None:
    pair, keys = lived(kind, SAMPLERS[name], device, seed=2)
    weights = in_order(pair, keys)
    samples = torch.stack([pair.buffer.sample(2).key for _ in range(3000)]).cpu()
    pairs = {(one, other): weights[one] * weights[other] for one, other in itertools.product(keys, keys)}
    check_counts(Counter(zip(samples[:-1, 1].tolist(), samples[1:, 0].tolist(), strict=True)), pairs)
    if name == "uniform":
        pairs = {each: weight for each, weight in pairs.items() if each[0] != each[1]}
    check_counts(Counter(map(tuple, samples.tolist())), pairs)


# permutations


ORDERS = [(2, 2, True), (3, 3, True), (4, 3, True), (4, 4, True), (5, 2, True), (9, 2, True)]
SETS = [(5, 3, False), (6, 3, False), (8, 4, False), (9, 7, False)]


@statistical
@pytest.mark.parametrize("size, count, ordered", [*ORDERS, *SETS])
def test_every_choice_without_replacement_is_equally_likely(size: int, count: int, ordered: bool, device: str) -> None:
    outcomes = list((itertools.permutations if ordered else itertools.combinations)(range(size), count))
    buffer = make(size, device=device, seed=1, **NUMBER)
    buffer.add(number=torch.arange(size, device=device))
    samples = [buffer.sample(count).key.tolist() for _ in range(max(1500, 40 * len(outcomes)))]
    found = Counter(tuple(keys if ordered else sorted(keys)) for keys in samples)
    check_counts(found, dict.fromkeys(outcomes, 1.0))


@pytest.mark.parametrize("name", ["uniform", "replacement"])
@pytest.mark.parametrize("share", [0.02, 0.98])
def test_uniform_over_a_large_ring_where_few_or_most_can_be_drawn(name: str, share: float, device: str) -> None:
    """Few: every step ends, nearly always by a truncation whose final observation is not known."""
    envs, turn, draw = 50, scale(40, 6), random.Random(5)
    pair = StepPair(envs * turn, envs, sampler=SAMPLERS[name], device=device, seed=4, fields=FEW, autoreset="same_step")
    for number in range(turn + 7):
        lucky = [draw.random() < share for _ in range(envs)]
        pair.add([numbered(number, env, FEW, terminated=lucky[env], truncated=not lucky[env]) for env in range(envs)])
    for count in (1, len(pair.model.eligible())):
        assert len(pair.sample(count)) == count


# masses and ranks at the ends of their scales


# a mass of 1 puts every target on a border between two slots
@pytest.mark.parametrize("mass", [1, 3, UNIT])
@pytest.mark.parametrize("size", scale([1, 2, 127, 128, 129, 4095, 4096, 4097, 70_001], [1, 129, 4097]))
def test_every_slot_from_first_to_last_is_reachable(size: int, mass: int, device: str) -> None:
    buffer = with_masses([mass] * size, device=device)
    assert buffer.sample(size).key.tolist() == list(range(size))


@pytest.mark.parametrize("size, times", [(8, 1023), (300, 63), (5000, 1)])
def test_tiny_masses_behind_a_huge_one(size: int, times: int, device: str) -> None:
    # an odd number that single precision cannot add to the huge mass
    tiny, rest = UNIT + 1, size - 1
    buffer = with_masses([times * tiny * rest] + [tiny] * rest, device=device, seed=size)
    # as many equal parts as tiny masses would fill: the last of them are one tiny slot each
    keys = buffer.sample((times + 1) * rest).key
    assert keys[: times * rest].eq(0).all()
    assert keys[times * rest :].tolist() == list(range(1, size))


def test_every_number_that_is_a_priority_has_its_rank(device: str) -> None:
    # the largest and the smallest number, neighbours in their last bit, and both zeros, which are equal
    largest = 1.7976931348623157e308
    priorities = [0.0, 5e-324, 1.0, largest, math.nextafter(1.0, 2.0), -0.0, 1e-300, -2.0]
    order = [3, 7, 4, 2, 6, 1, 0, 5]
    buffer = make(8, RankBased(alpha=1.0), device=device)
    fill(buffer, 8, priority=priorities)
    # so many draws that every transition is among them
    batch = buffer.sample(320)
    ranks = [order.index(key) + 1 for key in batch.key.tolist()]
    harmonic = sum(1 / rank for rank in range(1, 9))
    assert (ranks, set(ranks)) == (sorted(ranks), set(range(1, 9)))
    assert close(batch.probability, [1 / rank / harmonic for rank in ranks], "probability")
    stats = buffer.stats()
    assert (stats.min_priority, stats.max_priority, stats.saturated_priorities) == (0.0, largest, 0)


@pytest.mark.parametrize("start, end", [(0.4, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("step, share", [(0, 0), (1, 0.25), (2, 0.5), (4, 1), (5, 1), (10**9, 1)])
def test_schedule_goes_from_start_to_end_and_stays(step: int, share: float, start: float, end: float) -> None:
    assert LinearSchedule(start, end, steps=4)(step) == pytest.approx(start + (end - start) * share)
