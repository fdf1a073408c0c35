"""Goals that a batch gets in hindsight: exactly those of the strategy, equally likely, and rewards that follow."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale, statistical, thinned
from distribution import check_counts
from hindsight_oracle import (
    ACHIEVED,
    DESIRED,
    GOALS,
    MODES,
    after,
    check_batch,
    goal_step,
    goals_of,
    hindsight,
    live_with_goals,
    reward_of,
    rewritten,
)
from trajectory_pair import Pair

from gpu_replay import Combined, Field, Latest, Proportional, RankBased, Uniform

pytestmark = pytest.mark.contract
STRATEGIES = ("future", "final", "episode")
# so many rows of each key that a goal of a dozen is missed once in thirty thousand
EACH = scale(120, 4)


@thinned(
    "sizes, mode, strategy",
    scale([(1, 9, 0.15), (3, 12, 0.1), (2, 5, 0.5), (2, 1, 0.3), (1, 2, 0.4)], [(2, 5, 0.5)]),
    scale(list(MODES), list(MODES)[:2]),
    STRATEGIES,
    times=3,
)
def test_every_goal_of_the_strategy_is_reached_and_no_other(
    sizes: tuple[int, int, float], strategy: str, mode: str, device: str
) -> None:
    """Over the seam, endings of all kinds, broken streams and clears."""
    num_envs, steps, end = sizes
    draw = random.Random(f"{num_envs} {steps} {strategy} {mode}")
    pair = Pair(
        num_envs * steps,
        num_envs,
        sampler=Uniform(replacement=True),
        fields=GOALS,
        device=device,
        relabel=hindsight(strategy),
        **MODES[mode],
    )
    played = 0
    for _ in range(scale(5, 2)):
        live_with_goals(pair, draw.randint(1, 2 * steps), draw, end=end)
        view = pair.model.view()
        eligible = view.eligible()
        if not eligible:
            continue
        played += 1
        seen = check_batch(pair.buffer.sample(EACH * len(eligible)), view, strategy)
        if EACH >= 100:
            assert {key: set(goals) for key, goals in seen.items()} == {
                key: goals for key in eligible if (goals := set(goals_of(view, key, strategy)))
            }
        pair.check()
    assert played or steps == 1


STREAM = ".....T.........."


# the goal after an ending is that of the final observation: the dead step 3 carries it, or it was given; where nobody
# saw it, the last step keeps the goal it was given, and the others get the newest that is stored
FINALS: dict[str, tuple[dict[str, Any], dict[int, list[int]]]] = {
    "next_step": ({}, {0: [4, 1], 1: [4, 1], 2: [4, 1]}),
    **{
        f"{mode}, {rows} rows": ({"autoreset": mode, "final_capacity": rows}, wanted)
        for mode in ("same_step", "disabled")
        for rows, wanted in (
            (None, {0: [-3, -1], 1: [-3, -1], 2: [-3, -1], 3: [5, 1]}),
            (0, {0: [3, 1], 1: [3, 1], 2: [2002, 3000], 3: [5, 1]}),
        )
    },
}


@pytest.mark.parametrize("name", FINALS)
def test_the_goal_after_an_ending_is_that_of_the_final_observation(name: str, device: str) -> None:
    settings, wanted = FINALS[name]
    batch = stream("..T..", device, "final", **settings).buffer.sample(60)
    found = dict(zip(batch.key.tolist(), batch[DESIRED].tolist(), strict=True))
    assert {key: found[key] for key in wanted} == wanted


def stream(letters: str, device: str, strategy: str, capacity: int = 12, **settings: Any) -> Pair:
    """One environment that took these steps: T terminated, U truncated."""
    given = {"sampler": Uniform(replacement=True), "relabel": hindsight(strategy), **settings}
    pair = Pair(capacity, 1, fields=GOALS, device=device, **given)
    final = pair.model.autoreset != "next_step"
    for number, letter in enumerate(letters):
        pair.add([goal_step(number, 0, end=letter.replace(".", ""), final=final)])
    return pair


@statistical
@pytest.mark.parametrize("strategy, first, middle", [("future", 8, 5), ("final", 1, 1), ("episode", 8, 8)])
def test_goals_are_uniform(strategy: str, first: int, middle: int, device: str) -> None:
    """Of the 12 steps that are stored, two end an episode whose first steps are overwritten; the next one runs."""
    pair = stream(STREAM, device, strategy)
    view = pair.model.view()
    seen = check_batch(pair.buffer.sample(20_000), view, strategy)
    assert sorted(seen) == view.eligible() == [4, 5, *range(7, 15)]
    for key, counts in seen.items():
        allowed = goals_of(view, key, strategy)
        assert set(counts) == set(allowed)
        if len(allowed) > 1:
            check_counts(counts, dict.fromkeys(allowed, 1))
    assert (len(seen[7]), len(seen[10])) == (first, middle)


def test_a_termination_waits_for_its_final_observation(device: str) -> None:
    pair = stream("..T", device, "future")
    rows = rewritten(pair.buffer.sample(50), pair.model.view())
    assert any(rows)
    assert not all(rows)
    assert 2 in pair.buffer.sample(50).key.tolist()
    pair.add([goal_step(3, 0)])
    assert all(rewritten(pair.buffer.sample(50), pair.model.view()))


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled, few finals"])
def test_next_obs_of_a_termination_is_its_final_observation(mode: str, stack: int, device: str) -> None:
    pair = stream("..T.....TT..", device, "future", stack=stack, **MODES[mode])
    view = pair.model.view()
    batch = pair.buffer[view.eligible()]
    expected = [after(view, 0, key) for key in batch.key.tolist()]
    newest = batch[f"next_{ACHIEVED}"].reshape(len(batch), -1, 2)[:, -1].tolist()
    assert all(place is None or tuple(found) == place for found, place in zip(newest, expected, strict=True))
    ended = zip(expected, batch.terminated.tolist(), strict=True)
    assert sum(place is not None and terminated for place, terminated in ended) >= 2


@pytest.mark.parametrize("ratio", scale([0.0, 0.1, 0.25, 0.5, 0.8, 1.0], [0.5]))
def test_exactly_the_share_is_rewritten(ratio: float, device: str) -> None:
    pair = stream("." * 12, device, "future", relabel=hindsight(ratio=ratio))
    view = pair.model.view()
    for batch in (1, 2, 3, 7, 10, 64):
        for _ in range(3):
            assert sum(rewritten(pair.buffer.sample(batch), view)) == round(ratio * batch)


@statistical
def test_rows_are_a_random_set(device: str) -> None:
    pair = stream("." * 12, device, "final", relabel=hindsight("final", 0.5), sampler=Proportional())
    view = pair.model.view()
    chosen = Counter(tuple(rewritten(pair.buffer.sample(6), view)) for _ in range(1500))
    # each of the 20 sets of three rows
    check_counts(chosen, dict.fromkeys(chosen, 1))
    assert len(chosen) == 20


SAMPLERS: dict[str, Any] = {
    "uniform": Uniform(),
    "replacement": Uniform(replacement=True),
    "latest": Latest(),
    "proportional": Proportional(alpha=1.0, eps=0.0),
    "independent": Proportional(stratified=False, normalize="buffer", initial="stored"),
    "rank": RankBased(),
    "combined": Combined(Uniform(), newest=2),
    "combined-proportional": Combined(Proportional(), newest=2),
}


@pytest.mark.parametrize("name", scale(list(SAMPLERS), ["proportional", "combined"]))
def test_the_draw_is_the_one_without_hindsight(name: str, device: str) -> None:
    """Keys, weights, probabilities, priorities and the rows that are left alone."""
    pairs = [
        stream(STREAM, device, "future", sampler=SAMPLERS[name], relabel=relabel)
        for relabel in (None, hindsight(ratio=0.5))
    ]
    for pair in pairs:
        pair.buffer.update_priorities(torch.arange(4, 16), torch.arange(1.0, 13.0))
    plain, relabelled = (pair.buffer.sample(8) for pair in pairs)
    for field in ("key", "weight", "probability", "discount", "terminated", "truncated", "action", ACHIEVED):
        assert torch.equal(plain[field], relabelled[field]), field
    changed = torch.tensor(rewritten(relabelled, pairs[1].model.view()), device=device)
    assert int(changed.sum()) == 4
    for field in ("reward", DESIRED):
        assert torch.equal(plain[field][~changed], relabelled[field][~changed]), field
    # what comes after a termination means nothing without hindsight
    left = ~changed & ~plain.terminated
    assert torch.equal(plain[f"next_{DESIRED}"][left], relabelled[f"next_{DESIRED}"][left])
    if pairs[1].model.by_mass:
        assert torch.equal(pairs[0].buffer.masses(), pairs[1].buffer.masses())
    # what is stored stays as it was
    keys = pairs[0].model.view().eligible()
    for field in ("reward", DESIRED):
        assert torch.equal(pairs[0].buffer[keys][field], pairs[1].buffer[keys][field])


@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_goals_of_stacks(mode: str, padding: str, device: str) -> None:
    pair = stream(STREAM, device, "episode", stack=3, padding=padding, autoreset=mode)
    batch = pair.buffer.sample(scale(200, 30))
    assert batch[DESIRED].shape == (len(batch), 3, 2)
    assert len(check_batch(batch, pair.model.view(), "episode")) >= 5


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_goals_leave_as_their_fields_say(autoreset: str, device: str) -> None:
    fields = GOALS | dict.fromkeys((ACHIEVED, DESIRED), Field((2,), torch.int16, torch.float64, 0.5))
    seen = []

    def note(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        seen.append((achieved.clone(), desired.clone()))
        return reward_of(achieved, desired)

    pair = Pair(12, 1, fields=fields, device=device, autoreset=autoreset, relabel=hindsight(reward_fn=note))
    for number in range(9):
        pair.add([goal_step(number, 0, end="T" if number == 5 else "", final=autoreset == "same_step")])
    batch = pair.buffer.sample(6)
    achieved, desired = seen.pop()
    assert achieved.dtype == desired.dtype == batch[DESIRED].dtype == torch.float64
    rows = {tuple(row) for row in batch[DESIRED].tolist()}
    assert {tuple(row) for row in desired.tolist()} == rows
    # of steps of 1 and environments of 1, halved
    assert {abs(row[1]) for row in rows} == {0.5}
    assert sorted(achieved[:, 0].tolist()) == sorted(batch[f"next_{ACHIEVED}"][:, 0].tolist())
    assert sorted(batch.reward.tolist()) == sorted(reward_of(achieved, desired).tolist())


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_goal_that_is_reached_may_end_the_episode(autoreset: str, device: str) -> None:
    def reached(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        return (achieved == desired).all(dim=1)

    relabel = hindsight("episode", terminated_fn=reached)
    pair = stream("...T" + "." * 6 + "U.", device, "episode", relabel=relabel, autoreset=autoreset, gamma=0.75)
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
    place = after(view, 0, 3)
    assert {tuple(row) for row in batch[f"next_{ACHIEVED}"][went_on].tolist()} == {place}
