"""The rows of every benchmark of vectors: five classic fields of a small environment, with checkable values.

Every field of a row follows from its observation, so any sampled batch can be checked without knowing which rows it
holds. The check matters: the speed of a buffer that mixes up rows means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field

Rows = dict[str, np.ndarray]

# name of a field to its shape and type
Dtypes = Mapping[str, tuple[tuple[int, ...], type[np.generic]]]

DTYPES: Dtypes = {
    "obs": ((4,), np.float32),
    "action": ((), np.int64),
    "reward": ((), np.float32),
    "next_obs": ((4,), np.float32),
    "terminated": ((), np.bool_),
}
ROW_BYTES = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in DTYPES.values())


def described() -> dict[str, list[Any]]:
    """The fields as a record describes them: name to [dtype, shape]."""
    return {name: [np.dtype(dtype).name, list(shape)] for name, (shape, dtype) in DTYPES.items()}


def buffer_fields(dtypes: Dtypes = DTYPES) -> dict[str, Field]:
    """The fields as a ReplayBuffer takes them."""
    return {name: Field(shape, torch.from_numpy(np.empty(0, dtype)).dtype) for name, (shape, dtype) in dtypes.items()}


def make_rows(count: int, random: np.random.Generator) -> Rows:
    """`count` rows as NumPy arrays [count, *shape]."""
    obs = random.standard_normal((count, 4), dtype=np.float32)
    return {"obs": obs, **_implied(obs)}


def as_stepped(rows: Rows) -> dict[str, Any]:
    """One row as a loop over one environment has it: observations in float32, a float64 reward and a Python bool."""
    return {**rows, "reward": rows["reward"].astype(np.float64), "terminated": rows["terminated"].tolist()}


def make_priorities(batch: int, random: np.random.Generator) -> Tensor:
    """(batch,) float32 absolute TD errors, as a learner would give them."""
    return torch.from_numpy(np.abs(random.standard_normal(batch, dtype=np.float32)))


def mismatches(fields: Mapping[str, Tensor], *, has_next_obs: bool = True) -> list[str]:
    """Names of the fields whose sampled values do not belong to the sampled observations.

    has_next_obs: False for buffers that take `next_obs` from the following row instead of storing it.
    """
    found = {name: fields[name].cpu().numpy() for name in DTYPES}
    obs = found["obs"].reshape(-1, 4)
    expected = {"obs": obs, **_implied(obs)}
    names = [name for name in DTYPES if has_next_obs or name != "next_obs"]
    return [name for name in names if not np.array_equal(found[name].reshape(expected[name].shape), expected[name])]


def _implied(obs: np.ndarray) -> Rows:
    return {
        "action": (np.abs(obs[:, 0]) * np.float32(1000)).astype(np.int64),
        "reward": obs[:, 1].copy(),
        "next_obs": obs + np.float32(1),
        "terminated": obs[:, 2] > 2,
    }
