"""Errors of the trajectory buffer: the right type, what was asked, what was found; a failed call stores nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from devices import INTERPRETED, scale
from devices import device_fixture as device_fixture
from trajectory_pair import Pair, play
from transitions import EXACT

from gpu_replay import Field, Proportional, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract

FIELDS = {"obs": Field((2,), torch.float32), "action": Field((), torch.int64)}
OBS, ACTION = FIELDS["obs"], FIELDS["action"]
LOSSY = (TypeError, ValueError)


def build(device: str = "cpu", **changed: Any) -> TrajectoryReplayBuffer:
    arguments: dict[str, Any] = {"capacity": 12, "num_envs": 3, "fields": FIELDS} | changed
    return TrajectoryReplayBuffer(**arguments, device=device)


SAME = {"autoreset": "same_step"}
# what the message names is the setting and its value
BAD_VALUES: list[tuple[Any, dict[str, list[Any]]]] = [
    (ValueError, {"capacity": [0, -5], "num_envs": [0, -1], "stack": [0, -2], "n_step": [0, -2]}),
    # no observation field has a height and a width to be shifted by two pixels
    (ValueError, {"gamma": [-0.1, 1.1, float("nan")], "random_shift": [-1, 2], "final_capacity": [-1]}),
    (TypeError, {"capacity": [12.0, True], "num_envs": [1.5, True, "3"], "gamma": ["0.9", True], "seed": [0.5]}),
    (TypeError, {"stack": [2.0, None, True], "n_step": [2.0, None, True], "random_shift": [1.5]}),
    (TypeError, {"final_capacity": [2.5], "sampler": ["uniform"]}),
    (LOSSY, {"autoreset": ["never", "nextstep", None], "padding": ["edge", 0]}),
]
RESERVED = ["key", "weight", "probability", "priority", "reward", "terminated", "truncated", "discount", "next_obs"]
BAD_SETTINGS: list[tuple[dict[str, Any], Any, str]] = [
    *(
        ((SAME if name == "final_capacity" else {}) | {name: value}, error, rf"(?i){name}.*{value}")
        for error, settings in BAD_VALUES
        for name, values in settings.items()
        for value in values
    ),
    ({"capacity": 2}, ValueError, r"(?is)capacity.*2.*3|3.*capacity.*2"),
    ({"capacity": 2**31}, ValueError, r"(?i)capacity"),
    ({"num_envs": 13}, ValueError, r"(?is)12.*13|13.*12"),
    ({"stack": 13}, ValueError, r"stack=13 is longer than the ring.*capacity 12.*at least 39"),
    ({"n_step": 7, "num_envs": 2}, ValueError, r"n_step=7 is longer than the ring.*6 steps of each of the 2"),
    ({"sampler": Uniform}, TypeError, r"sampler"),
    ({"fields": {}}, ValueError, r"(?i)field"),
    ({"fields": [OBS, ACTION]}, TypeError, r"(?i)field"),
    ({"fields": {"obs": torch.float32, "action": ACTION}}, TypeError, r"obs"),
    ({"fields": {"action": ACTION}}, (ValueError, KeyError), r"obs"),
    ({"fields": {"obs": OBS}}, (ValueError, KeyError), r"action"),
    ({"fields": {"observation": OBS, "action": ACTION}}, (ValueError, KeyError), r"'?obs\b"),
    ({"fields": {"obs": OBS, "obs.image": OBS, "action": ACTION}}, (ValueError, KeyError), r"obs.image|obs"),
    *(
        ({"fields": FIELDS | {name: Field((), torch.float32)}}, (ValueError, KeyError), rf"{name}.*reserved")
        for name in [*RESERVED, "final_obs"]
    ),
]


@pytest.mark.parametrize("changed, error, message", BAD_SETTINGS)
def test_settings_that_mean_nothing_are_refused(changed: dict[str, Any], error: Any, message: str, device: str) -> None:
    with pytest.raises(error, match=message):
        build(device, **changed)


@pytest.mark.parametrize("capacity, kept", [(3, 3), (4, 3), (5, 3), (6, 6), (14, 12), (2999, 2997)])
def test_capacity_is_rounded_down_to_whole_steps(capacity: int, kept: int, device: str) -> None:
    assert build(device, capacity=capacity).capacity == kept


@pytest.mark.parametrize("sampler", [Uniform(), Proportional()], ids=repr)
def test_what_does_not_fit_is_refused_with_a_table_of_fields(sampler: Any, device: str) -> None:
    fields = {"obs": Field((1024, 1024, 3), torch.uint8), "action": ACTION}
    with pytest.raises(MemoryError) as refused:
        build(device, capacity=2**31 - 1, num_envs=64, fields=fields, sampler=sampler, stack=4)
    for name in ("obs", "action", "reward"):
        assert re.search(rf"(?m)^.*\b{name}\b.*\d", str(refused.value)), f"no line for {name}"


def step(*names: str, rows: int = 3, **changed: Any) -> dict[str, Any]:
    """The arguments of one `add`, without these names."""
    whole: dict[str, Any] = {
        "obs": torch.arange(2.0 * rows).reshape(rows, 2),
        "action": torch.arange(rows),
        "reward": torch.zeros(rows),
        "terminated": torch.zeros(rows, dtype=torch.bool),
        "truncated": torch.zeros(rows, dtype=torch.bool),
    }
    return {name: value for name, value in (whole | changed).items() if name not in names}


BAD_ADDS: dict[str, tuple[dict[str, Any], Any, str]] = {
    **{f"missing {name}": (step(name), KeyError, name) for name in step()},
    "nothing": ({}, KeyError, r"obs"),
    "unknown field": (step(rewards=torch.zeros(3)), KeyError, r"rewards"),
    "result as a field": (step(next_obs=torch.zeros(3, 2)), KeyError, r"next_obs"),
    "one environment too few": (step(rows=2), ValueError, r"(?s)3.*2|2.*3"),
    "one environment too many": (step(rows=4), ValueError, r"(?s)3.*4|4.*3"),
    "no environments": (step(rows=0), ValueError, r"(?s)3.*0|0.*3"),
    "two steps at once": (step(rows=6), ValueError, r"(?s)3.*6|6.*3"),
    "wrong shape": (step(obs=torch.zeros(3, 3)), ValueError, r"(?s)obs.*2.*3, 3"),
    "missing environment dimension": (step(obs=torch.zeros(2)), ValueError, r"obs"),
    "stack instead of a frame": (step(obs=torch.zeros(3, 4, 2)), ValueError, r"(?s)obs.*3, 4, 2"),
    "scalar reward": (step(reward=torch.tensor(0.5)), ValueError, r"reward"),
    "column of rewards": (step(reward=torch.zeros(3, 1)), ValueError, r"reward.*3, 1"),
    "fewer rewards": (step(reward=torch.zeros(2)), ValueError, r"(?s)reward.*2"),
    "more flags": (step(terminated=torch.zeros(4, dtype=torch.bool)), ValueError, r"(?s)terminated.*4"),
    "fewer flags": (step(truncated=torch.zeros(2, dtype=torch.bool)), ValueError, r"(?s)truncated.*2"),
    "flags as integers": (step(terminated=torch.zeros(3, dtype=torch.int64)), LOSSY, r"terminated.*int64"),
    "flags as floats": (step(truncated=torch.zeros(3)), LOSSY, r"truncated.*float32"),
    "complex reward": (step(reward=torch.zeros(3).cfloat()), LOSSY, r"reward.*complex"),
    "text as reward": (step(reward="abc"), LOSSY, r"reward"),
    "None as action": (step(action=None), LOSSY, r"action"),
    "objects as reward": (step(reward=np.array([1, None, 2])), LOSSY, r"reward"),
    "reward out of range": (step(reward=torch.tensor([0.0, 1e39, 0.0], dtype=torch.float64)), LOSSY, r"reward"),
    "float action": (step(action=torch.zeros(3)), LOSSY, r"action.*(float32.*int64|int64.*float32)"),
    "final_obs of another shape": (step(final_obs=torch.zeros(3, 4)), ValueError, r"(?s)final_obs.*3, 4"),
    "final_obs of fewer environments": (step(final_obs=torch.zeros(2, 2)), ValueError, r"(?s)final_obs.*2"),
    "final_obs of another kind": (step(final_obs=torch.zeros(3, 2).cfloat()), LOSSY, r"final_obs.*complex"),
    "final_obs that is text": (step(final_obs="last"), LOSSY, r"final_obs"),
    "final_obs of a field that is not there": (step(**{"final_obs.image": torch.zeros(3, 2)}), KeyError, r"final_obs"),
    "fewer priorities": (step(priority=torch.ones(2)), ValueError, r"priorit.*2"),
    "column of priorities": (step(priority=torch.ones(3, 1)), ValueError, r"priorit"),
    "one priority for all": (step(priority=1.0), ValueError, r"priorit"),
    "text priority": (step(priority="high"), LOSSY, r"priorit"),
    "truths as priorities": (step(priority=torch.ones(3, dtype=torch.bool)), LOSSY, r"priorit"),
}


MODES = ["same_step"] if INTERPRETED else ["next_step", "same_step", "disabled"]
# with next-step autoreset `final_obs` is not looked at
REFUSED = [
    (name, mode) for name in BAD_ADDS for mode in MODES if mode != "next_step" or "final_obs" not in BAD_ADDS[name][0]
]


@pytest.mark.parametrize("name, autoreset", REFUSED)
def test_add_refuses_and_stores_nothing(name: str, autoreset: str, device: str) -> None:
    fields, error, message = BAD_ADDS[name]
    for streams in (("", "", ""), (".T....", "...U..", "......")):
        pair = Pair(12, 3, fields=FIELDS, device=device, autoreset=autoreset)
        play(pair, *streams, fields=FIELDS, final=True)
        before = repr(pair.buffer.stats())
        with pytest.raises(error, match=message):
            pair.buffer.add(**fields)
        assert repr(pair.buffer.stats()) == before
        pair.check()
        # what was open goes on
        play(pair, ".", ".", ".", fields=FIELDS)
        pair.check()


@pytest.mark.parametrize("given, missing", [("image", "vector"), ("vector", "image"), ("sound", "sound")])
def test_a_dictionary_of_final_observations_must_be_whole(given: str, missing: str, device: str) -> None:
    fields = {"obs.image": OBS, "obs.vector": Field((), torch.float32), "action": ACTION}
    buffer = build(device, fields=fields, autoreset="same_step")
    values = {"image": torch.zeros(3, 2), "vector": torch.zeros(3), "sound": torch.zeros(3)}
    observations = {"obs.image": values["image"], "obs.vector": values["vector"]}
    flags = {"truncated": torch.ones(3, dtype=torch.bool)}
    with pytest.raises((KeyError, ValueError), match=f"final_obs.{missing}"):
        buffer.add(**step("obs", **observations, **flags, **{f"final_obs.{given}": values[given]}))
    assert len(buffer) == 0


BAD_KEYS: list[tuple[Any, Any, str]] = [
    (torch.tensor([3.0]), TypeError, r"(?i)key.*float"),
    (np.array([0.5]), TypeError, r"(?i)key"),
    (torch.tensor([True]), TypeError, r"(?i)key.*bool"),
    ("3", TypeError, r"(?i)key"),
    (None, TypeError, r"(?i)key"),
    (torch.zeros(2, 1, dtype=torch.int64), ValueError, r"(?i)key"),
    ([4, 99, 98], KeyError, r"\b99\b"),
    ([4, -1], KeyError, r"-1"),
    # overwritten, dead, still open
    ([4, 1], KeyError, r"\b1\b"),
    ([4, 9, 99], KeyError, r"\b9\b"),
    ([10, 12], KeyError, r"\b12\b"),
]


@pytest.mark.parametrize("keys, error, message", BAD_KEYS)
def test_keys_that_cannot_be_read_are_refused_by_name(keys: Any, error: Any, message: str, device: str) -> None:
    # t = 1 to 4 are stored; key 9 (t = 3 of the first environment) is dead
    pair = Pair(12, 3, fields=FIELDS, device=device)
    play(pair, "..T..", ".....", ".....", fields=FIELDS)
    assert pair.buffer[[4, 10]].key.tolist() == [4, 10]
    with pytest.raises(error, match=message):
        pair.buffer[keys]


def test_message_of_an_ineligible_key_does_not_say_that_it_is_gone(device: str) -> None:
    pair = Pair(12, 3, fields=FIELDS, device=device)
    play(pair, "..", "..", "..", fields=FIELDS)
    with pytest.raises(KeyError, match="eligible") as waits:
        pair.buffer[4]
    with pytest.raises(KeyError) as gone:
        pair.buffer[400]
    assert str(waits.value).replace("4", "") != str(gone.value).replace("400", "")


TWO, ONES = torch.tensor([3, 4]), torch.ones(2)
BAD_CALLS: dict[str, tuple[Callable[[TrajectoryReplayBuffer], Any], Any, str]] = {
    "float keys": (lambda buffer: buffer.update_priorities(torch.zeros(2), ONES), TypeError, r"(?i)key.*float"),
    "no keys": (lambda buffer: buffer.update_priorities(None, ONES), TypeError, r"(?i)key"),
    "fewer priorities": (lambda buffer: buffer.update_priorities(TWO, ONES[:1]), ValueError, r"(?s)2.*1|1.*2"),
    "column of priorities": (lambda buffer: buffer.update_priorities(TWO, ONES[:, None]), ValueError, r"(?i)priorit"),
    "complex priorities": (lambda buffer: buffer.update_priorities(TWO, ONES.cfloat()), LOSSY, r"(?i)priorit"),
    "batch size 0": (lambda buffer: buffer.sample(0), ValueError, r"0"),
    "negative batch size": (lambda buffer: buffer.sample(-3), ValueError, r"-3"),
    "batch size that is no int": (lambda buffer: buffer.sample(2.0), TypeError, r"2.0"),
    "batch size that is a truth": (lambda buffer: buffer.sample(True), TypeError, r"True"),
    "positional arguments": (lambda buffer: buffer.add(*step().values()), TypeError, r"positional"),
    "negative beta": (lambda buffer: buffer.sample(2, beta=-0.5), ValueError, r"beta"),
    "beta that is text": (lambda buffer: buffer.sample(2, beta="0.5"), TypeError, r"beta"),
    "mask of another length": (lambda buffer: buffer.begin_episodes(np.ones(2, bool)), ValueError, r"(?s)3.*2|2.*3"),
    "mask of another type": (lambda buffer: buffer.begin_episodes(np.ones(3)), LOSSY, r"(?i)bool"),
    "mask of indices": (lambda buffer: buffer.begin_episodes(np.arange(3)), LOSSY, r"(?i)bool"),
}


@pytest.mark.parametrize("sampler", scale([EXACT, Uniform()], [EXACT]), ids=repr)
@pytest.mark.parametrize("name", BAD_CALLS)
def test_calls_that_mean_nothing_change_nothing(name: str, sampler: Any, device: str) -> None:
    call, error, message = BAD_CALLS[name]
    pair, twin = (Pair(12, 3, fields=FIELDS, sampler=sampler, device=device) for _ in range(2))
    for each in (pair, twin):
        play(each, "..T..", ".....", ".....", fields=FIELDS)
    with pytest.raises(error, match=message):
        call(pair.buffer)
    for each in (pair, twin):
        each.check()
        play(each, "..", "..", "..", fields=FIELDS)
    pair.check()
    assert pair.buffer.sample(5).key.tolist() == twin.buffer.sample(5).key.tolist()


@pytest.mark.parametrize("call", ["add", "extend"])
def test_final_observations_where_none_are_taken_say_which_mode_is_meant(call: str, device: str) -> None:
    buffer = build(device, autoreset="next_step")
    given = step(terminated=torch.zeros(3, dtype=torch.bool), truncated=torch.ones(3, dtype=torch.bool))
    for final in ({"final_obs": torch.ones(3, 2)}, {"final_obs": np.array([None, None, None], dtype=object)}):
        rows = given | final
        if call == "extend":
            rows = {name: value[None] for name, value in rows.items()}
        with pytest.raises(ValueError, match=r'"next_step" takes no final_obs.*"same_step"'):
            getattr(buffer, call)(**rows)
        assert buffer.added == 0
