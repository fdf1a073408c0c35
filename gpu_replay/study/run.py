"""One run of the study: a method on an environment with a seed, episode by episode, with what was measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_replay.console.seeds import stream_seed
from gpu_replay.study.agent import Agent, Learned, smooth_l1
from gpu_replay.study.exploration import Explorer
from gpu_replay.study.methods import METHODS, Drawn
from gpu_replay.study.settings import CORRELATED, AgentSettings
from gpu_replay.study.statistics import correlated_pairs, td_statistics


@dataclass(frozen=True)
class RunId:
    """Which run; equal ids and settings give equal episodes."""

    environment: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Of its file."""
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


class _Updates:
    """What the updates of an episode leave behind, measured when it is over."""

    def __init__(self) -> None:
        self._errors: list[Any] = []
        self._weights: list[Any] = []
        self._states: list[Any] = []
        self._values: list[Any] = []

    def note(self, drawn: Drawn, learned: Learned) -> None:
        """Keep an update."""
        self._errors.append(learned.td_error)
        self._weights.append(drawn.weight)
        self._states.append(drawn.states)
        # the network overwrites its values at the next update
        self._values.append(learned.values.max(axis=1))

    def measured(self) -> dict[str, Any]:
        """The columns of an episode that are about its updates."""
        if not self._errors:
            names = ("td_mean", "td_median", "td_max", "td_std", "correlated_pairs", "q_mean", "q_max", "loss")
            return {**dict.fromkeys(names), "updates": 0}
        errors, values = np.stack(self._errors), np.stack(self._values)
        spread = td_statistics(errors)
        loss = np.stack(self._weights) * smooth_l1(errors)
        found = {
            "td_mean": spread.mean,
            "td_median": spread.median,
            "td_max": spread.maximum,
            "td_std": spread.deviation,
            "correlated_pairs": correlated_pairs(np.stack(self._states), CORRELATED),
            "q_mean": values,
            "q_max": values.max(axis=1),
            "loss": loss,
        }
        means = {name: float(np.mean(each, dtype=np.float64)) for name, each in found.items()}
        return {**means, "updates": len(errors)}


def episodes(run: RunId, settings: AgentSettings) -> Iterator[Episode]:
    """Train, and give each episode as it ends.

    Everything random follows from the seed of the run: the environment's starts, the network's first values, random
    actions and draws. Methods with the same seed share the first three.
    """
    import gymnasium

    began = time.perf_counter()
    environment: Any = gymnasium.make(run.environment, disable_env_checker=True)
    size, actions = int(environment.observation_space.shape[0]), int(environment.action_space.n)
    memory = METHODS[run.method].make(settings, run.environment, size, stream_seed(run.seed, "replay"))
    agent = Agent(settings, memory.width, actions, stream_seed(run.seed, "network"))
    explorer = Explorer(actions, settings.persistence, stream_seed(run.seed, "actions"))
    # gymnasium takes seeds of 32 bits from some environments' point of view
    first = stream_seed(run.seed, "training") % 2**31
    least = max(settings.first_update, settings.batch_size)
    steps = 0
    try:
        for episode in range(1, settings.episodes + 1):
            progress = (episode - 1) / max(settings.episodes - 1, 1)
            obs, _ = environment.reset(seed=first if episode == 1 else None)
            updates, total, duration, over = _Updates(), 0.0, 0, False
            while not over:
                action = explorer.choose(settings.epsilon(steps))
                if action is None:
                    action = agent.act(memory.see(obs))
                next_obs, reward, terminated, truncated, _ = environment.step(action)
                memory.add(obs, action, float(reward), next_obs, terminated=terminated, truncated=truncated)
                obs, over = next_obs, terminated or truncated
                total += float(reward)
                duration += 1
                steps += 1
                if steps % settings.train_every == 0 and memory.can_draw(least):
                    for _ in range(settings.updates):
                        drawn = memory.draw(settings.batch_size, progress)
                        learned = agent.learn(drawn)
                        memory.update(drawn.keys, learned.td_error)
                        updates.note(drawn, learned)
                if settings.target_every is not None and steps % settings.target_every == 0:
                    agent.copy_to_target()
            if settings.target_every is None:
                agent.copy_to_target()
            yield Episode(
                environment=run.environment,
                method=run.method,
                seed=run.seed,
                episode=episode,
                steps=steps,
                duration=duration,
                total=total,
                **updates.measured(),
                epsilon=settings.epsilon(steps),
                seconds=time.perf_counter() - began,
            )
    finally:
        environment.close()
