"""TorchRL: a TensorDict storage, and float32 segment trees in C++ or, where a build has them, in CUDA.

Its wheels contain a compiled extension that only loads with the torch it was built with; with another torch there is no
prioritized replay, and the peer is skipped with that reason. Stacks of frames are stored whole, twice.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from gpu_replay.bench.peers_suite import Sampled, Task
from gpu_replay.bench.records import CannotMeasure, installed_version
from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import Subject


def _extension() -> Any:
    """The compiled trees; CannotMeasure when this torch cannot load them."""
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
    importlib.import_module("torchrl")
    try:
        return importlib.import_module("torchrl._torchrl")
    except ImportError as error:
        versions = f"torchrl {installed_version('torchrl')} cannot be loaded by torch {torch.__version__}"
        raise CannotMeasure(
            f"the compiled extension of {versions}, so there is no prioritized replay; build it from source against "
            f"this torch (`pip install git+https://github.com/pytorch/rl --no-build-isolation`)."
        ) from error


def make(task: Task) -> Subject:
    """`ReplayBuffer` with `LazyTensorStorage` and `PrioritizedSampler`, the batch size given with each call."""
    _extension()
    data = importlib.import_module("torchrl.data")
    samplers = importlib.import_module("torchrl.data.replay_buffers.samplers")
    tensordict: Any = importlib.import_module("tensordict").TensorDict
    # only newer versions have trees on a device
    where = {} if task.device.type == "cpu" else {"device": task.device}
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(task.capacity, device=task.device),
        sampler=samplers.PrioritizedSampler(task.capacity, alpha=task.alpha, beta=task.beta, **where),
    )

    def inputs(rows: Rows) -> Any:
        return {name: torch.from_numpy(values).to(task.device) for name, values in rows.items()}

    def sample(batch: int) -> Sampled:
        drawn, info = buffer.sample(batch, return_info=True)
        weight = info["priority_weight"] if "priority_weight" in info else info["_weight"]
        return info["index"], {**{n: drawn.get(n) for n in task.dtypes}, "weight": torch.as_tensor(weight)}

    return task.subject(
        add=lambda rows: buffer.extend(tensordict(rows, batch_size=[rows["obs"].shape[0]])),
        sample=sample,
        update=buffer.update_priority,
        inputs=inputs,
    )
