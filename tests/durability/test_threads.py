"""Threads: one adds while others sample, update, read and save, and no transition, stack or window is ever torn; large
gathers are made by several threads, of one buffer or of many at once.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from children import in_a_child, needs_fork
from devices import device_fixture as device_fixture
from devices import host_only, scale
from programs import KINDS, any_program, run

from gpu_replay import Combined, Field, Proportional, RankBased, ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.ops import frames, ring, threads

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


class Adder:
    """Calls `add` in another thread until it is told to stop, and keeps the error that ended it."""

    def __init__(self, add: Callable[[], object]) -> None:
        self.add = add
        self.error: Exception | None = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self.stop.is_set():
                self.add()
        except Exception as error:
            self.error = error

    def __enter__(self) -> Adder:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


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


def adding(buffer: ReplayBuffer, device: str) -> Adder:
    """Adds 1 to 23 transitions at a time, whose numbers are their keys."""
    counts = itertools.cycle(range(1, 24))

    def add() -> None:
        first, count = buffer.added, next(counts)
        assert buffer.add(**rows(first, count, device)).tolist() == list(range(first, first + count))

    return Adder(add)


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
def test_no_transition_is_torn_while_another_thread_adds(
    capacity: int, sampler: Any, device: str, tmp_path: Path
) -> None:
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
    with Adder(lambda: add_step(buffer, device)):
        for _ in range(scale(400, 4)):
            batch = buffer.sample(8)
            check_stacks(batch)
            buffer.update_priorities(batch.key, batch.reward)
    assert buffer.added > 10 * ENVS
    assert buffer.total_mass() == int(buffer.masses().sum())


# gathers on several threads


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every gather is a large one, for three threads."""
    before = torch.get_num_threads()
    for module, name in ((threads, "LARGE"), (ring, "LARGE"), (frames, "LARGE_GATHER")):
        monkeypatch.setattr(module, name, 1)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@host_only
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_several_threads_gather_on_several_threads_as_on_one(kind: str) -> None:
    def play(seed: int) -> None:
        program = any_program(random.Random(seed), kind, "replacement", calls=40)
        # what is refused silences warnings, in all threads
        run(program._replace(calls=[call for call in program.calls if call[0] != "refused"]))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(play, range(6)))
    assert any(thread.name.startswith("gpu_replay gather") for thread in threading.enumerate())


@pytest.mark.parametrize("here", [True, False], ids=["this thread", "another"])
def test_what_a_thread_raises_is_raised_when_all_are_done(here: bool) -> None:
    """Or the others would write rows of a batch that somebody reads."""
    together = threading.Barrier(2, timeout=20)
    begun: list[bool] = []
    done: list[bool] = []

    def work(begin: int, end: int) -> None:
        mine = threading.current_thread() is threading.main_thread()
        if mine not in begun:
            begun.append(mine)
            together.wait()
        if mine == here:
            raise ValueError("of a row")
        begun.append(mine)
        time.sleep(0.05)
        done.append(mine)

    with pytest.raises(ValueError, match="of a row"):
        threads.in_parts(work, 60, 2)
    # each of the two has begun once more than it made pieces
    assert len(begun) == len(done) + 2 > 2


@pytest.mark.parametrize("wanted", [2, 3, 16])
@pytest.mark.parametrize("count", [2, 3, 67, 256, 65_536])
def test_pieces_are_all_rows_once(count: int, wanted: int) -> None:
    pieces: list[tuple[int, int]] = []
    threads.in_parts(lambda begin, end: pieces.append((begin, end)), count, wanted)
    pieces.sort()
    assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == count
    assert min(count, wanted) <= len(pieces) <= 4 * wanted


@needs_fork
def test_a_forked_process_makes_its_own() -> None:
    test_pieces_are_all_rows_once(6, 3)
    in_a_child(lambda: test_pieces_are_all_rows_once(6, 3))
