"""The Blind Cliffwalk of the prioritized-replay paper, and the ways to choose its next transition that are compared.

Each of n states has a right and a wrong action. The wrong one ends the episode with 0, the right one leads to the next
state, the last right one ends the episode with 1. All 2**n sequences of actions are in the memory, so that there is one
reward in 2**(n + 1) - 2 transitions.

Schaul et al. 2016, "Prioritized Experience Replay", section 3.1 and appendix B.1.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_replay import Field, Proportional, RankBased, ReplayBuffer, Uniform
from gpu_replay.samplers import Sampler

STEP_SIZE = 0.25
INITIAL_SPREAD = 0.1
CONVERGED = 1e-3
# the running sum of squares rounds at each update; within this of the limit an exact sum decides
SLACK = 1e-9
# uniform draws do not depend on what is learned, so they are sampled in blocks
BLOCK = 16384
PRIORITIZED: dict[str, Sampler] = {"proportional": Proportional(), "rank": RankBased()}
FIELDS = {
    "state": Field((), torch.int64),
    "action": Field((), torch.int64),
    "reward": Field((), torch.float32),
    "terminated": Field((), torch.bool),
}
Memory = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Outcome:
    """One run: `updates` until convergence, or the largest number allowed when `converged` is False."""

    agent: str
    states: int
    transitions: int
    seed: int
    updates: int
    converged: bool
    seconds: float


def right_action(state: int) -> int:
    """The action that leads on; it alternates, so that nothing learned about an action transfers to the next state."""
    return state % 2


def true_values(states: int) -> NDArray[np.float64]:
    """(n, 2) values of both actions under the best policy: (1 - 1/n) ** (steps still to go) and 0."""
    values = np.zeros((states, 2))
    for state in range(states):
        values[state, right_action(state)] = (1 - 1 / states) ** (states - 1 - state)
    return values


def fill_memory(states: int, random: np.random.Generator) -> Memory:
    """Every sequence of n actions once, in random order, each until its end: m = 2**(n + 1) - 2 transitions."""
    sequences = random.permutation(2**states)
    choices = (sequences[:, None] >> np.arange(states)) & 1
    right = choices == np.array([right_action(state) for state in range(states)])
    # a step is taken where all steps before it were right
    taken = np.logical_and.accumulate(np.insert(right[:, :-1], 0, True, axis=1), axis=1)
    episode, state = np.nonzero(taken)
    good, last = right[episode, state], state == states - 1
    return {
        "state": state.astype(np.int64),
        "action": choices[episode, state].astype(np.int64),
        "reward": (good & last).astype(np.float32),
        "terminated": ~good | last,
    }


class QTable:
    """Tabular Q-learning on a chain, with its distance from the true values.

    states: n >= 2; the discount is 1 - 1/n, so that values keep their scale as the chain grows.
    random: draws the initial values, normal with standard deviation 0.1.
    """

    def __init__(self, states: int, random: np.random.Generator) -> None:
        self._discount = 1 - 1 / states
        self._truth: list[list[float]] = true_values(states).tolist()
        self.values: list[list[float]] = random.normal(0.0, INITIAL_SPREAD, (states, 2)).tolist()
        self._limit = CONVERGED * 2 * states
        self._squares = self._exact_squares()

    @property
    def converged(self) -> bool:
        """Whether the mean squared error is below 1e-3."""
        return self._squares < self._limit + SLACK and self._exact_squares() < self._limit

    def td_error(self, state: int, action: int, reward: float, terminated: bool) -> float:
        """reward + discount * max Q(next state) - Q(state, action), without learning from it."""
        bootstrap = 0.0 if terminated else self._discount * max(self.values[state + 1])
        return reward + bootstrap - self.values[state][action]

    def update(self, state: int, action: int, reward: float, terminated: bool) -> float:
        """Learn from one transition and return the TD error it had before."""
        error = self.td_error(state, action, reward, terminated)
        row, true = self.values[state], self._truth[state][action]
        before = row[action] - true
        row[action] += STEP_SIZE * error
        after = row[action] - true
        self._squares += after * after - before * before
        return error

    def gain(self, state: int, action: int, reward: float, terminated: bool) -> float:
        """By how much an update would lower the sum of squared errors."""
        before = self.values[state][action] - self._truth[state][action]
        after = before + STEP_SIZE * self.td_error(state, action, reward, terminated)
        return before * before - after * after

    def _exact_squares(self) -> float:
        pairs = zip(self.values, self._truth, strict=True)
        return math.fsum((q - t) ** 2 for row, true in pairs for q, t in zip(row, true, strict=True))


def solve(agent: str, states: int, seed: int, most_updates: int) -> Outcome:
    """Learn from one transition after another until the mean squared error of Q is below 1e-3.

    agent: "oracle" takes the transition whose update lowers the error most; "greedy" the one with the largest last
           |TD error|; "proportional" and "rank" sample by it from a ReplayBuffer; "uniform" samples from one uniformly.
    seed:  of the memory's order, the initial values and the draws; agents of one seed share memory and values.

    Transitions that were never sampled come first with "greedy", and have the largest priority so far with the two that
    sample by it. No importance weights: the environment is deterministic, so there is no bias to correct.
    """
    random = np.random.default_rng([states, seed])
    memory = fill_memory(states, random)
    table = QTable(states, random)
    start = time.perf_counter()
    updates = LEARNERS[agent](table, memory, agent, seed, most_updates)
    seconds = time.perf_counter() - start
    return Outcome(agent, states, len(memory["state"]), seed, updates, table.converged, seconds)


def _oracle(table: QTable, memory: Memory, agent: str, seed: int, most: int) -> int:
    # copies of a transition are the same update
    distinct = sorted(set(zip(*(memory[name].tolist() for name in FIELDS), strict=True)))
    for updates in range(most):
        if table.converged:
            return updates
        table.update(*max(distinct, key=lambda step: table.gain(*step)))
    return most


def _greedy(table: QTable, memory: Memory, agent: str, seed: int, most: int) -> int:
    steps = list(zip(*(memory[name].tolist() for name in FIELDS), strict=True))
    queue = [(-math.inf, key) for key in range(len(steps))]
    for updates in range(most):
        if table.converged:
            return updates
        key = queue[0][1]
        heapq.heapreplace(queue, (-abs(table.update(*steps[key])), key))
    return most


def _prioritized(table: QTable, memory: Memory, agent: str, seed: int, most: int) -> int:
    buffer = _buffer(memory, PRIORITIZED[agent], seed)
    priority = np.empty(1)
    for updates in range(most):
        if table.converged:
            return updates
        batch = buffer.sample(1, beta=0.0)
        state, action, reward, terminated = (batch[name].item() for name in FIELDS)
        priority[0] = abs(table.update(state, action, reward, terminated))
        buffer.update_priorities(batch["key"], priority)
    return most


def _uniform(table: QTable, memory: Memory, agent: str, seed: int, most: int) -> int:
    buffer = _buffer(memory, Uniform(replacement=True), seed)
    updates = 0
    while updates < most:
        batch = buffer.sample(min(BLOCK, most - updates))
        for step in zip(*(batch[name].tolist() for name in FIELDS), strict=True):
            if table.converged:
                return updates
            table.update(*step)
            updates += 1
    return updates


def _buffer(memory: Memory, sampler: Sampler, seed: int) -> ReplayBuffer:
    """On the CPU everywhere: single transitions give a GPU nothing to do."""
    buffer = ReplayBuffer(len(memory["state"]), FIELDS, sampler=sampler, device="cpu", seed=seed)
    buffer.add(**memory)
    return buffer


# the agents in the order of the tables: by the updates that they should need, fewest first
LEARNERS = {
    "oracle": _oracle,
    "greedy": _greedy,
    "proportional": _prioritized,
    "rank": _prioritized,
    "uniform": _uniform,
}
