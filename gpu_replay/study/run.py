"""One run of the study: train one method on one environment with one seed, and record each episode."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from gpu_replay.console.seeds import stream_seed
from gpu_replay.study.agent import Agent, Explorer, smooth_l1
from gpu_replay.study.methods import Floats, Memory, Minibatch
from gpu_replay.study.settings import CORRELATED, AgentSettings
from gpu_replay.study.statistics import correlated_pairs, td_statistics

# columns of episodes.csv, explained at `make_run`: those that name the run, and means over an episode's updates
KEYS = ("environment", "method", "seed")
MEASURED = ("td_mean", "td_median", "td_max", "td_std", "correlated_pairs", "q_mean", "q_max", "loss")
COLUMNS = (*KEYS, "episode", "steps", "duration", "return", *MEASURED, "epsilon", "updates", "seconds")


class RunId(NamedTuple):
    """The name of a run; equal ids and settings give equal episodes."""

    environment: str
    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.environment}-{self.method}-seed{self.seed}"


def measured(updates: list[tuple[Minibatch, Floats, Floats]]) -> dict[str, Any]:
    """The columns of an episode that describe its updates."""
    if not updates:
        return {**dict.fromkeys(MEASURED), "updates": 0}
    batches, td_errors, best_values = zip(*updates, strict=True)
    errors, best = np.stack(td_errors), np.stack(best_values)
    columns = {
        **td_statistics(errors),
        "correlated_pairs": correlated_pairs(np.stack([batch.states for batch in batches]), CORRELATED),
        "q_mean": best,
        "q_max": best.max(axis=1),
        "loss": np.stack([batch.weight for batch in batches]) * smooth_l1(errors),
    }
    means = {name: float(np.mean(values, dtype=np.float64)) for name, values in columns.items()}
    return {**means, "updates": len(updates)}


def make_run(run: RunId, settings: AgentSettings) -> list[dict[str, Any]]:
    """Train for the settings' number of episodes; returns one row of episodes.csv for each.

    steps:            environment steps of the run so far.
    duration:         steps of the episode.
    return:           the sum of the environment's rewards.
    td_mean, td_median, td_max, td_std: statistics of a batch's absolute TD errors, means over the episode's updates.
    correlated_pairs: correlated pairs among a batch's states, mean over the episode's updates.
    q_mean, q_max:    mean and largest of a batch's best values, max over actions of Q; means over the updates.
    loss:             mean over the updates.
    epsilon:          share of random actions at the end of the episode.
    updates:          updates in the episode; if there are none, the columns about them are None.
    seconds:          duration of the run so far.

    The seed of the run decides all randomness: the environment's starts, the initial weights, random actions and
    sampling. Methods with the same seed share the first three.
    """
    import gymnasium

    began = time.perf_counter()
    environment: Any = gymnasium.make(run.environment, disable_env_checker=True)
    size, actions = int(environment.observation_space.shape[0]), int(environment.action_space.n)
    memory = Memory(run.method, settings, run.environment, size, stream_seed(run.seed, "replay"))
    agent = Agent(settings, memory.width, actions, stream_seed(run.seed, "network"))
    explorer = Explorer(actions, settings.persistence, stream_seed(run.seed, "actions"))
    # some environments accept only 32-bit seeds
    first = stream_seed(run.seed, "training") % 2**31
    first_update = max(settings.first_update, settings.batch_size) + memory.lag
    steps, episodes = 0, []
    try:
        for episode in range(1, settings.episodes + 1):
            progress = (episode - 1) / max(settings.episodes - 1, 1)
            obs, _ = environment.reset(seed=first if episode == 1 else None)
            updates: list[tuple[Minibatch, Floats, Floats]] = []
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
                        td_error, best = agent.update(batch)
                        memory.update_priorities(batch.keys, td_error)
                        updates.append((batch, td_error, best))
                if settings.target_every is not None and steps % settings.target_every == 0:
                    agent.copy_to_target()
            if settings.target_every is None:
                agent.copy_to_target()
            seconds = time.perf_counter() - began
            line = {"episode": episode, "steps": steps, "duration": duration, "return": total, **measured(updates)}
            episodes.append({**run._asdict(), **line, "epsilon": settings.epsilon(steps), "seconds": seconds})
    finally:
        environment.close()
    return episodes
