"""Tianshou: rings in NumPy, a float64 sum tree in Numba that works on whole batches.

Stacks of frames are stored whole and `obs_next` is the stack of the following step (`ignore_obs_next`). Storing single
frames (`stack_num`, `save_only_last_obs`) takes a seventh of the memory, and copies each batch twice.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import PeerSubject, Task

from .tree_index import TreeIndex


class TianshouBuffer(PeerSubject):
    """`PrioritizedVectorReplayBuffer` of as many sub-buffers as rows are added at once: its way of adding a batch."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, fixed_add=True)
        data = importlib.import_module("tianshou.data")
        self._batch: Any = data.Batch
        self._buffer = data.PrioritizedVectorReplayBuffer(
            task.capacity, task.added, alpha=task.alpha, beta=task.beta, ignore_obs_next=task.stacks
        )
        self._truncated = np.zeros(task.added, dtype=np.bool_)

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


class TianshouIndex(TreeIndex):
    """`SegmentTree`, which finds whole batches of prefix sums."""

    def __init__(self, task: Task) -> None:
        self._tree = importlib.import_module("tianshou.data").SegmentTree(task.capacity)
        super().__init__(task)

    def total(self) -> float:
        """See TreeIndex."""
        return float(self._tree.reduce())

    def find(self, targets: np.ndarray) -> np.ndarray:
        """See TreeIndex."""
        found: np.ndarray = self._tree.get_prefix_sum_idx(targets)
        return found

    def masses(self, slots: np.ndarray) -> np.ndarray:
        """See TreeIndex."""
        found: np.ndarray = self._tree[slots]
        return found

    def set(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """See TreeIndex."""
        self._tree[slots] = masses


def make(task: Task) -> TianshouBuffer:
    """An empty buffer; ImportError without tianshou."""
    return TianshouBuffer(task)


def make_index(task: Task) -> TianshouIndex:
    """A full index; ImportError without tianshou."""
    return TianshouIndex(task)
