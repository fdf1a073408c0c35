"""cpprb: segment trees and rings in C++ behind Cython.

Stacks of frames are stored whole, twice: with `next_of` and `stack_compress`, which hold one environment's steps once,
an `add` takes several times as long, and drawing is no faster.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from gpu_replay.bench.subjects import PeerSubject, Task


class CpprbBuffer(PeerSubject):
    """`cpprb.PrioritizedReplayBuffer`, which returns NumPy arrays; scalars come as [B, 1]."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        cpprb = importlib.import_module("cpprb")
        fields = {name: {"shape": shape or 1, "dtype": dtype} for name, (shape, dtype) in task.dtypes.items()}
        self._buffer = cpprb.PrioritizedReplayBuffer(task.capacity, fields, alpha=task.alpha)
        self._names = tuple(task.dtypes)
        self._beta = task.beta

    def add(self, rows: Any) -> object:
        """See Subject."""
        return self._buffer.add(**rows)

    def sample(self, batch: int) -> Any:
        """See Subject."""
        drawn = self._buffer.sample(batch, beta=self._beta)
        tensors = {name: torch.from_numpy(drawn[name]) for name in self._names}
        tensors["weight"] = torch.from_numpy(drawn["weights"])
        return drawn["indexes"], tensors

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """See Subject."""
        return self._buffer.update_priorities(sampled[0], priorities.numpy())


def make(task: Task) -> CpprbBuffer:
    """An empty buffer; ImportError without cpprb."""
    return CpprbBuffer(task)
