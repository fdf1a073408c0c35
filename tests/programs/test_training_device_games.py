"""The rules of Catch and DevicePong: known hands, rallies set up by hand, whole games, serves in plain integers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_replay.training import device_games as rules
from gpu_replay.training.device_games import (
    AGENT,
    AGENT_SCORE,
    AGENT_SPEED,
    BALL,
    BALL_X,
    BALL_Y,
    CELL,
    COURT,
    HEIGHT,
    HITS,
    LEFT,
    OPPONENT,
    OPPONENT_SCORE,
    REACH,
    RIGHT,
    SERVE_SPEED,
    SERVES,
    SIDE,
    SPEED_X,
    SPEED_Y,
    WIDTH,
    Catch,
    DevicePong,
)
from gpu_replay.training.environments import Step

CPU = torch.device("cpu")
STAY, UP, DOWN = 0, 1, 2
MIDDLE = (COURT - HEIGHT) // 2


def one_game(**rows: int) -> tuple[DevicePong, Tensor]:
    """A game whose state is set by hand, and the state: a ball that flies level to the agent unless `rows` say else."""
    game = DevicePong(1, CPU, side=84)
    game.reset(0)
    state = game.games
    given = {"BALL_X": COURT // 2, "BALL_Y": COURT // 2, "SPEED_X": SERVE_SPEED, "SPEED_Y": 0, "OPPONENT": MIDDLE}
    for name, value in (given | rows).items():
        state[getattr(rules, name)] = value
    return game, state


def after(game: DevicePong, action: int = STAY) -> tuple[Step, list[int]]:
    """One step, and the state after it."""
    game.send(torch.full((game.num_envs,), action))
    step = game.recv()
    return step, game.games[:, 0].tolist()


@pytest.mark.parametrize("speed_y", [-700, 700])
def test_the_ball_bounces_off_walls(speed_y: int) -> None:
    near = 300 if speed_y < 0 else COURT - BALL - 300
    _, state = after(one_game(BALL_Y=near, SPEED_Y=speed_y)[0])
    assert state[SPEED_Y] == -speed_y
    assert state[BALL_Y] == (400 if speed_y < 0 else COURT - BALL - 400)
    assert state[BALL_X] == COURT // 2 + SERVE_SPEED


@pytest.mark.parametrize("hits, speed", [(0, 8.75), (1, 9.5), (100, 12.0)])
def test_a_paddle_returns_the_ball_faster_and_at_an_angle(hits: int, speed: float) -> None:
    at = RIGHT - BALL - 100
    _, level = after(one_game(BALL_X=at, BALL_Y=COURT // 2, AGENT=COURT // 2 - (HEIGHT - BALL) // 2, HITS=hits)[0])
    assert (level[SPEED_X], level[SPEED_Y], level[HITS]) == (-speed * CELL, 0, hits + 1)
    # the way beyond the paddle is flown back
    assert level[BALL_X] == RIGHT - BALL - (SERVE_SPEED - 100)
    # half way to the rules.END, at it and as far out as the ball still touches
    for out, share in ((rules.END // 2, 0.5), (rules.END, 1.0), ((HEIGHT + BALL) // 2 - 1, 1.0)):
        agent = COURT // 2 - (HEIGHT - BALL) // 2 - out
        _, angled = after(one_game(BALL_X=at, BALL_Y=COURT // 2, AGENT=agent, HITS=hits)[0])
        assert angled[SPEED_Y] == pytest.approx(share * (speed - 4) * CELL * 7 / 6, rel=0.01)
        assert -angled[SPEED_X] == speed * CELL <= rules.MOST_SPEED
    # the opponent as the agent does
    paddle = COURT // 2 - (HEIGHT - BALL) // 2
    step, state = after(one_game(BALL_X=LEFT + WIDTH + 100, SPEED_X=-SERVE_SPEED, OPPONENT=paddle, HITS=hits)[0])
    assert (step.reward.tolist(), state[SPEED_X], state[HITS]) == ([0.0], speed * CELL, hits + 1)


@pytest.mark.parametrize("missed_by", ["agent", "opponent"])
def test_a_missed_ball_is_a_point_and_the_loser_receives(missed_by: str) -> None:
    there = {"agent": {"BALL_X": COURT - BALL - 1, "AGENT": 0}, "opponent": {"BALL_X": 1, "OPPONENT": 0}}[missed_by]
    towards = 1 if missed_by == "agent" else -1
    step, state = after(one_game(**there, SPEED_X=towards * SERVE_SPEED)[0])
    assert step.reward.tolist() == [-towards]
    assert not step.terminated.any()
    assert [state[AGENT_SCORE], state[OPPONENT_SCORE]] == ([0, 1] if missed_by == "agent" else [1, 0])
    assert state[SPEED_X] == towards * SERVE_SPEED
    assert state[BALL_X] == (COURT - BALL) // 2
    # a rally begins with both paddles in the middle
    assert [state[AGENT], state[OPPONENT]] == [MIDDLE, MIDDLE]
    assert (state[HITS], state[SERVES]) == (0, 2)


def test_the_twenty_first_point_ends_the_game_and_shows_its_last_picture() -> None:
    game, _ = one_game(BALL_X=COURT - BALL - 1, OPPONENT_SCORE=20, AGENT_SCORE=7, AGENT=0)
    step, state = after(game)
    assert step.terminated.tolist() == [True]
    assert [state[AGENT_SCORE], state[OPPONENT_SCORE], state[AGENT]] == [0, 0, MIDDLE]
    # the agent's paddle was at the top, and begins in the middle
    column = RIGHT // CELL
    assert step.final_frame[0, 0, column] == 255
    assert step.frame[0, 0, column] == 0


@pytest.mark.parametrize("action, way", [(STAY, 0), (UP, -AGENT_SPEED), (DOWN, AGENT_SPEED)])
def test_paddles_have_limited_speed_and_stay_on_the_court(action: int, way: int) -> None:
    game, _ = one_game(AGENT=MIDDLE, OPPONENT=0, BALL_Y=COURT - BALL, SPEED_X=0)
    _, state = after(game, action)
    assert state[AGENT] - MIDDLE == way
    assert state[OPPONENT] == rules.OPPONENT_SPEED
    for _ in range(10):
        _, state = after(game, action)
    assert 0 <= state[AGENT] <= COURT - HEIGHT
    assert (state[AGENT] in (0, COURT - HEIGHT)) == (action != STAY)


@pytest.mark.parametrize("side", [42, 63, 84])
def test_a_pixel_is_as_bright_as_the_share_of_it_that_is_covered(side: int) -> None:
    pong = DevicePong(3, CPU, side)
    picture = pong.reset(5)
    unit = COURT / side
    for shown, state in zip(picture, pong.games.T.tolist(), strict=True):
        expected = torch.zeros(side, side)
        for x, y, width, height in (
            (LEFT, state[OPPONENT], WIDTH, HEIGHT),
            (RIGHT, state[AGENT], WIDTH, HEIGHT),
            (state[BALL_X], state[BALL_Y], BALL, BALL),
        ):
            down = [max(0.0, min((row + 1) * unit, y + height) - max(row * unit, y)) / unit for row in range(side)]
            across = [max(0.0, min((at + 1) * unit, x + width) - max(at * unit, x)) / unit for at in range(side)]
            expected = torch.maximum(expected, torch.outer(torch.tensor(down), torch.tensor(across)))
        # shares are rounded to fifteenths and seventeenths
        assert float((shown / 255 - expected).abs().max()) <= 1 / 30 + 1 / 34
        assert (shown == 255).sum() == (expected > 0.999).sum()


def test_serves_are_a_function_of_the_seed_and_fall_on_the_middle_of_the_court() -> None:
    rows = []
    for seed in (0, 12345, 2**62 + 3, 0):
        pong = DevicePong(2_000, CPU, 42)
        pong.reset(seed)
        rows.append(pong.games[BALL_Y].double())
        assert COURT // 8 <= rows[-1].min() < COURT // 7
        assert COURT * 6 // 7 < rows[-1].max() <= COURT - COURT // 8
        assert float(rows[-1].mean()) == pytest.approx(COURT / 2, rel=0.05)
    assert torch.equal(rows[0], rows[3])
    # those of two games, and of two seeds, have nothing in common
    assert abs(float(torch.corrcoef(torch.stack(rows[:3]))[0, 1:].abs().max())) < 0.1
    assert abs(float(torch.corrcoef(torch.stack([rows[0][1:], rows[0][:-1]]))[0, 1])) < 0.1


def test_a_restored_game_goes_on_as_it_would_have() -> None:
    pong, other = DevicePong(6, CPU, 42), DevicePong(6, CPU, 42)
    pong.reset(2)
    other.reset(3)
    actions = torch.randint(0, 3, (60, 6), generator=torch.Generator().manual_seed(0))
    for action in actions[:30]:
        pong.send(action)
        pong.recv()
    other.load_state_dict(pong.state_dict())
    for action in actions[30:]:
        for each in (pong, other):
            each.send(action)
        mine, theirs = pong.recv(), other.recv()
        assert torch.equal(mine.frame, theirs.frame)
        assert torch.equal(mine.reward, theirs.reward)


@pytest.mark.gpu
def test_a_gpu_plays_the_same_games() -> None:
    host, device = DevicePong(64, CPU, 42), DevicePong(64, torch.device("cuda"), 42)
    assert torch.equal(host.reset(9), device.reset(9).cpu())
    actions = torch.randint(0, 3, (500, 64), generator=torch.Generator().manual_seed(0))
    for action in actions:
        host.send(action)
        device.send(action.cuda())
        mine, theirs = host.recv(), device.recv()
        assert torch.equal(mine.reward, theirs.reward.cpu())
        assert torch.equal(mine.frame, theirs.frame.cpu())


# Catch

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
        row, column, centre = parts(step.frame)
        if arrived:
            # the ball is on the floor in its column, and another game begins
            assert step.final_frame[:, :-1].sum() == 0
            assert (step.final_frame[torch.arange(GAMES), -1, before] == 1).all()
            assert not torch.equal(column, before)
        else:
            assert torch.equal(column, before)
            assert torch.equal(centre, moved)


def test_the_seed_decides_the_games() -> None:
    first, same, other = (Catch(50, CPU).reset(seed) for seed in (7, 7, 8))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
