"""Runs of the study: its measures and goals by hand, what its memories give back, and the lines of its table."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_replay.study import agent as study_agent
from gpu_replay.study.agent import Agent
from gpu_replay.study.methods import TASKS, Floats, Memory, Minibatch
from gpu_replay.study.network import Parameters
from gpu_replay.study.run import MEASURED, RunId, make_run
from gpu_replay.study.settings import ENVIRONMENTS, METHODS, AgentSettings, agents, described
from gpu_replay.study.statistics import correlated_pairs, td_statistics

gymnasium = pytest.importorskip("gymnasium")

ROOT = Path(__file__).resolve().parents[2]
SHORT = AgentSettings(episodes=6, hidden=(16,), batch_size=16, first_update=16, memory=60)


def test_initial_values_are_spread_as_those_of_torch() -> None:
    parameters = Parameters((4, 500, 2))
    parameters.draw(np.random.default_rng(3))
    for weight, bias, bound in zip(parameters.weights, parameters.biases, (4**-0.5, 500**-0.5), strict=True):
        assert max(np.abs(weight.numpy()).max(), np.abs(bias).max()) <= bound
        assert weight.numpy().std() == pytest.approx(bound / 3**0.5, rel=0.05)


# what is measured


def test_td_statistics_by_hand() -> None:
    # absolute values 1, 2, 3, 6: deviation sqrt((4 + 1 + 0 + 9) / 4)
    found = td_statistics(np.array([[-2.0, 1.0, 6.0, -3.0], [0.0, 0.0, 0.0, 0.0]], dtype=np.float32))
    expected = {"td_mean": 3.0, "td_median": 2.5, "td_max": 6.0, "td_std": pytest.approx(3.5**0.5, rel=1e-15)}
    assert {name: values.tolist() for name, values in found.items()} == {n: [x, 0.0] for n, x in expected.items()}


# with a: (1, 2, 3): b rises with it (r = 1), c falls (r = -1), d is flat and has no correlation,
# f: (2, 1, 5) has r = 3 / sqrt(2 * 26 / 3) = 0.7206
A, B, C, D, F = (1, 2, 3), (10, 20, 30), (3, 2, 1), (7, 7, 7), (2, 1, 5)
# three times 0.1 divided by three is not 0.1 in floating point
TENTHS = (0.1, 0.1, 0.1)
# two components are always correlated unless they are equal: 10 states, one of them flat
TWO = [(float(at), float(at * at - 3)) for at in range(1, 10)] + [(0.5, 0.5)]


BY_HAND: list[tuple[list[tuple[float, ...]], float, int]] = [
    *(([A, B, C, D, D], 0.8, 3), ([A, F], 0.72, 1), ([A, F], 0.73, 0), ([C, F], 0.72, 1)),
    *(([A], 0.8, 0), ([A, A, A, A], 0.8, 6), ([A, TENTHS, TENTHS], 0.8, 0), (TWO, 0.8, 36)),
]


def test_correlated_pairs_by_hand() -> None:
    for batch, above, pairs in BY_HAND:
        assert correlated_pairs(np.array([batch], dtype=np.float32), above).tolist() == [pairs], batch


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("components", [3, 4, 6])
def test_correlated_pairs_are_those_of_corrcoef(components: int, size: float) -> None:
    # more updates than are computed at a time
    states = np.random.default_rng(components).standard_normal((70, 33, components)).astype(np.float32)
    matrices = np.abs([np.corrcoef(batch) for batch in states.astype(np.float64)])
    expected = (np.triu(matrices, 1) > 0.8).sum(axis=(1, 2)).tolist()
    assert len(set(expected)) > 5
    assert correlated_pairs((states * np.float32(size)).astype(np.float32), 0.8).tolist() == expected


# goals


def policy(name: str, obs: np.ndarray, chance: np.random.Generator) -> int:
    """One that reaches the ends of episodes."""
    if name == "MountainCar-v0":
        # pushing along with the movement reaches the flag
        return 2 if obs[1] >= 0 else 0
    if name == "Acrobot-v1":
        # so does twisting against the swing of the first link
        return 2 if obs[4] < 0 else 0
    # both ways in which CartPole ends: the pole falls, or the cart runs away while the pole is held
    return int(chance.integers(2)) if chance.random() < 0.1 else int(obs[2] + 0.3 * obs[3] + 0.05 > 0)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_with_the_true_goal_it_is_the_environment(name: str) -> None:
    task, environment, chance, found = TASKS[name], gymnasium.make(name), np.random.default_rng(0), []
    for episode in range(12):
        obs, _ = environment.reset(seed=episode)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = environment.step(policy(name, obs, chance))
            found.append((obs, float(reward), bool(terminated)))
            over = terminated or truncated
    environment.close()
    achieved = torch.from_numpy(np.stack([task.achieved(obs) for obs, _, _ in found]))
    desired = torch.tensor(task.goal).expand_as(achieved)
    rewards = task.reward_fn(achieved, desired)
    assert achieved.dtype == rewards.dtype == torch.float32
    assert rewards.tolist() == [reward for _, reward, _ in found]
    ends = [terminated for _, _, terminated in found]
    assert any(ends)
    if task.terminated_fn is not None:
        assert task.terminated_fn(achieved, desired).tolist() == ends


OTHER_GOALS: list[tuple[str, tuple[float, ...], tuple[float, ...], float, bool | None]] = [
    # a metre from the goal is near; three are not
    ("CartPole-v1", (1.0, 0.1), (2.0, 0.1), 1, None),
    ("CartPole-v1", (-1.0, 0.1), (2.0, 0.1), 0, None),
    # the step with which the pole falls is paid by the environment, whatever the goal
    ("CartPole-v1", (0.0, -0.25), (0.0, 0.15), 1, None),
    ("MountainCar-v0", (-0.3,), (-0.3,), -1, True),
    ("Acrobot-v1", (0.5,), (0.25,), 0, True),
    ("Acrobot-v1", (0.25,), (0.25,), -1, False),
]


def test_other_goals_by_hand() -> None:
    for name, achieved, desired, reward, ends in OTHER_GOALS:
        task, pair = TASKS[name], (torch.tensor([achieved]), torch.tensor([desired]))
        found = None if task.terminated_fn is None else task.terminated_fn(*pair).item()
        assert (task.reward_fn(*pair).tolist(), found) == ([reward], ends), (name, achieved)


# runs


@pytest.mark.parametrize("method", METHODS)
def test_the_same_run_again_is_the_same(method: str) -> None:
    run = RunId("CartPole-v1", method, 3)
    first, again, other = (make_run(each, SHORT) for each in (run, run, run._replace(seed=4)))
    assert [{**each, "seconds": 0} for each in again] == [{**each, "seconds": 0} for each in first]
    assert [each["duration"] for each in other] != [each["duration"] for each in first]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_line_says_what_happened(name: str) -> None:
    settings = dataclasses.replace(SHORT, episodes=1 if name == "Acrobot-v1" else 3, train_every=5, updates=2)
    run, steps, seconds = RunId(name, "uniform", 0), 0, 0.0
    for number, episode in enumerate(make_run(run, settings), 1):
        before, steps = steps, steps + episode["duration"]
        assert (*(episode[key] for key in ("environment", "method", "seed")), episode["episode"]) == (*run, number)
        assert (episode["steps"], episode["epsilon"]) == (steps, settings.epsilon(steps))
        assert episode["return"] == (1 if name == "CartPole-v1" else -1) * episode["duration"]
        # two updates at each fifth step from the one with which 16 are stored
        assert episode["updates"] == 2 * sum(step % 5 == 0 and step >= 16 for step in range(before + 1, steps + 1))
        assert episode["seconds"] > seconds
        seconds = episode["seconds"]
    # an episode without updates has nothing to say of them
    (episode,) = make_run(run, dataclasses.replace(settings, episodes=1, first_update=999))
    assert (episode["updates"], [episode[key] for key in MEASURED]) == (0, [None] * 8)


def test_measurements_are_means_over_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Minibatch, Floats, Floats]] = []
    update = study_agent.Agent.update

    def spied(self: Agent, drawn: Minibatch) -> tuple[Floats, Floats]:
        errors, values = update(self, drawn)
        copies = dataclasses.replace(drawn, states=drawn.states.copy(), weight=drawn.weight.copy())
        seen.append((copies, np.abs(errors).astype(np.float64), values.copy()))
        return errors, values

    monkeypatch.setattr(study_agent.Agent, "update", spied)
    settings = dataclasses.replace(SHORT, episodes=1)
    (episode,) = make_run(RunId("MountainCar-v0", "proportional", 0), settings)
    assert episode["updates"] == len(seen) == 200 - 15

    # every pair of MountainCar's states that are not flat
    pairs = [itertools.combinations(batch.states, 2) for batch, _, _ in seen]
    losses = [batch.weight * np.where(errors < 1, errors * errors / 2, errors - 0.5) for batch, errors, _ in seen]
    expected = {
        "td_mean": [errors.mean() for _, errors, _ in seen],
        "td_median": [np.median(errors) for _, errors, _ in seen],
        "td_max": [errors.max() for _, errors, _ in seen],
        "td_std": [errors.std() for _, errors, _ in seen],
        "correlated_pairs": [sum(len(set(a)) > 1 < len(set(b)) for a, b in each) for each in pairs],
        "q_mean": [values.mean() for _, _, values in seen],
        "q_max": [values.max() for _, _, values in seen],
        "loss": [each.mean() for each in losses],
    }
    means = {name: float(np.mean(each)) for name, each in expected.items()}
    assert {name: episode[name] for name in means} == pytest.approx(means, rel=1e-5)


def filled(method: str, settings: AgentSettings, steps: int) -> Any:
    """A memory after some steps of CartPole, numbered in the first component, of which each tenth ends an episode."""
    memory = Memory(method, settings, "CartPole-v1", 4, 0)
    for step in range(steps):
        obs, after = (np.array([at, 0, 0.01 * at, 0], dtype=np.float32) for at in (step, step + 0.5))
        ends = step % 10 == 9
        memory.add(obs, step % 2, 1.0, after, terminated=ends and step % 20 == 9, truncated=ends and step % 20 == 19)
    return memory


@pytest.mark.parametrize("method", METHODS)
def test_a_memory_gives_back_what_happened(method: str) -> None:
    settings = dataclasses.replace(SHORT, memory=100, gamma=0.5)
    memory = filled(method, settings, 60)
    drawn = memory.sample(32, 0.5)
    at = drawn.states[:, 0].astype(int)
    assert drawn.inputs.shape == drawn.next_inputs.shape == (32, memory.width)
    assert (drawn.inputs[:, :4].tolist(), drawn.action.tolist()) == (drawn.states.tolist(), (at % 2).tolist())
    assert drawn.discount.tolist() == np.where(at % 20 == 9, 0, 0.5).tolist()
    ended = at % 10 == 9
    # what follows within an episode is the next observation; at its end it is the final one, also of a truncated one
    following = at + np.where(ended | (method != "hindsight"), 0.5, 1)
    assert drawn.next_inputs[:, 0].tolist() == following.tolist()
    if method == "none":
        assert sorted(at.tolist()) == list(range(28, 60))
    if method == "combined":
        assert 59 in at
    if method != "hindsight":
        assert drawn.reward.tolist() == [1.0] * 32
        return
    assert memory.network_input(drawn.states[0]).tolist() == [*drawn.states[0], 0, 0]
    # beside the observation stands a goal: the true one, or one that was achieved later in the same episode
    goals = drawn.inputs[:, 4:]
    assert drawn.next_inputs[:, 4:].tolist() == goals.tolist()
    true = (goals == 0).all(axis=1)
    assert np.count_nonzero(~true) == round(0.8 * 32)
    later = goals[~true, 0] - at[~true]
    assert (later > 0).all()
    assert (goals[~true, 0] < at[~true] - at[~true] % 10 + 10).all()


def test_importance_weights_grow_stronger_over_the_run() -> None:
    def weights(method: str, progress: float) -> np.ndarray:
        memory = filled(method, SHORT, 60)
        memory.update_priorities(torch.arange(60), np.linspace(0.01, 3, 60, dtype=np.float32))
        return memory.sample(32, progress).weight

    for method in ("none", "uniform", "combined", "hindsight"):
        assert weights(method, 0.5).tolist() == [1.0] * 32
    early, late = weights("proportional", 0.0), weights("proportional", 1.0)
    # the same draws, weighted by P ** -0.4 and by P ** -1
    np.testing.assert_allclose(late, early ** (1 / 0.4), rtol=1e-4)
    assert early.min() < 0.7
    assert weights("rank", 0.0).tolist() == weights("rank", 1.0).tolist()
    assert weights("rank", 0.0).min() < 1


@pytest.mark.parametrize("name, tuned", [("study", False), ("study-tuned", True)])
def test_settings_are_those_of_the_recorded_studies_and_may_be_shortened(name: str, tuned: bool) -> None:
    recorded = json.loads((ROOT / "bench" / "results" / name / "settings.json").read_text())
    found = described(agents(ENVIRONMENTS, tuned=tuned), list(METHODS), 5, tuned=tuned, quick=False)
    for each in ("environments", "seeds", "tuned", "quick"):
        assert json.loads(json.dumps(found[each])) == recorded[each]
    assert [each.episodes for each in agents(ENVIRONMENTS, tuned=tuned, episodes=7).values()] == [7, 7, 7]
