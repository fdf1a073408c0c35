"""A task on which priorities pay: fetch a key, pass a door, reach a goal; the one reward is there.

    gpu-replay train gpu_replay.examples.key_door:KeyDoor-v0 --steps 150000 --n-step 3 --persistence 0.5 \\
      --epsilon-end 0.1 --epsilon-steps 100000 --learning-rate-end 1e-3 --eval-every 5000

and the same with `--sampler uniform`. While the agent explores, about one step in a thousand is rewarded. Proportional
replay samples these steps, and those before them whose values they changed, far more often than uniform replay does.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

SIDE, WALL, DOOR, KEY, GOAL = 8, 4, 7, (7, 0), (0, 7)
MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1))


class KeyDoor(gymnasium.Env[np.ndarray, np.int64]):
    """Two rooms of a grid. The wall between them has a door, which lets through who has been at the key.

    Observations are one-hot, [2 * SIDE * SIDE] float32: whether the key was fetched, row and column. The reward is 1 at
    the goal, which ends the episode, and 0 before; episodes are cut after 200 steps.
    """

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = Box(0.0, 1.0, (2 * SIDE * SIDE,), np.float32)
        self.action_space = Discrete(len(MOVES))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin in the corner above the key."""
        super().reset(seed=seed)
        self._place, self._has_key = (0, 0), False
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move down, up, right or left, unless a wall is there."""
        row, column = self._place[0] + MOVES[action][0], self._place[1] + MOVES[action][1]
        is_open = column != WALL or (row == DOOR and self._has_key)
        if 0 <= row < SIDE and 0 <= column < SIDE and is_open:
            self._place = (row, column)
        self._has_key |= self._place == KEY
        won = self._place == GOAL
        return self._observe(), float(won), won, False, {}

    def _observe(self) -> np.ndarray:
        seen = np.zeros((2, SIDE, SIDE), np.float32)
        seen[(int(self._has_key), *self._place)] = 1
        return seen.reshape(-1)


gymnasium.register("KeyDoor-v0", "gpu_replay.examples.key_door:KeyDoor", max_episode_steps=200, reward_threshold=0.99)
