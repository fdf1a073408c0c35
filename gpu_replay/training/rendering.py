"""Environments that can be watched: what the agent meets, and beside it a picture for a person at every moment.

An agent that plays Atari sees small grey frames. The colours come from a second emulator that plays the same game: the
same seed, the same actions, so the same frames, which rewards and endings confirm at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gpu_replay.console.errors import UserError
from gpu_replay.training.catch import SIDE, Catch
from gpu_replay.training.environments import Environment, EnvironmentSpec, Step
from gpu_replay.training.registry import EnvironmentId
from gpu_replay.training.settings import Settings
from gpu_replay.training.vector_envs import HostEnvironment, make_atari, make_atari_screen, make_gymnasium

CPU = torch.device("cpu")
# a console shows sixty frames a second, of which an agent acts on every fourth
ATARI_FPS = 15.0
CATCH_FPS = 8.0
CATCH_PIXELS = 20
# colours of an empty cell, and of the ball and the paddle
GROUND = np.array((24, 28, 38), dtype=np.uint8)
BODY = np.array((236, 196, 86), dtype=np.uint8)


class Scene(Environment, Protocol):
    """One environment, and what there is to be seen of it.

    picture: (height, width, 3) uint8 of this moment; after an ending the last of the old episode.
    fps:     pictures in a second of natural speed.
    scale:   by how much they are enlarged unless told otherwise.
    """

    picture: np.ndarray
    fps: float
    scale: int


def make_scene(environment: EnvironmentId, settings: Settings) -> Scene:
    """An environment to be watched. Raises UserError for one that cannot be drawn."""
    if environment.kind == "catch":
        return CatchScene()
    if environment.kind == "atari":
        return AtariScene(environment.name, settings)
    return GymnasiumScene(environment.name)


class _Watched:
    """An environment of one game, watched."""

    picture: np.ndarray

    def __init__(self, played: Environment) -> None:
        self.spec: EnvironmentSpec = played.spec
        self.num_envs = played.num_envs
        self._played = played

    def send(self, actions: Tensor) -> None:
        """Start a step."""
        self._played.send(actions)

    def close(self) -> None:
        """Release what the environments hold."""
        self._played.close()

    def state(self) -> None:
        """A film is not resumed."""

    def restore(self, state: Mapping[str, Tensor]) -> Tensor:
        """Not to be had: `state` never gave one."""
        raise RuntimeError("an environment that is watched cannot be resumed; reset it instead.")


class CatchScene(_Watched):
    """Catch, its board painted cell by cell."""

    fps = CATCH_FPS
    scale = 1

    def __init__(self) -> None:
        super().__init__(Catch(1, CPU))

    def reset(self, seed: int) -> Tensor:
        """Start a game."""
        board = self._played.reset(seed)
        self.picture = _painted(board)
        return board

    def recv(self) -> Step:
        """Finish a step."""
        step = self._played.recv()
        self.picture = _painted(_last(step))
        return step


class AtariScene(_Watched):
    """An Atari game in full resolution and colour, beside the frames that the agent sees."""

    fps = ATARI_FPS
    scale = 2

    def __init__(self, game: str, settings: Settings) -> None:
        super().__init__(make_atari(game, 1, settings))
        self._screen: HostEnvironment = make_atari_screen(game, settings)

    def reset(self, seed: int) -> Tensor:
        """Start the same game in both emulators."""
        self.picture = self._screen.reset(seed)[0].numpy()
        return self._played.reset(seed)

    def send(self, actions: Tensor) -> None:
        """Start a step in both."""
        self._screen.send(actions)
        super().send(actions)

    def recv(self) -> Step:
        """Finish it in both. Raises RuntimeError if they do not agree on what happened."""
        step, shown = self._played.recv(), self._screen.recv()
        for name in ("reward", "terminated", "truncated"):
            if not torch.equal(getattr(step, name), getattr(shown, name)):
                raise RuntimeError(f"the two emulators of {self.spec.name} differ in {name}; the film would be untrue.")
        self.picture = _last(shown)[0].numpy()
        return step

    def close(self) -> None:
        """Release both."""
        self._screen.close()
        super().close()


class GymnasiumScene(_Watched):
    """A Gymnasium environment, as it draws itself."""

    scale = 1

    def __init__(self, name: str) -> None:
        self._pictures: list[Any] = []
        played = make_gymnasium(name, 1, watch=self._pictures.append)
        super().__init__(played)
        self.fps = played.fps

    def reset(self, seed: int) -> Tensor:
        """Start an episode. Raises UserError if nothing can be seen of it."""
        import gymnasium

        try:
            obs = self._played.reset(seed)
        except (gymnasium.error.Error, ImportError) as error:
            raise UserError(f"{self.spec.name} cannot be drawn: {' '.join(str(error).split())}") from None
        self._take(-1)
        return obs

    def recv(self) -> Step:
        """Finish a step."""
        step = self._played.recv()
        # an ending is followed by the first picture of the next episode
        self._take(-2 if bool(step.terminated[0] | step.truncated[0]) else -1)
        return step

    def _take(self, place: int) -> None:
        picture = self._pictures[place]
        self._pictures.clear()
        if not isinstance(picture, np.ndarray) or picture.ndim != 3:
            raise UserError(f'{self.spec.name} cannot be drawn: it has no render_mode "rgb_array".')
        self.picture = picture


def _last(step: Step) -> Tensor:
    """The frame that the action led to, also at an ending."""
    ended = bool(step.terminated[0] | step.truncated[0])
    return step.final_obs if ended and step.final_obs is not None else step.obs


def _painted(board: Tensor) -> np.ndarray:
    """A board (1, 12, 12) as a picture of square cells with thin gaps."""
    colours = np.where(board[0].numpy().astype(bool)[..., None], BODY, GROUND)
    picture = colours.repeat(CATCH_PIXELS, 0).repeat(CATCH_PIXELS, 1)
    for line in range(0, SIDE * CATCH_PIXELS, CATCH_PIXELS):
        picture[line] = picture[:, line] = 0
    return picture
