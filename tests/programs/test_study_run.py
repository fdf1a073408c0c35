"""Runs of the study: what a line of the table says, and that it is the same every time."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from gpu_replay.study.methods import Floats, Memory, Minibatch
from gpu_replay.study.run import MEASURED, RunId, make_run
from gpu_replay.study.settings import ENVIRONMENTS, METHODS, TUNED, AgentSettings, agents, described

gymnasium = pytest.importorskip("gymnasium")

SHORT = AgentSettings(episodes=6, hidden=(16,), batch_size=16, first_update=16, memory=60)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_run_again_is_the_same(method: str) -> None:
    run = RunId("CartPole-v1", method, 3)
    first, again, other = (make_run(each, SHORT) for each in (run, run, run._replace(seed=4)))
    assert [{**each, "seconds": 0} for each in again] == [{**each, "seconds": 0} for each in first]
    assert [each["duration"] for each in other] != [each["duration"] for each in first]
    keys = [(each["environment"], each["method"], each["seed"], each["episode"]) for each in first]
    assert keys == [("CartPole-v1", method, 3, episode) for episode in range(1, 7)]


@pytest.mark.parametrize("environment, reward", [("CartPole-v1", 1.0), ("Acrobot-v1", -1.0), ("MountainCar-v0", -1.0)])
def test_a_line_says_what_happened(environment: str, reward: float) -> None:
    settings = dataclasses.replace(SHORT, episodes=2 if environment == "Acrobot-v1" else 3, train_every=5, updates=2)
    found, steps = make_run(RunId(environment, "uniform", 0), settings), 0
    for episode in found:
        before, steps = steps, steps + episode["duration"]
        assert (episode["steps"], episode["return"]) == (steps, reward * episode["duration"])
        assert episode["epsilon"] == settings.epsilon(steps)
        # two updates at each fifth step from the one with which 16 are stored
        assert episode["updates"] == 2 * sum(step % 5 == 0 and step >= 16 for step in range(before + 1, steps + 1))
    assert [a["seconds"] < b["seconds"] for a, b in itertools.pairwise(found)] == [True] * (len(found) - 1)


def test_an_episode_without_updates_has_nothing_to_say_of_them() -> None:
    settings = dataclasses.replace(SHORT, episodes=1, first_update=1_000)
    (episode,) = make_run(RunId("CartPole-v1", "uniform", 0), settings)
    assert (episode["updates"], [episode[name] for name in MEASURED]) == (0, [None] * 8)


def test_measurements_are_means_over_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_replay.study import agent

    errors, values, states, weights = [], [], [], []
    update = agent.Agent.update

    def spied(self: agent.Agent, drawn: Minibatch) -> tuple[Floats, Floats]:
        learned = update(self, drawn)
        errors.append(np.abs(learned[0]).astype(np.float64))
        values.append(learned[1])
        states.append(drawn.states.astype(np.float64))
        weights.append(drawn.weight)
        return learned

    monkeypatch.setattr(agent.Agent, "update", spied)
    settings = dataclasses.replace(SHORT, episodes=1)
    (episode,) = make_run(RunId("MountainCar-v0", "proportional", 0), settings)
    assert episode["updates"] == len(errors) == 200 - 15
    loss = [w * np.where(e < 1, e * e / 2, e - 0.5) for w, e in zip(weights, errors, strict=True)]
    pairs = [sum(len(set(a)) > 1 < len(set(b)) for i, a in enumerate(s) for b in s[:i]) for s in states]
    expected = {
        "td_mean": np.mean([e.mean() for e in errors]),
        "td_median": np.mean([np.median(e) for e in errors]),
        "td_max": np.mean([e.max() for e in errors]),
        "td_std": np.mean([e.std() for e in errors]),
        # every pair of MountainCar's states that are not flat
        "correlated_pairs": np.mean(pairs),
        "q_mean": np.mean(values),
        "q_max": np.mean([v.max() for v in values]),
        "loss": np.mean(loss),
    }
    assert {name: episode[name] for name in expected} == pytest.approx(expected, rel=1e-5)


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


def test_default_settings_are_those_of_the_tutorial() -> None:
    found = described(agents(ENVIRONMENTS, tuned=False), list(METHODS), 5, tuned=False, quick=False)
    assert found["seeds"] == [0, 1, 2, 3, 4]
    names = "episodes hidden scale gamma learning_rate memory batch_size first_update epsilon_start epsilon_end "
    names += "epsilon_steps persistence train_every updates target_every double"
    values = (300, (128,), None, 0.8, 1e-3, 10_000, 64, 64, 1.0, 0.05, 1_000, 0.0, 1, 1, None, False)
    expected = dict(zip(names.split(), values, strict=True))
    assert found["environments"] == dict.fromkeys(ENVIRONMENTS, expected)
    assert "Discount 0.8" in found["notes"][0]


def test_tuned_settings_are_those_named_and_may_be_shortened() -> None:
    assert agents(ENVIRONMENTS, tuned=True) == TUNED
    assert [each.episodes for each in agents(ENVIRONMENTS, tuned=True, episodes=7).values()] == [7, 7, 7]
    assert described(TUNED, ["none"], 1, tuned=True, quick=False)["notes"] == []
