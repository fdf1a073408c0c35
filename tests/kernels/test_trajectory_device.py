"""What the host knows of a trajectory buffer on a device without asking: enough to rarely ask, never too much.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import random

import pytest
import torch
from devices import thinned
from interpreted import kernel_device as kernel_device

from gpu_replay import Field, Latest, Proportional, TrajectoryReplayBuffer, Uniform
from gpu_replay.engines.device_trajectory import TrajectoryDeviceEngine
from gpu_replay.ops.counters import Counter

FIELDS = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")


def made(device: str, capacity: int = 96, num_envs: int = 3, **settings: object) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(capacity, num_envs, FIELDS, device=device, **settings)


def add(buffer: TrajectoryReplayBuffer, end: bool = False) -> None:
    """A step of all environments, which ends or goes on for all."""
    envs, device = buffer.num_envs, buffer.device
    zeros = torch.zeros(envs, dtype=torch.int64, device=device)
    flags = torch.full((envs,), end, device=device)
    buffer.add(obs=zeros, action=zeros, reward=zeros, terminated=flags, truncated=flags & False)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The counts that the host asked the device for."""
    found: list[int] = []
    count = TrajectoryDeviceEngine._count_newest

    def counted(self: TrajectoryDeviceEngine, added: int, slots: int) -> int:
        found.append(added)
        return count(self, added, slots)

    monkeypatch.setattr(TrajectoryDeviceEngine, "_count_newest", counted)
    return found


@pytest.mark.slow
def test_a_full_ring_is_asked_rarely(reads: list[int], device: str) -> None:
    buffer = made(device, stack=4, n_step=3, sampler=Uniform())
    for _ in range(32):
        add(buffer)
    for _ in range(30):
        add(buffer)
        buffer.sample(20)
    # of some 80 eligible starts, 3 are lost with each step
    assert 1 <= len(reads) <= 3


def test_a_ring_that_is_filling_up_is_asked_once_for_each_size(reads: list[int], device: str) -> None:
    buffer = made(device, sampler=Proportional())
    for _ in range(12):
        add(buffer)
    for _ in range(8):
        add(buffer)
        buffer.sample(100)
        buffer.sample_sequences(5, 3)
    # by mass one start is enough for any batch
    assert len(reads) == 1
    buffer = made(device, sampler=Uniform())
    reads.clear()
    for _ in range(12):
        add(buffer)
    for batch in (5, 30, 33, 32):
        buffer.sample(batch)
    assert len(reads) == 1


@thinned("seed, stack", range(2), [1, 4])
def test_the_lower_bound_is_never_above_the_number(seed: int, stack: int, device: str) -> None:
    draw = random.Random(seed)
    buffer = made(device, 30, stack=stack, n_step=2, sampler=Latest())
    engine = buffer._engine
    assert isinstance(engine, TrajectoryDeviceEngine)
    seen = 0
    for step in range(45):
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


def test_captured_adds_may_have_done_anything(reads: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may be replayed without the host knowing; while one is captured there is nobody to ask."""
    buffer = made(device, sampler=Uniform())
    engine = buffer._engine
    add(buffer)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.draws), "capturing", lambda self: True)
        add(buffer)
        assert engine.count_at_least(1000, 0) == 1000
        assert engine.span_of_steps() == (0, 32)
        assert reads == []
    for _ in range(5):
        # a replay
        add(buffer)
        buffer.sample(3)
    assert len(reads) == 5
    assert engine.span_of_steps() == (0, 7)


def test_a_restored_buffer_is_asked(reads: list[int], device: str) -> None:
    buffer = made(device, sampler=Uniform())
    for _ in range(35):
        add(buffer)
    other = made(device, sampler=Uniform())
    other.load_state_dict(buffer.state_dict())
    assert other._engine.span_of_steps() == (3, 35)
    assert other.sample(50).key.tolist() == buffer.sample(50).key.tolist()
    assert len(reads) == 2
    assert int(other._counters[Counter.ELIGIBLE]) == other.stats().eligible == 31 * 3


def test_too_few_are_refused_with_their_number(device: str) -> None:
    buffer = made(device, sampler=Uniform())
    with pytest.raises(RuntimeError, match="no eligible start"):
        buffer.sample(1)
    for _ in range(4):
        add(buffer)
    with pytest.raises(ValueError, match="needs 10 eligible starts; the buffer holds 9"):
        buffer.sample(10)
    with pytest.raises(ValueError, match="needs 7 eligible starts; the buffer holds 6"):
        buffer.sample_sequences(7, 3)
    with pytest.raises(RuntimeError, match="needs 5 consecutive steps of an environment; the buffer holds 4"):
        buffer.sample_sequences(1, 3, 2)
    assert buffer.sample(9).key.shape == (9,)
