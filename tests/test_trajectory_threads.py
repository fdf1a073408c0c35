"""Threads on a trajectory buffer: one adds steps while another samples, and no stack or window is ever torn."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale

from gpu_replay import Batch, Field, Proportional, RankBased, TrajectoryReplayBuffer, Uniform
from gpu_replay.samplers import Sampler

pytestmark = pytest.mark.contract

ENVS, STACK, WINDOW = 3, 4, 2
SIDE = (9, 7)


@pytest.fixture(autouse=True)
def eager_switching() -> Iterator[None]:
    """Let threads change places as often as they can, so that a missing lock shows itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def add(buffer: TrajectoryReplayBuffer, step: int, device: str) -> None:
    """One step of all environments in which every number is that of the step; no episode ever ends."""
    number = torch.full((ENVS,), step, device=device)
    buffer.add(
        obs=number.reshape(-1, 1, 1).expand(ENVS, *SIDE).to(torch.int32),
        action=number,
        reward=number.float(),
        terminated=number < 0,
        truncated=number < 0,
    )


def check_whole(batch: Batch) -> None:
    """Fail unless every frame, action and reward belongs to the step that the key says."""
    step = batch.key.cpu() // ENVS
    back = torch.arange(STACK - 1, -1, -1)
    frames = (step[:, None] - back).clamp(min=0)[:, :, None, None].expand(-1, -1, *SIDE)
    assert torch.equal(batch.obs.cpu().long(), frames)
    after = (step[:, None] + WINDOW - back).clamp(min=0)[:, :, None, None].expand(-1, -1, *SIDE)
    assert torch.equal(batch.next_obs.cpu().long(), after)
    assert torch.equal(batch.action.cpu(), step)
    assert torch.equal(batch.reward.cpu(), (step + 0.5 * (step + 1)).float())


@pytest.mark.parametrize("sampler", [Uniform(), Proportional(), RankBased()], ids=["uniform", "proportional", "rank"])
def test_one_thread_adds_while_another_samples_and_updates(sampler: Sampler, device: str) -> None:
    buffer = TrajectoryReplayBuffer(
        31 * ENVS,
        ENVS,
        {"obs": Field(SIDE, torch.int32), "action": Field((), torch.int64)},
        stack=STACK,
        n_step=WINDOW,
        gamma=0.5,
        sampler=sampler,
        device=device,
    )
    started = 10
    for step in range(started):
        add(buffer, step, device)
    stop, errors = threading.Event(), []

    def run() -> None:
        step = started
        try:
            while not stop.is_set():
                add(buffer, step, device)
                step += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(scale(400, 4)):
            batch = buffer.sample(8)
            check_whole(batch)
            buffer.update_priorities(batch.key, batch.reward)
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert not errors
    assert buffer.added > started * ENVS
    if isinstance(sampler, Proportional):
        assert buffer.total_mass() == int(buffer.masses().sum())
