"""Uniform sampling: distinct transitions in random order, every set and every order equally likely."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale, statistical
from distribution import check_counts
from transitions import fill, make

from gpu_replay import Combined, ReplayBuffer, Uniform

pytestmark = pytest.mark.contract

AWKWARD = scale([1, 2, 3, 7, 8, 97, 127, 128, 129, 1000], [1, 2, 7, 97, 129])
REPLACEMENT = Uniform(replacement=True)


def stored(size: int, *, device: str, sampler: Uniform | None = None, seed: int = 0, spare: int = 0) -> ReplayBuffer:
    """A buffer that holds `size` transitions, whose oldest key is 0 when nothing was overwritten."""
    buffer = make(size + spare, sampler, device=device, seed=seed)
    fill(buffer, size)
    return buffer


def tally(buffer: ReplayBuffer, count: int, times: int, outcome: Callable[[list[int]], tuple[int, ...]]) -> Counter:
    """How often each outcome came, over so many samples."""
    first = buffer.added - len(buffer)
    return Counter(outcome([key - first for key in buffer.sample(count).key.tolist()]) for _ in range(times))


@pytest.mark.parametrize("size", [*AWKWARD, scale(100_003, 4099)])
def test_batch_of_everything_is_a_permutation(size: int, device: str) -> None:
    buffer = stored(size, device=device)
    wrapped = len(fill(buffer, size // 2 + 1))
    for _ in range(scale(10, 1) if size < 4000 else 1):
        keys = buffer.sample(size).key.cpu()
        assert torch.equal(keys.sort().values, torch.arange(wrapped, wrapped + size))
        assert size < 100 or not torch.equal(keys, keys.sort().values)


@statistical
@pytest.mark.parametrize("sampler", [Uniform(), REPLACEMENT], ids=["without", "with"])
@pytest.mark.parametrize("size", [2, 3, 7, 97])
def test_every_transition_is_equally_likely_in_every_row(sampler: Uniform, size: int, device: str) -> None:
    buffer = stored(size, device=device, sampler=sampler, seed=size)
    fill(buffer, 2)
    for row in zip(*[buffer.sample(min(size, 4)).key.tolist() for _ in range(2000)], strict=True):
        check_counts(Counter(row), dict.fromkeys(range(2, size + 2), 1.0))


@statistical
@pytest.mark.parametrize("size, count", [(2, 2), (3, 2), (3, 3), (4, 3), (4, 4), (5, 2), (6, 2), (7, 2), (9, 2)])
def test_every_ordered_choice_without_replacement_is_equally_likely(size: int, count: int, device: str) -> None:
    outcomes = list(itertools.permutations(range(size), count))
    found = tally(stored(size, device=device, seed=1), count, max(1500, 40 * len(outcomes)), tuple)
    check_counts(found, dict.fromkeys(outcomes, 1.0))


@statistical
@pytest.mark.parametrize("size, count", [(5, 3), (6, 3), (8, 4), (9, 7)])
def test_every_set_without_replacement_is_equally_likely(size: int, count: int, device: str) -> None:
    outcomes = list(itertools.combinations(range(size), count))
    times = max(1500, 40 * len(outcomes))
    found = tally(stored(size, device=device, seed=2), count, times, lambda keys: tuple(sorted(keys)))
    check_counts(found, dict.fromkeys(outcomes, 1.0))


@statistical
@pytest.mark.parametrize("size", [11, 97])
def test_distance_of_two_rows_without_replacement_is_uniform(size: int, device: str) -> None:
    buffer = stored(size, device=device, seed=3)
    rows = torch.stack([buffer.sample(4).key for _ in range(3000)])
    for one, other in ((0, 1), (0, 3), (2, 3)):
        distances = Counter(((rows[:, other] - rows[:, one]) % size).tolist())
        check_counts(distances, dict.fromkeys(range(1, size), 1.0))


@statistical
def test_order_of_a_batch_of_everything_is_random(device: str) -> None:
    buffer = stored(40, device=device, seed=4)
    keys = torch.cat([buffer.sample(40).key for _ in range(400)])
    check_counts(Counter((keys[::2] < keys[1::2]).tolist()), {True: 1.0, False: 1.0})


@statistical
@pytest.mark.parametrize("sampler", [Uniform(), REPLACEMENT], ids=["without", "with"])
def test_successive_samples_do_not_depend_on_each_other(sampler: Uniform, device: str) -> None:
    buffer = stored(7, device=device, sampler=sampler, seed=5)
    samples = [buffer.sample(2).key.tolist() for _ in range(3001)]
    pairs = Counter((one[1], other[0]) for one, other in itertools.pairwise(samples))
    check_counts(pairs, dict.fromkeys(itertools.product(range(7), range(7)), 1.0))


@statistical
def test_rows_with_replacement_do_not_depend_on_each_other(device: str) -> None:
    buffer = stored(6, device=device, sampler=REPLACEMENT, seed=6)
    keys = torch.cat([buffer.sample(128).key for _ in range(200)]).tolist()
    pairs = Counter(zip(keys[::2], keys[1::2], strict=True))
    check_counts(pairs, dict.fromkeys(itertools.product(range(6), range(6)), 1.0))


@statistical
@pytest.mark.parametrize("sampler", [Uniform(), REPLACEMENT], ids=["without", "with"])
def test_both_ends_of_a_large_buffer_are_reached(sampler: Uniform, device: str) -> None:
    buffer = stored(100_003, device=device, sampler=sampler, seed=7)
    keys = torch.cat([buffer.sample(1024).key for _ in range(40)])
    # the 97 parts differ by at most one transition of 1,031
    check_counts(Counter((keys * 97 // 100_003).tolist()), dict.fromkeys(range(97), 1.0))


@statistical
def test_combined_rows_of_a_uniform_base_are_distinct_and_uniform(device: str) -> None:
    buffer = make(7, Combined(Uniform(), newest=1), device=device, seed=2)
    fill(buffer, 9)
    rows = [buffer.sample(4).key.tolist() for _ in range(2000)]
    assert all(len(set(keys[:3])) == 3 for keys in rows)
    # the newest is in the base as likely as any other
    check_counts(Counter(keys[0] for keys in rows), dict.fromkeys(range(2, 9), 1.0))
