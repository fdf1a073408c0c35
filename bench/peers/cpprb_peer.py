"""cpprb: segment trees and rings in C++ behind Cython.

Stacks of frames are stored whole, twice: with `next_of` and `stack_compress`, which hold one environment's steps once,
an `add` takes several times as long, and drawing is no faster.
"""

from __future__ import annotations

import importlib

from gpu_replay.bench.peers_suite import Sampled, Task
from gpu_replay.bench.subjects import Subject, tensors


def make(task: Task) -> Subject:
    """`cpprb.PrioritizedReplayBuffer`, which returns NumPy arrays; scalars come as [B, 1]."""
    fields = {name: {"shape": shape or 1, "dtype": dtype} for name, (shape, dtype) in task.dtypes.items()}
    buffer = importlib.import_module("cpprb").PrioritizedReplayBuffer(task.capacity, fields, alpha=task.alpha)

    def sample(batch: int) -> Sampled:
        drawn = buffer.sample(batch, beta=task.beta)
        return drawn["indexes"], tensors({**{name: drawn[name] for name in task.dtypes}, "weight": drawn["weights"]})

    return task.subject(
        add=lambda rows: buffer.add(**rows),
        sample=sample,
        update=lambda slots, priorities: buffer.update_priorities(slots, priorities.numpy()),
    )
