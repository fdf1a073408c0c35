"""`stats()`: what a user watches, against values worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from devices import device_fixture as device_fixture
from tolerances import close
from transitions import EXACT, SAMPLERS, contents, fill, make, same_draws

from gpu_replay import Latest, Proportional, Stats, Uniform

pytestmark = pytest.mark.contract

FIELDS = {
    "size",
    "added",
    "min_priority",
    "mean_priority",
    "max_priority",
    "entropy",
    "effective_sample_size",
    "mean_age",
    "max_age",
    "mean_times_sampled",
    "max_times_sampled",
    "stale_updates",
    "rejected_priorities",
    "saturated_priorities",
}


def test_stats_are_a_frozen_record_of_plain_numbers(device: str) -> None:
    buffer = make(5, EXACT, device=device)
    fill(buffer, 3)
    stats = buffer.stats()
    assert isinstance(stats, Stats)
    assert {field.name for field in dataclasses.fields(stats)} >= FIELDS
    for name in FIELDS:
        assert isinstance(getattr(stats, name), (int, float)), name
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.size = 7


def test_size_and_added(device: str) -> None:
    buffer = make(5, EXACT, device=device)
    assert (buffer.stats().size, buffer.stats().added) == (0, 0)
    fill(buffer, 3)
    assert (buffer.stats().size, buffer.stats().added) == (3, 3)
    fill(buffer, 9)
    assert (buffer.stats().size, buffer.stats().added) == (5, 12)
    buffer.clear()
    assert (buffer.stats().size, buffer.stats().added) == (0, 12)


def test_priorities_are_those_given(device: str) -> None:
    buffer = make(6, Proportional(alpha=0.6, eps=1e-6), device=device)
    fill(buffer, 4, priority=[0.5, 2.0, 8.0, 0.25])
    stats = buffer.stats()
    found = [stats.min_priority, stats.mean_priority, stats.max_priority]
    assert close(found, [0.25, 2.6875, 8.0], "priority")
    fill(buffer, 5, priority=[1.0, 1.0, 1.0, 3.0, 1.0])
    # 8.0 is in slot 2, which key 8 took
    stats = buffer.stats()
    found = [stats.min_priority, stats.mean_priority, stats.max_priority]
    assert close(found, [0.25, (0.25 + 1 + 1 + 1 + 3 + 1) / 6, 3.0], "priority")


@pytest.mark.parametrize("settings", [EXACT, Proportional(alpha=0.5, eps=0.0)], ids=["alpha 1", "alpha 0.5"])
def test_entropy_and_effective_sample_size_of_the_sampling_distribution(settings: Proportional, device: str) -> None:
    buffer = make(9, settings, device=device)
    fill(buffer, 5, priority=[1, 4, 16, 1, 64])
    masses = [mass for mass in buffer.masses().tolist() if mass]
    shares = [mass / sum(masses) for mass in masses]
    stats = buffer.stats()
    assert close(stats.entropy, -sum(share * math.log(share) for share in shares), "statistic")
    assert close(stats.effective_sample_size, 1 / sum(share * share for share in shares), "statistic")


@pytest.mark.parametrize("sampler", [Uniform(), Uniform(replacement=True), Proportional(alpha=0.0)], ids=repr)
def test_entropy_and_effective_sample_size_of_a_uniform_distribution(
    sampler: Uniform | Proportional, device: str
) -> None:
    buffer = make(9, sampler, device=device)
    fill(buffer, 7)
    stats = buffer.stats()
    assert close(stats.entropy, math.log(7), "statistic")
    assert close(stats.effective_sample_size, 7, "statistic")


@pytest.mark.parametrize("sampler", [Uniform(), Latest()], ids=repr)
def test_priorities_of_a_sampler_without_them_are_nan(sampler: Uniform | Latest, device: str) -> None:
    buffer = make(9, sampler, device=device)
    fill(buffer, 7)
    stats = buffer.stats()
    assert all(math.isnan(value) for value in (stats.min_priority, stats.mean_priority, stats.max_priority))


def test_age_counts_transitions_added_since(device: str) -> None:
    buffer = make(4, device=device)
    fill(buffer, 1)
    assert (buffer.stats().mean_age, buffer.stats().max_age) == (0, 0)
    fill(buffer, 2)
    assert (buffer.stats().mean_age, buffer.stats().max_age) == (1, 2)
    fill(buffer, 20)
    assert (buffer.stats().mean_age, buffer.stats().max_age) == (1.5, 3)
    buffer.clear()
    fill(buffer, 2)
    assert (buffer.stats().mean_age, buffer.stats().max_age) == (0.5, 1)


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
    assert buffer.stats().max_times_sampled == 25
    assert buffer.stats().mean_times_sampled == 25
    buffer.clear()
    fill(buffer, 2)
    assert buffer.stats().max_times_sampled == 0


def test_looking_at_transitions_is_not_sampling_them(device: str) -> None:
    buffer = make(3, EXACT, device=device)
    fill(buffer, 3)
    buffer[[0, 1, 1]]
    assert buffer.stats().max_times_sampled == 0


def test_counters_of_an_untroubled_buffer_are_zero(device: str) -> None:
    buffer = make(6, EXACT, device=device)
    fill(buffer, 9)
    keys = buffer.sample(4).key
    buffer.update_priorities(keys, torch.ones(4, device=device))
    stats = buffer.stats()
    assert (stats.stale_updates, stats.rejected_priorities, stats.saturated_priorities) == (0, 0, 0)


@pytest.mark.parametrize("name", SAMPLERS)
def test_stats_of_an_empty_buffer(name: str, device: str) -> None:
    stats = make(6, SAMPLERS[name], device=device).stats()
    assert (stats.size, stats.max_age, stats.max_times_sampled, stats.stale_updates) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", SAMPLERS)
def test_stats_change_nothing(name: str, device: str) -> None:
    buffer, twin = make(66, SAMPLERS[name], device=device), make(66, SAMPLERS[name], device=device)
    fill(buffer, 80)
    fill(twin, 80)
    assert repr(buffer.stats()) == repr(buffer.stats())
    assert contents(buffer) == contents(buffer)
    same_draws(buffer, twin, 4, times=1)
