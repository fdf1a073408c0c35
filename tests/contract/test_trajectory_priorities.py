"""Priorities in the trajectory buffer: they belong to eligible starts, and nothing else can be given any.

A start gets its priority in the `add` that completes it, steps after its own; an update can change it from then on and
until something that it needs is overwritten.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from model import UNIT, mass_of
from tolerances import close
from trajectory_pair import Pair, numbered, play
from transitions import EXACT

from gpu_replay import Field, Proportional

pytestmark = pytest.mark.contract

FIELDS = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
STORED = Proportional(alpha=1.0, eps=0.0, initial="stored")


def one(device: str, sampler: Any = EXACT, capacity: int = 8, num_envs: int = 1, **settings: Any) -> Pair:
    return Pair(capacity, num_envs, sampler=sampler, fields=FIELDS, device=device, **settings)


def units(pair: Pair) -> list[float]:
    """Masses in units of priority 1, in slot order."""
    return [mass / UNIT for mass in pair.buffer.masses().tolist()]


# what is done, and the masses that follow in units of priority 1, in slot order up to the last that is not 0: a text
# adds steps (see `play`), a tuple one step with a priority of each environment, two lists update keys with priorities;
# and how many keys were stale
LIVES: dict[str, tuple[Any, ...]] = {
    "a start enters when it is complete": (
        {"n_step": 3},
        [("...", []), (".", [1]), (".", [1, 1]), ("T", [1] * 6)],
    ),
    "its own priority counts when it is complete": ({"n_step": 2}, [((4,), []), ((8,), []), (".", [4]), (".", [4, 8])]),
    "own priorities of each environment": (
        {"num_envs": 3, "capacity": 9},
        [((2, 3, 5), []), ((7, 11, 13), [2, 3, 5]), ((1, 1, 1), [2, 3, 5, 7, 11, 13])],
    ),
    "the sign is dropped": ({"capacity": 3}, [((-4,), []), ((-0.0,), [4]), (".", [4, 1 / UNIT])]),
    "the running maximum counts an own priority only when its start is complete": (
        {"n_step": 2, "capacity": 6},
        # start 0 was completed while the 64 of start 1 was still waiting; start 2 takes the largest so far
        [(".", []), ((64,), []), (".", [1]), ("..", [1, 64, 64])],
    ),
    "starts completed together take the maximum from before the call": (
        {"n_step": 4},
        [(".", []), ((16,), []), (".T", [1, 16, 1, 1]), ("..T", [1, 16, 1, 1, 0, 16, 16])],
    ),
    "the own priority of a dead step never counts": ({}, [("T", [1]), ((512,), [1]), ("...", [1, 0, 1, 1])]),
    "nor that of a step that never becomes a start": (
        {"autoreset": "same_step", "capacity": 5},
        [("T", [1]), ((512, "U"), [1]), ("...", [1, 0, 1, 1])],
    ),
    "updates move the running maximum, and clears leave it": (
        {},
        [
            ("...", [1, 1]),
            ([[0, 1], [0.25, 0.125]], [0.25, 0.125]),
            (".", [0.25, 0.125, 0.25]),
            ([[0], [8.0]], [8, 0.125, 0.25]),
            ([[0], [0.5]], [0.5, 0.125, 0.25]),
            (".", [0.5, 0.125, 0.25, 8]),
            ("c..", [0, 0, 0, 0, 0, 8]),
        ],
    ),
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
    "the stored maximum ignores priorities that wait": (
        {"sampler": STORED, "n_step": 2, "capacity": 4},
        [(".", []), ((64,), []), (".", [1])],
    ),
    **{
        f"the initial priority {number}": (
            {"sampler": Proportional(alpha=1.0, eps=0.0, initial=number), "capacity": 4},
            [(".", []), ((700,), [mass]), ("..", [mass, 700, mass])],
        )
        for number, mass in ((0.5, 0.5), (0, 1 / UNIT), (100.0, 100.0))
    },
    "an update cannot wake a start that is not complete": (
        {"n_step": 2, "autoreset": "same_step"},
        # 1 and 2 end in a truncation that was not seen, 3 and 4 wait; nor is it remembered
        [("..U..", [1]), ([[1, 2, 3, 4], [50, 60, 70, 80]], [1]), (".", [1, 0, 0, 1])],
    ),
    "an update cannot wake a dead step": (
        {},
        [(".T...", [1, 1, 0, 1]), ([[2, 0], [50.0, 2.0]], [2, 1, 0, 1]), (".", [2, 1, 0, 1, 2])],
    ),
    "an update cannot wake a start that lost its stack": (
        {"capacity": 4, "stack": 3},
        # 2 and 3 are stored, but frames of theirs are gone; 5 waits
        [("......", [1]), ([[2, 3, 5], [50, 60, 70]], [1])],
    ),
    "an update of a repeated key keeps the last": (
        {},
        # 5 is dead and 6 waits; the largest ever given is that of the last ones
        [
            ("....T..", [1] * 5),
            ([[1, 2, 1, 5, 0, 1, 2, 0], [9, 7, 3, 99, 6, 0.5, 0.25, 0.125]], [0.125, 0.5, 0.25, 1, 1]),
            (".", [0.125, 0.5, 0.25, 1, 1, 0, 0.5]),
        ],
    ),
    "overwritten and unknown keys": (
        {"capacity": 4},
        # keys 2 to 5 are stored
        [("......", [1, 0, 1, 1]), ([[0, 1, 3, 6, -1, 2**40], [9, 9, 3, 9, 9, 9]], [1, 0, 1, 3]), (".", [1, 3, 0, 3])],
        5,
    ),
    "cleared keys": ({}, [("....c..", [0, 0, 0, 0, 1]), ([[1, 3, 4], [9, 9, 2]], [0, 0, 0, 0, 2])], 2),
    "keys of a sample that was long ago": (
        {"capacity": 3, "stack": 2},
        # t = 0 was overwritten by t = 3; nothing of the old keys is left
        [("....", [0, 0, 1]), ([[0, 0], [5, 5]], [0, 0, 1])],
        2,
    ),
}


@pytest.mark.parametrize("name", LIVES)
def test_masses_worked_out_by_hand(name: str, device: str) -> None:
    settings, calls, *stale = LIVES[name]
    pair = one(device, **settings)
    for call, expected in calls:
        if isinstance(call, str):
            play(pair, *[call] * pair.model.num_envs, fields=FIELDS)
        elif isinstance(call, list):
            pair.update([int(key) for key in call[0]], call[1])
        else:
            number, more = pair.model.count, {"truncated": "U" in call}
            own = [value for value in call if value != "U"]
            pair.add([numbered(number, env, FIELDS, priority=float(own[env]), **more) for env in range(len(own))])
        pair.check()
        assert units(pair) == expected + [0] * (pair.model.capacity - len(expected))
    assert pair.buffer.stats().stale_updates == sum(stale)


def test_saturated_priorities_are_counted_and_the_total_cannot_overflow(device: str) -> None:
    pair = one(device, capacity=4)
    play(pair, "....", fields=FIELDS)
    pair.update([0, 1, 2], [1e300, 3e38, 1.0])
    assert pair.buffer.masses().tolist() == [2**60, 2**60, UNIT, 0]
    assert pair.buffer.total_mass() == 2**61 + UNIT
    assert pair.buffer.stats().saturated_priorities == 2


def test_own_and_initial_priorities_are_subject_to_eps_clip_and_alpha(device: str) -> None:
    settings = Proportional(alpha=0.5, eps=0.25, clip=9.0)
    pair = Pair(8, 1, sampler=settings, fields=FIELDS, device=device)
    for priority in (3.75, 1e6, None, None):
        pair.add([numbered(pair.model.count, 0, FIELDS, priority=priority)])
    expected = [mass_of(value, settings, 8) for value in (3.75, 1e6, 1e6)]
    assert close(pair.buffer.masses()[:3], expected, "mass")
    assert close(pair.buffer.masses()[:2], [2 * UNIT, 3 * UNIT], "mass")
