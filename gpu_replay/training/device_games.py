"""Catch and Pong in torch: every step runs on the device alone, without the host."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay import Field
from gpu_replay.training.environments import PONG_POINTS, PONG_WON, Environment, EnvironmentSpec, Step

# of Catch
SIDE = 12
REACH = 1  # columns that the paddle covers on either side of its centre
# of Pong
WINNING_SCORE = 21
# lengths in 1/256 of a cell of the court, which is 84 x 84 cells at every resolution; speeds in the same units a step
CELL = 256
COURT = 84 * CELL
BALL = 4 * CELL  # side of the ball
WIDTH, HEIGHT = 2 * CELL, 16 * CELL  # of a paddle
LEFT, RIGHT = 4 * CELL, COURT - 4 * CELL - WIDTH  # left edges of the paddles
AGENT_SPEED, OPPONENT_SPEED = 8 * CELL, 11 * CELL // 2
SERVE_SPEED, FASTER, MOST_SPEED = 8 * CELL, 3 * CELL // 4, 12 * CELL  # horizontal; each hit adds FASTER
END = 6 * CELL  # from the middle of a paddle: hits further out make no steeper angle
# a pixel's brightness is the share covered vertically, in 15ths, times the share covered across, in 17ths: 0 to 255
DOWN, ACROSS = 15, 17
MOST_AIM = CELL  # the opponent hits the ball up to this far from the middle of its paddle
AIMED = 2  # purposes of a rally's random numbers: 0 and 1 are its serve, 2 and up the opponent's aim after each hit
# rows of the state, (ROWS, E) int64; positions are those of upper left corners
(BALL_X, BALL_Y, AGENT, OPPONENT, SPEED_X, SPEED_Y, AIM, HITS, AGENT_SCORE, OPPONENT_SCORE, SERVES, ROWS) = range(12)


class Catch(Environment):
    """Catch: the smallest game that exercises the whole device-resident path.

    A ball falls straight down, one row a step, from a random column; the paddle on the floor, three columns wide, moves
    left, stays, or moves right. When the ball arrives, the episode ends with +1 if the paddle is under it, else -1.

    `num_envs` games in parallel; obs (E, 12, 12) uint8 with 1 where the ball or the paddle is.

    Actions: 0 left, 1 stay, 2 right. Every episode lasts 11 steps. No call synchronises with the device.
    """

    row: Tensor
    column: Tensor
    paddle: Tensor
    on_device = True
    spec = EnvironmentSpec("catch", Field((SIDE, SIDE), torch.uint8, torch.float32, 1.0), 3, 0.95, bounds=None)

    def __init__(self, num_envs: int, device: torch.device) -> None:
        super().__init__()
        self.num_envs, self.device = num_envs, device
        self._generator = torch.Generator(device=device)
        self.generators = (self._generator,)
        self._environments = torch.arange(num_envs, device=device)
        # a number would be copied from the host, which a CUDA graph cannot do
        self._lit = torch.ones((), dtype=torch.uint8, device=device)
        # the ball's row and column, and the paddle's column
        for name in ("row", "column", "paddle"):
            self.register_buffer(name, torch.zeros(num_envs, dtype=torch.int64, device=device))

    def reset(self, seed: int) -> Tensor:
        """Start a new game in every environment."""
        self._generator.manual_seed(seed)
        self.row.zero_()
        for mine, new in zip((self.column, self.paddle), self._new_games(), strict=True):
            mine.copy_(new)
        return self._board()

    def recv(self) -> Step:
        """Step with the actions of `send`."""
        self.paddle.add_(self._actions - 1).clamp_(REACH, SIDE - 1 - REACH)
        self.row += 1
        terminated = self.row == SIDE - 1
        caught = (self.column - self.paddle).abs() <= REACH
        reward = torch.where(caught, 1.0, -1.0) * terminated
        final_frame = self._board()
        self.row.masked_fill_(terminated, 0)
        for mine, new in zip((self.column, self.paddle), self._new_games(), strict=True):
            mine.copy_(torch.where(terminated, new, mine))
        return Step(self._board(), reward, terminated, torch.zeros_like(terminated), final_frame)

    def get_extra_state(self) -> Tensor:
        """The state of the generator that starts new games."""
        return self._generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the state of that generator."""
        self._generator.set_state(state)

    def _new_games(self) -> tuple[Tensor, Tensor]:
        """A random column for each ball and for each paddle's centre."""
        size = (self.num_envs,)
        column = torch.randint(0, SIDE, size, generator=self._generator, device=self.device)
        paddle = torch.randint(REACH, SIDE - REACH, size, generator=self._generator, device=self.device)
        return column, paddle

    def _board(self) -> Tensor:
        board = torch.zeros((self.num_envs, SIDE, SIDE), dtype=torch.uint8, device=self.device)
        for offset in range(-REACH, REACH + 1):
            board[self._environments, SIDE - 1, self.paddle + offset] = self._lit
        board[self._environments, self.row, self.column] = self._lit
        return board


class DevicePong(Environment):
    """Pong: thousands of games at once, without an emulator and without the host in the loop.

    The opponent's paddle is on the left, the agent's on the right. A ball leaves a paddle at an angle that depends on
    where it was hit, and faster after each hit of a rally. The opponent follows the ball with limited speed: it always
    reaches slow balls and misses fast, steep ones. Whoever scores 21 points first wins, and the game is reset within
    that step.

    The image is anti-aliased: a pixel is as bright as the share of it that is covered, so that 42 pixels a side show
    positions as exactly as 84.

    All quantities are integers, and serves come from a counter-based hash instead of a generator: the same seed and
    actions give the same games on every device, bit for bit.

    `num_envs` games in parallel; obs (E, side, side) uint8, 255 where a paddle or the ball covers a pixel.

    Actions: 0 stay, 1 up, 2 down. Reward: +1 for a point of the agent, -1 for one of the opponent.
    No call synchronises with the device.
    """

    games: Tensor
    seeds: Tensor
    on_device = True

    def __init__(self, num_envs: int, device: torch.device, side: int = 84, stack: int = 4) -> None:
        super().__init__()
        frame = Field((side, side), torch.uint8, torch.float32, 1 / 255)
        self.spec = EnvironmentSpec("device-pong", frame, 3, PONG_WON, None, stack, PONG_POINTS)
        self.num_envs, self.device = num_envs, device
        self._edges = torch.arange(side + 1, device=device) * COURT // side
        self._numbers = torch.arange(num_envs, device=device)
        # for the agent's paddle and the opponent's: the direction away from it, and where along it the ball touches it
        self._away = torch.tensor([[-1], [1]], device=device)
        self._touch = torch.tensor([[BALL - RIGHT], [LEFT + WIDTH]], device=device)
        # ranges of the height and vertical speed of a serve, and of the opponent's aim
        self._purposes = torch.arange(AIMED + 1, device=device)[:, None]
        self._least = torch.tensor([[COURT // 8], [-SERVE_SPEED // 2], [-MOST_AIM]], device=device)
        self._most = torch.tensor([[COURT - COURT // 8], [SERVE_SPEED // 2], [MOST_AIM]], device=device)
        # sizes for the state's rows from BALL_Y to OPPONENT
        self._heights = torch.tensor([BALL, HEIGHT, HEIGHT], device=device)[:, None, None]
        self._columns = self._covered(torch.tensor([RIGHT, LEFT], device=device), WIDTH, ACROSS)[:, None, None]
        self.register_buffer("games", torch.zeros((ROWS, num_envs), dtype=torch.int64, device=device))
        self.register_buffer("seeds", torch.zeros(num_envs, dtype=torch.int64, device=device))

    def reset(self, seed: int) -> Tensor:
        """Start a new game in every environment."""
        self.seeds.copy_(_mixed(self._numbers + (seed + 1)))
        state = self.games.zero_()
        state.copy_(self._served(state, torch.ones_like(self._numbers, dtype=torch.bool), self._numbers % 2 == 0))
        return self._picture()

    def recv(self) -> Step:
        """Step with the actions of `send`."""
        state = self.games
        direction = (self._actions == 2).long() - (self._actions == 1).long()
        state[AGENT] = (state[AGENT] + direction * AGENT_SPEED).clamp(0, COURT - HEIGHT)
        state[OPPONENT] = (state[OPPONENT] + self._opponent_moves(state)).clamp(0, COURT - HEIGHT)
        won, lost = self._move_ball(state)
        state[AGENT_SCORE] += won
        state[OPPONENT_SCORE] += lost
        terminated = torch.maximum(state[AGENT_SCORE], state[OPPONENT_SCORE]) >= WINNING_SCORE
        final_frame = self._picture() if self._needed(terminated) else None
        points = won | lost
        if self._needed(points):
            state.copy_(self._served(state, points, lost))
        if self._needed(terminated):
            state[AGENT_SCORE : OPPONENT_SCORE + 1].masked_fill_(terminated, 0)
        return Step(self._picture(), won.float() - lost.float(), terminated, torch.zeros_like(terminated), final_frame)

    def _opponent_moves(self, state: Tensor) -> Tensor:
        """The opponent follows the ball with a part of its paddle that changes with each hit."""
        wanted = state[BALL_Y] + (BALL - HEIGHT) // 2 + state[AIM] - state[OPPONENT]
        return wanted.clamp(-OPPONENT_SPEED, OPPONENT_SPEED)

    def _move_ball(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Move the ball one step and bounce it off walls and paddles, in place.

        Returns masks (E,) bool of the games in which the agent scored, and in which the opponent did.
        """
        before = state[BALL_X].clone()
        x, y = before + state[SPEED_X], state[BALL_Y] + state[SPEED_Y]
        top = COURT - BALL
        low, high = y < 0, y > top
        y = torch.where(low, -y, torch.where(high, 2 * top - y, y))
        speed_y = torch.where(low | high, -state[SPEED_Y], state[SPEED_Y])
        speed = (SERVE_SPEED + FASTER * (state[HITS] + 1)).clamp(max=MOST_SPEED)
        # of the agent's paddle and of the opponent's: (2, E)
        reached = (before * self._away >= self._touch) & (x * self._away < self._touch)
        offset = y + (BALL - HEIGHT) // 2 - state[AGENT : OPPONENT + 1]
        hit = reached & (offset.abs() < (HEIGHT + BALL) // 2)
        struck = hit.any(0)
        # of the paddle that the ball flies to, and the direction away from it
        towards = state[SPEED_X] > 0
        away = torch.where(towards, self._away[0], self._away[1])
        x = torch.where(struck, 2 * torch.where(towards, RIGHT - BALL, LEFT + WIDTH) - x, x)
        # off the ends of a paddle: up to 5.5 cells a step after the first hit, 9.3 at full speed
        slope = torch.where(towards, offset[0], offset[1]).clamp(-END, END) * (speed - SERVE_SPEED // 2)
        if self._needed(struck):
            aim = self._random(state[SERVES], AIMED + 1 + state[HITS], -MOST_AIM, MOST_AIM)
            state[AIM] = torch.where(struck, aim, state[AIM])
        state[HITS] += struck
        state[BALL_X], state[BALL_Y] = x, y
        state[SPEED_X] = torch.where(struck, away * speed, state[SPEED_X])
        state[SPEED_Y] = torch.where(struck, 7 * slope // (6 * END), speed_y)
        return x < 0, x > top

    def _served(self, state: Tensor, where: Tensor, to_agent: Tensor) -> Tensor:
        """The state with a new rally in games `where`: paddles and ball centred, the ball flying `to_agent` or away."""
        serves = state[SERVES] + where
        fresh = state.clone()
        fresh[BALL_X] = (COURT - BALL) // 2
        fresh[BALL_Y], speed_y, fresh[AIM] = self._random(serves, self._purposes, self._least, self._most)
        fresh[AGENT : OPPONENT + 1] = (COURT - HEIGHT) // 2
        fresh[SPEED_X] = torch.where(to_agent, SERVE_SPEED, -SERVE_SPEED)
        fresh[SPEED_Y] = speed_y
        fresh[HITS] = 0
        fresh[SERVES] = serves
        return torch.where(where, fresh, state)

    def _needed(self, where: Tensor) -> bool:
        """Whether any row needs the work that follows. A GPU always says yes: the answer would synchronise with it."""
        if self.device.type != "cpu":
            return True
        return bool(where.any())

    def _random(self, serve: Tensor, purpose: Tensor | int, low: Tensor | int, high: Tensor | int) -> Tensor:
        """(..., E) int64 in [low, high], a function of only the seed, the game, its serve and the purpose (..., 1)."""
        bits = _mixed(self.seeds + (serve * 1024 + purpose) + 1)
        return low + _shift_right(bits, 32) * (high - low + 1) // 2**32

    def _covered(self, corner: Tensor, size: Tensor | int, parts: int) -> Tensor:
        """(..., side) uint8: how many `parts` of each row or column lie within `size` of each corner (...,)."""
        low, high = self._edges[:-1], self._edges[1:]
        begin = corner[..., None]
        covered = (torch.minimum(high, begin + size) - torch.maximum(low, begin)).clamp_(min=0)
        return ((covered * (2 * parts) + (high - low)) // (2 * (high - low))).to(torch.uint8)

    def _picture(self) -> Tensor:
        state = self.games
        across = self._covered(state[BALL_X], BALL, ACROSS)[:, None, :]
        ball, *paddles = self._covered(state[BALL_Y : OPPONENT + 1], self._heights, DOWN)[..., None]
        shown = ball * across
        for paddle, columns in zip(paddles, self._columns, strict=True):
            shown = torch.maximum(shown, paddle * columns)
        return shown


def _mixed(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014); int64 wraps around on every device."""
    bits = bits * -0x61C8864680B583EB
    bits = (bits ^ _shift_right(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shift_right(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Shift int64 right as unsigned 64-bit integers; torch's own shift keeps the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
