"""Stable-Baselines3: uniform replay in NumPy. It has no priorities: an update does nothing and all weights are one.

Stacks of frames are stored once a step and the following row serves as `next_obs` (`optimize_memory_usage`).
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from gpu_replay.bench.peers_suite import Sampled, Task
from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import Subject


def make(task: Task) -> Subject:
    """`ReplayBuffer` of as many environments as rows are added; scalars come as [B, 1], `terminated` as floats."""
    spaces = importlib.import_module("gymnasium.spaces")
    shape, dtype = task.dtypes["obs"]
    low, high = (0, 255) if dtype is np.uint8 else (-np.inf, np.inf)
    infos: list[dict[str, Any]] = [{} for _ in range(task.added)]
    buffer = importlib.import_module("stable_baselines3.common.buffers").ReplayBuffer(
        task.capacity,
        spaces.Box(low, high, shape, dtype),
        # values of actions are not validated
        spaces.Discrete(18),
        device="cpu",
        n_envs=task.added,
        optimize_memory_usage=task.stacks,
        handle_timeout_termination=False,
    )

    def inputs(rows: Rows) -> Any:
        return rows["obs"], rows["next_obs"], rows["action"], rows["reward"], rows["terminated"], infos

    def sample(batch: int) -> Sampled:
        drawn = buffer.sample(batch)
        found = {"obs": drawn.observations, "action": drawn.actions, "reward": drawn.rewards}
        found |= {"next_obs": drawn.next_observations, "terminated": drawn.dones}
        return None, {**found, "weight": torch.ones(batch)}

    return task.subject(lambda rows: buffer.add(*rows), sample, lambda *_: None, inputs, fixed_add=True)
