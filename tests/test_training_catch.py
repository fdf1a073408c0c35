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


def test_games_follow_the_rules() -> None:
    game = Catch(GAMES, CPU)
    row, column, centre = parts(game.reset(3))
    for t in range(3 * (SIDE - 1)):
        arrived = (t + 1) % (SIDE - 1) == 0
        assert (row == t % (SIDE - 1)).all()
        action = torch.randint(0, 3, (GAMES,), generator=torch.Generator().manual_seed(t))
        game.send(action)
        step = game.recv()
        moved = (centre + action - 1).clamp(REACH, SIDE - 1 - REACH)
        assert torch.equal(step.reward, torch.where((column - moved).abs() <= REACH, 1.0, -1.0) * arrived)
        assert step.terminated.tolist() == [arrived] * GAMES
        assert not step.truncated.any()
        before = column
        row, column, centre = parts(step.obs)
        if arrived:
            # the ball is on the floor in its column, and another game begins
            assert step.final_obs[:, :-1].sum() == 0
            assert (step.final_obs[torch.arange(GAMES), -1, before] == 1).all()
            assert not torch.equal(column, before)
        else:
            assert torch.equal(column, before)
            assert torch.equal(centre, moved)


def test_chance_gives_minus_a_half() -> None:
    game = Catch(2_000, CPU)
    generator = torch.Generator().manual_seed(0)
    game.reset(4)
    for _ in range(SIDE - 1):
        game.send(torch.randint(0, 3, (2_000,), generator=generator))
        step = game.recv()
    # the standard error of 2,000 games is 0.02
    assert float(step.reward.mean()) == pytest.approx(-0.5, abs=0.1)


def test_the_seed_decides_the_games() -> None:
    first, same, other = (Catch(50, CPU).reset(seed) for seed in (7, 7, 8))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
