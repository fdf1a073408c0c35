"""What adapters share; it needs none of their libraries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpu_replay import CheckpointError, Field, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.ops.advice import install

AnyBuffer = TypeVar("AnyBuffer", ReplayBuffer, TrajectoryReplayBuffer)
Rows = TypeVar("Rows", np.ndarray, Tensor)


@contextmanager
def library(module: str) -> Iterator[None]:
    """Within it, an adapter imports its library; the error of one that is missing says how to install it."""
    try:
        yield
    except ImportError as error:
        told = f"{module} cannot be imported: {error}. Run: {install('integrations')}"
        raise ImportError(told, name=error.name) from error


def vector(size: int, dtype: torch.dtype) -> Field:
    """A field of `size` numbers: floats leave as float32, however short they are stored."""
    return Field((size,), dtype, torch.float32 if dtype.is_floating_point else None)


def equal_rows(one: Rows, other: Rows) -> Rows:
    """(rows,) bool, where all numbers of a row are equal; NaN equals itself."""
    equal = (one == other) | ((one != one) & (other != other))
    return equal.reshape(len(one), -1).all(1)


def ring(slots: int, num_envs: int, fields: Mapping[str, Field], **settings: Any) -> TrajectoryReplayBuffer:
    """A buffer in same-step autoreset mode that keeps final observations of terminated episodes too.

    It has a place for one step in eight, and 3 MiB or 32 bytes a step in any case: enough for episodes of eight steps
    and more. `buffer.stats().lost_terminal_obs` counts what found none.
    """
    row = sum(field.row_bytes for name, field in fields.items() if name.split(".")[0] == "obs")
    settings |= {"terminal_obs": True, "final_capacity": max(slots // 8, max(3 * 2**20, 32 * slots) // row)}
    return TrajectoryReplayBuffer(slots, num_envs, fields, autoreset="same_step", **settings)


def load_like(kind: type[AnyBuffer], path: str | Path, device: torch.device | str | None, **wanted: Any) -> AnyBuffer:
    """The saved buffer; steps that follow begin new episodes. Raises CheckpointError where it has other settings."""
    loaded = kind.load(path, device=device)
    for name, value in wanted.items():
        if not loaded._has(name, value):
            raise CheckpointError(f"{path} has the {name} {getattr(loaded, name)}; this buffer has {value}.")
    if isinstance(loaded, TrajectoryReplayBuffer):
        loaded.begin_episodes()
    return loaded
