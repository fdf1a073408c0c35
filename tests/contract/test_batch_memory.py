"""Memory of large batches is used again once nobody holds it, and never before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from devices import host_only
from torch import Tensor

from gpu_replay import Field, RankBased, ReplayBuffer, TrajectoryReplayBuffer, Uniform

pytestmark = host_only
PICTURES = np.random.default_rng(0).integers(0, 256, (500, 4, 42, 42), dtype=np.uint8)

HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor.view(-1)[5:],
    "array": lambda tensor: tensor.numpy(),
    "dlpack": lambda tensor: torch.from_dlpack(tensor),
    "storage": lambda tensor: tensor.untyped_storage(),
}


def frames() -> TrajectoryReplayBuffer:
    fields = {"obs": Field((42, 42), torch.uint8), "action": Field((), torch.float32)}
    buffer = TrajectoryReplayBuffer(2_000, 4, fields, stack=4, sampler=Uniform(), device="cpu")
    zeros, nothing = np.zeros((500, 4), np.float32), np.zeros((500, 4), dtype=bool)
    buffer.extend(obs=PICTURES, action=zeros, reward=zeros, terminated=nothing, truncated=nothing)
    return buffer


def rows(sampler: Any = None, *sampled: Any) -> ReplayBuffer:
    stack = Field((4, 42, 42), torch.uint8, *sampled)
    buffer = ReplayBuffer(500, {"obs": stack, "next_obs": stack}, sampler=sampler or Uniform(), device="cpu")
    buffer.add(obs=PICTURES, next_obs=PICTURES[::-1].copy())
    return buffer


@pytest.mark.parametrize("make", [frames, rows])
def test_batches_of_a_buffer_stay_what_they_were_while_others_are_drawn(make: Callable[[], Any]) -> None:
    buffer = make()
    kept = [buffer.sample(128) for _ in range(3)]
    copies = copy.deepcopy([(batch.obs, batch.next_obs) for batch in kept])
    # only a part of the last one is still held: its other half shares the memory
    half, whole = kept[2].next_obs, copies[2][1]
    del kept[2]

    def draw(times: int) -> None:
        for _ in range(times):
            buffer.sample(128)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(draw, [6] * 3))
    for batch, (obs, after) in zip(kept, copies, strict=False):
        assert torch.equal(batch.obs, obs)
        assert torch.equal(batch.next_obs, after)
    assert torch.equal(half, whole)


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_is_held_is_never_written_again(hold: Callable[[Tensor], Any]) -> None:
    buffer = rows()
    first = buffer.sample(160).obs
    address, held = first.data_ptr(), hold(first)
    del first
    for _ in range(4):
        assert buffer.sample(160).obs.data_ptr() != address
    del held


def test_an_autograd_graph_holds_what_it_needs() -> None:
    buffer, weight = rows(None, torch.float32, 1.0), torch.ones(1, requires_grad=True)
    first = buffer.sample(160).obs
    expected, loss = float(first.double().sum()), (weight * first).double().sum()
    del first
    for _ in range(4):
        buffer.sample(160)
    loss.backward()
    assert weight.grad.item() == pytest.approx(expected)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("sampler", [None, RankBased()], ids=["uniform", "by rank"])
def test_what_nobody_holds_is_used_again(sampler: Any, converted: bool) -> None:
    """With fresh memory a sample would take several times as long."""
    buffer = rows(sampler, *([torch.float32, 0.5] if converted else []))
    assert len({buffer.sample(160).obs.data_ptr() for _ in range(5)}) == 1
    # a loop that holds its batch while it draws the next one goes back and forth between two
    batch, seen = None, set()
    for _ in range(8):
        batch = buffer.sample(160)
        seen.add(batch.obs.data_ptr())
        stored = torch.from_numpy(PICTURES)[batch.key]
        assert torch.equal(batch.obs, stored * 0.5 if converted else stored)
    assert len(seen) == 2
