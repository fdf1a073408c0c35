"""Catch, in torch on any device: the smallest game that exercises the whole device-resident path.

A ball falls straight down, one row a step, from a random column; the paddle on the floor, three columns wide, moves
left, stays, or moves right. When the ball arrives, the episode ends with +1 if the paddle is under it and -1 if not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_replay import Field
from gpu_replay.training.environments import Environment, EnvironmentSpec, Step

SIDE = 12
REACH = 1  # columns that the paddle covers on either side of its centre


class Catch(Environment):
    """`num_envs` games in parallel; obs (E, 12, 12) uint8 with 1 where the ball or the paddle is.

    Actions: 0 left, 1 stay, 2 right. Every episode lasts 11 steps. No call synchronises with the device.
    """

    on_device = True
    spec = EnvironmentSpec(
        name="catch",
        observation=Field((SIDE, SIDE), torch.uint8, torch.float32, 1.0),
        num_actions=3,
        reward_threshold=0.95,
        bounds=None,
    )

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.num_envs = num_envs
        self.device = device
        self._generator = torch.Generator(device=device)
        self.generators = (self._generator,)
        self._environments = torch.arange(num_envs, device=device)
        # the ball's row and column, and the paddle's column
        zeros = torch.zeros((3, num_envs), dtype=torch.int64, device=device)
        self._row, self._column, self._paddle = (each.clone() for each in zeros)

    def reset(self, seed: int) -> Tensor:
        """Start a new game in every environment."""
        self._generator.manual_seed(seed)
        self._row.zero_()
        for mine, new in zip((self._column, self._paddle), self._new_games(), strict=True):
            mine.copy_(new)
        return self._board()

    def send(self, actions: Tensor) -> None:
        """Keep actions (E,) int64 for the next step."""
        self._actions = actions

    def recv(self) -> Step:
        """Step with the actions of `send`."""
        self._paddle.add_(self._actions - 1).clamp_(REACH, SIDE - 1 - REACH)
        self._row += 1
        terminated = self._row == SIDE - 1
        caught = (self._column - self._paddle).abs() <= REACH
        reward = torch.where(caught, 1.0, -1.0) * terminated
        final_obs = self._board()
        self._row.masked_fill_(terminated, 0)
        for mine, new in zip((self._column, self._paddle), self._new_games(), strict=True):
            mine.copy_(torch.where(terminated, new, mine))
        return Step(
            obs=self._board(),
            reward=reward,
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            final_obs=final_obs,
        )

    def state(self) -> dict[str, Tensor]:
        """The running games, and the state of the generator that starts new ones."""
        return {
            "row": self._row,
            "column": self._column,
            "paddle": self._paddle,
            "generator": self._generator.get_state(),
        }

    def restore(self, state: Mapping[str, Tensor]) -> Tensor:
        """Continue the games of this state; returns their boards (E, 12, 12) uint8."""
        for name, mine in (("row", self._row), ("column", self._column), ("paddle", self._paddle)):
            mine.copy_(state[name])
        self._generator.set_state(state["generator"])
        return self._board()

    def close(self) -> None:
        """Nothing to release."""

    def _new_games(self) -> tuple[Tensor, Tensor]:
        """A random column for each ball and for each paddle's centre."""
        size = (self.num_envs,)
        column = torch.randint(0, SIDE, size, generator=self._generator, device=self.device)
        paddle = torch.randint(REACH, SIDE - REACH, size, generator=self._generator, device=self.device)
        return column, paddle

    def _board(self) -> Tensor:
        board = torch.zeros((self.num_envs, SIDE, SIDE), dtype=torch.uint8, device=self.device)
        for offset in range(-REACH, REACH + 1):
            board[self._environments, SIDE - 1, self._paddle + offset] = 1
        board[self._environments, self._row, self._column] = 1
        return board
