"""What a type checker sees of the public classes: `mypy` reads this file, nothing runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import assert_type

from gpu_replay import (
    Batch,
    Field,
    Proportional,
    ReplayBuffer,
    Sampler,
    Sequences,
    ShardedReplay,
    Stats,
    TrajectoryReplayBuffer,
)
from gpu_replay.samplers import BaseSampler, Random


@dataclass(frozen=True)
class Recent(BaseSampler):
    window: int = 1_000

    def places(self, total: Tensor, rows: int, random: Random) -> Tensor:
        return total - 1 - (random.doubles(rows) * total.clamp(max=self.window)).long()


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
    assert_type(buffer.sampler, Sampler)
    samplers: list[Sampler] = [buffer.sampler, Recent(window=5)]
    assert_type(ReplayBuffer(10, buffer.fields, sampler=samplers[1]).sample(1), Batch)
    shard = ShardedReplay(buffer, timeout=20.0)
    assert_type(shard.sample(4, beta=0.5), Batch)
    assert_type(shard.global_stats(), Stats)
    assert_type(shard.stats(), Stats)
    assert_type(shard[shard.keys()], Batch)
    assert_type(ShardedReplay.load(path, "cpu", seed=3), ShardedReplay)
    assert_type(ReplayBuffer.load(path), ReplayBuffer)
    assert_type(TrajectoryReplayBuffer.load(path), TrajectoryReplayBuffer)
    of_sequences = TrajectoryReplayBuffer.load(path, sequences=Sequences(8, strict=True, stride=4))
    assert_type(of_sequences.sequences, Sequences | None)
    TrajectoryReplayBuffer.load(path, sequences=None)
