"""Priorities: what mass they become, who may change them, and which value wins."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from model import UNIT, mass_of
from tolerances import close
from transitions import EXACT, fill, make

from gpu_replay import Proportional, ReplayBuffer

pytestmark = pytest.mark.contract


def update(buffer: ReplayBuffer, keys: list[int], priorities: list[float]) -> None:
    device = buffer.device
    buffer.update_priorities(
        torch.tensor(keys, dtype=torch.int64, device=device),
        torch.tensor(priorities, dtype=torch.float64, device=device),
    )


def units(buffer: ReplayBuffer) -> list[float]:
    """The masses in units of priority 1."""
    return [mass / UNIT for mass in buffer.masses().tolist()]


@pytest.mark.parametrize("form", [torch.tensor, lambda keys: np.array(keys, dtype=np.int32), list])
def test_keys_in_every_form_and_priorities_that_require_grad(form: Any, device: str) -> None:
    buffer = make(4, EXACT, device=device)
    fill(buffer, 6)
    buffer.update_priorities(form([5, 2]), torch.tensor([1.0, 2.0], device=device, requires_grad=True) * 2)
    assert units(buffer) == [1, 2, 4, 1]


def test_update_with_repeated_key_keeps_the_last(device: str) -> None:
    buffer = make(4, EXACT, device=device)
    fill(buffer, 4)
    update(buffer, [1, 2, 1, 1, 2], [9.0, 7.0, 3.0, 0.5, 0.25])
    assert (units(buffer), buffer.total_mass()) == ([1, 0.5, 0.25, 1], int(2.75 * UNIT))


@pytest.mark.parametrize("count", [2, 33, 257, 1025, 5000])
@pytest.mark.parametrize("different", [1, 61])
def test_repeated_keys_in_a_long_shuffled_update(different: int, count: int, device: str) -> None:
    buffer = make(61, EXACT, device=device)
    fill(buffer, 61)
    generator = random.Random(count)
    for _ in range(2):
        keys = [generator.randrange(different) for _ in range(count)]
        last = dict(zip(keys, range(1, count + 1), strict=True))
        update(buffer, keys, [float(value) for value in range(1, count + 1)])
        expected = last if different == 1 else dict(zip(range(61), units(buffer), strict=True)) | last
        assert units(buffer) == [expected.get(key, 1.0) for key in range(61)]
        assert buffer.total_mass() == sum(buffer.masses().tolist())


@pytest.mark.parametrize("key", [0, 1, -1, -4, 6, 7, 10, 2**31, 2**40, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
def test_keys_that_are_not_live_are_ignored_and_counted(order: int, key: int, device: str) -> None:
    """0 and 1 were overwritten by 4 and 5, which hold their slots; the others never were."""
    buffer = make(4, EXACT, device=device)
    fill(buffer, 6)
    update(buffer, [key, 5][::order], [50.0, 2.0][::order])
    assert (units(buffer), buffer.stats().stale_updates) == ([1, 2, 1, 1], 1)
    # nor is it the largest priority ever given
    fill(buffer, 1)
    assert units(buffer) == [1, 2, 2, 1]


def test_sign_of_a_priority_is_dropped(device: str) -> None:
    buffer = make(4, EXACT, device=device)
    fill(buffer, 3, priority=[-2.0, 3.0, -0.0])
    assert units(buffer) == [2, 3, 1 / UNIT, 0]
    update(buffer, [1], [-16.0])
    assert units(buffer) == [2, 16, 1 / UNIT, 0]
    fill(buffer, 1)
    assert units(buffer)[3] == 16


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 1.0, 1.5])
@pytest.mark.parametrize("eps, clip", [(0.0, None), (1e-6, None), (0.1, 2.0), (0.0, 0.5)])
def test_mass_of_a_priority(alpha: float, eps: float, clip: float | None, device: str) -> None:
    settings = Proportional(alpha=alpha, eps=eps, clip=clip)
    priorities = [0.0, 1e-12, 1e-6, 1e-3, 0.1, 0.5, 1.0, 1.9, 2.0, 2.1, 10.0, 1e4, 1e8]
    expected = [mass_of(priority, settings, 13) for priority in priorities]
    added, updated = make(13, settings, device=device), make(13, settings, device=device)
    fill(added, 13, priority=priorities)
    fill(updated, 13)
    update(updated, list(range(13)), priorities)
    assert close(added.masses(), expected, "mass")
    assert (added.masses().tolist(), added.total_mass()) == (updated.masses().tolist(), sum(added.masses().tolist()))


def test_alpha_of_zero_is_uniform(device: str) -> None:
    buffer = make(50, Proportional(alpha=0.0, eps=0.0), device=device)
    fill(buffer, 50, priority=[0.0, 1e-30, 1e30, *range(47)])
    assert (buffer.masses().tolist(), buffer.sample(50).key.tolist()) == ([UNIT] * 50, list(range(50)))


def test_masses_are_rounded_to_the_nearest_and_none_is_zero(device: str) -> None:
    buffer = make(5, EXACT, device=device)
    fill(buffer, 5, priority=[10.4 / UNIT, 10.49 / UNIT, 10.51 / UNIT, 0.4 / UNIT, 0.0])
    assert buffer.masses().tolist() == [10, 10, 11, 1, 1]
    assert buffer.sample(33).key.tolist() == [0] * 10 + [1] * 10 + [2] * 11 + [3, 4]


@pytest.mark.parametrize("capacity", [1, 2, 3, 1000])
def test_saturation_is_counted_and_the_total_cannot_overflow(capacity: int, device: str) -> None:
    buffer = make(capacity, EXACT, device=device)
    fill(buffer, capacity)
    limit = 2**62 // capacity
    update(buffer, list(range(capacity)), [1e300 if key % 2 else 3e38 for key in range(capacity)])
    assert (buffer.masses().tolist(), buffer.total_mass()) == ([limit] * capacity, capacity * limit)
    assert buffer.stats().saturated_priorities == capacity
    assert sorted(set(buffer.sample(capacity).key.tolist())) == list(range(capacity))
    update(buffer, [0], [1.0])
    assert buffer.total_mass() == (capacity - 1) * limit + UNIT


# a number adds so many transitions, a list adds with these priorities, a dictionary updates, None clears
INITIALS: dict[str, tuple[Any, list[Any], list[float]]] = {
    "one before any priority was given": ("running", [2, 1], [1, 1, 1, 0]),
    "the largest ever given, even when it is small": ("running", [[0.25, 0.125], 1], [0.25, 0.125, 0.25, 0]),
    "the largest of an update": ("running", [2, {0: 0.25, 1: 0.125}, 1], [0.25, 0.125, 0.25, 0]),
    "it never falls": ("running", [2, {0: 8.0}, {0: 0.5}, 2], [0.5, 1, 8, 8]),
    "nor with a clear": ("running", [[8.0, 2.0], None, 1], [0, 0, 8, 0]),
    "the largest stored": ("stored", [2, {0: 8.0, 1: 2.0}, {0: 0.5}, 1], [0.5, 2, 2, 0]),
    "it falls": ("stored", [3, {0: 0.25, 1: 0.25, 2: 0.125}, 1], [0.25, 0.25, 0.125, 0.25]),
    "one when nothing is stored": ("stored", [2, {0: 8.0}, None, 1], [0, 0, 1, 0]),
    "what was overwritten is forgotten": ("stored", [[8, 2, 4, 2], [1], 1], [1, 4, 4, 2]),
    **{
        f"the number {number}": (number, [2, {0: 700.0}, 1], [700, *[max(number, 1 / UNIT)] * 2, 0])
        for number in (0.5, 0, 3, 100.0)
    },
}


@pytest.mark.parametrize("initial, calls, expected", INITIALS.values(), ids=INITIALS)
def test_initial_priorities(initial: Any, calls: list[Any], expected: list[float], device: str) -> None:
    buffer = make(4, Proportional(alpha=1.0, eps=0.0, initial=initial), device=device)
    for call in calls:
        if call is None:
            buffer.clear()
        elif isinstance(call, dict):
            update(buffer, list(call), list(call.values()))
        else:
            fill(buffer, *((call,) if isinstance(call, int) else (len(call), call)))
    assert units(buffer) == expected


def test_running_initial_takes_the_winner_of_repeated_keys(device: str) -> None:
    buffer = make(3, EXACT, device=device)
    fill(buffer, 2)
    update(buffer, [0, 0], [64.0, 2.0])
    fill(buffer, 1)
    assert units(buffer) == [2, 1, 2]


def test_initial_is_subject_to_eps_clip_and_alpha(device: str) -> None:
    settings = Proportional(alpha=0.5, eps=0.25, clip=9.0)
    buffer = make(4, settings, device=device)
    fill(buffer, 1)
    update(buffer, [0], [1e6])
    fill(buffer, 1)
    assert close(buffer.masses()[:2], [mass_of(1e6, settings, 4)] * 2, "mass")
    assert close(buffer.masses()[1:2], [3 * UNIT], "mass")
