"""How each method stores transitions and samples a batch of them.

A memory returns batches as NumPy arrays of one form, so that the agent does not know which method it learns with.
Networks of `hindsight` see the goal beside the observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_replay import Batch, Field, Hindsight, Proportional, RankBased, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.study.goals import TASKS, GoalTask
from gpu_replay.study.settings import METHODS, AgentSettings, Method

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Minibatch:
    """What the network sees before and after a step, (B, I), and what happened in between, (B,).

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
    keys: torch.Tensor


class TransitionMemory:
    """Single transitions in a `ReplayBuffer`.

    width: components of what the network sees.
    lag:   stored steps that cannot be sampled yet.
    """

    lag = 0

    def __init__(self, method: Method, agent: AgentSettings, size: int, seed: int) -> None:
        self.width = size
        self._gamma = agent.gamma
        self._beta = method.beta
        self._prioritized = isinstance(method.sampler, (Proportional, RankBased))
        obs, scalar = Field((size,), torch.float32), Field((), torch.float32)
        fields = {"obs": obs, "action": Field((), torch.int64), "reward": scalar, "next_obs": obs, "discount": scalar}
        self._buffer = ReplayBuffer(agent.memory, fields, sampler=method.sampler, device="cpu", seed=seed)

    def network_input(self, obs: Floats) -> Floats:
        """(I,) what the network sees of an observation (D,)."""
        return obs

    def add(
        self, obs: Floats, action: int, reward: float, next_obs: Floats, *, terminated: bool, truncated: bool
    ) -> None:
        """Store one step."""
        self._buffer.add(
            obs=obs[None],
            action=np.array([action]),
            reward=np.array([reward], dtype=np.float32),
            next_obs=next_obs[None],
            # the observation after a truncation is a real one, and bootstrapped from
            discount=np.array([0.0 if terminated else self._gamma], dtype=np.float32),
        )

    def sample(self, batch_size: int, progress: float) -> Minibatch:
        """A batch; `progress` is the share of the run that is over, from 0 to 1."""
        beta = None if self._beta is None else self._beta[0] + (self._beta[1] - self._beta[0]) * progress
        batch = self._buffer.sample(batch_size, beta=beta)
        obs = batch["obs"].numpy()
        return _minibatch(batch, obs, batch["next_obs"].numpy(), obs)

    def update_priorities(self, keys: torch.Tensor, td_errors: Floats) -> None:
        """Report the TD errors of a batch; samplers without priorities ignore them."""
        if self._prioritized:
            self._buffer.update_priorities(keys, td_errors)


class GoalMemory:
    """Episodes in a `TrajectoryReplayBuffer`, which relabels most of a batch with goals that were achieved later.

    The interface is that of `TransitionMemory`.
    """

    # the newest step waits for the observation after it
    lag = 1

    def __init__(self, method: Method, agent: AgentSettings, task: GoalTask, size: int, seed: int) -> None:
        self._task = task
        self._goal = np.array(task.goal, dtype=np.float32)
        self.width = size + len(task.goal)
        obs, goal = Field((size,), torch.float32), Field(self._goal.shape, torch.float32)
        fields = {"obs.observation": obs, "obs.achieved_goal": goal, "obs.desired_goal": goal}
        self._buffer = TrajectoryReplayBuffer(
            agent.memory,
            1,
            {**fields, "action": Field((), torch.int64)},
            gamma=agent.gamma,
            # single environments are reset when an episode ends, and the last observation comes with its last step
            autoreset="same_step",
            sampler=method.sampler,
            device="cpu",
            seed=seed,
            relabel=Hindsight(ratio=method.relabeled, reward_fn=task.reward_fn, terminated_fn=task.terminated_fn),
        )

    def network_input(self, obs: Floats) -> Floats:
        return np.concatenate((obs, self._goal))

    def add(
        self, obs: Floats, action: int, reward: float, next_obs: Floats, *, terminated: bool, truncated: bool
    ) -> None:
        given = self._goal_observation("obs", obs)
        if terminated or truncated:
            given |= self._goal_observation("final_obs", next_obs)
        self._buffer.add(
            **given,
            action=np.array([action]),
            reward=np.array([reward], dtype=np.float32),
            terminated=np.array([terminated]),
            truncated=np.array([truncated]),
        )

    def _goal_observation(self, prefix: str, obs: Floats) -> dict[str, Any]:
        parts = {"observation": obs, "achieved_goal": self._task.achieved(obs), "desired_goal": self._goal}
        return {f"{prefix}.{name}": value[None] for name, value in parts.items()}

    def sample(self, batch_size: int, progress: float) -> Minibatch:
        batch = self._buffer.sample(batch_size)
        obs, goals = batch["obs.observation"].numpy(), batch["obs.desired_goal"].numpy()
        next_inputs = np.concatenate((batch["next_obs.observation"].numpy(), goals), axis=1)
        return _minibatch(batch, np.concatenate((obs, goals), axis=1), next_inputs, obs)

    def update_priorities(self, keys: torch.Tensor, td_errors: Floats) -> None:
        """Uniform sampling has no priorities."""


def make_memory(
    method: str, agent: AgentSettings, environment: str, size: int, seed: int
) -> TransitionMemory | GoalMemory:
    """The memory of a method for observations of `size` components."""
    found = METHODS[method]
    if found.relabeled:
        return GoalMemory(found, agent, TASKS[environment], size, seed)
    return TransitionMemory(found, agent, size, seed)


def _minibatch(batch: Batch, inputs: Floats, next_inputs: Floats, states: Floats) -> Minibatch:
    columns = {name: batch[name].numpy() for name in ("action", "reward", "discount", "weight")}
    return Minibatch(inputs, next_inputs, states, **columns, keys=batch["key"])
