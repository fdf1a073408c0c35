"""One run of the study: a method on an environment with a seed, episode by episode, with what was measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_replay.console.seeds import stream_seed
from gpu_replay.study.agent import Agent, UpdateResult, smooth_l1
from gpu_replay.study.exploration import Explorer
from gpu_replay.study.methods import Minibatch, make_memory
from gpu_replay.study.settings import CORRELATED, AgentSettings
from gpu_replay.study.statistics import correlated_pairs, td_statistics

# columns of episodes.csv that are means over the updates of an episode
MEASURED = ("td_mean", "td_median", "td_max", "td_std", "correlated_pairs", "q_mean", "q_max", "loss")


@dataclass(frozen=True)
class RunId:
    """Which run; equal ids and settings give equal episodes."""

    environment: str
    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.environment}-{self.method}-seed{self.seed}"


@dataclass(frozen=True)
class Episode:
    """A line of episodes.csv: what happened in one episode, and what its updates were like.

    steps:            environment steps of the run so far.
    duration:         steps of the episode.
    total:            the sum of the environment's rewards (column `return`).
    td_mean, td_median, td_max, td_std: of the absolute TD errors of a batch, means over the episode's updates.
    correlated_pairs: of the states of a batch, mean over the episode's updates.
    q_mean, q_max:    mean and largest of a batch's best values, max over actions of Q; means over the updates.
    loss:             mean over the updates.
    epsilon:          share of random actions at its end.
    updates:          of the episode; without any, what is measured of them is None.
    seconds:          of the run so far.
    """

    environment: str
    method: str
    seed: int
    episode: int
    steps: int
    duration: int
    total: float
    td_mean: float | None
    td_median: float | None
    td_max: float | None
    td_std: float | None
    correlated_pairs: float | None
    q_mean: float | None
    q_max: float | None
    loss: float | None
    epsilon: float
    updates: int
    seconds: float


def measured(updates: list[tuple[Minibatch, UpdateResult]]) -> dict[str, Any]:
    """The columns of an episode that describe its updates."""
    if not updates:
        return {**dict.fromkeys(MEASURED), "updates": 0}
    errors = np.stack([result.td_error for _, result in updates])
    best = np.stack([result.best_values for _, result in updates])
    columns = {
        **td_statistics(errors),
        "correlated_pairs": correlated_pairs(np.stack([batch.states for batch, _ in updates]), CORRELATED),
        "q_mean": best,
        "q_max": best.max(axis=1),
        "loss": np.stack([batch.weight for batch, _ in updates]) * smooth_l1(errors),
    }
    means = {name: float(np.mean(values, dtype=np.float64)) for name, values in columns.items()}
    return {**means, "updates": len(updates)}


def make_run(run: RunId, settings: AgentSettings) -> list[Episode]:
    """Train for the settings' number of episodes.

    Everything random follows from the seed of the run: the environment's starts, the network's first values, random
    actions and draws. Methods with the same seed share the first three.
    """
    import gymnasium

    began = time.perf_counter()
    environment: Any = gymnasium.make(run.environment, disable_env_checker=True)
    size, actions = int(environment.observation_space.shape[0]), int(environment.action_space.n)
    memory = make_memory(run.method, settings, run.environment, size, stream_seed(run.seed, "replay"))
    agent = Agent(settings, memory.width, actions, stream_seed(run.seed, "network"))
    explorer = Explorer(actions, settings.persistence, stream_seed(run.seed, "actions"))
    # some environments take seeds of 32 bits only
    first = stream_seed(run.seed, "training") % 2**31
    first_update = max(settings.first_update, settings.batch_size) + memory.lag
    steps, episodes = 0, []
    try:
        for episode in range(1, settings.episodes + 1):
            progress = (episode - 1) / max(settings.episodes - 1, 1)
            obs, _ = environment.reset(seed=first if episode == 1 else None)
            updates: list[tuple[Minibatch, UpdateResult]] = []
            total, duration, over = 0.0, 0, False
            while not over:
                action = explorer.choose(settings.epsilon(steps))
                if action is None:
                    action = agent.act(memory.network_input(obs))
                next_obs, reward, terminated, truncated, _ = environment.step(action)
                memory.add(obs, action, float(reward), next_obs, terminated=terminated, truncated=truncated)
                obs, over = next_obs, terminated or truncated
                total += float(reward)
                duration += 1
                steps += 1
                if steps % settings.train_every == 0 and steps >= first_update:
                    for _ in range(settings.updates):
                        batch = memory.sample(settings.batch_size, progress)
                        result = agent.update(batch)
                        memory.update_priorities(batch.keys, result.td_error)
                        updates.append((batch, result))
                if settings.target_every is not None and steps % settings.target_every == 0:
                    agent.copy_to_target()
            if settings.target_every is None:
                agent.copy_to_target()
            seconds = time.perf_counter() - began
            facts = {**measured(updates), "epsilon": settings.epsilon(steps), "seconds": seconds}
            key = (run.environment, run.method, run.seed, episode)
            episodes.append(Episode(*key, steps, duration, total, **facts))
    finally:
        environment.close()
    return episodes
