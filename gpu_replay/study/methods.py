"""The methods that are compared: how each remembers transitions and draws a batch of them.

A memory takes what happened and gives batches back as NumPy arrays of one form, so that the agent does not know which
method it learns with. Networks of `hindsight` see the goal beside the observation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_replay import (
    Combined,
    Field,
    Latest,
    Proportional,
    ReplayBuffer,
    TrajectoryReplayBuffer,
    Uniform,
)
from gpu_replay.hindsight import Hindsight
from gpu_replay.samplers import RankBased, Sampler
from gpu_replay.study.goals import TASKS, GoalTask
from gpu_replay.study.settings import AgentSettings

Floats = NDArray[np.float32]
ALPHA = 0.6
BETA_START, BETA_END = 0.4, 1.0
RELABELLED = 0.8


@dataclass(frozen=True)
class Drawn:
    """A batch: what the network sees before and after, (B, I), and what happened in between, (B,).

    states:   (B, D) the environment's observations, without goals.
    discount: gamma, or 0 where the episode terminated.
    keys:     for `Memory.update`.
    """

    inputs: Floats
    next_inputs: Floats
    states: Floats
    action: NDArray[np.int64]
    reward: Floats
    discount: Floats
    weight: Floats
    keys: torch.Tensor


class Memory(Protocol):
    """What the agent asks of a method."""

    @property
    def width(self) -> int:
        """Numbers that the network sees."""

    def see(self, obs: Floats) -> Floats:
        """(I,) what the network sees of an observation (D,)."""

    def add(
        self, obs: Floats, action: int, reward: float, next_obs: Floats, *, terminated: bool, truncated: bool
    ) -> None:
        """Remember one step."""

    def can_draw(self, least: int) -> bool:
        """Whether `least` transitions can be drawn."""

    def draw(self, batch_size: int, progress: float) -> Drawn:
        """A batch; `progress` is how much of the run is over, from 0 to 1."""

    def update(self, keys: torch.Tensor, td_errors: Floats) -> None:
        """Tell what the TD errors of a batch were."""


class TransitionMemory:
    """Single transitions in a `ReplayBuffer`.

    beta: (start, end) of the importance weights over the run, or None for what the sampler says.
    """

    def __init__(
        self, agent: AgentSettings, sampler: Sampler, size: int, seed: int, beta: tuple[float, float] | None
    ) -> None:
        self.width = size
        self._gamma = agent.gamma
        self._beta = beta
        self._prioritized = isinstance(sampler, (Proportional, RankBased))
        self._stored = 0
        fields = {
            "obs": Field((size,), torch.float32),
            "action": Field((), torch.int64),
            "reward": Field((), torch.float32),
            "next_obs": Field((size,), torch.float32),
            "discount": Field((), torch.float32),
        }
        self._buffer = ReplayBuffer(agent.memory, fields, sampler=sampler, device="cpu", seed=seed)

    def see(self, obs: Floats) -> Floats:
        return obs

    def add(
        self, obs: Floats, action: int, reward: float, next_obs: Floats, *, terminated: bool, truncated: bool
    ) -> None:
        self._buffer.add(
            obs=obs[None],
            action=np.array([action]),
            reward=np.array([reward], dtype=np.float32),
            next_obs=next_obs[None],
            # what follows a truncation is real, and bootstrapped from
            discount=np.array([0.0 if terminated else self._gamma], dtype=np.float32),
        )
        self._stored += 1

    def can_draw(self, least: int) -> bool:
        return self._stored >= least

    def draw(self, batch_size: int, progress: float) -> Drawn:
        beta = None
        if self._beta is not None:
            start, end = self._beta
            beta = start + (end - start) * progress
        batch = self._buffer.sample(batch_size, beta=beta)
        inputs = batch["obs"].numpy()
        return Drawn(
            inputs=inputs,
            next_inputs=batch["next_obs"].numpy(),
            states=inputs,
            action=batch["action"].numpy(),
            reward=batch["reward"].numpy(),
            discount=batch["discount"].numpy(),
            weight=batch["weight"].numpy(),
            keys=batch["key"],
        )

    def update(self, keys: torch.Tensor, td_errors: Floats) -> None:
        if self._prioritized:
            self._buffer.update_priorities(keys, td_errors)


class GoalMemory:
    """Episodes in a `TrajectoryReplayBuffer`, which relabels most of a batch with goals that were achieved."""

    def __init__(self, agent: AgentSettings, task: GoalTask, size: int, seed: int) -> None:
        self._task = task
        self._goal = np.array(task.goal, dtype=np.float32)
        self.width = size + len(task.goal)
        self._stored = 0
        goal = Field(self._goal.shape, torch.float32)
        self._buffer = TrajectoryReplayBuffer(
            agent.memory,
            1,
            {
                "obs.observation": Field((size,), torch.float32),
                "obs.achieved_goal": goal,
                "obs.desired_goal": goal,
                "action": Field((), torch.int64),
            },
            gamma=agent.gamma,
            # single environments are reset when an episode is over, and the last observation comes with its last step
            autoreset="same_step",
            sampler=Uniform(),
            device="cpu",
            seed=seed,
            relabel=Hindsight(ratio=RELABELLED, reward_fn=task.reward_fn, terminated_fn=task.terminated_fn),
        )

    def see(self, obs: Floats) -> Floats:
        return np.concatenate((obs, self._goal))

    def add(
        self, obs: Floats, action: int, reward: float, next_obs: Floats, *, terminated: bool, truncated: bool
    ) -> None:
        given: dict[str, Any] = {f"obs.{name}": value[None] for name, value in self._named(obs).items()}
        if terminated or truncated:
            given |= {f"final_obs.{name}": value[None] for name, value in self._named(next_obs).items()}
        self._buffer.add(
            **given,
            action=np.array([action]),
            reward=np.array([reward], dtype=np.float32),
            terminated=np.array([terminated]),
            truncated=np.array([truncated]),
        )
        self._stored += 1

    def _named(self, obs: Floats) -> dict[str, Floats]:
        return {"observation": obs, "achieved_goal": self._task.achieved(obs), "desired_goal": self._goal}

    def can_draw(self, least: int) -> bool:
        # the newest step waits for the observation after it
        return self._stored > least

    def draw(self, batch_size: int, progress: float) -> Drawn:
        batch = self._buffer.sample(batch_size)
        states = batch["obs.observation"].numpy()
        goals = batch["obs.desired_goal"].numpy()
        return Drawn(
            inputs=np.concatenate((states, goals), axis=1),
            next_inputs=np.concatenate((batch["next_obs.observation"].numpy(), goals), axis=1),
            states=states,
            action=batch["action"].numpy(),
            reward=batch["reward"].numpy(),
            discount=batch["discount"].numpy(),
            weight=batch["weight"].numpy(),
            keys=batch["key"],
        )

    def update(self, keys: torch.Tensor, td_errors: Floats) -> None:
        """Uniform draws have no priorities."""


@dataclass(frozen=True)
class Method:
    """One of the compared methods.

    label:  for people.
    make:   (agent, environment, observation size, seed) -> the memory.
    detail: its settings as JSON values.
    """

    label: str
    make: Callable[[AgentSettings, str, int, int], Memory]
    detail: dict[str, Any]

    def described(self) -> dict[str, Any]:
        """The method as JSON values."""
        return {"label": self.label, **self.detail}


def _transitions(label: str, sampler: Sampler, beta: tuple[float, float] | None = None) -> Method:
    def make(agent: AgentSettings, environment: str, size: int, seed: int) -> Memory:
        return TransitionMemory(agent, sampler, size, seed, beta)

    detail: dict[str, Any] = {"buffer": "ReplayBuffer", "sampler": repr(sampler)}
    if beta is not None:
        detail["beta_over_the_run"] = list(beta)
    return Method(label, make, detail)


def _goals(label: str) -> Method:
    def make(agent: AgentSettings, environment: str, size: int, seed: int) -> Memory:
        return GoalMemory(agent, TASKS[environment], size, seed)

    detail = {"buffer": "TrajectoryReplayBuffer", "sampler": repr(Uniform()), "relabelled": RELABELLED}
    return Method(label, make, {**detail, "strategy": "future"})


METHODS = {
    "none": _transitions("no memory: the newest transitions", Latest()),
    "uniform": _transitions("uniform", Uniform()),
    "proportional": _transitions("proportional", Proportional(alpha=ALPHA, beta=BETA_START), (BETA_START, BETA_END)),
    "rank": _transitions("rank-based", RankBased(alpha=0.7, beta=0.5)),
    "combined": _transitions("combined: uniform and the newest", Combined(Uniform())),
    "hindsight": _goals("hindsight"),
}
