"""The rules of Catch, played with known hands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_replay.training.catch import REACH, SIDE, Catch

CPU = torch.device("cpu")
GAMES = 200


def parts(obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column of the ball, and centre of the paddle, read off boards on which they do not touch."""
    ball = obs[:, :-1].flatten(1).long()
    assert (ball.sum(1) == 1).all()
    place = ball.argmax(1)
    floor = obs[:, -1].long()
    assert (floor.sum(1) == 2 * REACH + 1).all()
    centre = (floor * torch.arange(SIDE)).sum(1) // (2 * REACH + 1)
    return place // SIDE, place % SIDE, centre


def chase(obs: Tensor) -> Tensor:
    """The action that brings the paddle under the ball."""
    _, column, centre = parts(obs)
    return torch.sign(column - centre) + 1


def test_the_ball_falls_one_row_a_step_and_arrives_after_eleven() -> None:
    game = Catch(GAMES, CPU)
    obs = game.reset(0)
    _, columns, _ = parts(obs)
    for t in range(SIDE - 1):
        row, column, _ = parts(obs)
        assert (row == t).all()
        assert torch.equal(column, columns)
        game.send(torch.randint(0, 3, (GAMES,), generator=torch.Generator().manual_seed(t)))
        step = game.recv()
        assert step.terminated.all() == (t == SIDE - 2)
        assert step.terminated.any() == (t == SIDE - 2)
        assert not step.truncated.any()
        obs = step.obs


def test_the_paddle_moves_by_one_and_stays_on_the_board() -> None:
    for action, move in ((0, -1), (1, 0), (2, 1)):
        game = Catch(GAMES, CPU)
        _, _, before = parts(game.reset(1))
        game.send(torch.full((GAMES,), action))
        _, _, after = parts(game.recv().obs)
        assert torch.equal(after, (before + move).clamp(REACH, SIDE - 1 - REACH))


def test_the_last_observation_has_the_ball_on_the_floor_and_the_next_is_a_new_game() -> None:
    game = Catch(GAMES, CPU)
    obs = game.reset(2)
    for _ in range(SIDE - 1):
        game.send(torch.ones(GAMES, dtype=torch.int64))
        step = game.recv()
    assert step.final_obs is not None
    assert step.final_obs[:, :-1].sum() == 0
    row, _, _ = parts(step.obs)
    assert (row == 0).all()
    assert not torch.equal(step.obs, obs)
    # the ball arrived in the column from which it fell
    floor = step.final_obs[:, -1]
    _, columns, _ = parts(obs)
    assert (floor[torch.arange(GAMES), columns] == 1).all()


def test_every_game_ends_with_plus_or_minus_one_and_only_then_counts() -> None:
    game = Catch(GAMES, CPU)
    obs = game.reset(3)
    for t in range(3 * (SIDE - 1)):
        _, column, centre = parts(obs)
        action = torch.randint(0, 3, (GAMES,), generator=torch.Generator().manual_seed(t))
        game.send(action)
        step = game.recv()
        centre = (centre + action - 1).clamp(REACH, SIDE - 1 - REACH)
        if (t + 1) % (SIDE - 1):
            assert (step.reward == 0).all()
        else:
            assert step.reward.tolist() == [
                1.0 if abs(c - p) <= REACH else -1.0 for c, p in zip(column, centre, strict=True)
            ]
        obs = step.obs


@pytest.mark.parametrize("policy, low, high", [("random", -0.6, -0.4), ("chase", 1.0, 1.0)])
def test_a_chaser_always_wins_and_chance_gives_minus_a_half(policy: str, low: float, high: float) -> None:
    game = Catch(2_000, CPU)
    generator = torch.Generator().manual_seed(0)
    obs = game.reset(4)
    for _ in range(SIDE - 1):
        game.send(chase(obs) if policy == "chase" else torch.randint(0, 3, (2_000,), generator=generator))
        step = game.recv()
        obs = step.obs
    # the standard error of 2,000 games is 0.02
    assert low <= float(step.reward.mean()) <= high


def test_the_seed_decides_the_games() -> None:
    first, same, other = (Catch(50, CPU).reset(seed) for seed in (7, 7, 8))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
