"""Goals of the study: with the true one a step pays and ends as the real environment says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpu_replay.study.methods import TASKS
from gpu_replay.study.settings import ENVIRONMENTS

gymnasium = pytest.importorskip("gymnasium")


def steps(name: str, episodes: int) -> list[tuple[np.ndarray, float, bool]]:
    """Observation after, reward and whether it terminated, of steps by a policy that reaches the ends of episodes."""
    environment, chance, found = gymnasium.make(name), np.random.default_rng(0), []
    for episode in range(episodes):
        obs, _ = environment.reset(seed=episode)
        over = False
        while not over:
            action = _action(name, obs, chance)
            obs, reward, terminated, truncated, _ = environment.step(action)
            found.append((obs, float(reward), bool(terminated)))
            over = terminated or truncated
    environment.close()
    return found


def _action(name: str, obs: np.ndarray, chance: np.random.Generator) -> int:
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
    task, found = TASKS[name], steps(name, 12)
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


def test_what_is_achieved_by_hand() -> None:
    assert TASKS["CartPole-v1"].achieved(np.array([1, 2, 3, 4], dtype=np.float32)).tolist() == [1, 3]
    assert TASKS["MountainCar-v0"].achieved(np.array([0.25, 2], dtype=np.float32)).tolist() == [0.25]
    # both links straight up are two lengths above the axis, hanging down two below
    for first, second, height in ((np.pi, 0, 2), (0, 0, -2), (np.pi / 2, np.pi / 2, 1)):
        obs = np.array([np.cos(first), np.sin(first), np.cos(second), np.sin(second), 0, 0], dtype=np.float32)
        assert TASKS["Acrobot-v1"].achieved(obs).tolist() == [pytest.approx(height, abs=1e-6)]
