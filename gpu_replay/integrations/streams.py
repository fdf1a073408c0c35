"""What adapters for buffers of parallel environments share; it needs none of their libraries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpu_replay import CheckpointError, Field, TrajectoryReplayBuffer


def vector(size: int, dtype: torch.dtype) -> Field:
    """A field of `size` numbers: floats leave as float32, however short they are stored."""
    return Field((size,), dtype, torch.float32 if dtype.is_floating_point else None)


def all_endings(slots: int, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Settings of a ring of `slots` steps that keeps final observations of terminated episodes too.

    It has a place for one step in eight, and 3 MiB or 32 bytes a step in any case: enough for episodes of eight steps
    and more. `buffer.stats().lost_terminal_obs` counts what found none.
    """
    row = sum(field.row_bytes for name, field in fields.items() if name.split(".")[0] == "obs")
    return {"terminal_obs": True, "final_capacity": max(slots // 8, max(3 * 2**20, 32 * slots) // row)}


def load_like(path: str | Path, device: torch.device, **wanted: Any) -> TrajectoryReplayBuffer:
    """The saved buffer; what follows begins new episodes. Raises CheckpointError where it has other settings."""
    loaded = TrajectoryReplayBuffer.load(path, device=device)
    for name, value in wanted.items():
        if not loaded._has(name, value):
            raise CheckpointError(f"{path} has the {name} {getattr(loaded, name)}; this buffer has {value}.")
    loaded.begin_episodes()
    return loaded
