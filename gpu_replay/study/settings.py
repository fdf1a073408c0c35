"""The compared methods, and the settings: the tutorial's, and tuned ones that can solve every environment.

The default agent is that of the tutorial from which the project descends (one hidden layer of 128, discount 0.8,
epsilon down to 0.05 within 1,000 steps, target network copied at each episode's end), so that its comparison can be
repeated; `TUTORIAL_NOTES` lists where those settings are known to be poor. `TUNED` starts from the settings of DQN in
RL Baselines3 Zoo; the returns noted there were measured with uniform replay, one run per seed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_replay import Combined, Latest, Proportional, RankBased, Sampler, Uniform

ENVIRONMENTS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
# two states of a batch are a correlated pair when the absolute value of their Pearson correlation exceeds this
CORRELATED = 0.8


@dataclass(frozen=True)
class Method:
    """One of the compared methods.

    label:     a short description; the part before a colon is its name in tables and plots.
    beta:      exponent of the importance weights at the start and the end of a run; None for the sampler's own.
    relabeled: share of a batch that hindsight relabels, in a TrajectoryReplayBuffer; 0 for a ReplayBuffer.
    """

    label: str
    sampler: Sampler
    beta: tuple[float, float] | None = None
    relabeled: float = 0.0

    @property
    def name(self) -> str:
        """The name in tables and plots."""
        return self.label.partition(":")[0]

    def described(self) -> dict[str, Any]:
        """The method as JSON values; an interrupted study continues only where these are equal."""
        buffer = "TrajectoryReplayBuffer" if self.relabeled else "ReplayBuffer"
        found: dict[str, Any] = {"label": self.label, "buffer": buffer, "sampler": repr(self.sampler)}
        if self.beta is not None:
            found["beta_over_the_run"] = list(self.beta)
        if self.relabeled:
            found |= {"relabelled": self.relabeled, "strategy": "future"}
        return found


METHODS = {
    "none": Method("no memory: the newest transitions", Latest()),
    "uniform": Method("uniform", Uniform()),
    "proportional": Method("proportional", Proportional(alpha=0.6, beta=0.4), beta=(0.4, 1.0)),
    "rank": Method("rank-based", RankBased(alpha=0.7, beta=0.5)),
    "combined": Method("combined: uniform and the newest", Combined(Uniform())),
    "hindsight": Method("hindsight", Uniform(), relabeled=0.8),
}


@dataclass(frozen=True)
class AgentSettings:
    """How the agent of one environment learns; the field defaults are the tutorial's.

    episodes:       of one run.
    hidden:         widths of the hidden layers, ReLU between them.
    scale:          factor of each component of an observation in the network's input; None leaves observations as is.
    gamma:          discount of one step.
    learning_rate:  Adam's step size.
    memory:         capacity of the buffer in transitions.
    batch_size:     transitions of one update.
    first_update:   transitions stored before the first update, at least `batch_size`.
    epsilon_start, epsilon_end, epsilon_steps: share of random actions, decreasing linearly over that many steps.
    persistence:    probability that a random action is repeated in the next step.
    train_every:    environment steps between updates.
    updates:        updates at each of those steps.
    target_every:   environment steps between copies to the target network; None copies at each episode's end.
    double:         the online network chooses the next action, the target network values it (van Hasselt et al. 2016).
    """

    episodes: int = 300
    hidden: tuple[int, ...] = (128,)
    scale: tuple[float, ...] | None = None
    gamma: float = 0.8
    learning_rate: float = 1e-3
    memory: int = 10_000
    batch_size: int = 64
    first_update: int = 64
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    epsilon_steps: int = 1_000
    persistence: float = 0.0
    train_every: int = 1
    updates: int = 1
    target_every: int | None = None
    double: bool = False

    def epsilon(self, step: int) -> float:
        """The share of random actions at environment step `step`."""
        fraction = min(step / self.epsilon_steps, 1.0)
        return self.epsilon_start + (self.epsilon_end - self.epsilon_start) * fraction


_tuned = functools.partial(AgentSettings, hidden=(128, 128), batch_size=128, first_update=1_000, epsilon_end=0.02)
TUNED = {
    # uniform replay, mean return of the last 100 episodes: 446 and 433 with seeds 0 and 1; 400 was aimed at. The best
    # of four tries with two layers of 128 had 367 after 400 episodes
    "CartPole-v1": _tuned(
        episodes=500,
        hidden=(256, 256),
        batch_size=64,
        gamma=0.99,
        memory=100_000,
        epsilon_steps=8_000,
        train_every=256,
        updates=128,
        target_every=256,
    ),
    # uniform replay, mean return of the last 100 episodes: -100.4 and -88.9 with seeds 0 and 1, so that -100 is reached
    # by one of them and by their mean
    "Acrobot-v1": _tuned(
        episodes=400,
        gamma=0.99,
        learning_rate=6.3e-4,
        memory=50_000,
        epsilon_steps=10_000,
        persistence=0.8,
        train_every=4,
        target_every=500,
        double=True,
    ),
    # uniform replay, mean return of the last 100 episodes: -116 with seed 1, -119 with seed 0 after 700 episodes; -120
    # was aimed at. Repeated random actions find the flag sooner
    "MountainCar-v0": _tuned(
        episodes=800,
        gamma=0.98,
        learning_rate=4e-3,
        epsilon_steps=24_000,
        persistence=0.9,
        train_every=16,
        updates=8,
        target_every=600,
    ),
}
TUTORIAL_NOTES = (
    "Discount 0.8 looks about 5 steps ahead: a pole that falls later costs nothing yet, and the goals of Acrobot and "
    "MountainCar, 80 and 100 steps away at best, are hidden from most states.",
    "Epsilon decreases within 1,000 steps, 5 episodes of MountainCar: single random actions hardly ever reach the flag "
    "in that time, and without it every return is -200.",
    "The target network is copied at each episode's end: on CartPole every 10 to 500 updates, on Acrobot and "
    "MountainCar every 500 and 200 updates while the goal is not reached.",
    "A memory of 10,000 holds 20 long episodes of CartPole; once the pole is balanced, failures are overwritten.",
)


def agents(environments: Sequence[str], *, tuned: bool, episodes: int | None = None) -> dict[str, AgentSettings]:
    """The settings of each environment; `episodes` replaces their number of episodes."""
    found = TUNED if tuned else dict.fromkeys(ENVIRONMENTS, AgentSettings())
    return {name: dataclasses.replace(found[name], episodes=episodes or found[name].episodes) for name in environments}


def described(
    agents: Mapping[str, AgentSettings], methods: Sequence[str], seeds: int, *, tuned: bool, quick: bool
) -> dict[str, Any]:
    """Everything that decides the results of a study, as JSON values, with notes for the reader of the report."""
    return {
        "tuned": tuned,
        "quick": quick,
        "episodes": max(agent.episodes for agent in agents.values()),
        "seeds": list(range(seeds)),
        "environments": {name: dataclasses.asdict(agent) for name, agent in agents.items()},
        "methods": {name: METHODS[name].described() for name in methods},
        "correlated_above": CORRELATED,
        "notes": [] if tuned else list(TUTORIAL_NOTES),
    }
