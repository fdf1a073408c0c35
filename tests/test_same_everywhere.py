"""The same everywhere: with one seed, the kernels draw the keys that the host code draws, bit for bit.

Each test plays the same calls to a buffer of the backend under test and to one of the host code. Proportional draws are
also held against the plain-Python oracle, in test_random_sequences.py; this covers the samplers that have none.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from devices import INTERPRETED
from devices import device_fixture as device_fixture
from tolerances import close
from transitions import EXACT, NUMBER, SAMPLERS

from gpu_replay import Combined, LinearSchedule, Proportional, RankBased, ReplayBuffer, Uniform

pytestmark = pytest.mark.contract

KINDS = SAMPLERS | {
    "exact": EXACT,
    "clipped": Proportional(alpha=0.5, beta=LinearSchedule(0.2, 1.0, 9), clip=4.0, normalize="buffer"),
    "stored": Proportional(alpha=0.7, initial="stored", stratified=False),
    "combined-replacement": Combined(Uniform(replacement=True), newest=3),
    "rank-independent": RankBased(alpha=1.0, normalize="buffer", stratified=False, initial="stored"),
    "combined-rank": Combined(RankBased(beta=LinearSchedule(0.2, 1.0, 9), resort_every=4), newest=2),
}


def pair(
    capacity: int, sampler: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[ReplayBuffer, ReplayBuffer]:
    """A buffer of the backend under test and one of the host code."""
    if device == "cpu" and not INTERPRETED:
        pytest.skip("the host code is what runs here")
    tested = ReplayBuffer(capacity, NUMBER, sampler=sampler, device=device, seed=11)
    if INTERPRETED:
        monkeypatch.setenv("GPU_REPLAY_BACKEND", "host")
    return tested, ReplayBuffer(capacity, NUMBER, sampler=sampler, device="cpu", seed=11)


def add(buffers: tuple[ReplayBuffer, ...], count: int, priority: list[float] | None = None) -> None:
    """The next `count` numbers into each buffer."""
    for buffer in buffers:
        number = torch.arange(buffer.added, buffer.added + count, device=buffer.device)
        given = None if priority is None else torch.tensor(priority, dtype=torch.float64, device=buffer.device)
        buffer.add(number=number, priority=given)


def check_draws(buffers: tuple[ReplayBuffer, ReplayBuffer], count: int) -> list[int]:
    """Fail unless the next samples have the same keys; return them."""
    tested, host = (buffer.sample(count) for buffer in buffers)
    keys: list[int] = host.key.tolist()
    assert tested.key.tolist() == keys
    assert tested.number.tolist() == keys
    assert close(tested.probability, host.probability, "probability")
    assert close(tested.weight, host.weight, "weight")
    return keys


@pytest.mark.parametrize("size, counts", [(3, (2,)), (7, (3, 5)), (97, (4, 97)), (1009, (33, 128)), (100_003, (257,))])
@pytest.mark.parametrize("replacement", [False, True])
def test_uniform_draws(
    replacement: bool, size: int, counts: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = pair(size, Uniform(replacement), device, monkeypatch)
    add(buffers, size)
    for count in counts:
        check_draws(buffers, count)
        # the draws depend on what is stored, not on where the ring stands
        add(buffers, 1 + size // 3)


@pytest.mark.parametrize("name", KINDS)
def test_random_sequences_of_calls(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = 131
    buffers = pair(capacity, KINDS[name], device, monkeypatch)
    generator = random.Random(name)
    add(buffers, 70)
    for _ in range(10):
        count = generator.randint(1, 90)
        priorities = [generator.uniform(0, 8) for _ in range(count)]
        add(buffers, count, priorities if generator.random() < 0.5 else None)
        keys = check_draws(buffers, generator.randint(4, 60))
        keys += [buffers[0].added - capacity - 1, buffers[0].added, *keys[:3]]
        # whole and half numbers, whose masses no library rounds differently
        given = [generator.randint(0, 12) / 2 for _ in keys]
        for buffer in buffers:
            device_keys = torch.tensor(keys, device=buffer.device)
            buffer.update_priorities(device_keys, torch.tensor(given, device=buffer.device))
    tested, host = (buffer.stats() for buffer in buffers)
    assert tested.stale_updates == host.stale_updates
    assert (tested.max_times_sampled, tested.mean_times_sampled) == (host.max_times_sampled, host.mean_times_sampled)
    assert close(
        [tested.entropy, tested.effective_sample_size], [host.entropy, host.effective_sample_size], "statistic"
    )


def test_state_moves_between_the_host_code_and_the_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for sampler in (Uniform(), Combined(KINDS["clipped"], newest=2)):
        with monkeypatch.context() as patch:
            buffers = pair(97, sampler, device, patch)
            add(buffers, 150)
            tested, host = buffers
            tested.sample(5)
            host.load_state_dict(tested.state_dict())
            check_draws(buffers, 9)
            add(buffers, 20)
            host.sample(7)
            tested.load_state_dict(host.state_dict())
            check_draws(buffers, 31)
