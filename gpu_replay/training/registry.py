"""Environments by name (`pong`, `CartPole-v1`, `catch`, `device-pong`), and the family whose default settings apply."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

import torch

from gpu_replay.console.errors import UserError, require
from gpu_replay.training.catch import Catch
from gpu_replay.training.device_pong import DevicePong
from gpu_replay.training.environments import Environment
from gpu_replay.training.settings import Family, Settings
from gpu_replay.training.vector_envs import Groups, is_image, make_atari, make_gymnasium, spaces


@dataclass(frozen=True)
class EnvironmentId:
    """A known environment. `name` is the ROM name for Atari, the registered id for Gymnasium."""

    name: str
    kind: Literal["catch", "device-pong", "atari", "gymnasium"]

    def family(self, device: torch.device) -> Family:
        """The family whose defaults apply on `device`."""
        if self.kind == "catch":
            return "catch"
        if self.kind == "device-pong":
            return "device-pong-cuda" if device.type == "cuda" else "device-pong"
        if self.kind == "atari":
            return "atari-cuda" if device.type == "cuda" else "atari"
        return "image" if is_image(spaces(self.name)[0]) else "vector"


def identify(name: str) -> EnvironmentId:
    """Look up an environment: `catch`, `device-pong`, a ROM name or ALE id, or a registered Gymnasium id.

    Raises UserError that names the closest known names, or the missing package.
    """
    if name == "catch":
        return EnvironmentId("catch", "catch")
    if name == "device-pong":
        return EnvironmentId("device-pong", "device-pong")
    require("gymnasium", purpose=f"environment {name!r}")
    import gymnasium

    known = set(gymnasium.registry)
    if name in known:
        registered = gymnasium.registry[name]
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


def make_environment(
    environment: EnvironmentId,
    num_envs: int,
    settings: Settings,
    device: torch.device,
    *,
    alone: bool = False,
    groups: int = 1,
) -> Environment:
    """`num_envs` parallel environments: Catch and DevicePong on `device`, all others in host memory.

    alone:  whether nothing else computes while they step, as in evaluations.
    groups: equal parts that are stepped apart; a divisor of `num_envs`.

    Raises UserError for several groups where nothing steps while the agent acts.
    """
    if groups > 1 and environment.kind != "atari":
        raise UserError(
            f"--groups {groups} needs an Atari game, whose emulators play on threads of their own; {environment.name} "
            "has none. Leave it out."
        )
    if environment.kind == "catch":
        return Catch(num_envs, device)
    if environment.kind == "device-pong":
        return DevicePong(num_envs, device, settings.frame_size, settings.frame_stack)
    if environment.kind == "atari":
        parts = [make_atari(environment.name, num_envs // groups, settings, alone=alone) for _ in range(groups)]
        return parts[0] if groups == 1 else Groups(parts)
    return make_gymnasium(environment.name, num_envs)


def _rom_name(name: str) -> str:
    """`ALE/MsPacman-v5`, `MsPacman` and `ms_pacman` are all `ms_pacman`."""
    bare = re.sub(r"-v\d+$", "", name.removeprefix("ALE/"))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower()
