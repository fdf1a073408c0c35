"""Tianshou: rings in NumPy, a float64 sum tree in Numba that works on whole batches."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.bench.cases import ADDED
from gpu_replay.bench.rows import Rows


class TianshouBuffer:
    """`PrioritizedVectorReplayBuffer` of as many sub-buffers as rows are added at once: its way of adding a batch."""

    add_size: int | None = ADDED
    has_next_obs = True

    def __init__(self, capacity: int, alpha: float, beta: float) -> None:
        data = importlib.import_module("tianshou.data")
        self._batch: Any = data.Batch
        self._buffer = data.PrioritizedVectorReplayBuffer(capacity, ADDED, alpha=alpha, beta=beta)
        self._truncated = np.zeros(ADDED, dtype=np.bool_)

    def inputs(self, rows: Rows) -> Any:
        """See Subject."""
        return {
            "obs": rows["obs"],
            "act": rows["action"],
            "rew": rows["reward"],
            "obs_next": rows["next_obs"],
            "terminated": rows["terminated"],
            "truncated": self._truncated,
        }

    def add(self, rows: Any) -> object:
        """See Subject."""
        return self._buffer.add(self._batch(rows))

    def sample(self, batch: int) -> Any:
        """See Subject."""
        drawn, index = self._buffer.sample(batch)
        return index, {
            "obs": torch.from_numpy(drawn.obs),
            "action": torch.from_numpy(drawn.act),
            "reward": torch.from_numpy(drawn.rew),
            "next_obs": torch.from_numpy(drawn.obs_next),
            "terminated": torch.from_numpy(drawn.terminated),
            "weight": torch.from_numpy(drawn.weight),
        }

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """See Subject."""
        return self._buffer.update_weight(sampled[0], priorities.numpy())

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """See Subject."""
        found: Mapping[str, Tensor] = sampled[1]
        return found


def make(capacity: int, alpha: float, beta: float) -> TianshouBuffer:
    """An empty buffer; ImportError without tianshou."""
    return TianshouBuffer(capacity, alpha, beta)
