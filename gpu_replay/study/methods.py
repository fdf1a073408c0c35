"""How each method stores transitions and samples batches.

Every memory returns batches in the same form, as NumPy arrays, so the agent does not know which method it learns with.
With `hindsight` the network also sees a goal: `TASKS` describes the environments as tasks with goals. With the true
goal, rewards and terminations are the environment's own (CartPole terminates whatever the goal), so only the goal is
new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_replay import Field, Hindsight, Proportional, RankBased, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.study.settings import METHODS, AgentSettings

Floats = NDArray[np.float32]
# bounds beyond which CartPole terminates: the cart's position in metres, the pole's angle of 12 degrees in radians
_BOUNDS = (2.4, 12 * 2 * np.pi / 360)


@dataclass(frozen=True)
class GoalTask:
    """What hindsight needs to know about an environment.

    achieved:      (D,) observation -> (G,) goal that it achieves.
    goal:          the true goal.
    reward_fn:     (K, G) achieved after the step, (K, G) desired -> (K,) reward.
    terminated_fn: the same arguments -> (K,) whether the episode ends there; None if that does not depend on the goal.
    """

    achieved: Callable[[Floats], Floats]
    goal: tuple[float, ...]
    reward_fn: Callable[[Tensor, Tensor], Tensor]
    terminated_fn: Callable[[Tensor, Tensor], Tensor] | None


def _near(achieved: Tensor, desired: Tensor) -> Tensor:
    return ((achieved - desired).abs() <= torch.tensor(_BOUNDS)).all(1)


def _balanced(achieved: Tensor, desired: Tensor) -> Tensor:
    """1 within the bounds of the goal, else 0; the step out of CartPole's own bounds keeps the reward it has there."""
    return (_near(achieved, desired) | ~_near(achieved, torch.zeros_like(desired))).float()


def _each_step_costs(achieved: Tensor, desired: Tensor) -> Tensor:
    """-1 for every step, including the last one, as in MountainCar."""
    return torch.full((len(achieved),), -1.0)


def _height(obs: Floats) -> Floats:
    """Height of Acrobot's tip above its axis, -cos(a) - cos(a + b), in links; obs: cos a, sin a, cos b, sin b."""
    return np.array([-obs[0] - (obs[0] * obs[2] - obs[1] * obs[3])], dtype=np.float32)


def _above(achieved: Tensor, desired: Tensor) -> Tensor:
    return (achieved > desired).squeeze(1)


def _steps_below_cost(achieved: Tensor, desired: Tensor) -> Tensor:
    """0 for the step that reaches the goal, else -1."""
    return _above(achieved, desired).float() - 1


TASKS = {
    "CartPole-v1": GoalTask(lambda obs: obs[[0, 2]], (0.0, 0.0), _balanced, None),
    "Acrobot-v1": GoalTask(_height, (1.0,), _steps_below_cost, _above),
    "MountainCar-v0": GoalTask(
        lambda obs: obs[:1], (0.5,), _each_step_costs, lambda achieved, desired: (achieved >= desired).squeeze(1)
    ),
}


@dataclass(frozen=True)
class Minibatch:
    """A batch: network inputs before and after a step, (B, I), and the transitions between them, (B,).

    states:   (B, D) the environment's observations, without goals.
    discount: gamma, or 0 where the episode terminated.
    keys:     for `update_priorities`.
    """

    inputs: Floats
    next_inputs: Floats
    states: Floats
    action: NDArray[np.int64]
    reward: Floats
    discount: Floats
    weight: Floats
    keys: Tensor


class Memory:
    """Transitions in a `ReplayBuffer`, or, for hindsight, episodes with goals in a `TrajectoryReplayBuffer`.

    size:  components of an observation.
    width: components of a network input.
    lag:   stored steps that cannot be sampled yet.
    """

    def __init__(self, method: str, agent: AgentSettings, environment: str, size: int, seed: int) -> None:
        found = METHODS[method]
        self._beta = found.beta
        self._prioritized = isinstance(found.sampler, (Proportional, RankBased))
        self._gamma = agent.gamma
        self._task = TASKS[environment] if found.relabeled else None
        self._goal = np.array(self._task.goal if self._task else (), dtype=np.float32)
        self.width = size + len(self._goal)
        # the newest step of a trajectory waits for the observation after it
        self.lag = int(self._task is not None)
        obs, action, scalar = Field((size,), torch.float32), Field((), torch.int64), Field((), torch.float32)
        if self._task is None:
            fields = {"obs": obs, "action": action, "reward": scalar, "next_obs": obs, "discount": scalar}
            self._transitions = ReplayBuffer(agent.memory, fields, sampler=found.sampler, device="cpu", seed=seed)
            return
        goal = Field(self._goal.shape, torch.float32)
        self._episodes = TrajectoryReplayBuffer(
            agent.memory,
            1,
            {"obs.observation": obs, "obs.achieved_goal": goal, "obs.desired_goal": goal, "action": action},
            gamma=agent.gamma,
            # single environments are reset when an episode ends, and the last observation comes with its last step
            autoreset="same_step",
            sampler=found.sampler,
            device="cpu",
            seed=seed,
            relabel=Hindsight(
                ratio=found.relabeled, reward_fn=self._task.reward_fn, terminated_fn=self._task.terminated_fn
            ),
        )

    def network_input(self, obs: Floats) -> Floats:
        """The network input (I,) for an observation (D,)."""
        return np.concatenate((obs, self._goal))

    def add(
        self, obs: Floats, action: int, reward: float, next_obs: Floats, *, terminated: bool, truncated: bool
    ) -> None:
        """Store one step."""
        step = {"action": np.array([action]), "reward": np.array([reward], dtype=np.float32)}
        if self._task is None:
            # the observation after a truncation is real, and the target bootstraps from it
            discount = np.array([0.0 if terminated else self._gamma], dtype=np.float32)
            self._transitions.add(obs=obs[None], next_obs=next_obs[None], discount=discount, **step)
            return
        seen = {"obs": obs, "final_obs": next_obs} if terminated or truncated else {"obs": obs}
        for name, each in seen.items():
            step[f"{name}.observation"] = each[None]
            step[f"{name}.achieved_goal"] = self._task.achieved(each)[None]
            step[f"{name}.desired_goal"] = self._goal[None]
        self._episodes.add(**step, terminated=np.array([terminated]), truncated=np.array([truncated]))

    def sample(self, batch_size: int, progress: float) -> Minibatch:
        """Sample a batch; `progress` is the finished share of the run, from 0 to 1."""
        beta = None if self._beta is None else self._beta[0] + (self._beta[1] - self._beta[0]) * progress
        if self._task is None:
            batch = self._transitions.sample(batch_size, beta=beta)
            states, following = batch["obs"].numpy(), batch["next_obs"].numpy()
            inputs = states
        else:
            batch = self._episodes.sample(batch_size)
            states, goals = batch["obs.observation"].numpy(), batch["obs.desired_goal"].numpy()
            inputs = np.concatenate((states, goals), axis=1)
            following = np.concatenate((batch["next_obs.observation"].numpy(), goals), axis=1)
        columns = {name: batch[name].numpy() for name in ("action", "reward", "discount", "weight")}
        return Minibatch(inputs, following, states, **columns, keys=batch["key"])

    def update_priorities(self, keys: Tensor, td_errors: Floats) -> None:
        """Report the TD errors of a batch; samplers without priorities ignore them."""
        if self._prioritized:
            self._transitions.update_priorities(keys, td_errors)
