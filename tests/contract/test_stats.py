"""`stats()`: what a user watches, against values worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from tolerances import close
from transitions import EXACT, fill, make

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
