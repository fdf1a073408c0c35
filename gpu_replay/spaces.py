"""The classic fields of a transition, read off Gymnasium spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpu_replay.fields import Field

if TYPE_CHECKING:
    from gymnasium import Space

# unsigned numbers that torch cannot compute with are stored in the next wider signed dtype
_WIDENED = {"uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}


def classic_fields(observation_space: Space[Any], action_space: Space[Any]) -> dict[str, Field]:
    """obs, action, reward, next_obs, terminated; composite spaces give one field per leaf, `obs.NAME`."""
    fields = _fields("obs", observation_space)
    fields.update(_fields("action", action_space))
    fields["reward"] = Field((), torch.float32)
    fields.update(_fields("next_obs", observation_space))
    fields["terminated"] = Field((), torch.bool)
    return fields


def _fields(name: str, space: Space[Any]) -> dict[str, Field]:
    from gymnasium import spaces

    if not isinstance(space, spaces.Space):
        raise TypeError(f"{name} needs a Gymnasium space such as Box or Discrete; found {space!r}.")
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        found: dict[str, Field] = {}
        for key, part in parts:
            leaf = key if isinstance(space, spaces.Dict) else f"item_{key}"
            found.update(_fields(f"{name}.{leaf}", part))
        return found
    if space.shape is None or space.dtype is None or isinstance(space, (spaces.Text, spaces.Sequence, spaces.Graph)):
        raise TypeError(
            f"{name} has the space {space}, which has no fixed shape and dtype; describe the fields yourself with "
            "ReplayBuffer(capacity, fields={...})."
        )
    return {name: Field(tuple(int(side) for side in space.shape), _dtype(name, space.dtype))}


def _dtype(name: str, dtype: Any) -> torch.dtype:
    kind = np.dtype(dtype).name
    found = _WIDENED.get(kind, getattr(torch, kind, None))
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} has NumPy dtype {kind}, which cannot be stored; describe the fields yourself.")
    return found
