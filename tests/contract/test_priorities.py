"""Priorities: what mass they become, who may change them, and which value wins, in both kinds of buffer.

What a start of a stream may do is worked out by hand: it gets its priority in the `add` that completes it, steps after
its own; an update can change it from then on and until something that it needs is overwritten.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from devices import scale
from model import UNIT, mass_of
from pairs import RowPair, StepPair, numbered, play
from programs import SAMPLERS
from tolerances import close
from transitions import EXACT, fill, make

from gpu_replay import Field, Proportional, ReplayBuffer, Sequences

pytestmark = pytest.mark.contract

FIELDS = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
STORED = Proportional(alpha=1.0, eps=0.0, initial="stored")
KINDS = ("rows", "steps")


def made(kind: str, sampler: Any, priorities: list[float | None], device: str, capacity: int = 0) -> Any:
    """A pair of rows, or of steps that each end an episode, with these priorities."""
    size = capacity or len(priorities)
    if kind == "rows":
        pair: Any = RowPair(size, sampler, device=device)
    else:
        pair = StepPair(size, 1, sampler=sampler, fields=FIELDS, device=device, autoreset="same_step")
    for missing, group in itertools.groupby(priorities, key=lambda value: value is None):
        values, first = list(group), pair.model.added
        if kind == "rows":
            pair.add(len(values), None if missing else values)
        else:
            steps = [numbered(first + at, 0, FIELDS, terminated=True, priority=each) for at, each in enumerate(values)]
            pair.extend([[step] for step in steps])
    return pair


def units(pair: Any) -> list[float]:
    """The masses in units of priority 1, in slot order."""
    return [mass / UNIT for mass in pair.buffer.masses().tolist()]


def test_the_smallest_mass_of_the_buffer_is_looked_up_again_after_an_update(device: str) -> None:
    sampler = Proportional(alpha=1.0, eps=0.0, beta=0.5, normalize="buffer")
    pair = RowPair(300, sampler, device=device, fields={"action": FIELDS["action"]})
    pair.add(300, [4.0] * 300)
    # of a block, down and up again, also where another key of the block has the smallest one by then
    for key, priority in ((130, 0.5), (130, 8.0), (7, 2.0), (5, 1.0), (5, 3.0), (299, 0.25), (298, 0.5), (299, 9.0)):
        pair.update([key], [priority])
        pair.sample(4)


@pytest.mark.parametrize("count", [2, 33, 257, 5000])
@pytest.mark.parametrize("different", [1, 61])
def test_the_last_of_a_repeated_key_counts_in_a_long_update(different: int, count: int, device: str) -> None:
    pair = RowPair(61, EXACT, device=device, fields={"action": FIELDS["action"]})
    pair.add(61)
    keys = random.Random(count)
    for _ in range(2):
        # what is replaced does not count as the largest either
        pair.update([keys.randrange(different) for _ in range(count)], [float(count - at) for at in range(count)])
        pair.add(1)
        pair.check_counts()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha", scale([0.0, 0.6, 1.5], [0.0, 0.6]))
@pytest.mark.parametrize("eps, clip", [(1e-6, None), (0.1, 2.0), *scale([(0.0, None), (0.0, 0.5)], [])])
def test_mass_of_a_priority(alpha: float, eps: float, clip: float | None, kind: str, device: str) -> None:
    settings = Proportional(alpha=alpha, eps=eps, clip=clip)
    priorities: list[Any] = [0.0, 1e-12, 1e-6, 1e-3, 0.1, 0.5, 1.0, 1.9, 2.0, 2.1, 10.0, 1e4, 1e8]
    # the last one gets the largest of those before it
    expected = [mass_of(priority, settings, 14) for priority in [*priorities, 1e8]]
    added, updated = (made(kind, settings, given, device).buffer for given in ([*priorities, None], [None] * 14))
    updated.update_priorities(list(range(14)), torch.tensor([*priorities, 1e8], dtype=torch.float64, device=device))
    assert close(added.masses(), expected, "mass")
    if alpha:
        # a priority is read as its mass says it
        wanted = [max((mass / UNIT) ** (1 / alpha) - eps, 0.0) for mass in expected]
        assert close(added.priorities(list(range(14))), wanted, "priority")
    else:
        with pytest.raises(RuntimeError, match="no priorities"):
            added.priorities([])
        assert math.isnan(added.stats().mean_priority)
    assert (added.masses().tolist(), added.total_mass()) == (updated.masses().tolist(), sum(added.masses().tolist()))


def test_masses_are_rounded_to_the_nearest_and_none_is_zero(device: str) -> None:
    buffer = make(5, EXACT, device=device)
    fill(buffer, 5, priority=[10.4 / UNIT, 10.49 / UNIT, 10.51 / UNIT, 0.4 / UNIT, 0.0])
    assert buffer.masses().tolist() == [10, 10, 11, 1, 1]
    assert buffer.sample(33).key.tolist() == [0] * 10 + [1] * 10 + [2] * 11 + [3, 4]


# how much masses are off, in the decades from 1e-7, 1e-6, 1e-5 and 1e-4 on, as the docstring of `Proportional` says
COARSE = {1.0: (0.34, 0.2, 0.041, 0.005), 0.6: (0.002, 0.002, 0.002, 0.002)}


@pytest.mark.parametrize("alpha", COARSE)
def test_small_masses_are_as_coarse_as_is_said_and_weights_fit_them(alpha: float, device: str) -> None:
    errors = torch.logspace(-7, -3, 4000, dtype=torch.float64)
    buffer = ReplayBuffer(4000, FIELDS, sampler=Proportional(alpha=alpha, beta=0.5), device=device)
    buffer.add(obs=torch.arange(4000), action=torch.arange(4000), priority=errors)
    masses = buffer.masses().cpu().double()
    off = (masses / ((errors + 1e-6) ** alpha * UNIT) - 1).abs().view(4, 1000).amax(1)
    assert (off <= torch.tensor(COARSE[alpha])).all()
    assert alpha < 1 or (off > torch.tensor(COARSE[alpha]) * 0.8).all()
    batch = buffer.sample(64)
    drawn = masses[batch.key.cpu()]
    assert close(batch.weight, (drawn.min() / drawn).sqrt(), "weight")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", scale([1, 2, 3, 100], [1, 3]))
def test_saturation_is_counted_and_the_total_cannot_overflow(capacity: int, kind: str, device: str) -> None:
    buffer, limit = made(kind, EXACT, [None] * capacity, device).buffer, 2**62 // capacity
    huge: list[float | None] = [1e300 if key % 2 else 3e38 for key in range(capacity)]
    buffer.update_priorities(list(range(capacity)), torch.tensor(huge, dtype=torch.float64, device=device))
    assert (buffer.masses().tolist(), buffer.total_mass()) == ([limit] * capacity, capacity * limit)
    assert buffer.stats().saturated_priorities == capacity
    added = made(kind, EXACT, huge, device).buffer
    assert (added.masses().tolist(), added.stats().saturated_priorities) == ([limit] * capacity, capacity)
    assert sorted(set(buffer.sample(capacity).key.tolist())) == list(range(capacity))
    buffer.update_priorities([0], [1.0])
    assert buffer.total_mass() == (capacity - 1) * limit + UNIT


# what is done, and the masses that follow in units of priority 1, in slot order up to the last that is not 0: a text
# adds steps (see `play`), a tuple one step with a priority of each environment, two lists update keys with priorities
LIVES: dict[str, tuple[Any, ...]] = {
    "its own priority counts when it is complete": ({"n_step": 2}, [((4,), []), ((8,), []), (".", [4]), (".", [4, 8])]),
    "the stored maximum is that of the eligible": (
        {"sampler": STORED, "capacity": 4, "stack": 2},
        [
            ("...", [1, 1]),
            ([[0, 1], [8.0, 2.0]], [8, 2]),
            (".", [8, 2, 8]),
            # step 0 goes, and with it start 1, whose stack needs it
            (".", [0, 0, 8, 8]),
            ([[2, 3], [0.5, 0.25]], [0, 0, 0.5, 0.25]),
            (".", [0.5, 0, 0, 0.25]),
            (".", [0.5, 0.5]),
            ("c...", [1]),
        ],
    ),
    "an update of a start that is not complete waits, and the last one counts": (
        {"n_step": 2, "autoreset": "same_step"},
        # 1 and 2 end in a truncation that was not seen: theirs are ignored; 5 gets the largest ever given, 90
        [
            ("..U..", [1]),
            ([[1, 2, 3, 4], [500, 600, 70, 90]], [1]),
            ([[4, 4], [30, 80]], [1]),
            (".", [1, 0, 0, 70]),
            ("..", [1, 0, 0, 70, 80, 90]),
        ],
    ),
    "an update of a start that an ending has closed does not count": (
        {"n_step": 3, "autoreset": "same_step"},
        [("..U.", []), ([[1, 2, 3], [500, 600, 70]], []), ("....", [0, 0, 0, 70, 70])],
    ),
    "an update of a step of a sequence that never gets its target does not count": (
        {"sequences": Sequences(3), "autoreset": "same_step"},
        [("..U.", [1]), ([[2], [500]], [1]), ("...", [1, 1, 0, 1])],
    ),
    "an update waits for the final observation of a truncated episode": (
        {"n_step": 2},
        [("..U", [1]), ([[1, 2], [5.0, 7.0]], [1]), ([[-1, 2], [9.0, 6.0]], [1]), (".", [1, 5, 6])],
    ),
    "an update of a start whose stack is not stored is ignored": (
        {"stack": 3, "n_step": 2},
        [("...", [1]), ("c..", []), ([[3, 4], [5, 7]], []), ("...", [0, 0, 0, 0, 0, 1])],
    ),
}


@pytest.mark.parametrize("name", LIVES)
def test_masses_worked_out_by_hand(name: str, device: str) -> None:
    settings, calls = LIVES[name]
    pair = StepPair(**{"capacity": 8, "num_envs": 1, "sampler": EXACT, "fields": FIELDS, "device": device} | settings)
    for call, expected in calls:
        if isinstance(call, str):
            play(pair, *[call] * pair.model.num_envs, fields=FIELDS)
        elif isinstance(call, list):
            pair.update([int(key) for key in call[0]], call[1])
        else:
            pair.add([numbered(pair.model.count, env, FIELDS, priority=float(own)) for env, own in enumerate(call)])
        pair.check()
        assert units(pair) == expected + [0] * (pair.model.capacity - len(expected))


def test_priorities_before_eligibility_come_to_count_also_in_long_updates(device: str) -> None:
    """An update by several programs on a device; on the host one that sums everything anew."""
    pair = StepPair(6_000, 1_000, sampler=EXACT, fields=FIELDS, n_step=2, autoreset="same_step", device=device)
    for number in range(2):
        pair.add([numbered(number, env, FIELDS) for env in range(1_000)])
    keys = [*range(2_000), *range(1_000, 2_000)]
    pair.update(keys, [1.0 + key % 7 for key in range(3_000)])
    for number in (2, 3):
        pair.add([numbered(number, env, FIELDS) for env in range(1_000)])
    pair.check_all()
    assert units(pair)[:2_000] == [1.0 + key % 7 for key in [*range(1_000), *range(2_000, 3_000)]]


def test_priorities_whose_squares_overflow_are_taken_without_a_warning(device: str) -> None:
    pair = RowPair(4, SAMPLERS["rank"], device=device)
    pair.add(4)
    largest = float(np.finfo(np.float64).max)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.update([0, 1, 2], [largest, 1e200, 3e38])
    pair.check_all()
