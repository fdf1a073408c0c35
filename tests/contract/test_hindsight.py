"""Hindsight: goals exactly those of the strategy, equally likely, and rewards that follow; its settings and functions.

That keys, weights and priorities are those of a buffer without it is in test_programs.py.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale, statistical
from distribution import check_counts
from hindsight_oracle import (
    ACHIEVED,
    DESIRED,
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

from gpu_replay import Proportional, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract
# so many rows of each key that a goal of a dozen is missed once in thirty thousand
EACH = scale(120, 4)


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
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
    pair = StepPair(capacity * envs, envs, device=device, **given)
    for letter in letters:
        pair.add(steps_of(pair, letter.replace(".", "")))
    return pair


def steps_of(pair: StepPair, end: str = "") -> list[Step]:
    """The next step of all environments."""
    return [goal_step(pair.model.count, env, end=end, final=True) for env in range(pair.model.num_envs)]


@statistical
@pytest.mark.parametrize("strategy, first, middle", [("future", 8, 5), ("final", 1, 1), ("episode", 8, 8)])
def test_goals_are_uniform(strategy: str, first: int, middle: int, device: str) -> None:
    """Of the 12 steps that are stored, two end an episode whose first steps are overwritten; the next one runs."""
    pair = stream(".....T..........", device, relabel=hindsight(strategy))
    view = pair.model.view()
    seen = check_batch(pair.buffer.sample(3_000), view, strategy)
    assert sorted(seen) == view.eligible() == [4, 5, *range(7, 15)]
    for key, counts in seen.items():
        allowed = goals_of(view, key, strategy)
        assert set(counts) == set(allowed)
        if len(allowed) > 1:
            check_counts(counts, dict.fromkeys(allowed, 1))
    assert (len(seen[7]), len(seen[10])) == (first, middle)


@pytest.mark.parametrize("ratio", scale([0.0, 0.1, 0.25, 0.8, 1.0], [0.5]))
def test_exactly_the_share_is_rewritten(ratio: float, device: str) -> None:
    pair = stream("." * 12, device, relabel=hindsight(ratio=ratio))
    view = pair.model.view()
    for batch in (1, 2, 3, 7, 10, 64):
        for _ in range(3):
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


def test_names_with_and_without_their_prefix_mean_the_same_and_sequences_are_refused(device: str) -> None:
    short, long = (
        made(device, relabel=hindsight(achieved=a, desired=d))
        for a, d in (("achieved_goal", "desired_goal"), (ACHIEVED, DESIRED))
    )
    assert short.state_dict()["settings"] == long.state_dict()["settings"]
    with pytest.raises(ValueError, match="sample_sequences cannot relabel"):
        short.sample_sequences(2, 3)
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


@pytest.mark.parametrize("name", BAD)
def test_rewards_and_endings_that_cannot_be_used(name: str, device: str) -> None:
    function, error, words = BAD[name]
    broken = made(device, relabel=hindsight(**{"terminated_fn" if "terminated" in name else "reward_fn": function}))
    with pytest.raises(error, match=words):
        broken.sample(8)


FORMS: dict[str, Any] = {
    "truths": lambda a, d: a[:, 0] > 3,
    "doubles": lambda a, d: reward_of(a, d).double(),
    "an array": lambda a, d: reward_of(a, d).cpu().numpy(),
    "with a gradient": lambda a, d: reward_of(a, d) * torch.ones((), requires_grad=True),
    "made in place": in_place,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_rewards_come_in_every_form(form: Any, device: str) -> None:
    asked = []

    def plain(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        asked.append((tuple(achieved.shape), achieved.dtype, desired.dtype))
        return torch.as_tensor(form(achieved.clone(), desired.clone()), device=device).detach().float()

    ended = {"ratio": 0.5, "terminated_fn": lambda a, d: (a == d).all(dim=1)}
    one, other = (made(device, relabel=hindsight(reward_fn=each, **ended)) for each in (plain, form))
    if device != "cpu" and form is FORMS["an array"]:
        # which would have waited for the device
        with pytest.raises(ValueError, match="a tensor .* on cuda.*found ndarray on cpu"):
            other.sample(9)
        return
    batch = other.sample(9)
    assert (batch.reward.dtype, batch.reward.requires_grad) == (torch.float32, False)
    same(one.sample(9), batch)
    # 4.5 rounds to the even number, and goals come as they leave
    assert asked == [((4, 2), torch.float32, torch.float32)]


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


def test_a_reward_function_that_clears_the_buffer_and_raises_leaves_it_empty(device: str) -> None:
    def clears(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        buffer.clear()
        raise ZeroDivisionError

    buffer = stream(".....", device, relabel=hindsight(reward_fn=clears)).buffer
    with pytest.raises(ZeroDivisionError):
        buffer.sample(3)
    state = buffer.state_dict()
    assert int(state["tensors"]["times_sampled"].abs().sum()) == 0
    buffer.load_state_dict(state)
    assert len(buffer) == 0


def test_checkpoints_of_other_hindsight_are_refused(tmp_path: Path) -> None:
    made().save(tmp_path / "goals")
    made(relabel=None).save(tmp_path / "plain")
    for name, relabel, message in (
        ("goals", None, r"reward_fn is code and is not saved.*load\(path, relabel="),
        ("goals", hindsight("final"), "strategy='future'"),
        ("plain", hindsight(), "saved without relabel"),
    ):
        with pytest.raises(ValueError, match=message):
            TrajectoryReplayBuffer.load(tmp_path / name, "cpu", relabel=relabel)
    with pytest.raises(ValueError, match="relabel is None here"):
        made(relabel=None).load_state_dict(made().state_dict())
    assert TrajectoryReplayBuffer.load(tmp_path / "plain", "cpu").relabel is None
