"""What a type checker sees of the public classes: `mypy` reads this file, nothing runs it."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

from gpu_replay import Batch, Field, Proportional, ReplayBuffer, Stats, TrajectoryReplayBuffer


def learning_step(path: str) -> None:
    buffer = ReplayBuffer(10, {"x": Field((), torch.float32)}, sampler=Proportional(), device="cpu")
    assert_type(buffer.add(x=torch.zeros(4)), Tensor)
    batch = buffer.sample(4)
    assert_type(batch, Batch)
    assert_type(batch.key, Tensor)
    assert_type(batch.weight, Tensor)
    assert_type(batch.probability, Tensor)
    buffer.update_priorities(batch.key, batch.weight.abs())
    assert_type(buffer.stats(), Stats)
    assert_type(ReplayBuffer.load(path), ReplayBuffer)
    assert_type(TrajectoryReplayBuffer.load(path), TrajectoryReplayBuffer)
