"""What the host knows of a trajectory buffer on a device without asking: enough to rarely ask, never too much.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from devices import thinned
from interpreted import kernel_device as kernel_device

from gpu_replay import Field, Latest, Proportional, TrajectoryReplayBuffer, Uniform
from gpu_replay.engines.device_trajectory import TrajectoryDeviceEngine

FIELDS = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
UNIFORM = Uniform()


@pytest.fixture(name="reads", autouse=True)
def reads_fixture(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The counts that the host asked the device for."""
    found: list[int] = []
    count = TrajectoryDeviceEngine._count_newest

    def counted(self: TrajectoryDeviceEngine, added: int, slots: int) -> int:
        found.append(added)
        return count(self, added, slots)

    monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")
    monkeypatch.setattr(TrajectoryDeviceEngine, "_count_newest", counted)
    return found


def made(device: str, steps: int, sampler: Any = UNIFORM, *, capacity: int = 30, **settings: Any) -> Any:
    """A buffer of three environments that has seen so many steps, of one episode."""
    buffer = TrajectoryReplayBuffer(capacity, 3, FIELDS, sampler=sampler, device=device, **settings)
    for _ in range(steps):
        add(buffer)
    return buffer


def add(buffer: Any, end: bool = False) -> None:
    """A step of all environments, which ends or goes on for all."""
    zeros = torch.zeros(3, dtype=torch.int64, device=buffer.device)
    flags = torch.full((3,), end, device=buffer.device)
    buffer.add(obs=zeros, action=zeros, reward=zeros, terminated=flags, truncated=flags & False)


def test_a_ring_that_is_filling_up_is_asked_once_for_each_size(reads: list[int], device: str) -> None:
    buffer = made(device, 5, Proportional())
    for _ in range(4):
        add(buffer)
        buffer.sample(9)
    buffer.sample_sequences(5, 3)
    # by mass one start is enough for any batch
    assert len(reads) == 1
    buffer = made(device, 8)
    for batch in (5, 21, 20):
        buffer.sample(batch)
    assert len(reads) == 2


@thinned("seed, stack", range(2), [1, 4])
def test_the_lower_bound_is_never_above_the_number(seed: int, stack: int, device: str) -> None:
    draw = random.Random(seed)
    buffer = made(device, 0, Latest(), stack=stack, n_step=2)
    engine, seen = buffer._engine, 0
    for step in range(30):
        # long episodes, many that end at once, and what is overwritten later
        add(buffer, end=draw.random() < (0.0 if step % 15 < 8 else 0.6))
        if draw.random() < 0.03:
            buffer.clear()
        eligible = buffer.stats().eligible
        assert engine._at_least() <= eligible
        seen += engine._at_least() > 0
        first, added = engine.draws.span()
        assert engine.span_of_steps() == (first // 3, added // 3)
        if draw.random() < 0.3:
            assert engine.count_at_least(10**9, 0) == eligible
            skipped = 3 * draw.randint(0, 9)
            masses = buffer._state.eligible_tree.masses.tolist()
            within = [key for key in range(first, added - skipped) if masses[key % 30]]
            assert engine.count_at_least(10**9, skipped) == len(within)
    assert seen > 3


def test_too_few_are_refused_with_their_number(device: str) -> None:
    with pytest.raises(RuntimeError, match="no eligible start"):
        made(device, 0).sample(1)
    buffer = made(device, 4)
    with pytest.raises(ValueError, match="needs 10 eligible starts; the buffer holds 9"):
        buffer.sample(10)
    with pytest.raises(ValueError, match="needs 7 eligible starts; the buffer holds 6"):
        buffer.sample_sequences(7, 3)
    with pytest.raises(RuntimeError, match="needs 5 consecutive steps of an environment; the buffer holds 4"):
        buffer.sample_sequences(1, 3, 2)
    assert buffer.sample(9).key.shape == (9,)
