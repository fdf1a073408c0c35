"""Runs of the study: its network against autograd, its measures and goals by hand, and the lines of its table."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from dqn_update import weighted_huber
from torch import nn

from gpu_replay.study import agent as study_agent
from gpu_replay.study.agent import Agent, smooth_l1
from gpu_replay.study.methods import TASKS, Floats, Memory, Minibatch
from gpu_replay.study.network import Parameters
from gpu_replay.study.run import MEASURED, RunId, make_run
from gpu_replay.study.settings import ENVIRONMENTS, METHODS, TUNED, AgentSettings, agents, described
from gpu_replay.study.statistics import correlated_pairs, td_statistics

gymnasium = pytest.importorskip("gymnasium")

SHORT = AgentSettings(episodes=6, hidden=(16,), batch_size=16, first_update=16, memory=60)


# the agent


def as_torch(parameters: Parameters) -> nn.Sequential:
    """The same network in torch's own layers."""
    layers: list[nn.Module] = []
    for weight, bias in zip(parameters.weights, parameters.biases, strict=True):
        layer = nn.Linear(*weight.shape)
        layer.weight.data, layer.bias.data = weight.t().clone(), torch.from_numpy(bias.copy())
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def flat(network: nn.Sequential) -> np.ndarray:
    """A torch network's parameters in the order of `Parameters.array`."""
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    return torch.cat([part for each in layers for part in (each.weight.t().reshape(-1), each.bias)]).detach().numpy()


def minibatch(rows: int, seed: int) -> Minibatch:
    """A batch in which errors are small and large, and some steps end episodes."""
    rng = np.random.default_rng(seed)
    obs, after = rng.standard_normal((2, rows, 4)).astype(np.float32)
    return Minibatch(
        inputs=obs,
        next_inputs=after,
        states=obs,
        action=rng.integers(0, 3, rows),
        reward=rng.normal(0, 2, rows).astype(np.float32),
        discount=np.where(rng.random(rows) < 0.3, 0, 0.9).astype(np.float32),
        weight=rng.random(rows).astype(np.float32),
        keys=torch.arange(rows),
    )


# hidden layers whose products are computed by NumPy, by torch, and by both
@pytest.mark.parametrize("hidden", [(5,), (128,), (64, 48), (300, 300)])
@pytest.mark.parametrize("double", [False, True])
def test_updates_are_those_of_autograd_and_adam(double: bool, hidden: tuple[int, ...]) -> None:
    scale = (1.0, 3.0, 0.5)
    settings = AgentSettings(hidden=hidden, scale=scale, batch_size=20, learning_rate=0.01, double=double)
    agent = Agent(settings, 4, 3, seed=5)
    online, target = as_torch(agent.online), as_torch(agent.online)
    adam = torch.optim.Adam(online.parameters(), lr=0.01)
    for step in range(6):
        batch = minibatch(20, step)
        # the fourth component is a goal, which is not scaled
        factors = torch.tensor((*scale, 1.0))
        obs, after = (torch.from_numpy(each) * factors for each in (batch.inputs, batch.next_inputs))
        values, following = online(obs), target(after)
        best = (online if double else target)(after).argmax(1)
        rest = (torch.from_numpy(each) for each in (batch.action, batch.reward, batch.discount, batch.weight))
        loss, error = weighted_huber(values, following, best, *rest)
        adam.zero_grad()
        loss.backward()
        adam.step()
        td_error, best_values = agent.update(batch)
        np.testing.assert_allclose(best_values, values.detach().amax(1).numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(td_error, -error.numpy(), rtol=1e-4, atol=1e-5)
        assert (batch.weight * smooth_l1(td_error)).mean() == pytest.approx(loss.item(), rel=1e-4)
        np.testing.assert_allclose(agent.online.array, flat(online), rtol=1e-4, atol=1e-4)
        if step == 2:
            agent.copy_to_target()
            target.load_state_dict(online.state_dict())
    # errors beyond one and within it were among them
    assert np.abs(td_error).max() > 1 > np.abs(td_error).min()
    # the best action is taken
    observations = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    expected = online(torch.from_numpy(observations) * torch.tensor((*scale, 1.0))).argmax(1).tolist()
    assert [agent.act(each) for each in observations] == expected
    assert len(set(expected)) > 1


def test_initial_values_are_spread_as_those_of_torch() -> None:
    parameters = Parameters((4, 500, 2))
    parameters.draw(np.random.default_rng(3))
    for weight, bias, bound in zip(parameters.weights, parameters.biases, (4**-0.5, 500**-0.5), strict=True):
        assert max(np.abs(weight.numpy()).max(), np.abs(bias).max()) <= bound
        assert weight.numpy().std() == pytest.approx(bound / 3**0.5, rel=0.05)


# what is measured


def test_td_statistics_by_hand() -> None:
    # absolute values 1, 2, 3, 6: mean 3, median 2.5, deviation sqrt((4 + 1 + 0 + 9) / 4)
    found = td_statistics(np.array([[-2.0, 1.0, 6.0, -3.0], [0.0, 0.0, 0.0, 0.0]], dtype=np.float32))
    assert {name: values.tolist() for name, values in found.items()} == {
        "td_mean": [3.0, 0.0],
        "td_median": [2.5, 0.0],
        "td_max": [6.0, 0.0],
        "td_std": [pytest.approx(3.5**0.5, rel=1e-15), 0.0],
    }


# with a: (1, 2, 3): b rises with it (r = 1), c falls (r = -1), d is flat and has no correlation,
# f: (2, 1, 5) has r = 3 / sqrt(2 * 26 / 3) = 0.7206
A, B, C, D, F = (1, 2, 3), (10, 20, 30), (3, 2, 1), (7, 7, 7), (2, 1, 5)
# three times 0.1 divided by three is not 0.1 in floating point
TENTHS = (0.1, 0.1, 0.1)
# two components are always correlated unless they are equal: 10 states, one of them flat
TWO = [(float(at), float(at * at - 3)) for at in range(1, 10)] + [(0.5, 0.5)]


@pytest.mark.parametrize(
    "batch, above, pairs",
    [
        *(([A, B, C, D, D], 0.8, 3), ([A, F], 0.72, 1), ([A, F], 0.73, 0), ([C, F], 0.72, 1)),
        *(([A], 0.8, 0), ([A, A, A, A], 0.8, 6), ([A, TENTHS, TENTHS], 0.8, 0), (TWO, 0.8, 36)),
    ],
)
def test_correlated_pairs_by_hand(batch: list[tuple[float, ...]], above: float, pairs: int) -> None:
    assert correlated_pairs(np.array([batch], dtype=np.float32), above).tolist() == [pairs]


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


@pytest.mark.parametrize(
    "name, achieved, desired, reward, ends",
    [
        # a metre from the goal is near; three are not
        ("CartPole-v1", (1.0, 0.1), (2.0, 0.1), 1, None),
        ("CartPole-v1", (-1.0, 0.1), (2.0, 0.1), 0, None),
        # the step with which the pole falls is paid by the environment, whatever the goal
        ("CartPole-v1", (0.0, -0.25), (0.0, 0.15), 1, None),
        ("MountainCar-v0", (-0.3,), (-0.3,), -1, True),
        ("Acrobot-v1", (0.5,), (0.25,), 0, True),
        ("Acrobot-v1", (0.25,), (0.25,), -1, False),
    ],
)
def test_other_goals_by_hand(
    name: str, achieved: tuple[float, ...], desired: tuple[float, ...], reward: float, ends: Any
) -> None:
    task = TASKS[name]
    pair = torch.tensor([achieved]), torch.tensor([desired])
    assert task.reward_fn(*pair).tolist() == [reward]
    assert (None if task.terminated_fn is None else task.terminated_fn(*pair).item()) == ends


# runs


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
    # an episode without updates has nothing to say of them
    (episode,) = make_run(RunId(environment, "uniform", 0), dataclasses.replace(settings, episodes=1, first_update=999))
    assert (episode["updates"], [episode[name] for name in MEASURED]) == (0, [None] * 8)


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

    def mean(measure: Any) -> float:
        return float(np.mean([measure(*each) for each in seen]))

    expected = {
        "td_mean": mean(lambda _, e, __: e.mean()),
        "td_median": mean(lambda _, e, __: np.median(e)),
        "td_max": mean(lambda _, e, __: e.max()),
        "td_std": mean(lambda _, e, __: e.std()),
        # every pair of MountainCar's states that are not flat
        "correlated_pairs": mean(
            lambda batch, *_: sum(len(set(a)) > 1 < len(set(b)) for a, b in itertools.combinations(batch.states, 2))
        ),
        "q_mean": mean(lambda _, __, values: values.mean()),
        "q_max": mean(lambda _, __, values: values.max()),
        "loss": mean(lambda batch, e, _: (batch.weight * np.where(e < 1, e * e / 2, e - 0.5)).mean()),
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
