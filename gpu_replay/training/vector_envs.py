"""Environments that live in host memory: Gymnasium's, and ALE's native vector environment for Atari.

Both run in same-step autoreset mode, in which no bogus transition exists. What is awkward about each stays in this
file: ALE's `final_obs` is absent on steps where nothing ended and garbage in rows that did not end, its rewards are
integers and its actions must be arrays; Gymnasium gives `final_obs` as an array of arrays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.console.errors import UserError
from gpu_replay.fields import Field
from gpu_replay.training.environments import EnvironmentSpec, Step
from gpu_replay.training.settings import Settings

# positions of NOOP, RIGHT and LEFT among Pong's minimal actions
PONG_ACTIONS = (0, 2, 3)
DEFAULT_FPS = 30.0


class HostEnvironment:
    """A Gymnasium vector environment in same-step autoreset mode, whose arrays live in host memory.

    actions: maps the agent's actions to the environment's.
    layout:  axes of one stored observation in terms of the environment's, or None.
    """

    def __init__(
        self,
        vector: Any,
        spec: EnvironmentSpec,
        actions: np.ndarray,
        layout: tuple[int, ...] | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.spec = spec
        self.num_envs = int(vector.num_envs)
        self._vector = vector
        self._actions = actions
        self._axes = None if layout is None else (0, *(axis + 1 for axis in layout))
        self._asynchronous = asynchronous
        self._pending = np.zeros(self.num_envs, dtype=np.int64)

    def reset(self, seed: int) -> Tensor:
        """First observations, each environment with its own seed made from `seed`."""
        seeds = np.random.SeedSequence(seed).generate_state(self.num_envs, np.uint32).astype(np.int64) >> 1
        obs, _ = self._vector.reset(seed=seeds if self._asynchronous else seeds.tolist())
        return self._tensor(obs)

    def send(self, actions: Tensor) -> None:
        """Start a step; the one place where actions leave the device."""
        self._pending = self._actions[actions.cpu().numpy()]
        if self._asynchronous:
            self._vector.send(self._pending)

    def recv(self) -> Step:
        """Finish it."""
        result = self._vector.recv() if self._asynchronous else self._vector.step(self._pending)
        obs, reward, terminated, truncated, info = result
        ended = np.flatnonzero(terminated | truncated)
        return Step(
            obs=self._tensor(obs),
            reward=torch.from_numpy(np.asarray(reward, dtype=np.float32)),
            terminated=torch.from_numpy(np.asarray(terminated, dtype=np.bool_)),
            truncated=torch.from_numpy(np.asarray(truncated, dtype=np.bool_)),
            final_obs=self._tensor(_filled(info["final_obs"], ended, obs)) if len(ended) else None,
        )

    def state(self) -> None:
        """Nothing: neither library gives away what its simulators hold."""

    def restore(self, state: Mapping[str, Tensor]) -> Tensor:
        """Not to be had: `state` never gave one."""
        raise RuntimeError(f"{self.spec.name} cannot go on in mid-episode; reset it instead.")

    @property
    def fps(self) -> float:
        """Steps in a second of natural speed, as far as the environment says."""
        return float((self._vector.metadata or {}).get("render_fps") or DEFAULT_FPS)

    def close(self) -> None:
        """Release the environments."""
        self._vector.close()

    def _tensor(self, obs: np.ndarray) -> Tensor:
        if self._axes is not None:
            obs = obs.transpose(self._axes)
        # ALE's frames come with a stack axis of one
        tensor = torch.from_numpy(np.ascontiguousarray(obs)).reshape(len(obs), *self.spec.observation.shape)
        return tensor if tensor.dtype == self.spec.observation.dtype else tensor.to(self.spec.observation.dtype)


def _filled(finals: np.ndarray, ended: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Final observations as one array. Rows of episodes that went on are garbage with ALE, missing with Gymnasium."""
    if finals.dtype != object:
        return finals
    filled = np.zeros_like(like)
    for row in ended:
        filled[row] = finals[row]
    return filled


def make_atari(game: str, num_envs: int, settings: Settings) -> HostEnvironment:
    """ALE's vector environment of a game, by its ROM name such as `pong`; rewards are the game's own."""
    side = settings.frame_size
    field = Field((side, side), torch.uint8, torch.float32, 1 / 255)
    return _atari(game, num_envs, settings, field, grayscale=True)


def make_atari_screen(game: str, settings: Settings) -> HostEnvironment:
    """One game as its console shows it, (height, width, 3): seeds and actions of `make_atari` make the same game."""
    from ale_py import ALEInterface, LoggerMode, roms

    ALEInterface.setLoggerMode(LoggerMode.Error)
    console = ALEInterface()
    rom: Any = roms.get_rom_path(game)
    console.loadROM(rom)
    height, width = console.getScreenDims()
    return _atari(game, 1, settings, Field((height, width, 3), torch.uint8), grayscale=False)


def _cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _atari(game: str, num_envs: int, settings: Settings, field: Field, *, grayscale: bool) -> HostEnvironment:
    from ale_py.vector_env import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    vector = AtariVectorEnv(
        game,
        num_envs,
        # the network learns beside the emulators: it keeps its cores
        num_threads=max(1, _cores() - settings.threads),
        autoreset_mode=AutoresetMode.SAME_STEP,
        img_height=field.shape[0],
        img_width=field.shape[1],
        grayscale=grayscale,
        # each frame crosses to the device, and is stored, once
        stack_num=1,
        repeat_action_probability=settings.sticky,
        reward_clipping=False,
    )
    space: Any = vector.single_action_space
    actions = np.arange(space.n, dtype=np.int64)
    if game == "pong" and settings.reduced_actions:
        actions = actions[list(PONG_ACTIONS)]
    spec = EnvironmentSpec(
        name=game,
        observation=field,
        num_actions=len(actions),
        reward_threshold=None,
        bounds=None,
        stack=settings.frame_stack,
    )
    return HostEnvironment(vector, spec, actions, asynchronous=True)


def make_gymnasium(name: str, num_envs: int, *, watch: Callable[[Any], object] | None = None) -> HostEnvironment:
    """A registered Gymnasium environment with discrete actions and Box observations, stepped in this process.

    watch: gets a picture, as the environment draws itself, after each reset and each step of any environment.

    Raises UserError for other spaces, and for environments that Gymnasium cannot make.
    """
    import gymnasium
    from gymnasium.spaces import Box, Discrete
    from gymnasium.vector import AutoresetMode

    seen: dict[str, Any] = {}
    if watch is not None:
        seen = {"wrappers": (lambda environment: _watched(environment, watch),), "render_mode": "rgb_array"}
    with _one_line_errors(name):
        vector = gymnasium.make_vec(
            name,
            num_envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
            **seen,
        )
    # what gymnasium promises of these spaces is wider than what is checked here
    observation: Any = vector.single_observation_space
    action: Any = vector.single_action_space
    if not isinstance(action, Discrete):
        vector.close()
        raise UserError(f"{name} has actions {action}; this agent needs Discrete ones, as CartPole-v1 has.")
    if not isinstance(observation, Box):
        vector.close()
        raise UserError(f"{name} has observations {observation}; this agent needs a Box, as CartPole-v1 has.")
    field, layout = _field(observation)
    low, high = (torch.from_numpy(np.asarray(bound)) for bound in (observation.low, observation.high))
    spec = EnvironmentSpec(
        name=name,
        observation=field,
        num_actions=int(action.n),
        reward_threshold=None if vector.spec is None else vector.spec.reward_threshold,
        bounds=(low, high) if field.dtype == torch.float32 else None,
    )
    actions = np.arange(int(action.n), dtype=np.int64) + int(action.start)
    return HostEnvironment(vector, spec, actions, layout)


def _watched(environment: Any, watch: Callable[[Any], object]) -> Any:
    """The environment, handing over a picture after each reset and step."""
    import gymnasium

    class Watched(gymnasium.Wrapper[Any, Any, Any, Any]):
        def reset(self, **options: Any) -> Any:
            result = self.env.reset(**options)
            watch(self.env.render())
            return result

        def step(self, action: Any) -> Any:
            result = self.env.step(action)
            watch(self.env.render())
            return result

    return Watched(environment)


def spaces(name: str) -> tuple[Any, Any]:
    """Observation and action space of a registered environment. Raises UserError when Gymnasium cannot make it."""
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


def _field(space: Any) -> tuple[Field, tuple[int, ...] | None]:
    """How observations of a Box are stored: bytes as bytes (images with channels first), all else as float32."""
    shape = tuple(space.shape)
    if space.dtype != np.uint8:
        return Field(shape, torch.float32), None
    if is_image(space):
        return Field((shape[2], *shape[:2]), torch.uint8, torch.float32, 1 / 255), (2, 0, 1)
    return Field(shape, torch.uint8, torch.float32, 1 / 255), None


def is_image(space: Any) -> bool:
    """Whether a Box holds images (height, width, channels) that are large enough for convolutions."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and min(space.shape[:2]) >= 36 and space.shape[2] <= 12
