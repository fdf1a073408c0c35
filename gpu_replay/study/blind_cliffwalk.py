"""The Blind Cliffwalk of the prioritized-replay paper: a chain in which one wrong step of two ends everything.

Each of n states has a right and a wrong action, and nothing tells which from outside. The wrong one ends the episode
with 0, the right one leads on, the last right one ends it with 1. All 2**n sequences of actions are in the memory, so
the one reward stands among 2**(n + 1) - 2 transitions.

Schaul et al. 2016, "Prioritized Experience Replay", section 3.1 and appendix B.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STEP_SIZE = 0.25
INITIAL_SPREAD = 0.1
CONVERGED = 1e-3
# sums of squares follow the updates one by one; an exact sum decides
SLACK = 1e-9


def discount(states: int) -> float:
    """1 - 1/n: values keep their scale while the chain grows."""
    return 1 - 1 / states


def right_action(state: int) -> int:
    """The action that leads on; it alternates, so that nothing learned about an action helps in the next state."""
    return state % 2


def true_values(states: int) -> NDArray[np.float64]:
    """(n, 2) values of both actions under the best policy: discount ** (steps still to go) and 0."""
    values = np.zeros((states, 2))
    for state in range(states):
        values[state, right_action(state)] = discount(states) ** (states - 1 - state)
    return values


@dataclass(frozen=True)
class Memory:
    """Transitions in the order in which they were lived, (m,) each: m = 2**(n + 1) - 2."""

    state: NDArray[np.int64]
    action: NDArray[np.int64]
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.state)


def fill_memory(states: int, random: np.random.Generator) -> Memory:
    """Every sequence of n actions once, in random order, each until its end."""
    sequences = random.permutation(2**states)
    choices = (sequences[:, None] >> np.arange(states)) & 1
    right = choices == np.array([right_action(state) for state in range(states)])
    # a step is lived where all steps before it were right
    lived = np.concatenate(
        [np.ones((len(right), 1), dtype=bool), np.logical_and.accumulate(right, axis=1)[:, :-1]], axis=1
    )
    episode, state = np.nonzero(lived)
    good = right[episode, state]
    last = state == states - 1
    return Memory(
        state=state.astype(np.int64),
        action=choices[episode, state].astype(np.int64),
        reward=(good & last).astype(np.float32),
        terminated=~good | last,
    )


class QTable:
    """Tabular Q-learning on a chain that knows how far it is from the true values.

    states: n >= 2.
    random: draws the initial values, normal with standard deviation 0.1.
    """

    def __init__(self, states: int, random: np.random.Generator) -> None:
        self._discount = discount(states)
        self._truth: list[list[float]] = true_values(states).tolist()
        self._values: list[list[float]] = random.normal(0.0, INITIAL_SPREAD, (states, 2)).tolist()
        self._limit = CONVERGED * 2 * states
        self._squares = self._exact_squares()

    @property
    def values(self) -> list[list[float]]:
        """Q of every state and action."""
        return self._values

    @property
    def mean_squared_error(self) -> float:
        """Against the true values, over all states and actions."""
        return self._exact_squares() / (2 * len(self._values))

    @property
    def converged(self) -> bool:
        """Whether the mean squared error is below 1e-3."""
        return self._squares < self._limit + SLACK and self._exact_squares() < self._limit

    def td_error(self, state: int, action: int, reward: float, terminated: bool) -> float:
        """reward + discount * max Q(next state) - Q(state, action), without learning from it."""
        ahead = 0.0 if terminated else self._discount * max(self._values[state + 1])
        return reward + ahead - self._values[state][action]

    def update(self, state: int, action: int, reward: float, terminated: bool) -> float:
        """Learn from one transition and return the TD error it had before."""
        error = self.td_error(state, action, reward, terminated)
        row, true = self._values[state], self._truth[state][action]
        before = row[action] - true
        row[action] += STEP_SIZE * error
        after = row[action] - true
        self._squares += after * after - before * before
        return error

    def gain(self, state: int, action: int, reward: float, terminated: bool) -> float:
        """By how much an update would lower the sum of squared errors."""
        before = self._values[state][action] - self._truth[state][action]
        after = before + STEP_SIZE * self.td_error(state, action, reward, terminated)
        return before * before - after * after

    def _exact_squares(self) -> float:
        pairs = zip(self._values, self._truth, strict=True)
        return math.fsum((q - t) ** 2 for row, true in pairs for q, t in zip(row, true, strict=True))
