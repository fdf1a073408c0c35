"""A memory of one rank is its buffer: the same rows, weights and state, on the host, through kernels and on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from devices import thinned
from interpreted import kernel_device as kernel_device
from programs import SAMPLERS
from refusals import whole_state
from test_distributions import lived
from test_own_sampler import OWN
from transitions import same

from gpu_replay import ShardedReplay

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
]
ALL = SAMPLERS | {"own": OWN["recent"]}


@pytest.fixture
def world(device: str) -> Iterator[None]:
    """This process is the only rank of a process group."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@thinned("name, kind", ALL, ["rows", "steps"])
def test_a_memory_of_one_rank_is_its_buffer(name: str, kind: str, device: str) -> None:
    buffer = lived(kind, ALL[name], device, seed=1)[0].buffer
    alone, shard = copy.deepcopy(buffer), ShardedReplay(buffer, timeout=20)
    for rows in (5, 5, 3):
        batch = alone.sample(rows)
        same(batch, shard.sample(rows))
        for each in (alone, shard):
            each.update_priorities(batch.key, batch.key % 7 + 0.5)
    for batch, expected in zip(shard.epoch(4), alone.epoch(4), strict=True):
        same(batch, expected)
    assert torch.equal(shard.keys(eligible=True), alone.keys(eligible=True))
    assert whole_state(buffer) == whole_state(alone)
    assert vars(shard.global_stats()) == pytest.approx(vars(alone.stats()), rel=1e-6, nan_ok=True)
    for wrong in (0, 2.5):
        with pytest.raises((ValueError, TypeError)):
            shard.sample(wrong)
    shard.clear()
    with pytest.raises(RuntimeError, match="holds no"):
        shard.sample(3)
    alone.clear()
    assert whole_state(buffer) == whole_state(alone)
    shard.close()
