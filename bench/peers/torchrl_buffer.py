"""TorchRL: a TensorDict storage, and float32 segment trees in C++ or, where a build has them, in CUDA.

Its wheels contain a compiled extension that only loads with the torch it was built with; with another torch there is no
prioritized replay, and the peer is skipped with that reason. Stacks of frames are stored whole, twice.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.bench.environment import installed_version
from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import MissingPeer, PeerSubject, Task

from .tree_index import TreeIndex


def _extension() -> Any:
    """The compiled trees; MissingPeer when this torch cannot load them."""
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
    importlib.import_module("torchrl")
    try:
        return importlib.import_module("torchrl._torchrl")
    except ImportError as error:
        versions = f"torchrl {installed_version('torchrl')} cannot be loaded by torch {torch.__version__}"
        raise MissingPeer(
            f"the compiled extension of {versions}, so there is no prioritized replay; build it from source against "
            f"this torch (`pip install git+https://github.com/pytorch/rl --no-build-isolation`)."
        ) from error


class TorchrlBuffer(PeerSubject):
    """`ReplayBuffer` with `LazyTensorStorage` and `PrioritizedSampler`, the batch size given with each call."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        _extension()
        data = importlib.import_module("torchrl.data")
        samplers = importlib.import_module("torchrl.data.replay_buffers.samplers")
        self._tensordict: Any = importlib.import_module("tensordict").TensorDict
        self._names = tuple(task.dtypes)
        self._device = task.device
        # only newer versions have trees on a device
        where = {} if task.device.type == "cpu" else {"device": task.device}
        self._buffer = data.ReplayBuffer(
            storage=data.LazyTensorStorage(task.capacity, device=task.device),
            sampler=samplers.PrioritizedSampler(task.capacity, alpha=task.alpha, beta=task.beta, **where),
        )

    def inputs(self, rows: Rows) -> Any:
        """See Subject."""
        return {name: torch.from_numpy(values).to(self._device) for name, values in rows.items()}

    def add(self, rows: Any) -> object:
        """See Subject."""
        return self._buffer.extend(self._tensordict(rows, batch_size=[rows["obs"].shape[0]]))

    def sample(self, batch: int) -> Any:
        """See Subject."""
        drawn, info = self._buffer.sample(batch, return_info=True)
        tensors = {name: drawn.get(name) for name in self._names}
        weight = info["priority_weight"] if "priority_weight" in info else info["_weight"]
        tensors["weight"] = torch.as_tensor(weight)
        return info["index"], tensors

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """See Subject."""
        return self._buffer.update_priority(sampled[0], priorities)


class TorchrlIndex(TreeIndex):
    """`SumSegmentTreeFp32`, the tree that its sampler uses by default."""

    def __init__(self, task: Task) -> None:
        self._tree = _extension().SumSegmentTreeFp32(task.capacity)
        self._size = task.capacity
        super().__init__(task)

    def total(self) -> float:
        """See TreeIndex."""
        return float(self._tree.query(0, self._size))

    def find(self, targets: np.ndarray) -> np.ndarray:
        """See TreeIndex."""
        found: np.ndarray = self._tree.scan_lower_bound(targets.astype(np.float32))
        # rounding can move a sum past the last slot
        return np.minimum(found, self._size - 1, out=found)

    def masses(self, slots: np.ndarray) -> np.ndarray:
        """See TreeIndex."""
        found: np.ndarray = self._tree[slots]
        return found

    def set(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """See TreeIndex."""
        self._tree[slots] = masses.astype(np.float32)


def make(task: Task) -> TorchrlBuffer:
    """An empty buffer; ImportError without torchrl, MissingPeer without its extension."""
    return TorchrlBuffer(task)


def make_index(task: Task) -> TorchrlIndex:
    """A full index; ImportError and MissingPeer likewise."""
    return TorchrlIndex(task)
