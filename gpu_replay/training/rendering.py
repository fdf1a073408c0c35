"""Environments that also render an image for human viewers.

An agent that plays Atari sees small grey frames. The colour images come from a second emulator that runs the same game
with the same seed and actions; rewards and endings are compared at every step to confirm that the games are equal.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_replay.console.errors import UserError
from gpu_replay.training.environments import Environment, Step
from gpu_replay.training.host_envs import make_atari, make_gymnasium
from gpu_replay.training.settings import Settings

# the console shows sixty frames a second, and the agent acts on every fourth
ATARI_FPS = 15.0
# colours of an empty cell, and of the ball and the paddles
GROUND = np.array((24, 28, 38), dtype=np.uint8)
BODY = np.array((236, 196, 86), dtype=np.uint8)


class RenderedEnvironment(Environment):
    """One environment, not a batch of them, that renders each of its steps.

    picture: (height, width, 3) uint8 of the current state; after the end of an episode still its last state.
    fps:     pictures per second at natural speed.
    scale:   default magnification.
    """

    picture: np.ndarray
    scale = 1

    def __init__(self, played: Environment, fps: float) -> None:
        super().__init__()
        self.spec, self.num_envs = played.spec, played.num_envs
        self.fps = fps
        self._played = played

    def send(self, actions: Tensor) -> None:
        """Start a step with actions (1,) int64."""
        self._played.send(actions)

    def close(self) -> None:
        """Release the environment."""
        self._played.close()


class RenderedBoard(RenderedEnvironment):
    """A game whose observations are its image: Catch and DevicePong, rendered cell by cell.

    pixels: side of a cell in pixels; `gaps` puts thin lines between cells.
    """

    def __init__(self, played: Environment, fps: float, pixels: int, gaps: bool = False) -> None:
        super().__init__(played, fps)
        self._pixels, self._gaps = pixels, gaps

    def reset(self, seed: int) -> Tensor:
        """Start a game."""
        board = self._played.reset(seed)
        self.picture = self._draw(board)
        return board

    def recv(self) -> Step:
        """Wait for the step."""
        step = self._played.recv()
        self.picture = self._draw(_last_frame(step))
        return step

    def _draw(self, board: Tensor) -> np.ndarray:
        """A board (1, height, width) as a picture of square cells."""
        covered = board[0].numpy()[..., None] * (self.spec.observation.scale or 1.0)
        colours = (GROUND + covered * (BODY.astype(float) - GROUND)).round().astype(np.uint8)
        picture = colours.repeat(self._pixels, 0).repeat(self._pixels, 1)
        if self._gaps:
            picture[:: self._pixels] = picture[:, :: self._pixels] = 0
        return picture


class RenderedAtari(RenderedEnvironment):
    """An Atari game in the console's colours."""

    scale = 2

    def __init__(self, game: str, settings: Settings) -> None:
        super().__init__(make_atari(game, 1, settings), ATARI_FPS)
        self._screen = make_atari(game, 1, settings, screen=True)

    def reset(self, seed: int) -> Tensor:
        """Start the same game in both emulators."""
        self.picture = self._screen.reset(seed)[0].numpy()
        return self._played.reset(seed)

    def send(self, actions: Tensor) -> None:
        """Start a step in both."""
        self._screen.send(actions)
        super().send(actions)

    def recv(self) -> Step:
        """Wait for both. Raises RuntimeError if they disagree about the step."""
        step, shown = self._played.recv(), self._screen.recv()
        for name in ("reward", "terminated", "truncated"):
            if not torch.equal(getattr(step, name), getattr(shown, name)):
                raise RuntimeError(
                    f"the two emulators of {self.spec.name} differ in {name}: this would be another game."
                )
        self.picture = _last_frame(shown)[0].numpy()
        return step

    def close(self) -> None:
        """Release both."""
        self._screen.close()
        super().close()


class RenderedGymnasium(RenderedEnvironment):
    """A Gymnasium environment, rendered by itself."""

    def __init__(self, name: str) -> None:
        played = make_gymnasium(name, 1, rendered=True)
        super().__init__(played, played.fps)
        self._pictures = played.pictures

    def reset(self, seed: int) -> Tensor:
        """Start an episode. Raises UserError if it cannot be rendered."""
        import gymnasium

        try:
            frame = self._played.reset(seed)
        except (gymnasium.error.Error, ImportError) as error:
            raise UserError(f"{self.spec.name} cannot be rendered: {' '.join(str(error).split())}") from None
        self._show(-1)
        return frame

    def recv(self) -> Step:
        """Wait for the step."""
        step = self._played.recv()
        # the newest image is the first of the next episode, the one before it the last of this one
        self._show(-2 if bool(step.ended[0]) else -1)
        return step

    def _show(self, place: int) -> None:
        picture = self._pictures()[place]
        if not isinstance(picture, np.ndarray) or picture.ndim != 3:
            raise UserError(f'{self.spec.name} cannot be rendered: it has no render_mode "rgb_array".')
        self.picture = picture


def _last_frame(step: Step) -> Tensor:
    """The frame that the action led to, also at the end of an episode."""
    return step.final_frame if step.final_frame is not None and bool(step.ended[0]) else step.frame
