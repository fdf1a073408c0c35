"""Priorities in the trajectory buffer: they belong to eligible starts, and nothing else can be given any.

A start gets its priority in the `add` that completes it, steps after its own; an update can change it from then on and
until something that it needs is overwritten.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from oracle import UNIT, mass_of
from tolerances import close
from trajectory_pair import Pair, numbered, play
from transitions import EXACT

from gpu_replay import Combined, Field, Latest, Proportional, Uniform

pytestmark = pytest.mark.contract

FIELDS = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
STORED = Proportional(alpha=1.0, eps=0.0, initial="stored")


def one(device: str, sampler: Any = EXACT, capacity: int = 8, num_envs: int = 1, **settings: Any) -> Pair:
    return Pair(capacity, num_envs, sampler=sampler, fields=FIELDS, device=device, **settings)


def add(pair: Pair, priority: Any = None, **flags: bool) -> None:
    """One step of every environment; `priority` for each of them."""
    number, envs = pair.history.count, pair.history.num_envs
    steps = [numbered(number, env, FIELDS, **flags) for env in range(envs)]
    if priority is not None:
        priorities = priority if isinstance(priority, (list, tuple)) else [priority] * envs
        steps = [step | {"priority": float(value)} for step, value in zip(steps, priorities, strict=True)]
    pair.add(steps)
    pair.check()


def units(pair: Pair) -> list[float]:
    """Masses in units of priority 1, in slot order."""
    return [mass / UNIT for mass in pair.buffer.masses().tolist()]


def test_a_start_enters_when_it_is_complete(device: str) -> None:
    pair = one(device, n_step=3)
    for number in range(6):
        assert units(pair) == [1.0] * max(0, number - 3) + [0.0] * (8 - max(0, number - 3))
        add(pair)
    assert pair.buffer.total_mass() == 3 * UNIT


def test_an_ending_completes_several_starts_at_once(device: str) -> None:
    pair = one(device, n_step=3)
    play(pair, "...T", fields=FIELDS)
    assert units(pair) == [1, 1, 1, 1, 0, 0, 0, 0]


def test_own_priority_counts_when_the_start_is_complete(device: str) -> None:
    pair = one(device, n_step=2)
    add(pair, 4.0)
    add(pair, 8.0)
    assert pair.buffer.total_mass() == 0
    add(pair)
    assert units(pair)[:3] == [4, 0, 0]
    add(pair)
    assert units(pair)[:4] == [4, 8, 0, 0]


def test_own_priority_is_kept_for_each_environment(device: str) -> None:
    pair = one(device, num_envs=3, capacity=12)
    add(pair, [2.0, 3.0, 5.0])
    add(pair, [7.0, 11.0, 13.0])
    add(pair)
    assert units(pair)[:6] == [2, 3, 5, 7, 11, 13]


def test_sign_of_an_own_priority_is_dropped(device: str) -> None:
    pair = one(device)
    add(pair, -4.0)
    add(pair, -0.0)
    add(pair)
    assert units(pair)[:2] == [4, 1 / UNIT]


def test_running_maximum_counts_an_own_priority_only_when_its_start_is_complete(device: str) -> None:
    pair = one(device, n_step=2)
    add(pair)
    add(pair, 64.0)
    add(pair)
    # start 0 was completed while the 64 of start 1 was still waiting
    assert units(pair)[:2] == [1, 0]
    add(pair)
    # start 1 enters with its own; start 2 is completed later and takes the largest so far
    add(pair)
    assert units(pair)[:4] == [1, 64, 64, 0]


def test_starts_completed_together_take_the_maximum_from_before_the_call(device: str) -> None:
    pair = one(device, n_step=4)
    add(pair)
    add(pair, 16.0)
    add(pair)
    add(pair, terminated=True)
    assert units(pair)[:4] == [1, 16, 1, 1]
    # the next episode starts from the 16
    add(pair)
    add(pair)
    add(pair, terminated=True)
    assert units(pair)[4:7] == [0, 16, 16]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_own_priority_of_what_never_becomes_a_start_never_counts(autoreset: str, device: str) -> None:
    pair = one(device, autoreset=autoreset)
    # with next-step autoreset step 1 is dead; otherwise it is truncated and its final observation unknown
    add(pair, terminated=True)
    add(pair, 512.0, truncated=True)
    for _ in range(3):
        add(pair)
    masses = pair.buffer.masses().tolist()
    assert max(masses) == UNIT
    assert masses[1] == 0


def test_running_maximum_of_updates_is_the_initial_priority(device: str) -> None:
    pair = one(device)
    play(pair, "...", fields=FIELDS)
    pair.update([0, 1], [0.25, 0.125])
    play(pair, ".", fields=FIELDS)
    assert units(pair)[:3] == [0.25, 0.125, 0.25]
    pair.update([0], [8.0])
    pair.update([0], [0.5])
    play(pair, ".", fields=FIELDS)
    assert units(pair)[:4] == [0.5, 0.125, 0.25, 8]
    pair.clear()
    play(pair, "..", fields=FIELDS)
    assert units(pair)[5:6] == [8]


def test_stored_maximum_is_that_of_the_eligible(device: str) -> None:
    pair = one(device, STORED, capacity=4, stack=2)
    play(pair, "...", fields=FIELDS)
    assert units(pair) == [1, 1, 0, 0]
    pair.update([0, 1], [8.0, 2.0])
    play(pair, ".", fields=FIELDS)
    assert units(pair) == [8, 2, 8, 0]
    # step 0 goes, and with it start 1, whose stack needs it
    play(pair, ".", fields=FIELDS)
    assert units(pair) == [0, 0, 8, 8]
    pair.update([2, 3], [0.5, 0.25])
    play(pair, ".", fields=FIELDS)
    assert units(pair) == [0.5, 0, 0, 0.25]
    play(pair, ".", fields=FIELDS)
    assert units(pair) == [0.5, 0.5, 0, 0]
    pair.clear()
    play(pair, "...", fields=FIELDS)
    assert max(units(pair)) == 1


def test_stored_maximum_ignores_priorities_that_wait(device: str) -> None:
    pair = one(device, STORED, n_step=2)
    add(pair)
    add(pair, 64.0)
    add(pair)
    assert units(pair)[:2] == [1, 0]


@pytest.mark.parametrize("number", [0.5, 0, 100.0])
def test_initial_that_is_a_number(number: float, device: str) -> None:
    pair = one(device, Proportional(alpha=1.0, eps=0.0, initial=number))
    add(pair)
    add(pair, 700.0)
    add(pair)
    add(pair)
    mass = max(number, 1 / UNIT)
    assert units(pair)[:3] == [mass, 700, mass]


def test_own_and_initial_priorities_are_subject_to_eps_clip_and_alpha(device: str) -> None:
    settings = Proportional(alpha=0.5, eps=0.25, clip=9.0)
    pair = Pair(8, 1, sampler=settings, fields=FIELDS, device=device)
    for priority in (3.75, 1e6, None, None):
        pair.add([numbered(pair.history.count, 0, FIELDS, priority=priority)])
    expected = [mass_of(value, settings, 8) for value in (3.75, 1e6, 1e6)]
    assert close(pair.buffer.masses()[:3], expected, "mass")
    assert close(pair.buffer.masses()[:2], [2 * UNIT, 3 * UNIT], "mass")


def test_update_cannot_wake_a_start_that_is_not_complete(device: str) -> None:
    pair = one(device, n_step=2, autoreset="same_step")
    play(pair, "..U..", fields=FIELDS)
    before = units(pair)
    assert before == [1, 0, 0, 0, 0, 0, 0, 0]
    # 1 and 2 end in a truncation that was not seen, 3 and 4 wait
    pair.update([1, 2, 3, 4], [50.0, 60.0, 70.0, 80.0])
    assert units(pair) == before
    assert pair.buffer.stats().stale_updates == 0
    # nor is it remembered, by the start or as the largest ever given
    play(pair, ".", fields=FIELDS)
    assert units(pair) == [1, 0, 0, 1, 0, 0, 0, 0]
    pair.check()


def test_update_cannot_wake_a_dead_step(device: str) -> None:
    pair = one(device)
    play(pair, ".T...", fields=FIELDS)
    pair.update([2, 0], [50.0, 2.0])
    assert units(pair)[:5] == [2, 1, 0, 1, 0]
    assert pair.buffer.stats().stale_updates == 0
    play(pair, ".", fields=FIELDS)
    assert units(pair)[4] == 2


def test_update_cannot_wake_a_start_that_lost_its_stack(device: str) -> None:
    pair = one(device, capacity=4, stack=3)
    play(pair, "......", fields=FIELDS)
    assert units(pair) == [1, 0, 0, 0]
    # 2 and 3 are stored, but frames of theirs are gone; 5 waits
    pair.update([2, 3, 5], [50.0, 60.0, 70.0])
    assert units(pair) == [1, 0, 0, 0]
    assert pair.buffer.stats().stale_updates == 0
    pair.check()


def test_update_of_overwritten_and_unknown_keys_is_ignored_and_counted(device: str) -> None:
    pair = one(device, capacity=4)
    play(pair, "......", fields=FIELDS)
    pair.update([0, 1, 3, 6, -1, 2**40], [9.0, 9.0, 3.0, 9.0, 9.0, 9.0])
    # keys 2 to 5 are stored
    assert units(pair) == [1, 0, 1, 3]
    assert pair.buffer.stats().stale_updates == 5
    pair.check()
    play(pair, ".", fields=FIELDS)
    assert units(pair) == [1, 3, 0, 3]


def test_update_of_cleared_keys_is_counted(device: str) -> None:
    pair = one(device)
    play(pair, "....", fields=FIELDS)
    pair.clear()
    play(pair, "..", fields=FIELDS)
    pair.update([1, 3, 4], [9.0, 9.0, 2.0])
    assert units(pair) == [0, 0, 0, 0, 2, 0, 0, 0]
    assert pair.buffer.stats().stale_updates == 2


def test_update_with_repeated_keys_keeps_the_last(device: str) -> None:
    pair = one(device, num_envs=2)
    play(pair, "....", "..T.", fields=FIELDS)
    pair.update([1, 2, 1, 7, 1, 2, 7], [9.0, 7.0, 3.0, 99.0, 0.5, 0.25, 99.0])
    # eligible: 0 to 5; 7 is dead
    assert units(pair) == [1, 0.5, 0.25, 1, 1, 1, 0, 0]
    play(pair, ".", ".", fields=FIELDS)
    # the largest ever given is that of the last ones
    assert units(pair)[6] == 0.5


def test_update_long_after_the_sample_reaches_the_same_start(device: str) -> None:
    """Keys from before the seam name the same step after it, as long as it is there."""
    pair = one(device, capacity=6, num_envs=2, stack=2)
    play(pair, "..", "..", fields=FIELDS)
    keys = pair.buffer.sample(4).key.tolist()
    assert set(keys) == {0, 1}
    play(pair, "..", "..", fields=FIELDS)
    # t = 0 was overwritten by t = 3; nothing of the old keys is left
    pair.update(keys, [5.0] * 4)
    assert pair.buffer.stats().stale_updates == 4
    assert units(pair) == [0, 0, 0, 0, 1, 1]
    pair.check()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("how", ["add", "update"])
def test_priority_that_is_not_finite_is_refused_and_changes_nothing(how: str, value: float) -> None:
    pair = one("cpu", num_envs=2)
    play(pair, "...", ".T.", fields=FIELDS)
    before = (units(pair), pair.buffer.added, pair.buffer.stats().stale_updates)
    ones, no = np.ones(2, dtype=np.int64), np.zeros(2, dtype=bool)
    step = {"obs": ones, "action": ones, "reward": np.zeros(2), "terminated": no, "truncated": no}
    calls = {
        "add": lambda: pair.buffer.add(**step, priority=np.array([1.0, value])),
        "update": lambda: pair.buffer.update_priorities([0, 2, 99], np.array([2.0, value, 1.0])),
    }
    with pytest.raises(ValueError, match=r"(?i)finite|nan|inf"):
        calls[how]()
    assert (units(pair), pair.buffer.added, pair.buffer.stats().stale_updates) == before
    play(pair, ".", ".", fields=FIELDS)
    pair.check()


@pytest.mark.parametrize("sampler", [Uniform(), Latest(), Combined(Uniform())], ids=repr)
def test_samplers_without_priorities_accept_and_ignore_them(sampler: Any, device: str) -> None:
    pair = one(device, sampler, capacity=16)
    for _ in range(6):
        add(pair, 3.0)
    pair.update([0, 1, 2, 1], [1e6] * 4)
    assert pair.buffer.stats().eligible == 5
    assert set(pair.buffer.sample(3).key.tolist()) <= set(range(5))
    with pytest.raises(RuntimeError, match=r"(?i)priorit"):
        pair.buffer.masses()
    with pytest.raises(RuntimeError, match=r"(?i)priorit"):
        pair.buffer.total_mass()


def test_update_through_a_combined_sampler_changes_its_base(device: str) -> None:
    pair = one(device, Combined(EXACT, newest=1), capacity=16)
    play(pair, ".........", fields=FIELDS)
    keys = list(range(8))
    pair.update(keys, [2.0**30 if key == 3 else 1 / UNIT for key in keys])
    assert pair.buffer.sample(5).key.tolist() == [3, 3, 3, 3, 7]


def test_saturated_priorities_are_counted_and_the_total_cannot_overflow(device: str) -> None:
    pair = one(device, capacity=4)
    play(pair, "....", fields=FIELDS)
    pair.update([0, 1, 2], [1e300, 3e38, 1.0])
    assert pair.buffer.masses().tolist() == [2**60, 2**60, UNIT, 0]
    assert pair.buffer.total_mass() == 2**61 + UNIT
    assert pair.buffer.stats().saturated_priorities == 2
