"""What adapters for buffers of parallel environments share; it needs none of their libraries."""

from __future__ import annotations

from pathlib import Path

import torch

from gpu_replay import CheckpointError, Field, TrajectoryReplayBuffer


def vector(size: int, dtype: torch.dtype) -> Field:
    """A field of `size` numbers: floats leave as float32, however short they are stored."""
    return Field((size,), dtype, torch.float32 if dtype.is_floating_point else None)


def load_like(path: str | Path, buffer: TrajectoryReplayBuffer) -> TrajectoryReplayBuffer:
    """The saved buffer; what follows begins new episodes. Raises CheckpointError for other settings than `buffer`'s."""
    loaded = TrajectoryReplayBuffer.load(path, device=buffer.device)
    for name in ("capacity", "num_envs", "fields", "n_step", "gamma", "sampler"):
        found, wanted = getattr(loaded, name), getattr(buffer, name)
        if found != wanted:
            raise CheckpointError(f"{path} has the {name} {found}; this buffer has {wanted}.")
    loaded.begin_episodes()
    return loaded
