"""Nested dictionaries go in where they come out, under any name; so do observations of Gymnasium, and many steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import scale
from transitions import same

from gpu_replay import Field, Latest, ReplayBuffer, TrajectoryReplayBuffer

pytestmark = pytest.mark.contract

NUMBER = Field((), torch.int64)
OBSERVATION = {"image": Field((2,), torch.uint8), "robot": {"arm": NUMBER, "a-b/0": NUMBER}}
FLAT = ("obs.image", "obs.robot.arm", "obs.robot.a-b/0")


def observed(number: int, rows: int = 2) -> dict[str, Any]:
    each = np.arange(rows) + 10 * number
    return {"image": np.stack((each, each), 1).astype(np.uint8), "robot": {"arm": each, "a-b/0": -each}}


def test_dictionaries_are_the_dotted_names_of_a_transition(device: str) -> None:
    fields = {"obs": OBSERVATION, "action": {"x": NUMBER}, "next_obs": OBSERVATION}
    nested = ReplayBuffer(6, fields, device=device, sampler=Latest())
    assert list(nested.fields) == [*FLAT, "action.x", *(f"next_{name}" for name in FLAT)]
    for number in range(3):
        obs, after, action = observed(number), observed(number + 1), np.array([number, -number])
        nested.add(obs=obs, action={"x": torch.from_numpy(action)}, next_obs=after)
    batch = nested.sample(6)
    assert batch["obs.image"].tolist() == [[each, each] for each in (0, 1, 10, 11, 20, 21)]
    assert batch["action.x"].tolist() == [0, 0, 1, -1, 2, -2]
    assert batch["obs"]["robot"]["a-b/0"].tolist() == [0, -1, -10, -11, -20, -21]
    assert batch.next_obs.robot.arm.tolist() == [10, 11, 20, 21, 30, 31]
    # what came out goes in again, as a batch too
    nested.add(obs=batch.obs, action=batch["action"], next_obs=batch.next_obs)
    again = nested.sample(6)
    assert all(torch.equal(again[name], batch[name]) for name in nested.fields)


@pytest.mark.parametrize("name", ["agent/0", "two words", "ünï", "x,y;z%2C", "a..b", "class"])
def test_any_name_is_a_field(name: str, device: str, tmp_path: Any) -> None:
    buffer = ReplayBuffer(4, {name: NUMBER}, device=device, sampler=Latest())
    buffer.add(**{name: np.arange(4)})
    assert buffer.sample(4)[name].tolist() == [0, 1, 2, 3]
    buffer.save(tmp_path / "saved")
    assert ReplayBuffer.load(tmp_path / "saved", device=device).sample(4)[name].tolist() == [0, 1, 2, 3]


def test_dictionaries_with_other_names_are_refused_and_store_nothing(device: str) -> None:
    buffer = ReplayBuffer(4, {"obs": {"a": NUMBER, "b": NUMBER}, "note": NUMBER}, device=device)
    one = np.zeros(1, np.int64)
    for message, obs in (
        ("missing 'obs.b'", {"a": one}),
        ("unknown 'obs.c.d'", {"a": one, "b": one, "c": {"d": one}}),
        ("missing 'obs.a', 'obs.b' and has unknown 'obs'", one),
    ):
        with pytest.raises(KeyError, match=message):
            buffer.add(obs=obs, note=one)
    with pytest.raises(KeyError, match="'obs.a' is given twice"):
        buffer.add(obs={"a": one, "b": one}, **{"obs.a": one}, note=one)
    with pytest.raises((TypeError, KeyError), match=r"dictionary of 'x'|'note.x'"):
        buffer.add(obs={"a": one, "b": one}, note={"x": one})
    assert (len(buffer), buffer.added) == (0, 0)


STREAM = {"obs": OBSERVATION, "action": NUMBER}


def streams(device: str) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(20, 2, STREAM, autoreset="same_step", sampler=Latest(), device=device)


def rows_of(obs: dict[str, Any], ended: list[bool]) -> list[dict[str, Any] | None]:
    """As Gymnasium gives final observations: one dictionary for each environment that ended."""
    return [
        {"image": obs["image"][env], "robot": {name: value[env] for name, value in obs["robot"].items()}}
        if over
        else None
        for env, over in enumerate(ended)
    ]


def objects(rows: list[Any]) -> np.ndarray:
    array = np.full(len(rows), None, dtype=object)
    for place, row in enumerate(rows):
        array[place] = row
    return array


def stacked(values: list[Any]) -> Any:
    """Dictionaries of arrays as one of longer arrays."""
    if isinstance(values[0], dict):
        return {name: stacked([value[name] for value in values]) for name in values[0]}
    return np.stack(values)


FORMS = ["masked", "objects", "dict", "dict of objects", "list", "dotted", "both"]


# they are one before any kernel sees them
@pytest.mark.parametrize("form", scale(FORMS, FORMS[:2]))
def test_final_observations_come_in_every_form(form: str, device: str, tmp_path: Any) -> None:
    buffer, twin, extended = streams(device), streams(device), streams(device)
    played, given, table = [], [], np.full((6, 2), None, dtype=object)
    for number in range(6):
        ended = [number == 2, number in (2, 4)]
        final = observed(50 + number)
        step = {"action": [0, 0], "reward": [0.0, 0.0], "terminated": [False, False], "truncated": ended}
        columns = dict(zip(FLAT, (final["image"], final["robot"]["arm"], final["robot"]["a-b/0"]), strict=True))
        dotted = {f"final_{name}": value for name, value in columns.items()}
        twin.add(obs=observed(number), **step, **dotted)
        rows = rows_of(final, ended)
        table[number] = rows
        forms: dict[str, Any] = {
            "dict": final,
            "masked": final | {"_image": np.array(ended), "_robot": np.array(ended)},
            "objects": objects(rows) if any(ended) else None,
            "dict of objects": {
                "image": objects([row and row["image"] for row in rows]),
                "robot": {name: objects([row and row["robot"][name] for row in rows]) for name in ("arm", "a-b/0")},
            },
            "list": objects(rows),
        }
        played.append({"obs": observed(number), **step})
        arm = {"final_obs.robot.arm": columns["obs.robot.arm"]}
        both = {"final_obs": {"image": final["image"], "robot": {"a-b/0": final["robot"]["a-b/0"]}}, **arm}
        given.append({"dotted": dotted, "both": both}.get(form) or {"final_obs": forms[form]})
        buffer.add(**played[-1], **given[-1])
    many = stacked(played)
    # arrays may lie on disk
    np.save(tmp_path / "action.npy", many["action"])
    many["action"] = np.load(tmp_path / "action.npy", mmap_mode="r")
    of_steps = {"final_obs": table if form == "objects" else [each.get("final_obs") for each in given]}
    extended.extend(**many, **(of_steps if form in ("objects", "list") else stacked(given)))
    assert buffer.stats().eligible == 10
    batch = buffer.sample(10)
    for other in (twin, extended):
        same(batch, other.sample(10))
    cut = batch["key"].tolist().index(4)
    assert batch.next_obs.robot.arm[cut].item() == 520


def test_final_observations_that_do_not_fit_are_refused(device: str) -> None:
    buffer = streams(device)
    step: dict[str, Any] = {"action": [0, 0], "reward": [0.0, 0.0], "terminated": [False] * 2, "truncated": [True] * 2}
    final = observed(9)
    missing = {"image": final["image"]}
    for error, message, given in (
        (KeyError, "final_obs.sound", final | {"sound": np.zeros(2)}),
        (KeyError, "environment 1 must hold", objects([rows_of(final, [True] * 2)[0], missing])),
        (TypeError, "object array", rows_of(final, [True] * 2)),
        (TypeError, "3 observation fields", np.zeros((2, 3))),
    ):
        with pytest.raises(error, match=message):
            buffer.add(obs=observed(0), **step, final_obs=given)
    rows, arm = rows_of(final, [True] * 2), {"final_obs.robot.arm": final["robot"]["arm"]}
    many = stacked([{"obs": observed(0), **{name: np.array(value) for name, value in step.items()}}])
    for call in (
        lambda: buffer.add(obs=observed(0), **step, final_obs=rows, **arm),
        lambda: buffer.extend(**many, final_obs=[rows], **{name: value[None] for name, value in arm.items()}),
    ):
        with pytest.raises(KeyError, match="unknown 'final_obs'"):
            call()
    assert buffer.added == 0


def test_final_observations_of_a_tuple_space_come_in_tuples(device: str) -> None:
    fields = {"obs": {"item_0": NUMBER, "item_1": Field((2,), torch.uint8)}, "action": NUMBER}
    settings: dict[str, Any] = {"autoreset": "same_step", "sampler": Latest(), "device": device}
    buffers = [TrajectoryReplayBuffer(20, 2, fields, **settings) for _ in range(4)]
    obs, final = [(np.arange(6).reshape(3, 2) + more, np.full((3, 2, 2), more, np.uint8)) for more in (0, 100)]
    many: dict[str, Any] = {"action": np.zeros((3, 2), np.int64), "reward": np.zeros((3, 2))}
    many |= {"terminated": np.zeros((3, 2), bool), "truncated": np.array([[False] * 2, [False, True], [True] * 2])}
    for step in range(3):
        given = {name: value[step] for name, value in many.items()}
        obs_now, final_now = (tuple(part[step] for part in parts) for parts in (obs, final))
        buffers[0].add(obs=obs_now, **given, final_obs=final_now)
        buffers[1].add(obs=obs_now, **given, final_obs=objects(list(zip(*final_now, strict=True))))
    buffers[2].extend(obs=obs, **many, final_obs=final)
    buffers[3].extend(obs=obs, **many, final_obs=list(zip(*final, strict=True)))
    batch = buffers[0].sample(6)
    assert batch["next_obs.item_0"].tolist() == [2, 3, 4, 103, 104, 105]
    for other in buffers[1:]:
        same(batch, other.sample(6))
