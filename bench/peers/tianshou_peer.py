"""Tianshou: rings in NumPy, a float64 sum tree in Numba that works on whole batches.

Stacks of frames are stored whole and `obs_next` is the stack of the following step (`ignore_obs_next`). Storing single
frames (`stack_num`, `save_only_last_obs`) takes a seventh of the memory, and copies each batch twice.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from gpu_replay.bench.peers_suite import Sampled, Task
from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import Subject, tensors

_NAMES = {"obs": "obs", "action": "act", "reward": "rew", "next_obs": "obs_next", "terminated": "terminated"}


def make(task: Task) -> Subject:
    """`PrioritizedVectorReplayBuffer` of as many sub-buffers as rows are added at once: its way of adding a batch."""
    data = importlib.import_module("tianshou.data")
    buffer = data.PrioritizedVectorReplayBuffer(
        task.capacity, task.added, alpha=task.alpha, beta=task.beta, ignore_obs_next=task.stacks
    )
    truncated = np.zeros(task.added, dtype=np.bool_)

    def inputs(rows: Rows) -> Any:
        return {**{theirs: rows[ours] for ours, theirs in _NAMES.items()}, "truncated": truncated}

    def sample(batch: int) -> Sampled:
        drawn, index = buffer.sample(batch)
        return index, tensors({**{ours: drawn[theirs] for ours, theirs in _NAMES.items()}, "weight": drawn.weight})

    return task.subject(
        add=lambda rows: buffer.add(data.Batch(rows)),
        sample=sample,
        update=lambda index, priorities: buffer.update_weight(index, priorities.numpy()),
        inputs=inputs,
        fixed_add=True,
    )
