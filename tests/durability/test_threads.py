"""Threads: one adds while others sample, update, read and save, and no transition, stack or window is ever torn."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import scale

from gpu_replay import Combined, Field, Proportional, RankBased, ReplayBuffer, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract

START = 64  # transitions stored before the threads begin
WIDE = {
    "obs": Field((257,), torch.float32),
    "action": Field((), torch.int64),
    "next_obs": Field((129,), torch.float64),
    "flags": Field((65,), torch.int32),
}


SAMPLERS = [Proportional(), RankBased(), Uniform(), Combined(Proportional(), 3)]


@pytest.fixture(autouse=True)
def eager_switching() -> Iterator[None]:
    """Let threads change places as often as they can, so that a missing lock shows itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@contextmanager
def repeated(call: Callable[[], object]) -> Iterator[None]:
    """Within it another thread makes a call again and again; raises what that raised."""
    stop = threading.Event()

    def again() -> None:
        while not stop.is_set():
            call()

    with ThreadPoolExecutor(1) as other:
        running = other.submit(again)
        try:
            yield
        finally:
            stop.set()
            running.result(60)


def rows(first: int, count: int, device: str) -> dict[str, torch.Tensor]:
    """So many transitions, each field full of the transition's number."""
    number = torch.arange(first, first + count, device=device)
    return {
        name: number.reshape(-1, *[1] * len(field.shape)).expand(-1, *field.shape).to(field.dtype)
        for name, field in WIDE.items()
    }


def check_whole(batch: Any) -> None:
    """Fail unless every number in a row is the key of the row."""
    for name, field in WIDE.items():
        values = batch[name].long().reshape(-1, field.elements)
        assert torch.equal(values, batch.key[:, None].expand(-1, field.elements)), name


def adding(buffer: ReplayBuffer, device: str) -> AbstractContextManager[None]:
    """Adds 1 to 23 transitions at a time, whose numbers are their keys."""
    counts = itertools.cycle(range(1, 24))

    def add() -> None:
        first, count = buffer.added, next(counts)
        assert buffer.add(**rows(first, count, device)).tolist() == list(range(first, first + count))

    return repeated(add)


def made(device: str, sampler: Any, capacity: int, stored: int = START) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, WIDE, sampler=sampler, device=device)
    buffer.add(**rows(0, stored, device))
    return buffer


def users(buffer: ReplayBuffer, path: Path, batch_size: int = 24) -> dict[str, Callable[[], Any]]:
    """What each of several threads does again and again with one buffer that another fills."""
    newest = size = 0

    def learn() -> None:
        nonlocal newest
        batch = buffer.sample(batch_size)
        check_whole(batch)
        assert batch.key.max() - batch.key.min() < buffer.capacity
        # what was drawn can only become newer, up to the width of the ring
        assert batch.key.max() >= newest - buffer.capacity
        newest = max(newest, int(batch.key.max()))
        buffer.update_priorities(batch.key, batch.key.double() % 5 + 0.5)

    def read() -> None:
        nonlocal size
        stats, last = buffer.stats(), buffer.added - 1
        assert buffer.capacity >= stats.size >= size
        size = stats.size
        assert stats.max_age == size - 1
        try:
            check_whole(buffer[[last]])
        except KeyError:
            assert buffer.added - last > buffer.capacity

    def keep() -> None:
        buffer.save(path)
        found = ReplayBuffer.load(path, device="cpu")
        check_whole(found[found.keys()])

    return {"learn": learn, "read": read, "keep": keep}


# the larger ones have sums above the masses
@pytest.mark.parametrize("capacity, sampler", [*((START, each) for each in SAMPLERS), (5003, Proportional())], ids=repr)
def test_no_row_is_torn_while_another_thread_adds(capacity: int, sampler: Any, device: str, tmp_path: Path) -> None:
    buffer = made(device, sampler, capacity)
    use = users(buffer, tmp_path)
    with adding(buffer, device):
        for _ in range(scale(150, 4)):
            use["learn"]()
            use["read"]()
    assert buffer.added > START
    check_whole(buffer[buffer.keys()])
    if isinstance(sampler, Proportional):
        assert buffer.total_mass() == sum(buffer.masses().tolist())
        assert buffer.masses()[: len(buffer)].min().item() > 0


ENVS, STACK, WINDOW = 3, 4, 2
SIDE = (9, 7)


def add_step(buffer: TrajectoryReplayBuffer, device: str) -> None:
    """One step of all environments in which every number is that of the step; no episode ever ends."""
    number = torch.full((ENVS,), buffer.added // ENVS, device=device)
    obs = number.reshape(-1, 1, 1).expand(ENVS, *SIDE).to(torch.int32)
    buffer.add(obs=obs, action=number, reward=number.float(), terminated=number < 0, truncated=number < 0)


def check_stacks(batch: Any) -> None:
    """Fail unless every frame, action and reward belongs to the step that the key says."""
    step, back = batch.key.cpu() // ENVS, torch.arange(STACK - 1, -1, -1)
    frames = (step[:, None] - back).clamp(min=0)[:, :, None, None].expand(-1, -1, *SIDE)
    assert torch.equal(batch.obs.cpu().long(), frames)
    after = (step[:, None] + WINDOW - back).clamp(min=0)[:, :, None, None].expand(-1, -1, *SIDE)
    assert torch.equal(batch.next_obs.cpu().long(), after)
    assert torch.equal(batch.action.cpu(), step)
    assert torch.equal(batch.reward.cpu(), (step + 0.5 * (step + 1)).float())


def test_no_stack_or_window_is_torn_while_another_thread_adds(device: str) -> None:
    fields = {"obs": Field(SIDE, torch.int32), "action": Field((), torch.int64)}
    settings: dict[str, Any] = {"stack": STACK, "n_step": WINDOW, "gamma": 0.5, "device": device}
    settings["sampler"] = Proportional()
    buffer = TrajectoryReplayBuffer(31 * ENVS, ENVS, fields, **settings)
    for _ in range(10):
        add_step(buffer, device)
    with repeated(lambda: add_step(buffer, device)):
        for _ in range(scale(400, 4)):
            batch = buffer.sample(8)
            check_stacks(batch)
            buffer.update_priorities(batch.key, batch.reward)
    assert buffer.added > 10 * ENVS
    assert buffer.total_mass() == int(buffer.masses().sum())
