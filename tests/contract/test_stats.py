"""`stats()`: what a user watches, against values worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from tolerances import close
from transitions import EXACT, SAMPLERS, contents, fill, make, same_draws

from gpu_replay import Latest, Proportional, Stats, Uniform

pytestmark = pytest.mark.contract

FIELDS = {
    *("size", "added", "min_priority", "mean_priority", "max_priority", "entropy", "effective_sample_size"),
    *("mean_age", "max_age", "mean_times_sampled", "max_times_sampled"),
    *("stale_updates", "rejected_priorities", "saturated_priorities"),
}


def test_stats_are_a_frozen_record_of_plain_numbers(device: str) -> None:
    buffer = make(5, EXACT, device=device)
    keys = fill(buffer, 3)
    buffer.update_priorities(keys, torch.ones(3, device=device))
    # looking at transitions is not sampling them
    buffer[[0, 1, 1]]
    stats = buffer.stats()
    assert isinstance(stats, Stats)
    assert {field.name for field in dataclasses.fields(stats)} >= FIELDS
    assert all(isinstance(getattr(stats, name), (int, float)) for name in FIELDS)
    # nothing went wrong
    assert (stats.stale_updates, stats.rejected_priorities, stats.saturated_priorities) == (0, 0, 0)
    assert stats.max_times_sampled == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.size = 7


def test_priorities_are_those_given(device: str) -> None:
    buffer = make(6, Proportional(alpha=0.6, eps=1e-6), device=device)
    # 8.0 is in slot 2, which key 8 takes
    for given, expected in (
        ([0.5, 2.0, 8.0, 0.25], [0.25, 2.6875, 8.0]),
        ([1.0, 1.0, 1.0, 3.0, 1.0], [0.25, (0.25 + 1 + 1 + 1 + 3 + 1) / 6, 3.0]),
    ):
        fill(buffer, len(given), priority=given)
        stats = buffer.stats()
        assert close([stats.min_priority, stats.mean_priority, stats.max_priority], expected, "priority")


@pytest.mark.parametrize(
    "settings, masses",
    [
        (EXACT, [1, 4, 16, 1, 64]),
        (Proportional(alpha=0.5, eps=0.0), [1, 2, 4, 1, 8]),
        *((each, [1] * 5) for each in (Uniform(), Uniform(replacement=True), Latest(), Proportional(alpha=0.0))),
    ],
    ids=repr,
)
def test_entropy_and_effective_sample_size_of_the_sampling_distribution(
    settings: Any, masses: list[int], device: str
) -> None:
    buffer = make(9, settings, device=device)
    fill(buffer, 5, priority=[1, 4, 16, 1, 64])
    shares, stats = [mass / sum(masses) for mass in masses], buffer.stats()
    if not isinstance(settings, Latest):
        assert close(stats.entropy, -sum(share * math.log(share) for share in shares), "statistic")
        assert close(stats.effective_sample_size, 1 / sum(share * share for share in shares), "statistic")
    found = (stats.min_priority, stats.mean_priority, stats.max_priority)
    assert [math.isnan(value) for value in found] == [not isinstance(settings, Proportional) or not settings.alpha] * 3


def test_size_added_and_age(device: str) -> None:
    buffer = make(4, device=device)
    assert (buffer.stats().size, buffer.stats().added) == (0, 0)
    for count, size, mean, most in ((1, 1, 0, 0), (2, 3, 1, 2), (20, 4, 1.5, 3), (None, 0, None, 0), (2, 2, 0.5, 1)):
        if count is None:
            buffer.clear()
        else:
            fill(buffer, count)
        stats = buffer.stats()
        assert (stats.size, stats.added, stats.max_age) == (size, buffer.added, most)
        assert mean is None or stats.mean_age == mean
    assert buffer.added == 25


@pytest.mark.parametrize("name", SAMPLERS)
def test_times_sampled_counts_every_row_of_what_is_stored(name: str, device: str) -> None:
    buffer = make(6, SAMPLERS[name], device=device)
    fill(buffer, 6)
    times = dict.fromkeys(range(6), 0)
    for count in (3, 6, 2):
        for key in buffer.sample(count).key.tolist():
            times[key] += 1
    stats = buffer.stats()
    assert stats.max_times_sampled == max(times.values())
    assert close(stats.mean_times_sampled, 11 / 6, "statistic")
    fill(buffer, 4)
    # keys 4 and 5 are left, and the new ones were never sampled
    stats = buffer.stats()
    assert stats.max_times_sampled == max(times[4], times[5])
    assert close(stats.mean_times_sampled, (times[4] + times[5]) / 6, "statistic")
    buffer.sample(6)
    fill(buffer, 6)
    # all were overwritten, in two pieces
    assert buffer.stats().max_times_sampled == 0


def test_times_sampled_counts_a_transition_drawn_twice_in_one_batch(device: str) -> None:
    buffer = make(3, EXACT, device=device)
    fill(buffer, 2)
    buffer.sample(50)
    assert (buffer.stats().max_times_sampled, buffer.stats().mean_times_sampled) == (25, 25)
    buffer.clear()
    fill(buffer, 2)
    assert buffer.stats().max_times_sampled == 0


@pytest.mark.parametrize("name", SAMPLERS)
def test_stats_of_an_empty_buffer(name: str, device: str) -> None:
    stats = make(6, SAMPLERS[name], device=device).stats()
    assert (stats.size, stats.max_age, stats.max_times_sampled, stats.stale_updates) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", SAMPLERS)
def test_stats_change_nothing(name: str, device: str) -> None:
    buffer, twin = make(66, SAMPLERS[name], device=device), make(66, SAMPLERS[name], device=device)
    fill(buffer, 80)
    fill(twin, 80)
    assert (repr(buffer.stats()), contents(buffer)) == (repr(buffer.stats()), contents(buffer))
    same_draws(buffer, twin, 4, times=1)
