"""The Blind Cliffwalk of the prioritized-replay paper, and the compared ways to choose the next transition.

Each of n states has a right and a wrong action. The wrong one ends the episode with reward 0, the right one leads to
the next state, and the right one in the last state ends the episode with reward 1. The memory holds all 2**n sequences
of actions: one reward in 2**(n + 1) - 2 transitions.

Schaul et al. 2016, "Prioritized Experience Replay", section 3.1 and appendix B.1.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_replay import Batch, Field, Proportional, RankBased, ReplayBuffer, Sampler, Uniform

STEP_SIZE = 0.25
INITIAL_SPREAD = 0.1
CONVERGED = 1e-3
# uniform samples do not depend on learning, so they are taken in blocks
BLOCK = 16384
PRIORITIZED: dict[str, Sampler] = {"proportional": Proportional(), "rank": RankBased()}
FIELDS = {
    "state": Field((), torch.int64),
    "action": Field((), torch.int64),
    "reward": Field((), torch.float32),
    "terminated": Field((), torch.bool),
}
Memory = dict[str, NDArray[np.generic]]
Step = tuple[Any, ...]
# a generator that yields one transition at a time and receives its TD error
Choice = Generator[Step, float, None]


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
    """The right action of a state. It alternates, so that nothing learned transfers to the next state."""
    return state % 2


def true_values(states: int) -> NDArray[np.float64]:
    """(n, 2) values of both actions under the best policy: (1 - 1/n) ** (steps still to go) and 0."""
    values = np.zeros((states, 2))
    for state in range(states):
        values[state, right_action(state)] = (1 - 1 / states) ** (states - 1 - state)
    return values


def fill_memory(states: int, random: np.random.Generator) -> Memory:
    """Every sequence of n actions once, in random order, each until it ends: m = 2**(n + 1) - 2 transitions."""
    sequences = random.permutation(2**states)
    choices = (sequences[:, None] >> np.arange(states)) & 1
    right = choices == np.array([right_action(state) for state in range(states)])
    # a step is taken if all steps before it were right
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

    @property
    def converged(self) -> bool:
        """Whether the mean squared error is below 1e-3."""
        pairs = zip(self.values, self._truth, strict=True)
        squares = ((q - true) ** 2 for row, truth in pairs for q, true in zip(row, truth, strict=True))
        return math.fsum(squares) < CONVERGED * 2 * len(self.values)

    def td_error(self, state: int, action: int, reward: float, terminated: bool) -> float:
        """reward + discount * max Q(next state) - Q(state, action), without learning from it."""
        bootstrap = 0.0 if terminated else self._discount * max(self.values[state + 1])
        return reward + bootstrap - self.values[state][action]

    def update(self, state: int, action: int, reward: float, terminated: bool) -> float:
        """Learn from one transition and return the TD error it had before."""
        error = self.td_error(state, action, reward, terminated)
        self.values[state][action] += STEP_SIZE * error
        return error

    def gain(self, state: int, action: int, reward: float, terminated: bool) -> float:
        """How much an update would lower the sum of squared errors."""
        before = self.values[state][action] - self._truth[state][action]
        after = before + STEP_SIZE * self.td_error(state, action, reward, terminated)
        return before * before - after * after


def solve(agent: str, states: int, seed: int, most_updates: int) -> Outcome:
    """Learn from one transition after another until the mean squared error of Q is below 1e-3.

    agent: "oracle" takes the transition whose update lowers the error most; "greedy" the one with the largest last
           |TD error|; "proportional" and "rank" sample from a ReplayBuffer with |TD error| as the priority; "uniform"
           samples uniformly from a ReplayBuffer.
    seed:  seeds the memory's order, the initial values and sampling; agents of one seed share memory and values.

    "greedy" takes transitions that were never sampled first; "proportional" and "rank" give them the largest priority
    so far. There are no importance weights: the environment is deterministic, so there is no bias to correct.
    """
    random = np.random.default_rng([states, seed])
    memory = fill_memory(states, random)
    table = QTable(states, random)
    start, updates = time.perf_counter(), 0
    choice = LEARNERS[agent](table, memory, agent, seed)
    step = next(choice)
    while updates < most_updates and not table.converged:
        step = choice.send(table.update(*step))
        updates += 1
    return Outcome(agent, states, len(memory["state"]), seed, updates, table.converged, time.perf_counter() - start)


def _oracle(table: QTable, memory: Memory, agent: str, seed: int) -> Choice:
    # copies of a transition give the same update
    distinct = sorted(set(_steps(memory)))
    while True:
        yield max(distinct, key=lambda step: table.gain(*step))


def _greedy(table: QTable, memory: Memory, agent: str, seed: int) -> Choice:
    steps = _steps(memory)
    queue = [(-math.inf, key) for key in range(len(steps))]
    while True:
        key = queue[0][1]
        error = yield steps[key]
        heapq.heapreplace(queue, (-abs(error), key))


def _prioritized(table: QTable, memory: Memory, agent: str, seed: int) -> Choice:
    buffer = _buffer(memory, PRIORITIZED[agent], seed)
    while True:
        batch = buffer.sample(1, beta=0.0)
        error = yield tuple(batch[name].item() for name in FIELDS)
        buffer.update_priorities(batch["key"], np.array([abs(error)]))


def _uniform(table: QTable, memory: Memory, agent: str, seed: int) -> Choice:
    buffer = _buffer(memory, Uniform(replacement=True), seed)
    while True:
        for step in _steps(buffer.sample(BLOCK)):  # noqa: UP028 (a list cannot be sent the errors)
            yield step


def _steps(columns: Memory | Batch) -> list[Step]:
    """Transitions as the arguments of `QTable.update`."""
    return list(zip(*(columns[name].tolist() for name in FIELDS), strict=True))


def _buffer(memory: Memory, sampler: Sampler, seed: int) -> ReplayBuffer:
    """A buffer on the CPU, always: single transitions give a GPU nothing to do."""
    buffer = ReplayBuffer(len(memory["state"]), FIELDS, sampler=sampler, device="cpu", seed=seed)
    buffer.add(**memory)
    return buffer


# the agents in the order of the tables, by the number of updates they should need
LEARNERS = {
    "oracle": _oracle,
    "greedy": _greedy,
    "proportional": _prioritized,
    "rank": _prioritized,
    "uniform": _uniform,
}
