"""What hindsight may do to each row of a batch, in the words of the contract, from every step that was ever added.

Goals say when and where they were achieved: step and environment, negative in a final observation. Desired goals are
those of the episode, which no achieved goal equals, so that a rewritten row can be told from one that was left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from model import Step, View
from pairs import final_of, numbered
from torch import Tensor

from gpu_replay import Batch, Field, Hindsight

ACHIEVED, DESIRED = "obs.achieved_goal", "obs.desired_goal"
GOALS = {
    "obs.observation": Field((), torch.int32),
    # they leave halved, and so reward functions see them
    ACHIEVED: Field((2,), torch.int16, torch.float32, 0.5),
    DESIRED: Field((2,), torch.int16, torch.float32, 0.5),
    "action": Field((), torch.int64),
}
Goal = tuple[int, ...]
# of the strategy "geometric"
GAMMA = 0.8


def reward_of(achieved: Tensor, desired: Tensor) -> Tensor:
    """A number that says both goals."""
    weights = torch.tensor([1.0, 7.0], device=achieved.device)
    return achieved.float() @ weights + 1000 * (desired.float() @ weights)


def hindsight(strategy: str = "future", ratio: float = 1.0, **more: Any) -> Hindsight:
    """`Hindsight` with the rewards of these tests."""
    fixed = {"gamma": GAMMA} if strategy == "geometric" else {}
    return Hindsight(**{"reward_fn": reward_of, "strategy": strategy, "ratio": ratio, **fixed, **more})


def goal_step(
    number: int, env: int, *, end: str = "", final: bool = False, fields: Mapping[str, Field] = GOALS
) -> Step:
    """A step of one environment; `end` has a T where it terminated, a U where it was truncated."""
    step = numbered(number, env, fields, reward=float(number))
    step[DESIRED] = [2000 + number, 3000 + env]
    step |= {"terminated": "T" in end, "truncated": "U" in end}
    return step | ({"final": final_of(step, bool(end))} if final else {})


def after(view: View, env: int, number: int) -> Goal | None:
    """The goal achieved after a step, where the observation that shows it is stored."""
    steps, marks = view.model.steps[env], view.marks[env]
    if number + 1 < view.count and marks[number + 1][0] == marks[number][0]:
        return tuple(steps[number + 1][ACHIEVED])
    if (env, number) in view.kept:
        return tuple(steps[number]["final"][ACHIEVED])
    return None


def goals_of(view: View, key: int, strategy: str) -> list[Goal]:
    """The goals that a row with this key may get, each equally likely or, if geometric, `GAMMA` times as likely as the
    one before; none where the row stays as it is.
    """
    env, start = view.place(key)
    if after(view, env, start) is None:
        return []
    first = view.marks[env][start][0]
    episode = [number for number in range(view.oldest, view.count) if view.marks[env][number] == (first, False)]
    known = {number: goal for number in episode if (goal := after(view, env, number)) is not None}
    if strategy == "final":
        return [known[max(known)]]
    return [goal for number, goal in known.items() if number >= start or strategy == "episode"]


def frames(batch: Batch, name: str) -> list[tuple[Goal, ...]]:
    """The goals in the frames of each row, as they are stored."""
    stored = batch[name].cpu().double() * 2
    return [tuple(map(tuple, row)) for row in stored.long().reshape(len(batch), -1, 2).tolist()]


def rewritten(batch: Batch, view: View) -> list[bool]:
    """Whether each row has another goal than its step was given; fails where a row is torn."""
    found = []
    goals = [frames(batch, name) for name in (DESIRED, f"next_{DESIRED}")]
    for key, here, after_that in zip(batch.key.tolist(), *goals, strict=True):
        env, number = view.place(key)
        found.append(max(here)[0] < 2000)
        if found[-1]:
            assert set(here) == set(after_that) == {here[0]}
        else:
            assert tuple(view.model.steps[env][number][DESIRED]) in here
    return found


def check_batch(batch: Batch, view: View, strategy: str) -> dict[int, Counter[Goal]]:
    """Fail unless every row is one that hindsight may leave behind; returns the goals of each key by their counts."""
    seen: dict[int, Counter[Goal]] = {}
    achieved, goals = ([row[-1] for row in frames(batch, name)] for name in (f"next_{ACHIEVED}", DESIRED))
    names = ("reward", "discount", "terminated", "truncated", "action")
    others = [tuple(row) for row in zip(*(batch[name].tolist() for name in names), strict=True)]
    # of rows that are alike one is looked at
    alike = Counter(zip(batch.key.tolist(), goals, achieved, others, rewritten(batch, view), strict=True))
    for (key, goal, shown, values, changed), count in alike.items():
        env, number = view.place(key)
        plain = view.row(key)
        expected = [plain[name] for name in names]
        if changed:
            assert goal in goals_of(view, key, strategy), f"key {key}"
            # what the step itself achieved, final observations of terminated episodes included
            assert shown == after(view, env, number), f"key {key}"
            expected[0] = reward_of(torch.tensor([shown]) / 2, torch.tensor([goal]) / 2).item()
            seen.setdefault(key, Counter())[goal] += count
        assert list(values) == expected, f"{names} of key {key}"
    return seen
