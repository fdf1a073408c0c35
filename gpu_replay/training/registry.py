"""Environments by name (`pong`, `CartPole-v1`, `catch`, `device-pong`): default settings, environments, pictures."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu_replay.console.errors import UserError, require
from gpu_replay.training.device_games import Catch, DevicePong
from gpu_replay.training.environments import Environment
from gpu_replay.training.host_envs import is_image, make_atari, make_gymnasium, spaces
from gpu_replay.training.rendering import RenderedAtari, RenderedBoard, RenderedEnvironment, RenderedGymnasium
from gpu_replay.training.settings import ENVIRONMENTS, Family, Settings

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """How to configure, make and render the environments of one kind.

    family: (name, whether the agent's device is a GPU) -> the family whose default settings apply.
    make:   (name, number of environments, settings, device, whether nothing else computes while they step) -> the
            environments.
    render: (name, settings) -> an environment that renders itself.
    """

    family: Callable[[str, bool], Family]
    make: Callable[[str, int, Settings, torch.device, bool], Environment]
    render: Callable[[str, Settings], RenderedEnvironment]


KINDS: dict[str, Kind] = {
    "catch": Kind(
        lambda _, cuda: "catch",
        lambda _, count, settings, device, alone: Catch(count, device),
        lambda _, settings: RenderedBoard(Catch(1, CPU), fps=8.0, pixels=20, gaps=True),
    ),
    "device-pong": Kind(
        lambda _, cuda: "device-pong-cuda" if cuda else "device-pong",
        lambda _, count, settings, device, alone: DevicePong(count, device, settings.frame_size, settings.frame_stack),
        # the pictures that the agent sees
        lambda _, settings: RenderedBoard(
            DevicePong(1, CPU, settings.frame_size, settings.frame_stack), fps=15.0, pixels=336 // settings.frame_size
        ),
    ),
    "atari": Kind(
        lambda _, cuda: "atari-cuda" if cuda else "atari",
        lambda name, count, settings, device, alone: make_atari(name, count, settings, alone=alone),
        RenderedAtari,
    ),
    "gymnasium": Kind(
        lambda name, cuda: "image" if is_image(spaces(name)[0]) else "vector",
        lambda name, count, settings, device, alone: make_gymnasium(name, count),
        lambda name, settings: RenderedGymnasium(name),
    ),
}


@dataclass(frozen=True)
class EnvironmentId:
    """A known environment. `name` is the ROM name for Atari, the registered id for Gymnasium; `kind` one of KINDS."""

    name: str
    kind: str

    def settings(self, device: torch.device, **changes: Any) -> Settings:
        """The defaults for this environment on `device`, with `changes` on top."""
        family = KINDS[self.kind].family(self.name, device.type == "cuda")
        return Settings.for_family(family, **{**ENVIRONMENTS.get(self.name, {}), **changes})

    def make(self, num_envs: int, settings: Settings, device: torch.device, *, alone: bool = False) -> Environment:
        """`num_envs` parallel environments: Catch and DevicePong on `device`, all others in host memory.

        alone: whether nothing else computes while they step, as in evaluations.
        """
        return KINDS[self.kind].make(self.name, num_envs, settings, device, alone)

    def rendered(self, settings: Settings) -> RenderedEnvironment:
        """An environment that renders itself. Raises UserError if it cannot."""
        return KINDS[self.kind].render(self.name, settings)


def identify(name: str) -> EnvironmentId:
    """Look up an environment: `catch`, `device-pong`, a ROM name or ALE id, or a registered Gymnasium id.

    `MODULE:ID` imports first the module that registers it, as `gymnasium.make` does. Raises UserError with the closest
    known names, or with the missing package or module.
    """
    if name in ("catch", "device-pong"):
        return EnvironmentId(name, name)
    require("gymnasium", purpose=f"environment {name!r}")
    import gymnasium

    module, _, name_there = name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except (ImportError, SystemExit) as error:
            why = f"it exits with {error.code}" if isinstance(error, SystemExit) else error
            raise UserError(f"{name!r} is of module {module!r}, which cannot be imported: {why}") from None
    known = set(gymnasium.registry)
    if name_there in known:
        registered = gymnasium.registry[name_there]
        if str(registered.entry_point).startswith("ale_py"):
            return EnvironmentId(registered.kwargs["game"], "atari")
        return EnvironmentId(name, "gymnasium")
    # a ROM name has no version
    if name.startswith("ALE/") or re.search(r"-v\d+$", name) is None:
        require("ale_py", purpose=f"environment {name!r}")
        from ale_py import roms

        games, rom = set(roms.get_all_rom_ids()), _rom_name(name)
        if rom in games:
            return EnvironmentId(rom, "atari")
        known |= games
    near = difflib.get_close_matches(name, [*sorted(known), "catch", "device-pong"], n=3, cutoff=0.6)
    hint = f"Did you mean {' or '.join(near)}?" if near else "Try pong, CartPole-v1 or catch."
    raise UserError(f"unknown environment {name!r}. {hint}")


def _rom_name(name: str) -> str:
    """`ALE/MsPacman-v5`, `MsPacman` and `ms_pacman` are all `ms_pacman`."""
    bare = re.sub(r"-v\d+$", "", name.removeprefix("ALE/"))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower()
