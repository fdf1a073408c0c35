"""Environments in host memory: Gymnasium's vector environments, and ALE's native one for Atari.

Both run in same-step autoreset mode, in which every transition is a real one. Their peculiarities stay in this file:
ALE gives no `final_obs` for steps in which no episode ends and garbage in rows that did not end, its rewards are
integers and its actions must be arrays; Gymnasium gives `final_obs` as an array of arrays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field
from gpu_replay.console.errors import UserError
from gpu_replay.console.versions import cpu_cores
from gpu_replay.training.environments import PONG_POINTS, PONG_WON, Environment, EnvironmentSpec, Step
from gpu_replay.training.settings import Settings

# positions of NOOP, RIGHT and LEFT among Pong's minimal actions; the other three are duplicates
PONG_ACTIONS = (0, 2, 3)
DEFAULT_FPS = 30.0
Axes = tuple[int, ...] | None


class HostEnvironment(Environment):
    """A Gymnasium vector environment in same-step autoreset mode.

    actions:      maps the agent's actions to the environment's.
    layout:       permutation of an observation's axes for storage, or None.
    asynchronous: whether the environment has `send` and `recv` of its own, as ALE's has.

    fps: steps per second at natural speed, if the environment states it.
    """

    def __init__(
        self, vector: Any, spec: EnvironmentSpec, actions: np.ndarray, layout: Axes = None, asynchronous: bool = False
    ) -> None:
        super().__init__()
        self.spec = spec
        self.num_envs = int(vector.num_envs)
        self._vector, self._meanings, self._asynchronous = vector, actions, asynchronous
        self.fps = float((vector.metadata or {}).get("render_fps") or DEFAULT_FPS)
        self._axes = None if layout is None else (0, *(axis + 1 for axis in layout))
        games = [_game(environment) for environment in getattr(vector, "envs", ())]
        # games whose state can be set: Gymnasium's classic control
        self._games = [game for game in games if game is not None]
        self.resumable = len(self._games) == self.num_envs

    def reset(self, seed: int) -> Tensor:
        """First frames; each environment has its own seed, derived from `seed`."""
        seeds = np.random.SeedSequence(seed).generate_state(self.num_envs, np.uint32).astype(np.int64) >> 1
        obs, _ = self._vector.reset(seed=seeds if self._asynchronous else seeds.tolist())
        return self._tensor(obs)

    def send(self, actions: Tensor) -> None:
        """Start a step; this copies the actions to the host."""
        self._pending = self._meanings[actions.cpu().numpy()]
        if self._asynchronous:
            self._vector.send(self._pending)

    def recv(self) -> Step:
        """Wait for the step."""
        result = self._vector.recv() if self._asynchronous else self._vector.step(self._pending)
        obs, reward, terminated, truncated, info = result
        ended = np.flatnonzero(terminated | truncated)
        terminated, truncated = (torch.from_numpy(np.asarray(flag, np.bool_)) for flag in (terminated, truncated))
        final = self._tensor(_filled(info["final_obs"], ended, obs)) if len(ended) else None
        return Step(self._tensor(obs), torch.from_numpy(np.asarray(reward, np.float32)), terminated, truncated, final)

    def get_extra_state(self) -> dict[str, Any]:
        """State, step count and random stream of each game; empty unless every game exposes them."""
        games = self._games if self.resumable else []
        return {
            "states": {str(place): torch.tensor(np.array(game.state)) for place, (game, _) in enumerate(games)},
            "elapsed": [limit._elapsed_steps for _, limit in games],
            # JSON has integers of any size
            "random": [json.dumps(game.np_random.bit_generator.state) for game, _ in games],
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue the games of this state, after a `reset`."""
        kept = zip(state["states"].values(), state["elapsed"], state["random"], strict=True)
        for (game, limit), (own, elapsed, stream) in zip(self._games, kept, strict=True):
            game.state, limit._elapsed_steps = own.numpy().astype(np.float64), elapsed
            game.np_random.bit_generator.state = json.loads(stream)

    def pictures(self) -> list[Any]:
        """Pictures of the first environment since the last call, if it was made with `rendered`."""
        found: list[Any] = self._vector.render()[0]
        return found

    def close(self) -> None:
        """Release the environments."""
        self._vector.close()

    def _tensor(self, obs: np.ndarray) -> Tensor:
        if self._axes is not None:
            obs = obs.transpose(self._axes)
        # ALE's frames come with a stack axis of one
        tensor = torch.from_numpy(np.ascontiguousarray(obs)).reshape(len(obs), *self.spec.observation.shape)
        return tensor if tensor.dtype == self.spec.observation.dtype else tensor.to(self.spec.observation.dtype)


def _game(environment: Any) -> tuple[Any, Any] | None:
    """A classic control game of Gymnasium, whose attribute `state` is complete, and the wrapper that counts its steps.

    None for other games, and for games in other wrappers, which may have a state of their own.
    """
    limit = None
    while hasattr(environment, "env"):
        name = type(environment).__name__
        if name not in ("TimeLimit", "OrderEnforcing", "PassiveEnvChecker"):
            return None
        limit = environment if name == "TimeLimit" else limit
        environment = environment.env
    ours = type(environment).__module__.startswith("gymnasium.envs.classic_control.")
    return (environment, limit) if ours and limit is not None else None


def _filled(finals: np.ndarray, ended: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Final observations as one array. Rows of running episodes are garbage with ALE, missing with Gymnasium."""
    if finals.dtype != object:
        return finals
    filled = np.zeros_like(like)
    for row in ended:
        filled[row] = finals[row]
    return filled


def make_atari(
    game: str, num_envs: int, settings: Settings, *, screen: bool = False, alone: bool = False
) -> HostEnvironment:
    """ALE's vector environment of a game, by its ROM name such as `pong`; rewards are not clipped.

    screen: frames in the console's resolution and colours, (height, width, 3), instead of the agent's small grey ones.
    alone:  the emulators use all cores, since nothing else computes while they run.
    """
    from ale_py.vector_env import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    side = settings.frame_size
    field = _screen_field(game) if screen else Field((side, side), torch.uint8, torch.float32, 1 / 255)
    vector = AtariVectorEnv(
        game,
        num_envs,
        # otherwise the network learns meanwhile and needs its own cores
        num_threads=max(1, cpu_cores() - (0 if alone else settings.threads)),
        autoreset_mode=AutoresetMode.SAME_STEP,
        img_height=field.shape[0],
        img_width=field.shape[1],
        grayscale=not screen,
        # frames are transferred and stored once; `Actors` stacks them
        stack_num=1,
        repeat_action_probability=settings.sticky,
        reward_clipping=False,
    )
    pong, space = game == "pong", vector.single_action_space
    actions = np.array(PONG_ACTIONS) if pong else np.arange(space.n, dtype=np.int64)  # type: ignore[attr-defined]
    threshold, points = (PONG_WON, PONG_POINTS) if pong else (None, None)
    spec = EnvironmentSpec(game, field, len(actions), threshold, None, settings.frame_stack, points)
    return HostEnvironment(vector, spec, actions, asynchronous=True)


def _screen_field(game: str) -> Field:
    from ale_py import ALEInterface, LoggerMode, roms

    ALEInterface.setLoggerMode(LoggerMode.Error)
    console = ALEInterface()
    rom: Any = roms.get_rom_path(game)
    console.loadROM(rom)
    return Field((*console.getScreenDims(), 3), torch.uint8)


def make_gymnasium(name: str, num_envs: int, *, rendered: bool = False) -> HostEnvironment:
    """A registered Gymnasium environment with discrete actions and Box observations, stepped in this process.

    rendered: every reset and step is rendered, for `HostEnvironment.pictures`.

    Raises UserError for other spaces, and for environments that Gymnasium cannot make.
    """
    import gymnasium
    from gymnasium.spaces import Box, Discrete
    from gymnasium.vector import AutoresetMode
    from gymnasium.wrappers import RenderCollection

    options: dict[str, Any] = {"vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}}
    if rendered:
        options |= {"wrappers": (partial(RenderCollection, reset_clean=False),), "render_mode": "rgb_array"}
    with _one_line_errors(name):
        vector = gymnasium.make_vec(name, num_envs, vectorization_mode="sync", **options)
    # typed wider by gymnasium than what is checked here
    observation: Any = vector.single_observation_space
    action: Any = vector.single_action_space
    for what, space, kind in (("actions", action, Discrete), ("observations", observation, Box)):
        if not isinstance(space, kind):
            vector.close()
            raise UserError(f"{name} has {what} {space}; this agent needs {kind.__name__} ones, as CartPole-v1 has.")
    field, layout = _field(observation)
    low, high = (torch.from_numpy(np.asarray(bound)) for bound in (observation.low, observation.high))
    threshold = None if vector.spec is None else vector.spec.reward_threshold
    bounds = (low, high) if field.dtype == torch.float32 else None
    spec = EnvironmentSpec(name, field, int(action.n), threshold, bounds)
    return HostEnvironment(vector, spec, np.arange(spec.num_actions) + int(action.start), layout)


def spaces(name: str) -> tuple[Any, Any]:
    """Observation and action space of a registered environment. Raises UserError if Gymnasium cannot make it."""
    import gymnasium

    with _one_line_errors(name):
        environment = gymnasium.make(name)
    environment.close()
    return environment.observation_space, environment.action_space


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    import gymnasium

    try:
        yield
    except (gymnasium.error.Error, ImportError) as error:
        raise UserError(f"Gymnasium cannot make {name!r}: {' '.join(str(error).split())}") from None


def _field(space: Any) -> tuple[Field, Axes]:
    """The field that stores observations of a Box (bytes as bytes, all else as float32), and the order of its axes."""
    shape = tuple(space.shape)
    if space.dtype != np.uint8:
        return Field(shape, torch.float32), None
    if is_image(space):
        return Field((shape[2], *shape[:2]), torch.uint8, torch.float32, 1 / 255), (2, 0, 1)
    return Field(shape, torch.uint8, torch.float32, 1 / 255), None


def is_image(space: Any) -> bool:
    """Whether a Box holds images (height, width, channels) that are large enough for convolutions."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and min(space.shape[:2]) >= 36 and space.shape[2] <= 12
