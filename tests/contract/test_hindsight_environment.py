"""Hindsight with the dictionaries of a Gymnasium environment of goals: what the environment says is what is sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale

from gpu_replay import Field, Hindsight, Proportional, TrajectoryReplayBuffer

gymnasium = pytest.importorskip("gymnasium")

pytestmark = pytest.mark.contract


class Walk(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """A point in the plane that is to be moved to a goal, with the interface of `GoalEnv` of Gymnasium-Robotics."""

    observation_space = gymnasium.spaces.Dict(
        {
            name: gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float64)
            for name, size in (("observation", 3), ("achieved_goal", 2), ("desired_goal", 2))
        }
    )
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def _seen(self) -> dict[str, np.ndarray]:
        state = np.append(self._place, self._steps)
        return {"observation": state, "achieved_goal": self._place.copy(), "desired_goal": self._goal.copy()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._steps = self.np_random.normal(size=2), 0
        self._goal = self.np_random.normal(size=2)
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self._place, self._steps = self._place + action, self._steps + 1
        reward = float(self.compute_reward(self._place, self._goal))
        return self._seen(), reward, reward == 0, self._steps == 9, {}

    @staticmethod
    def compute_reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return -(np.linalg.norm(achieved - desired, axis=-1) > 0.6).astype(np.float64)


def reward_fn(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return -(torch.linalg.vector_norm(achieved - desired, dim=1) > 0.6).float()


def reached(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return reward_fn(achieved, desired) == 0


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_batches_of_a_goal_environment(autoreset: str, device: str) -> None:
    goal = Field((2,), torch.float32)
    buffer = TrajectoryReplayBuffer(
        capacity=400,
        num_envs=4,
        fields={
            "obs.observation": Field((3,), torch.float32),
            "obs.achieved_goal": goal,
            "obs.desired_goal": goal,
            "action": Field((2,), torch.float32),
        },
        autoreset=autoreset,
        gamma=0.5,
        sampler=Proportional(),
        device=device,
        relabel=Hindsight(reward_fn=reward_fn, terminated_fn=reached, ratio=0.5),
    )
    mode = gymnasium.vector.AutoresetMode.NEXT_STEP
    if autoreset == "same_step":
        mode = gymnasium.vector.AutoresetMode.SAME_STEP
    envs = gymnasium.vector.SyncVectorEnv([Walk] * 4, autoreset_mode=mode)
    envs.action_space.seed(0)
    obs, _ = envs.reset(seed=0)
    for _ in range(scale(150, 40)):
        action = envs.action_space.sample()
        after, reward, terminated, truncated, info = envs.step(action)
        fields = {f"obs.{name}": value for name, value in obs.items()}
        if "final_obs" in info:
            # one dictionary for each environment that ended
            for name in obs:
                ended = [None if each is None else each[name] for each in info["final_obs"]]
                fields[f"final_obs.{name}"] = np.array([*ended, None], dtype=object)[:-1]
        buffer.add(**fields, action=action, reward=reward, terminated=terminated, truncated=truncated)
        obs = after
    batch = buffer.sample(128)
    desired, achieved = batch.obs.desired_goal, batch.next_obs.achieved_goal
    assert torch.equal(desired, batch.next_obs.desired_goal)
    # every row, with the goal it was given or another, is one that the environment could have given
    assert torch.equal(batch.reward, reward_fn(achieved, desired))
    assert torch.equal(batch.terminated, reached(achieved, desired))
    assert torch.equal(batch.discount, torch.where(batch.terminated, 0.0, 0.5))
    moved = batch.next_obs.observation - batch.obs.observation
    assert torch.allclose(moved[:, :2], batch.action, atol=1e-5)
    assert torch.equal(moved[:, 2], torch.ones(128, device=moved.device))
    # with hindsight goals are reached far more often
    stored = buffer[batch.key]
    assert int(batch.terminated.sum()) > 2 * int(stored.terminated.sum()) > 0
    others = (desired != stored.obs.desired_goal).any(dim=1)
    assert int(others.sum()) == 64
