"""What the trajectory buffer means, in streams short enough to work out by hand.

The observation of step t is t + 1, its reward 2^t, its final observation -(t + 1), and gamma is 1/2, so that a window
of m steps from t is worth m * 2^t. Every case is played to the oracle and to the buffer: the rest of the tests compare
these two with each other, here both stand against literals.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import StepPair, play

from gpu_replay import Field, Sequences

pytestmark = pytest.mark.contract

FIELDS = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
T, U, B, NO = (True, False), (False, True), (True, True), (False, False)  # terminated, truncated


SAME, THREE, STACK, ZEROS = {"autoreset": "same_step"}, {"n_step": 3}, {"stack": 3}, {"padding": "zero"}
TWO, PAIRS = {"stack": 2}, {"n_step": 2}
SEEN, ROW = SAME | {"final": True}, {"final_capacity": 1}
KEPT = SEEN | {"terminal_obs": True}
STRICT, EVEN = {"sequences": Sequences(3, strict=True)}, Sequences(3, strict=True, stride=2)
TURNED = "..T...TT.....T....T."


def of(capacity: int) -> dict[str, Any]:
    return {"capacity": capacity}


def case(settings: dict[str, Any], streams: str, eligible: list[int], rows: Any = None) -> tuple[Any, ...]:
    """A text for each environment, what can be drawn then, and some of it: obs, next_obs (None where it is
    unspecified), how many steps its window has, and flags.
    """
    return {"gamma": 0.5, "capacity": 100} | settings, streams.split(), eligible, rows or {}


CASES = {
    "next step: after a termination it is dead": case(
        {}, "..T..T", [0, 1, 2, 4, 5], {1: (2, 3, 1, NO), 2: (3, 4, 1, T), 5: (6, 6, 1, T)}
    ),
    "next step: after a truncation comes its last observation": case({}, "..U..", [0, 1, 2], {2: (3, 4, 1, U)}),
    "next step: a truncation waits for the observation after it": case({}, "..U", [0, 1]),
    "next step: flags of a dead step mean nothing": case({}, ".TTU..", [0, 1, 3], {3: (4, 5, 1, U)}),
    "next step: terminated and truncated is a termination": case({}, "..B..", [0, 1, 2], {2: (3, None, 1, B)}),
    "same step: an episode begins": case(SAME, "..T..", [0, 1, 2, 3], {2: (3, None, 1, T), 3: (4, 5, 1, NO)}),
    "same step: a truncation that was not seen is not drawn": case(SAME, "..U..", [0, 1, 3], {1: (2, 3, 1, NO)}),
    "final: a truncation has its own": case(SEEN, "..U..", [0, 1, 2, 3], {2: (3, -3, 1, U)}),
    "three steps: ended": case(
        THREE, "...T...", [0, 1, 2, 3], {0: (1, 4, 3, NO), 1: (2, None, 3, T), 3: (4, None, 1, T)}
    ),
    "three steps: a truncation": case(THREE, "...U.", [0, 1, 2, 3], {1: (2, 5, 3, U), 3: (4, 5, 1, U)}),
    "three steps, same step: not seen": case(THREE | SAME, "...U....", [0, 4], {4: (5, 8, 3, NO)}),
    "three steps, final: windows": case(
        THREE | SEEN, "...U....", [0, 1, 2, 3, 4], {1: (2, -4, 3, U), 3: (4, -4, 1, U)}
    ),
    "stack, next step": case(
        STACK, ".U...", [0, 1, 3], {1: ([1, 1, 2], [1, 2, 3], 1, U), 3: ([4, 4, 4], [4, 4, 5], 1, NO)}
    ),
    "stack, same step": case(
        STACK | SAME, "..T...", [0, 1, 2, 3, 4], {2: ([1, 2, 3], None, 1, T), 3: ([4, 4, 4], [4, 4, 5], 1, NO)}
    ),
    "stack, final: next_obs ends with it": case(STACK | SEEN, ".U.", [0, 1], {1: ([1, 1, 2], [1, 2, -2], 1, U)}),
    "stack, final: an episode of one step": case(STACK | SEEN, "U", [0], {0: ([1, 1, 1], [1, 1, -1], 1, U)}),
    "stack, zeros: second episode": case(
        STACK | SEEN | ZEROS, "..T...", [0, 1, 2, 3, 4], {3: ([0, 0, 4], [0, 4, 5], 1, NO)}
    ),
    "ring: goes with its oldest frame": case(STACK | SAME | of(4), ".......", [5], {5: ([4, 5, 6], [5, 6, 7], 1, NO)}),
    "ring as long as the stack: long ones": case(TWO | SAME | of(2), "..T.....", []),
    "ring as long as the stack: short ones": case(TWO | SAME | of(2), ".T.T", [2, 3], {3: ([3, 4], None, 1, T)}),
    "ring of one step: only what needs nothing else": case(of(1), "..T", [2], {2: (3, None, 1, T)}),
    "ring of three: the window must be stored as well": case(PAIRS | of(3), "......", [3]),
    "two environments: keys alternate": case(of(5), "... ...", [2, 3], {2: (2, 3, 1, NO), 3: (102, 103, 1, NO)}),
    "two environments: one ends": case({}, ".T.. ..U.", [0, 1, 2, 3, 5], {2: (2, None, 1, T), 5: (103, 104, 1, U)}),
    "clear: stacks do not reach back": case(TWO, "...c....", [4, 5], {4: ([4, 5], [5, 6], 1, NO)}),
    "clear: a dead step is dead all the same": case(TWO, "..Tc...", [4], {4: ([5, 5], [5, 6], 1, NO)}),
    "begin_episodes: after an ending no step is dead": case({}, "..T|..", [0, 1, 2, 3]),
    "begin_episodes: the final observation did not come": case({}, "..U|..", [0, 1, 3]),
    "begin_episodes: open ones": case(
        TWO | PAIRS, "...|...", [0, 3], {0: ([1, 1], [2, 3], 2, NO), 3: ([4, 4], [5, 6], 2, NO)}
    ),
    "side ring: one that is taken is not overwritten": case(SEEN | ROW | of(4), "U.U.", [0, 1]),
    "side ring: it is free when its step is overwritten": case(SEEN | ROW | of(2), "U.U.", [2], {2: (3, -3, 1, U)}),
    "side ring: by the very step that needs it": case(SEEN | ROW | of(2), "U.U", [1, 2]),
    "side ring: terminations take none": case(SEEN | ROW, "TBTU.", [0, 1, 2, 3]),
    "terminal: without a place the last one stands for it": case(
        SEEN, "..T..T", [*range(6)], {2: (3, 3, 1, T), 5: (6, 6, 1, T)}
    ),
    "terminal: a termination has its own": case(KEPT, "..T..T", [*range(6)], {2: (3, -3, 1, T), 5: (6, -6, 1, T)}),
    "terminal: windows": case(KEPT | PAIRS, "...T..", [0, 1, 2, 3], {2: (3, -4, 2, T), 3: (4, -4, 1, T)}),
    "terminal: a stack ends with it": case(
        KEPT | STACK | {"autoreset": "disabled"}, "...T.", [0, 1, 2, 3], {3: ([2, 3, 4], [3, 4, -4], 1, T)}
    ),
    "terminal: a truncation takes the free place": case(
        KEPT | {"final_capacity": 2}, "TT.U", [0, 1, 2, 3], {0: (1, -1, 1, T), 1: (2, 2, 1, T), 3: (4, -4, 1, U)}
    ),
    "terminal: truncations take the places of terminations": case(
        KEPT | {"final_capacity": 2},
        "TTUUT",
        [*range(5)],
        {0: (1, 1, 1, T), 1: (2, 2, 1, T), 2: (3, -3, 1, U), 3: (4, -4, 1, U), 4: (5, 5, 1, T)},
    ),
    "terminal: of one step the truncated ones come first": case(
        KEPT | {"final_capacity": 3},
        "T T U T",
        [*range(4)],
        {0: (1, -1, 1, T), 1: (101, -101, 1, T), 2: (201, -201, 1, U), 3: (301, 301, 1, T)},
    ),
    "terminal: and take the only place": case(KEPT | ROW, "T U", [0, 1], {0: (1, 1, 1, T), 1: (101, -101, 1, U)}),
    "strict rows: no ending divides them": case(STRICT | SAME | of(8), TURNED, [14, 15, 16]),
    "strict rows: in a ring that has turned less": case(STRICT | SAME | of(8), TURNED[:15], [8, 9, 10, 11]),
    "strict rows: one that ends with the newest step": case(STRICT | SAME | of(8), TURNED[:19], [11, 14, 15, 16]),
    "strict rows: of every other step": case({"sequences": EVEN} | SAME | of(8), TURNED, [14, 16]),
    "side ring of two: a clear frees them": case(SEEN | {"final_capacity": 2}, "UUcU.", [2], {2: (3, -3, 1, U)}),
}


@pytest.mark.parametrize("found", CASES.values(), ids=CASES)
def test_buffer_and_oracle_agree_with_what_was_worked_out_by_hand(found: tuple[Any, ...], device: str) -> None:
    settings, streams, eligible, rows = found
    made = {name: value for name, value in settings.items() if name != "final"}
    pair = StepPair(num_envs=len(streams), fields=FIELDS, device=device, **made)
    play(pair, *streams, fields=FIELDS, final="final" in settings)
    # the buffer holds what the oracle says, and the oracle says this
    pair.check_contents()
    view = pair.model.view()
    assert view.eligible() == eligible
    for key, (obs, after, steps, flags) in rows.items():
        row, reward = view.row(key), steps * 2 ** (key // len(streams))
        assert row["obs"] == obs
        assert after is None or row["next_obs"] == after
        assert (row["reward"], row["discount"]) == (reward, 0 if flags[0] else 0.5**steps)
        assert (row["terminated"], row["truncated"]) == flags
    if "terminal_obs" in settings:
        lost = [key for key, (obs, after, _, flags) in rows.items() if flags == T and after == obs]
        assert pair.buffer.stats().lost_terminal_obs == view.lost == len(lost)


SEQUENCES: dict[str, tuple[str, int, dict[str, Any], dict[int, str]]] = {
    "dead steps are not covered, nor what comes after": ("..T....", 3, {}, {0: "111", 1: "110", 2: "100"}),
    "they are no first step": ("..T.....", 3, {}, {0: "111", 1: "110", 2: "100", 4: "111"}),
    "same step: what comes after an ending is not covered": ("..T...", 3, SAME, {0: "111", 1: "110", 2: "100"}),
    "a truncation that was not seen is masked": ("..U....", 3, SAME, {0: "110", 1: "100", 3: "111"}),
    "so are all steps whose window reaches it": ("...U.....", 3, {"n_step": 2, **SAME}, {0: "110", 1: "100", 4: "111"}),
    "one that was seen is not": ("..U....", 3, {"final": True, **SAME}, {0: "111", 1: "110", 2: "100", 3: "111"}),
    "a broken stream ends the mask": ("...|....", 3, {}, {0: "110", 1: "100", 3: "111"}),
    "and the windows that reach it": ("....|.....", 3, {"n_step": 2}, {0: "110", 1: "100", 4: "111"}),
    "which the next step tells": ("...|", 3, {}, {}),
    "the window that the last step needs may be longer": ("......", 2, {"n_step": 4}, {0: "11"}),
    "a strict row may end with one that was not seen": ("...U...U", 4, SAME | {"strict": True}, {0: "1110", 4: "1110"}),
    "a row may end with a dead step": ("..T.", 3, {}, {0: "111", 1: "110"}),
}


@pytest.mark.parametrize("stream, length, settings, masks", SEQUENCES.values(), ids=SEQUENCES)
def test_masks_of_sequences_worked_out_by_hand(
    stream: str, length: int, settings: dict[str, Any], masks: dict[int, str], device: str
) -> None:
    made = {name: value for name, value in settings.items() if name not in ("final", "strict")}
    rows = Sequences(length, strict="strict" in settings)
    pair = StepPair(100, 1, fields=FIELDS, device=device, sequences=rows, **made)
    play(pair, stream, fields=FIELDS, final="final" in settings)
    view = pair.check()
    expected = {key: [sign == "1" for sign in mask] for key, mask in masks.items()}
    assert {key: [step["mask"] for step in view.sequence(key, length)] for key in view.eligible()} == expected
    batch = pair.buffer[list(expected)]
    assert dict(zip(batch.key.tolist(), batch.mask.tolist(), strict=True)) == expected
