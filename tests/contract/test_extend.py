"""`extend`: forms in which many steps come; that they leave behind what as many `add` do is in test_programs.py."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import host_only
from transitions import EXACT, same

from gpu_replay import Field, Hindsight, Latest, Proportional, TrajectoryReplayBuffer, Uniform
from gpu_replay.loops.compiling import compiler

pytestmark = pytest.mark.contract

FIELDS = {"obs": Field((2,), torch.float32), "action": Field((), torch.int64)}
NESTED = {
    "obs": {"a": Field((2,), torch.uint8), "b": {"c": Field((), torch.float32)}},
    "action": Field((), torch.int64),
}


def stream(draw: np.random.Generator, steps: int, envs: int, end: float) -> dict[str, Any]:
    """Random steps of some environments; a share `end` of them ends an episode."""
    ended = draw.random((steps, envs)) < end
    truncated = draw.random((steps, envs)) < 0.6
    return {
        "obs": draw.standard_normal((steps, envs, 2)).astype(np.float32),
        "action": draw.integers(9, size=(steps, envs)),
        "reward": draw.standard_normal((steps, envs)),
        "terminated": ended & (~truncated | (draw.random((steps, envs)) < 0.1)),
        "truncated": ended & truncated,
    }


def assert_equal(one: TrajectoryReplayBuffer, other: TrajectoryReplayBuffer) -> None:
    """Fail unless both have one state, give the same rows, and draw the same."""
    first, second = one.state_dict(), other.state_dict()
    assert first["counters"] == second["counters"]
    for name, tensor in first["tensors"].items():
        # what stands in unwritten memory does not count
        assert torch.equal(tensor, second["tensors"][name]) or "fields" in name, name
    assert repr(one.stats()) == repr(other.stats())
    for mine, theirs in zip(one.batches(50), other.batches(50), strict=True):
        same(mine, theirs)
    same(one.sample(3), other.sample(3))


@pytest.mark.parametrize("n_step", [1, 3])
def test_extending_is_adding_with_hindsight(n_step: int, device: str) -> None:
    goal = Field((1,), torch.float32)
    fields = {"obs": {"achieved_goal": goal, "desired_goal": goal}, "action": Field((), torch.int64)}
    relabel = Hindsight(reward_fn=lambda achieved, desired: (achieved == desired).all(1).float())
    one, other = (TrajectoryReplayBuffer(40, 2, fields, relabel=relabel, device=device) for _ in range(2))
    given = stream(np.random.default_rng(0), 12 * n_step, 2, 0.2)
    place = given.pop("obs")[..., :1]
    other.extend(obs={"achieved_goal": place, "desired_goal": place}, **given)
    for step in range(12 * n_step):
        obs = {"achieved_goal": place[step], "desired_goal": place[step]}
        one.add(obs=obs, **{name: value[step] for name, value in given.items()})
    assert_equal(one, other)


FORMS = ["dense", "objects", "list", "dotted"]


@pytest.mark.parametrize("form", FORMS)
def test_final_observations_come_in_every_form(form: str, device: str) -> None:
    settings: dict[str, Any] = {"autoreset": "same_step", "sampler": Latest(), "device": device}
    one, other = (TrajectoryReplayBuffer(60, 2, NESTED, **settings) for _ in range(2))
    draw = np.random.default_rng(1)
    steps = 12
    given = stream(draw, steps, 2, 0.3)
    given["obs"] = {"a": draw.integers(9, size=(steps, 2, 2), dtype=np.uint8), "b": {"c": given["reward"]}}
    final = {"a": draw.integers(9, size=(steps, 2, 2), dtype=np.uint8), "b": {"c": given["reward"] + 1}}
    cut = given["truncated"] & ~given["terminated"]
    rows = np.full((steps, 2), None, dtype=object)
    for step, env in zip(*np.nonzero(cut), strict=True):
        rows[step, env] = {"a": final["a"][step, env], "b": {"c": final["b"]["c"][step, env]}}
    forms: dict[str, Any] = {
        "dense": {"final_obs": final},
        "objects": {"final_obs": rows},
        "list": {"final_obs": [row if cut[step].any() else None for step, row in enumerate(rows)]},
        "dotted": {"final_obs.a": final["a"], "final_obs.b.c": final["b"]["c"]},
    }
    other.extend(**given, **forms[form])
    for step in range(steps):
        obs = {"a": given["obs"]["a"][step], "b": {"c": given["obs"]["b"]["c"][step]}}
        rest = {name: value[step] for name, value in given.items() if name != "obs"}
        one.add(obs=obs, **rest, final_obs=rows[step] if cut[step].any() else None)
    assert cut.sum() >= 3
    assert one.stats().eligible == other.stats().eligible
    same(one.sample(one.stats().eligible), other.sample(one.stats().eligible))


def test_arrays_may_lie_on_disk(tmp_path: Any) -> None:
    given = stream(np.random.default_rng(3), 30, 2, 0.1)
    np.save(tmp_path / "obs.npy", given["obs"])
    one, other = (TrajectoryReplayBuffer(40, 2, FIELDS, device="cpu") for _ in range(2))
    one.extend(**given)
    other.extend(**{**given, "obs": np.load(tmp_path / "obs.npy", mmap_mode="r")})
    assert_equal(one, other)


BAD: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, r"needs shape \[T, 2, 2\].*found \[9, 2\]", {"obs": np.zeros((9, 2), np.float32)}),
    (ValueError, r"'action' has 4 steps where the others of this extend have 9", {"action": np.zeros((4, 2), int)}),
    (TypeError, "'action' is stored as torch.int64", {"action": np.zeros((9, 2))}),
    (TypeError, "'terminated' is stored as torch.bool", {"terminated": np.zeros((9, 2))}),
    (ValueError, r"priority needs shape \[9, 2\]", {"priority": np.zeros(9)}),
    (ValueError, r"'final_obs' needs 9 steps; found 2", {"final_obs": [None, None]}),
    (ValueError, r"'final_obs' needs shape \[9, 2, 2\]", {"final_obs": np.zeros((9, 2), np.float32)}),
    (
        ValueError,
        "None for environment",
        {"final_obs": [np.array([None, None])] * 9, "truncated": np.ones((9, 2), bool)},
    ),
    (KeyError, "unknown 'note'", {"note": np.zeros((9, 2))}),
]


@pytest.mark.parametrize("error, message, changed", BAD, ids=[message for _, message, _ in BAD])
def test_what_cannot_be_stored_is_refused_whole(
    error: type[Exception], message: str, changed: dict[str, Any], device: str
) -> None:
    buffer = TrajectoryReplayBuffer(40, 2, FIELDS, autoreset="same_step", sampler=EXACT, device=device)
    given = stream(np.random.default_rng(4), 9, 2, 0.2)
    with pytest.raises(error, match=message):
        buffer.extend(**{**given, **changed})
    assert (buffer.added, buffer.stats().eligible) == (0, 0)
    with pytest.raises(ValueError, match="at least one step"):
        buffer.extend(**{name: value[:0] for name, value in given.items()})
    alone = TrajectoryReplayBuffer(40, 1, FIELDS, device=device)
    with pytest.raises(ValueError, match=r"value\[:, None\]"):
        alone.extend(**{name: value[:, 0] for name, value in given.items()})


@host_only
@pytest.mark.skipif(compiler() is None, reason="loops run as Python here")
@pytest.mark.parametrize("sampler", [Uniform(), Proportional()], ids=str)
def test_a_million_steps_take_seconds(sampler: Any) -> None:
    given = stream(np.random.default_rng(5), 1_000_000, 1, 0.01)
    buffer = TrajectoryReplayBuffer(1_000_000, 1, FIELDS, sampler=sampler, n_step=3, device="cpu")
    begin = time.process_time()
    buffer.extend(**given)
    assert time.process_time() - begin < 3
    assert buffer.stats().eligible > 900_000
