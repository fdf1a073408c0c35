"""The rules of Catch and DevicePong: known hands, rallies set up by hand, whole games, serves in plain integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu_replay.training.device_games import (
    AGENT,
    AGENT_SCORE,
    AGENT_SPEED,
    BALL,
    BALL_X,
    BALL_Y,
    CELL,
    COURT,
    END,
    HEIGHT,
    HITS,
    LEFT,
    MOST_SPEED,
    OPPONENT,
    OPPONENT_SCORE,
    OPPONENT_SPEED,
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
        state[globals()[name]] = value
    return game, state


def after(game: DevicePong, action: int = STAY) -> tuple[Step, list[int]]:
    """One step, and the state after it."""
    game.send(torch.full((game.num_envs,), action))
    step = game.recv()
    return step, game.games[:, 0].tolist()


def play(player: Callable[[Tensor], Tensor], games: int, seed: int) -> Tensor:
    """The return of the first game of each environment."""
    pong = DevicePong(games, CPU, side=42)
    pong.reset(seed)
    returns, running = torch.zeros(games), torch.ones(games, dtype=torch.bool)
    for _ in range(4_000):
        pong.send(player(pong.games))
        step = pong.recv()
        returns += step.reward * running
        running &= ~step.terminated
        if not running.any():
            return returns
    raise AssertionError("a game took more than 4,000 steps")


def perfect(state: Tensor) -> Tensor:
    """Goes where the ball will arrive, and hits it with the end that sends it away from the opponent."""
    top = COURT - BALL
    arrival = (RIGHT - BALL - state[BALL_X]) // state[SPEED_X].clamp(min=1) + 1
    y = (state[BALL_Y] + state[SPEED_Y] * arrival) % (2 * top)
    y = torch.where(y > top, 2 * top - y, y)
    end = torch.where(state[OPPONENT] < MIDDLE, 5 * CELL, -5 * CELL)
    wanted = torch.where(state[SPEED_X] > 0, y + (BALL - HEIGHT) // 2 - end, MIDDLE)
    distance = wanted - state[AGENT]
    return torch.where(distance.abs() <= AGENT_SPEED // 2, STAY, torch.where(distance < 0, UP, DOWN))


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
    # half way to the END, at it and as far out as the ball still touches
    for out, share in ((END // 2, 0.5), (END, 1.0), ((HEIGHT + BALL) // 2 - 1, 1.0)):
        agent = COURT // 2 - (HEIGHT - BALL) // 2 - out
        _, angled = after(one_game(BALL_X=at, BALL_Y=COURT // 2, AGENT=agent, HITS=hits)[0])
        assert angled[SPEED_Y] == pytest.approx(share * (speed - 4) * CELL * 7 / 6, rel=0.01)
        assert -angled[SPEED_X] == speed * CELL <= MOST_SPEED


def test_the_opponent_returns_the_ball_as_the_agent_does() -> None:
    paddle = COURT // 2 - (HEIGHT - BALL) // 2
    game, _ = one_game(BALL_X=LEFT + WIDTH + 100, SPEED_X=-SERVE_SPEED, OPPONENT=paddle)
    step, state = after(game)
    assert step.reward.tolist() == [0.0]
    assert state[SPEED_X] == 8.75 * CELL
    assert state[HITS] == 1


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
    assert state[OPPONENT] == OPPONENT_SPEED
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


def test_a_perfect_player_wins_a_still_one_loses_and_so_does_a_random_one() -> None:
    assert play(perfect, 4, seed=1).min() >= 20
    assert play(lambda state: torch.zeros_like(state[AGENT]), 8, seed=1).tolist() == [-21.0] * 8
    generator = torch.Generator().manual_seed(0)
    random = play(lambda state: torch.randint(0, 3, state[AGENT].shape, generator=generator), 32, seed=1)
    assert random.mean() < -20


def splitmix(bits: int) -> int:
    """The finaliser of SplitMix64 in Python's own integers."""
    mask = 2**64 - 1
    bits = bits * 0x9E3779B97F4A7C15 & mask
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
    return bits ^ bits >> 31


@pytest.mark.parametrize("seed", [0, 12345, 2**62 + 3])
def test_serves_are_a_function_of_seed_game_and_serve(seed: int) -> None:
    pong = DevicePong(5, CPU, 42)
    pong.reset(seed)
    low, high = COURT // 8, COURT - COURT // 8
    expected = [
        low + (splitmix(splitmix(seed + game + 1) + 1024 + 1) >> 32) * (high - low + 1) // 2**32 for game in range(5)
    ]
    assert pong.games[BALL_Y].tolist() == expected


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
