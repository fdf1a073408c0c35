"""Hindsight as a setting: what is refused, what user functions may return, and buffers that are saved and loaded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import INTERPRETED
from devices import device_fixture as device_fixture
from hindsight_oracle import ACHIEVED, DESIRED, GOALS, goal_step, hindsight, reward_of
from trajectory_pair import columns, taken_by
from transitions import same

import gpu_replay
from gpu_replay import Field, Hindsight, TrajectoryReplayBuffer, Uniform


def made(device: str = "cpu", played: int = 9, capacity: int = 24, **settings: Any) -> TrajectoryReplayBuffer:
    """A buffer of two environments that has seen some steps."""
    given: dict[str, Any] = {"fields": GOALS, "relabel": hindsight(), "device": device, **settings}
    buffer = TrajectoryReplayBuffer(capacity, 2, **given)
    for number in range(played):
        add(buffer, number, "T" if number == 5 else "")
    return buffer


def add(buffer: TrajectoryReplayBuffer, number: int, *ends: str) -> None:
    """A step of both environments, with what ends it, in both or in each."""
    steps = [goal_step(number, env, end=ends[env % len(ends)], final=True) for env in range(2)]
    buffer.add(**taken_by(buffer, steps, GOALS))


# what is refused


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({}, TypeError, "reward_fn"),
        ({"achieved": 3}, TypeError, "achieved must be the name"),
        ({"desired": "achieved_goal"}, ValueError, "two fields"),
        ({"desired": "obs.achieved_goal"}, ValueError, "two fields"),
        ({"reward_fn": None}, TypeError, "reward_fn must be a function"),
        ({"terminated_fn": 1.0}, TypeError, "terminated_fn must be a function"),
        *(({"ratio": value}, TypeError, "ratio must be a number") for value in ("all", True)),
        *(({"ratio": value}, ValueError, "ratio must be from 0 to 1") for value in (1.01, -0.1, float("nan"))),
        ({"strategy": "random"}, ValueError, "'future', 'final' or 'episode'; found 'random'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Hindsight(**({"reward_fn": reward_of, **settings} if settings else {}))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"relabel": reward_of}, TypeError, "relabel must be Hindsight"),
        ({"relabel": hindsight(achieved="reached")}, ValueError, "relabel needs the field 'obs.reached'"),
        ({"relabel": hindsight(desired="obs.wanted")}, ValueError, "relabel needs the field 'obs.wanted'"),
        ({"n_step": 2}, ValueError, "n_step=1; found n_step=2"),
        ({"fields": {**GOALS, DESIRED: Field((3,), torch.int16)}}, ValueError, r"one shape and dtype.*\(3,\)"),
        ({"fields": {**GOALS, DESIRED: Field((2,), torch.int32)}}, ValueError, "one shape and dtype.*int32"),
        (
            {"fields": {**GOALS, **dict.fromkeys((ACHIEVED, DESIRED), Field((4, 4), torch.uint8))}, "random_shift": 2},
            ValueError,
            "random_shift=2 moves",
        ),
        ({"fields": {"obs": Field((2,), torch.float32), "action": GOALS["action"]}}, ValueError, "obs.achieved_goal"),
    ],
)
def test_buffers_that_cannot_be_relabelled(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TrajectoryReplayBuffer(**{"capacity": 8, "num_envs": 2, "fields": GOALS, "relabel": hindsight(), **settings})


def test_names_with_and_without_their_prefix_mean_the_same_and_sequences_are_refused(device: str) -> None:
    short, long = (
        made(device, relabel=hindsight(achieved=a, desired=d))
        for a, d in (("achieved_goal", "desired_goal"), (ACHIEVED, DESIRED))
    )
    assert short._config() == long._config()
    with pytest.raises(ValueError, match="sample_sequences cannot relabel"):
        short.sample_sequences(2, 3)
    same(short.sample(8), long.sample(8))


# what user functions may do


def fails(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("no such goal")


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (lambda a, d: None, TypeError, r"one value for each of 8 rows.*found NoneType"),
    "one number": (lambda a, d: 1.0, TypeError, r"a tensor \[8\].*found float"),
    "a column": (lambda a, d: (a - d)[:, :1].float(), ValueError, r"found shape \[8, 1\]"),
    "too few": (lambda a, d: a[1:, 0].float(), ValueError, r"found shape \[7\]"),
    "complex": (lambda a, d: a[:, 0].to(torch.complex64), TypeError, "real numbers"),
    "a scalar": (lambda a, d: a.float().mean(), ValueError, r"found shape \[\]"),
    "an error": (fails, ArithmeticError, "no such goal"),
    "terminated: floats": (lambda a, d: (a == d).all(1).float(), TypeError, "terminated_fn .* must return bool"),
    "terminated: a column too many": (lambda a, d: a == d, ValueError, r"terminated_fn.*found shape \[8, 2\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_rewards_and_endings_that_cannot_be_used(name: str, device: str) -> None:
    function, error, words = BAD[name]
    host = device == "cpu" and not INTERPRETED
    broken = made(device, relabel=hindsight(**{"terminated_fn" if "terminated" in name else "reward_fn": function}))
    good = made(device)
    for buffer in (broken, good):
        add(buffer, 9, "")
    before = broken.state_dict()
    with pytest.raises(error, match=words):
        broken.sample(8)
    after = broken.state_dict()
    # on the host also the draw is taken back
    kept = [each for each in before["tensors"] if host or each != "times_sampled"]
    assert all(torch.equal(after["tensors"][each], before["tensors"][each]) for each in kept)
    if not host:
        good.sample(8)
    assert after["counters"] == good.state_dict()["counters"]
    broken._relabel = good.relabel
    for buffer in (broken, good):
        add(buffer, 10, "")
    same(broken.sample(8), good.sample(8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_rewards_of_other_dtypes_are_cast(dtype: torch.dtype, device: str) -> None:
    buffer = made(device, relabel=hindsight(reward_fn=lambda a, d: (a[:, 0] > 3).to(dtype)))
    batch = buffer.sample(8)
    assert batch.reward.dtype == torch.float32
    assert set(batch.reward.tolist()) == {0.0, 1.0}


def test_rewards_may_be_arrays_and_need_no_gradient() -> None:
    asked: list[torch.Size] = []

    def as_array(achieved: torch.Tensor, desired: torch.Tensor) -> np.ndarray:
        asked.append(achieved.shape)
        return reward_of(achieved, desired).numpy()

    weight = torch.ones((), requires_grad=True)
    batches = [
        made(relabel=hindsight(ratio=0.5, reward_fn=function)).sample(9)
        for function in (reward_of, as_array, lambda a, d: reward_of(a, d) * weight)
    ]
    for batch in batches[1:]:
        same(batches[0], batch)
        assert not batch.reward.requires_grad
    # 4.5 rounds to the even number
    assert asked == [torch.Size([4, 2])]


def test_a_function_that_works_in_place_spoils_nothing(device: str) -> None:
    def in_place(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        reward = reward_of(achieved, desired)
        achieved.zero_()
        desired.fill_(-7)
        return reward

    one, other = (
        made(device, relabel=hindsight(reward_fn=each, terminated_fn=lambda a, d: (a == d).all(dim=1)))
        for each in (reward_of, in_place)
    )
    same(one.sample(8), other.sample(8))


def test_another_thread_adds_while_a_reward_function_works(device: str) -> None:
    begun, added = threading.Event(), threading.Event()

    def slow(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert added.wait(30)
        return reward_of(achieved, desired)

    buffer = made(device, relabel=hindsight(reward_fn=slow))

    def run() -> None:
        assert begun.wait(30)
        add(buffer, 9, "")
        added.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert len(buffer.sample(8)) == 8
    thread.join()
    assert buffer.added == 20


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_a_missing_final_observation_of_a_termination_is_named(autoreset: str) -> None:
    buffer = made(autoreset=autoreset, played=3)
    given = columns([goal_step(3, 0, end="T", final=True), goal_step(3, 1, final=True)], GOALS)
    for name in [each for each in given if each.startswith("final_")]:
        given[name] = np.array([None, None], dtype=object)
    with pytest.raises(ValueError, match="None for environment 0, whose episode ended"):
        buffer.add(**given)
    assert buffer.added == 6


# what is known of the buffer


def test_settings_and_memory(device: str) -> None:
    buffer, plain = made(device, relabel=hindsight("episode", 0.25)), made(device, relabel=None)
    names = {"achieved": "achieved_goal", "desired": "desired_goal"}
    assert buffer._config()["relabel"] == names | {"ratio": 0.25, "strategy": "episode"}
    assert (plain._config()["relabel"], plain.relabel) == (None, None)
    # a number for each step and for each environment
    assert buffer.nbytes - plain.nbytes == 4 * (24 + 2) == sum(buffer._sizes().values()) - sum(plain._sizes().values())
    assert "Hindsight" in gpu_replay.__all__


# state


LOADS: list[tuple[str, Any, type[Exception], str]] = [
    ("goals", None, ValueError, r"reward_fn is code and is not saved.*load\(path, relabel="),
    ("goals", hindsight("final"), ValueError, "strategy='future'"),
    ("goals", reward_of, TypeError, "relabel must be Hindsight"),
    ("plain", hindsight(), ValueError, "saved without relabel"),
]


def test_checkpoints_of_other_hindsight_are_refused(tmp_path: Path) -> None:
    made().save(tmp_path / "goals")
    made(relabel=None).save(tmp_path / "plain")
    for name, relabel, error, message in LOADS:
        with pytest.raises(error, match=message):
            TrajectoryReplayBuffer.load(tmp_path / name, "cpu", relabel=relabel)
    with pytest.raises(ValueError, match="relabel is None here"):
        made(relabel=None).load_state_dict(made().state_dict())
    assert TrajectoryReplayBuffer.load(tmp_path / "plain", "cpu").relabel is None


def test_a_buffer_of_before_there_was_hindsight_is_loaded(tmp_path: Path) -> None:
    buffer = made(relabel=None, sampler=Uniform())
    state = buffer.state_dict()
    del state["settings"]["relabel"]
    other = made(relabel=None, played=0)
    other.load_state_dict(state)
    same(other.sample(5), buffer.sample(5))
