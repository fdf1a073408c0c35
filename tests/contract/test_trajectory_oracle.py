"""What the trajectory buffer means, in streams short enough to work out by hand.

The observation of step t is t + 1, its reward 2^t, its final observation -(t + 1), and gamma is 1/2, so that a window
of m steps from t is worth m * 2^t. Every case is played to the oracle and to the buffer: the rest of the tests compare
these two with each other, here both stand against literals.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from trajectory_pair import Pair, play

from gpu_replay import Field

pytestmark = pytest.mark.contract

FIELDS = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
T, U, B, NO = (True, False), (False, True), (True, True), (False, False)  # terminated, truncated


@dataclass(frozen=True)
class Case:
    """One text for each environment, what can be drawn then, and some of it: obs, next_obs, reward, discount, flags."""

    streams: tuple[str, ...]
    eligible: list[int]
    rows: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    final: bool = False
    capacity: int = 100
    settings: dict[str, Any] = field(default_factory=dict)


def case(*streams: str, eligible: list[int], **more: Any) -> Case:
    rows = {int(name[1:]): more.pop(name) for name in list(more) if name.startswith("_")}
    known = {name: more.pop(name) for name in ("final", "capacity") if name in more}
    return Case(streams, eligible, rows, settings={"gamma": 0.5} | more, **known)


SAME = "same_step"
CASES = {
    "next step: the step after a termination is dead": case(
        "..T..", eligible=[0, 1, 2], _0=(1, 2, 1, 0.5, NO), _1=(2, 3, 2, 0.5, NO), _2=(3, None, 4, 0.0, T)
    ),
    "next step: the step after a truncation carries the final observation": case(
        "..U..", eligible=[0, 1, 2], _2=(3, 4, 4, 0.5, U)
    ),
    "a termination needs nothing after it": case("..T", eligible=[0, 1, 2]),
    "a truncation waits for the observation after it": case("..U", eligible=[0, 1]),
    "flags of a dead step mean nothing": case(".TT..", eligible=[0, 1, 3]),
    "an episode of one step after a dead one": case(
        ".TTU..", eligible=[0, 1, 3], _3=(4, 5, 8, 0.5, U), _1=(2, None, 2, 0.0, T)
    ),
    "terminated and truncated together is a termination that reports both": case(
        "..B..", eligible=[0, 1, 2], _2=(3, None, 4, 0.0, B)
    ),
    "same step: terminated and truncated together needs no final observation": case(
        "..B..", eligible=[0, 1, 2, 3], _2=(3, None, 4, 0.0, B), _3=(4, 5, 8, 0.5, NO), autoreset=SAME
    ),
    "same step: the next step begins a new episode": case(
        "..T..", eligible=[0, 1, 2, 3], _2=(3, None, 4, 0.0, T), _3=(4, 5, 8, 0.5, NO), autoreset=SAME
    ),
    "same step: a truncation without its final observation is not drawn": case(
        "..U..", eligible=[0, 1, 3], _1=(2, 3, 2, 0.5, NO), autoreset=SAME
    ),
    "same step: a truncation with its final observation is": case(
        "..U..", eligible=[0, 1, 2, 3], _2=(3, -3, 4, 0.5, U), final=True, autoreset=SAME
    ),
    "same step: at once": case("..U", eligible=[0, 1, 2], _2=(3, -3, 4, 0.5, U), final=True, autoreset=SAME),
    "disabled: as same step": case("..U..T.", eligible=[0, 1, 3, 4, 5], autoreset="disabled"),
    "disabled: with final observations": case(
        "..U..", eligible=[0, 1, 2, 3], _2=(3, -3, 4, 0.5, U), final=True, autoreset="disabled"
    ),
    "next step: final_obs is ignored": case("..U..", eligible=[0, 1, 2], _2=(3, 4, 4, 0.5, U), final=True),
    "three steps: full windows and those that a termination cut short": case(
        "...T...",
        eligible=[0, 1, 2, 3],
        _0=(1, 4, 3, 0.125, NO),
        _1=(2, None, 6, 0.0, T),
        _2=(3, None, 8, 0.0, T),
        _3=(4, None, 8, 0.0, T),
        n_step=3,
    ),
    "three steps: those that a truncation cut short": case(
        "...U.", eligible=[0, 1, 2, 3], _1=(2, 5, 6, 0.125, U), _2=(3, 5, 8, 0.25, U), _3=(4, 5, 8, 0.5, U), n_step=3
    ),
    "three steps: a window waits for its last observation": case("...", eligible=[], n_step=3),
    "three steps: and is there with it": case("....", eligible=[0], n_step=3),
    "three steps, same step: no window holds a truncation that was not seen": case(
        "...U....", eligible=[0, 4], _0=(1, 4, 3, 0.125, NO), _4=(5, 8, 48, 0.125, NO), n_step=3, autoreset=SAME
    ),
    "three steps, same step: every window that ends with a final observation": case(
        "...U....",
        eligible=[0, 1, 2, 3, 4],
        _1=(2, -4, 6, 0.125, U),
        _2=(3, -4, 8, 0.25, U),
        _3=(4, -4, 8, 0.5, U),
        n_step=3,
        final=True,
        autoreset=SAME,
    ),
    "stack: filled with the first frame": case(
        "..T...",
        eligible=[0, 1, 2, 3, 4],
        _0=([1, 1, 1], [1, 1, 2], 1, 0.5, NO),
        _1=([1, 1, 2], [1, 2, 3], 2, 0.5, NO),
        _2=([1, 2, 3], None, 4, 0.0, T),
        _3=([4, 4, 4], [4, 4, 5], 8, 0.5, NO),
        stack=3,
        autoreset=SAME,
    ),
    "stack: filled with zeros": case(
        "..T...",
        eligible=[0, 1, 2, 3, 4],
        _0=([0, 0, 1], [0, 1, 2], 1, 0.5, NO),
        _3=([0, 0, 4], [0, 4, 5], 8, 0.5, NO),
        stack=3,
        padding="zero",
        autoreset=SAME,
    ),
    "stack: a dead step belongs to the episode that ended": case(
        ".U...",
        eligible=[0, 1, 3],
        _1=([1, 1, 2], [1, 2, 3], 2, 0.5, U),
        _3=([4, 4, 4], [4, 4, 5], 8, 0.5, NO),
        stack=3,
    ),
    "stack: next_obs ends with the final observation": case(
        ".U.", eligible=[0, 1], _1=([1, 1, 2], [1, 2, -2], 2, 0.5, U), stack=3, final=True, autoreset=SAME
    ),
    "stack: an episode of one step and its final observation": case(
        "U", eligible=[0], _0=([1, 1, 1], [1, 1, -1], 1, 0.5, U), stack=3, final=True, autoreset=SAME
    ),
    "stack: the same with zeros": case(
        "U", eligible=[0], _0=([0, 0, 1], [0, 1, -1], 1, 0.5, U), stack=3, final=True, autoreset=SAME, padding="zero"
    ),
    "ring: a start goes with the oldest frame of its stack": case(
        ".......", eligible=[5], _5=([4, 5, 6], [5, 6, 7], 32, 0.5, NO), stack=3, capacity=4
    ),
    "ring: the beginning of an episode needs no frame before it": case(
        "...T...",
        eligible=[4, 5],
        _4=([5, 5, 5], [5, 5, 6], 16, 0.5, NO),
        _5=([5, 5, 6], [5, 6, 7], 32, 0.5, NO),
        stack=3,
        capacity=4,
        autoreset=SAME,
    ),
    "ring: an episode whose beginning is gone": case(
        ".......", eligible=[4, 5], _4=([4, 5], [5, 6], 16, 0.5, NO), stack=2, capacity=4
    ),
    "ring: a stack as long as the ring": case("..T.....", eligible=[], stack=2, capacity=2),
    "ring: a stack as long as the ring, in short episodes": case(
        ".T.T", eligible=[2, 3], _3=([3, 4], None, 8, 0.0, T), stack=2, capacity=2, autoreset=SAME
    ),
    "ring of one step: only what needs nothing else": case("..T", eligible=[2], _2=(3, None, 4, 0.0, T), capacity=1),
    "ring of one step: nothing while the episode goes on": case("...", eligible=[], capacity=1),
    "ring: the window must be stored as well": case("......", eligible=[3], n_step=2, capacity=3),
    "two environments: keys alternate, and five steps make room for two of each": case(
        "...", "...", eligible=[2, 3], _2=(2, 3, 2, 0.5, NO), _3=(1002, 1003, 2, 0.5, NO), capacity=5
    ),
    "two environments: an end in one of them": case(
        ".T..",
        "..U.",
        eligible=[0, 1, 2, 3, 5],
        _2=(2, None, 2, 0.0, T),
        _3=(1002, 1003, 2, 0.5, NO),
        _5=(1003, 1004, 4, 0.5, U),
    ),
    "clear: stacks do not reach back": case("...c....", eligible=[4, 5], _4=([4, 5], [5, 6], 16, 0.5, NO), stack=2),
    "clear: without a stack the first step after it can be drawn": case("...c....", eligible=[3, 4, 5]),
    "clear: windows begun before it are gone": case("...c..", eligible=[3], n_step=1),
    "clear: the step after an ending is dead all the same": case(
        "..Tc...", eligible=[4], _4=([5, 5], [5, 6], 16, 0.5, NO), stack=2
    ),
    "begin_episodes: open windows stay open": case(
        "...|...",
        eligible=[0, 3],
        _0=([1, 1], [2, 3], 2, 0.25, NO),
        _3=([4, 4], [5, 6], 16, 0.25, NO),
        stack=2,
        n_step=2,
    ),
    "begin_episodes: after an ending no step is dead": case("..T|..", eligible=[0, 1, 2, 3]),
    "begin_episodes: the final observation of a truncation did not come": case("..U|..", eligible=[0, 1, 3]),
    "begin_episodes: it had come": case("..U.|..", eligible=[0, 1, 2, 4]),
    "begin_episodes: before the first step": case("|...", eligible=[0, 1]),
    "begin_episodes: twice is once": case("..||..", eligible=[0, 2]),
}
SIDE_RING = {
    "a row that is taken is not overwritten": case("U.U.", eligible=[0, 1], capacity=4, final_capacity=1),
    "a row is free when its step is overwritten": case(
        "U.U.", eligible=[2], _2=(3, -3, 4, 0.5, U), capacity=2, final_capacity=1
    ),
    "by the very step that needs it": case("U.U", eligible=[1, 2], capacity=2, final_capacity=1),
    "a clear frees all rows": case("UUcU.", eligible=[2], _2=(3, -3, 4, 0.5, U), final_capacity=2),
    "terminations take none": case("TBTU.", eligible=[0, 1, 2, 3], final_capacity=1),
    "in the order of the environments": case("U.", "U.", "U.", eligible=[0, 1], final_capacity=2),
}


SIDE_CASES = {name: Case(**(vars(each) | {"final": True})) for name, each in SIDE_RING.items()}
for each in SIDE_CASES.values():
    each.settings["autoreset"] = SAME


@pytest.mark.parametrize("found", [*CASES.values(), *SIDE_CASES.values()], ids=[*CASES, *SIDE_CASES])
def test_buffer_and_oracle_agree_with_what_was_worked_out_by_hand(found: Case, device: str) -> None:
    pair = Pair(found.capacity, len(found.streams), fields=FIELDS, device=device, **found.settings)
    play(pair, *found.streams, fields=FIELDS, final=found.final)
    # the buffer holds what the oracle says, and the oracle says this
    view = pair.check()
    assert view.eligible() == found.eligible
    for key, (obs, after, reward, discount, flags) in found.rows.items():
        row = view.row(key)
        assert row["obs"] == obs
        assert after is None or row["next_obs"] == after
        assert (row["reward"], row["discount"]) == (reward, discount)
        assert (row["terminated"], row["truncated"]) == flags
    pair.check_refusals(view)


SEQUENCES: dict[str, tuple[str, int, dict[str, Any], dict[int, str]]] = {
    "dead steps are not covered, nor what comes after": ("..T....", 3, {}, {0: "111", 1: "110", 2: "100", 4: "111"}),
    "same step: what comes after an ending is not covered": (
        *("..T...", 3, {"autoreset": SAME}),
        {0: "111", 1: "110", 2: "100", 3: "111"},
    ),
    "one step is an eligible start": ("..U..", 1, {}, {0: "1", 1: "1", 2: "1"}),
    "the start must be eligible": ("..U..", 2, {"autoreset": SAME}, {0: "11", 1: "11", 3: "11"}),
    "a truncation ends the mask": ("..U...", 3, {}, {0: "111", 1: "110", 2: "100"}),
    "a broken stream ends the mask": ("...|....", 3, {}, {0: "111", 1: "110", 3: "111", 4: "111"}),
    "the window that the start needs may be longer": ("......", 2, {"n_step": 4}, {0: "11", 1: "11"}),
}


@pytest.mark.parametrize("stream, length, settings, masks", SEQUENCES.values(), ids=SEQUENCES)
def test_masks_of_sequences_worked_out_by_hand(
    stream: str, length: int, settings: dict[str, Any], masks: dict[int, str], device: str
) -> None:
    pair = Pair(100, 1, fields=FIELDS, device=device, **settings)
    play(pair, stream, fields=FIELDS)
    view = pair.check()
    expected = {key: [sign == "1" for sign in mask] for key, mask in masks.items()}
    starts = view.sequence_starts(length)
    assert {key: [step["mask"] for step in view.sequence(key, length)] for key in starts} == expected
    batch = pair.buffer.sample_sequences(50, length)
    assert dict(zip(batch.key.tolist(), batch.mask.tolist(), strict=True)) == expected
    pair.check_sequences(batch, view, length)
