"""Hindsight: goals exactly those of the strategy, equally likely, and rewards that follow; its settings and functions.

That keys, weights and priorities are those of a buffer without it is in test_programs.py.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import host_only, loops, scale, statistical
from distribution import check_counts
from hindsight_oracle import (
    ACHIEVED,
    DESIRED,
    GAMMA,
    GOALS,
    after,
    check_batch,
    frames,
    goal_step,
    goals_of,
    hindsight,
    reward_of,
    rewritten,
)
from model import Step
from pairs import StepPair
from programs import any_program, run
from transitions import same

from gpu_replay import Field, Proportional, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract
# so many rows of each key that a goal of a dozen is missed once in thirty thousand
EACH = scale(120, 4)


@pytest.mark.parametrize("strategy", ["future", "geometric", "final", "episode"])
def test_every_goal_of_the_strategy_is_reached_and_no_other(strategy: str, device: str, full: bool) -> None:
    """After random programs; what they draw themselves is compared row by row."""
    seed, left = 0, scale(60, 6) if full else scale(4, 1)
    while left:
        seed += 1
        draw = random.Random(f"{strategy} {seed} {full}")
        known = {"fields": "goals", "n_step": 1, "relabel": strategy, "place": "memory"}
        program = any_program(
            draw, "steps", "replacement", calls=scale(25, 12), capacity=draw.choice((1, 3, 5, 9)), **known
        )
        pair = run(program, device)
        view = pair.model.view()
        if eligible := view.eligible():
            left -= 1
            # every other row is rewritten
            seen = check_batch(pair.buffer.sample(2 * EACH * len(eligible)), view, strategy)
            found = {key: set(goals) for key, goals in seen.items()}
            known_goals = {key: goals for key in eligible if (goals := set(goals_of(view, key, strategy)))}
            assert found == known_goals or (EACH < 100 and found.keys() <= known_goals.keys())


def stream(letters: str, device: str = "cpu", *, envs: int = 1, capacity: int = 12, **settings: Any) -> StepPair:
    """Environments that all took these steps: T terminated, U truncated."""
    given = {"sampler": Uniform(replacement=True), "relabel": hindsight(), "fields": GOALS, **settings}
    with loops():
        pair = StepPair(capacity * envs, envs, device=device, **given)
        for letter in letters:
            pair.add(steps_of(pair, letter.replace(".", "")))
    pair.renew("state")
    return pair


def steps_of(pair: StepPair, end: str = "") -> list[Step]:
    """The next step of all environments."""
    return [goal_step(pair.model.count, env, end=end, final=True) for env in range(pair.model.num_envs)]


# how many goals a row may have: one before the ending, the first after it and two later ones
GOALS_OF = {"future": (2, 8, 7, 3), "geometric": (2, 8, 7, 3), "final": (1, 1, 1, 1), "episode": (2, 8, 8, 8)}


@pytest.mark.parametrize("strategy", GOALS_OF)
def test_goals_are_as_likely_as_is_said(strategy: str, device: str) -> None:
    """Of the 12 steps that are stored, two end an episode whose first steps are overwritten; the next one runs."""
    pair = stream(".....T..........", device, relabel=hindsight(strategy))
    view = pair.model.view()
    seen = check_batch(pair.buffer.sample(scale(6_000, 1_200)), view, strategy)
    assert sorted(seen) == view.eligible() == [4, 5, *range(7, 15)]
    for key, counts in seen.items():
        allowed = goals_of(view, key, strategy)
        power = GAMMA if strategy == "geometric" else 1.0
        if len(allowed) > 1:
            check_counts(counts, {goal: power**place for place, goal in enumerate(allowed)})
    assert tuple(len(goals_of(view, key, strategy)) for key in (4, 7, 8, 12)) == GOALS_OF[strategy]


def test_a_geometric_goal_of_gamma_1_is_uniform_and_of_a_small_one_the_next(device: str) -> None:
    alike, near = (stream("." * 12, device, relabel=hindsight("geometric", gamma=gamma)) for gamma in (1.0, 5e-324))
    expected = stream("." * 12, device, relabel=hindsight("future"))
    same(alike.buffer.sample(64), expected.buffer.sample(64))
    batch = near.buffer.sample(64)
    assert frames(batch, DESIRED) == frames(batch, f"next_{ACHIEVED}")


@pytest.mark.parametrize("ratio", scale([0.0, 0.1, 0.25, 0.8, 1.0], [0.5]))
def test_exactly_the_share_is_rewritten(ratio: float, device: str) -> None:
    pair = stream("." * 12, device, relabel=hindsight(ratio=ratio))
    view = pair.model.view()
    for batch in scale((1, 2, 3, 7, 10, 64), (2, 3, 7)):
        for _ in range(scale(3, 1)):
            assert sum(rewritten(pair.buffer.sample(batch), view)) == round(ratio * batch)


@statistical
def test_rows_are_a_random_set(device: str) -> None:
    pair = stream("." * 12, device, relabel=hindsight("final", 0.5), sampler=Proportional())
    view = pair.model.view()
    chosen = Counter(tuple(rewritten(pair.buffer.sample(6), view)) for _ in range(800))
    # each of the 20 sets of three rows
    check_counts(chosen, dict.fromkeys(chosen, 1))
    assert len(chosen) == 20


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_goal_that_is_reached_may_end_the_episode(autoreset: str, device: str) -> None:
    def reached(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        return (achieved == desired).all(dim=1)

    relabel = hindsight("episode", terminated_fn=reached)
    pair = stream("...T" + "." * 6 + "U.", device, relabel=relabel, autoreset=autoreset, gamma=0.75)
    batch = pair.buffer.sample(scale(400, 60))
    view = pair.model.view()
    assert all(rewritten(batch, view))
    same = (batch[f"next_{ACHIEVED}"] == batch[DESIRED]).all(dim=1)
    assert 0 < int(same.sum()) < len(batch)
    assert torch.equal(batch.terminated, same)
    assert torch.equal(batch.discount, torch.where(same, 0.0, 0.75))
    # truncation is a matter of time, not of goals
    assert batch.truncated.tolist() == [view.row(key)["truncated"] for key in batch.key.tolist()]
    # a termination that was none goes on from the observation after it
    went_on = (batch.key == 3) & ~same
    assert bool(went_on.any())
    assert set(frames(batch[went_on], f"next_{ACHIEVED}")) == {(after(view, 0, 3),)}


# settings, what user functions may do, and state


def made(device: str = "cpu", letters: str = ".....T...", **settings: Any) -> TrajectoryReplayBuffer:
    """A buffer of two environments that has seen some steps."""
    return stream(letters, device, envs=2, **settings).buffer


def test_names_with_and_without_their_prefix_mean_the_same(device: str) -> None:
    short, long = (
        made(device, relabel=hindsight(achieved=a, desired=d))
        for a, d in (("achieved_goal", "desired_goal"), (ACHIEVED, DESIRED))
    )
    assert short.state_dict()["settings"] == long.state_dict()["settings"]
    same(short.sample(8), long.sample(8))


def in_place(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    reward = reward_of(achieved, desired)
    achieved.zero_()
    desired.fill_(-7)
    return reward


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (lambda a, d: None, TypeError, r"one value for each of 8 rows.*found NoneType"),
    "too few": (lambda a, d: a[1:, 0].float(), ValueError, r"found shape \[7\]"),
    "terminated: floats": (lambda a, d: (a == d).all(1).float(), TypeError, "terminated_fn .* must return bool"),
}


# what functions may be and give has no kernel; one of each kind meets one
@pytest.mark.parametrize("name", scale([*BAD], ["too few"]))
def test_rewards_and_endings_that_cannot_be_used(name: str, device: str) -> None:
    function, error, words = BAD[name]
    broken = made(device, relabel=hindsight(**{"terminated_fn" if "terminated" in name else "reward_fn": function}))
    with pytest.raises(error, match=words):
        broken.sample(8)


class Reward(torch.nn.Module):
    """A module, whose own signature is one of anything."""

    def forward(self, achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        return reward_of(achieved, desired)

    def of_three(self, achieved: torch.Tensor, desired: torch.Tensor, step: Any) -> torch.Tensor:
        return reward_of(achieved, desired) + step["action"]


class Unsigned:
    """What `inspect` reads no signature of, as of functions of machine code."""

    __signature__ = "unknown"

    def __call__(self, *goals: torch.Tensor) -> torch.Tensor:
        return reward_of(*goals)


def with_action(achieved: torch.Tensor, desired: torch.Tensor, step: Any) -> torch.Tensor:
    return reward_of(achieved, desired) + step["action"]


# a function of a user, and one that gives the same as it should
FORMS: dict[str, tuple[Any, Any]] = {
    "truths": (lambda a, d: a[:, 0] > 3, lambda a, d: (a[:, 0] > 3).float()),
    "doubles": (lambda a, d: reward_of(a, d).double(), reward_of),
    "an array": (lambda a, d: reward_of(a, d).cpu().numpy(), reward_of),
    "with a gradient": (lambda a, d: reward_of(a, d) * torch.ones((), requires_grad=True), reward_of),
    "made in place": (in_place, reward_of),
    # as many arguments as are required count
    "a module": (Reward(), reward_of),
    "anything": (lambda *goals: reward_of(*goals), reward_of),
    "an option": (lambda a, d, info=None: reward_of(a, d) if info is None else None, reward_of),
    "a keyword bound": (partial(lambda a, d, scale: scale * reward_of(a, d), scale=1), reward_of),
    "machine code": (Unsigned(), reward_of),
    "a method": (Reward().of_three, with_action),
    "a position bound": (partial(lambda zero, a, d, step: with_action(a, d, step) + zero, 0), with_action),
}


@pytest.mark.parametrize("name", scale([*FORMS], ["an array", "made in place", "a method"]))
def test_rewards_come_in_every_form(name: str, device: str) -> None:
    form, plain = FORMS[name]
    ended = {"ratio": 0.5, "terminated_fn": lambda a, d: (a == d).all(dim=1)}
    one, other = (made(device, relabel=hindsight(reward_fn=each, **ended)) for each in (plain, form))
    if device != "cpu" and name == "an array":
        # which would have waited for the device
        with pytest.raises(ValueError, match="a tensor .* on cuda.*found ndarray on cpu"):
            other.sample(9)
        return
    batch = other.sample(9)
    assert (batch.reward.dtype, batch.reward.requires_grad) == (torch.float32, False)
    same(one.sample(9), batch)


def test_functions_of_three_see_the_other_fields_of_the_same_steps(device: str) -> None:
    fields = GOALS | {"info.effort": Field((2,), torch.uint8, scale=0.5)}
    seen = []

    def compute_reward(achieved: torch.Tensor, desired: torch.Tensor, info: Any) -> torch.Tensor:
        assert {*info} == {"action", "info.effort"}
        assert len(info["action"]) == len(achieved) == len(desired) == 4
        # goals come as they leave
        assert achieved.dtype == desired.dtype == torch.float32
        reward = info["action"].float() - info["info.effort"].sum(1)
        # each function has its own
        info["action"].fill_(-9)
        return reward

    def terminated_fn(achieved: torch.Tensor, desired: torch.Tensor, step: Any, /, bound: float = 4.0) -> torch.Tensor:
        seen.append(step["action"].tolist())
        return step["action"] % 2 == 0

    relabel = hindsight("final", 0.5, reward_fn=compute_reward, terminated_fn=terminated_fn)
    buffer = TrajectoryReplayBuffer(20, 1, fields, autoreset="next_step", relabel=relabel, device=device, seed=3)
    for number in range(12):
        step = goal_step(number, 0, fields=fields)
        buffer.add(**{name: [value] for name, value in step.items()})
    batch = buffer.sample(8)
    assert (batch.action >= 0).all()
    changed = batch[DESIRED][:, 0] < 1000
    expected = batch.action.float() - batch["info.effort"].sum(1)
    assert batch.reward[changed].tolist() == expected[changed].tolist()
    assert batch.reward[~changed].tolist() == batch.key[~changed].float().tolist()
    assert sorted(seen[0]) == sorted(batch.action[changed].tolist())
    assert batch.terminated[changed].tolist() == (batch.action[changed] % 2 == 0).tolist()


@pytest.mark.parametrize("name", ["reward_fn", "terminated_fn"])
@pytest.mark.parametrize(
    "function, count", [(lambda a: a, 1), (lambda: 0, 0), (lambda a, d, s, more: a, 4), (lambda a, d, s, m, *n: a, 4)]
)
def test_functions_of_another_number_are_refused_when_made(name: str, function: Any, count: int) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be a function of \(achieved, desired\) or .*takes {count}"):
        hindsight(**{name: function})


def test_another_thread_that_adds_waits_until_the_sample_returns(device: str) -> None:
    def slow(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert pair.buffer.added == 9
        return reward_of(achieved, desired)

    pair, twin = (stream(".....T...", device, relabel=hindsight(reward_fn=each)) for each in (slow, reward_of))
    thread = threading.Thread(target=pair.add, args=[steps_of(pair)])
    expected = twin.buffer.sample(8)
    same(pair.buffer.sample(8), expected)
    thread.join(30)
    assert pair.buffer.added == 10


CHANGES = ["add", "clear", "load", "sample", "update"]


@pytest.mark.parametrize("call", ["fail", *scale(CHANGES, CHANGES[::2])])
def test_a_reward_function_that_fails_or_changes_its_buffer_changes_nothing(call: str, device: str) -> None:
    def changes(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        assert len(buffer) == len(buffer.keys()) == 9
        if calls and len(achieved) == 8:
            calls.pop(call)()
        return reward_of(achieved, desired)

    pair, twin = (stream(".....T...", device, relabel=hindsight(reward_fn=each)) for each in (changes, reward_of))
    buffer, state = pair.buffer, twin.buffer.state_dict()
    calls = {
        "add": lambda: pair.add(steps_of(pair)),
        "clear": buffer.clear,
        "load": lambda: buffer.load_state_dict(state),
        "sample": lambda: buffer.sample(1),
        "update": lambda: buffer.update_priorities([0], [2.0]),
        "fail": lambda: math.sqrt(-1),
    }
    for each in (buffer, twin.buffer):
        each.sample(4)
    error, words = (ValueError, "math") if call == "fail" else (RuntimeError, "run inside sample: they must not change")
    with pytest.raises(error, match=words):
        buffer.sample(8)
    calls.clear()
    same(buffer.sample(8), twin.buffer.sample(8))
    assert repr(buffer.stats()) == repr(twin.buffer.stats())


@host_only
def test_checkpoints_of_other_hindsight_are_refused(tmp_path: Path) -> None:
    known = {"goals": hindsight(), "plain": None, "geometric": hindsight("geometric", gamma=0.9)}
    load = partial(TrajectoryReplayBuffer.load, device="cpu")
    for name, relabel in known.items():
        buffer = made(relabel=relabel)
        buffer.save(tmp_path / name)
        same(load(tmp_path / name, relabel=relabel).sample(8), buffer.sample(8))
    for name, relabel, message in (
        ("goals", None, r"reward_fn is code and is not saved.*load\(path, relabel="),
        ("goals", hindsight("final"), "strategy='future'"),
        ("plain", hindsight(), "saved without relabel"),
        ("geometric", hindsight("geometric", gamma=0.8), r"strategy='geometric', gamma=0\.9\); found Hindsight"),
        ("geometric", hindsight(), r"strategy='geometric', gamma=0\.9\); found Hindsight"),
    ):
        with pytest.raises(ValueError, match=message):
            load(tmp_path / name, relabel=relabel)
    with pytest.raises(ValueError, match="relabel is None here"):
        made(relabel=None).load_state_dict(made().state_dict())
