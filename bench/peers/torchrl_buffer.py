"""TorchRL: a TensorDict storage and float32 segment trees in C++."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpu_replay.bench.rows import DTYPES, Rows


class TorchrlBuffer:
    """`ReplayBuffer` with `LazyTensorStorage` and `PrioritizedSampler`, the batch size given with each call."""

    add_size: int | None = None
    has_next_obs = True

    def __init__(self, capacity: int, alpha: float, beta: float) -> None:
        data = importlib.import_module("torchrl.data")
        samplers = importlib.import_module("torchrl.data.replay_buffers.samplers")
        self._tensordict: Any = importlib.import_module("tensordict").TensorDict
        self._buffer = data.ReplayBuffer(
            storage=data.LazyTensorStorage(capacity),
            sampler=samplers.PrioritizedSampler(capacity, alpha=alpha, beta=beta),
        )

    def inputs(self, rows: Rows) -> Any:
        """See Subject."""
        return rows

    def add(self, rows: Any) -> object:
        """See Subject."""
        count = rows["obs"].shape[0]
        tensors = {name: torch.from_numpy(values) for name, values in rows.items()}
        return self._buffer.extend(self._tensordict(tensors, batch_size=[count]))

    def sample(self, batch: int) -> Any:
        """See Subject."""
        drawn, info = self._buffer.sample(batch, return_info=True)
        tensors = {name: drawn.get(name) for name in DTYPES}
        weight = info["priority_weight"] if "priority_weight" in info else info["_weight"]
        tensors["weight"] = torch.as_tensor(weight)
        return info["index"], tensors

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """See Subject."""
        return self._buffer.update_priority(sampled[0], priorities)

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """See Subject."""
        found: Mapping[str, Tensor] = sampled[1]
        return found


def make(capacity: int, alpha: float, beta: float) -> TorchrlBuffer:
    """An empty buffer; ImportError without torchrl."""
    return TorchrlBuffer(capacity, alpha, beta)
