"""Stable-Baselines3: uniform replay in NumPy. It has no priorities: an update does nothing and all weights are one.

Stacks of frames are stored once a step and the following row serves as `next_obs` (`optimize_memory_usage`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import PeerSubject, Task


class StableBaselines3Buffer(PeerSubject):
    """`ReplayBuffer` of as many environments as rows are added; scalars come as [B, 1], `terminated` as floats."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, fixed_add=True)
        buffers = importlib.import_module("stable_baselines3.common.buffers")
        spaces = importlib.import_module("gymnasium.spaces")
        shape, dtype = task.dtypes["obs"]
        low, high = (0, 255) if dtype is np.uint8 else (-np.inf, np.inf)
        self._infos: list[dict[str, Any]] = [{} for _ in range(task.added)]
        self._buffer = buffers.ReplayBuffer(
            task.capacity,
            spaces.Box(low, high, shape, dtype),
            # values of actions are not validated
            spaces.Discrete(18),
            device="cpu",
            n_envs=task.added,
            optimize_memory_usage=task.stacks,
            handle_timeout_termination=False,
        )

    def inputs(self, rows: Rows) -> Any:
        """See Subject."""
        return rows["obs"], rows["next_obs"], rows["action"], rows["reward"], rows["terminated"], self._infos

    def add(self, rows: Any) -> object:
        """See Subject."""
        return self._buffer.add(*rows)

    def sample(self, batch: int) -> Any:
        """See Subject."""
        return self._buffer.sample(batch)

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """Nothing has priorities."""
        return None

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """See Subject."""
        return {
            "obs": sampled.observations,
            "action": sampled.actions,
            "reward": sampled.rewards,
            "next_obs": sampled.next_observations,
            "terminated": sampled.dones,
            "weight": torch.ones(sampled.rewards.shape[0]),
        }


def make(task: Task) -> StableBaselines3Buffer:
    """An empty buffer; ImportError without stable-baselines3."""
    return StableBaselines3Buffer(task)
