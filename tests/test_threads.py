"""Threads: one adds while another samples and updates, and no transition is ever torn."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale

from gpu_replay import Batch, Combined, Field, Latest, Proportional, RankBased, ReplayBuffer, Uniform

pytestmark = pytest.mark.contract

START = 64  # transitions stored before the threads begin
WIDE = {
    "obs": Field((257,), torch.float32),
    "action": Field((), torch.int64),
    "next_obs": Field((129,), torch.float64),
    "flags": Field((65,), torch.int32),
}


@pytest.fixture(autouse=True)
def eager_switching() -> Iterator[None]:
    """Let threads change places as often as they can, so that a missing lock shows itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def rows(first: int, count: int, device: str) -> dict[str, torch.Tensor]:
    """So many transitions, each field full of the transition's number."""
    number = torch.arange(first, first + count, device=device)
    return {
        name: number.reshape(-1, *[1] * len(field.shape)).expand(-1, *field.shape).to(field.dtype)
        for name, field in WIDE.items()
    }


def check_whole(batch: Batch) -> None:
    """Fail unless every number in a row is the key of the row."""
    for name, field in WIDE.items():
        values = batch[name].long().reshape(-1, field.elements)
        assert torch.equal(values, batch.key[:, None].expand(-1, field.elements)), name


class Adder:
    """A thread that adds until it is told to stop, from the number `first` on, and keeps the error that ended it."""

    def __init__(self, buffer: ReplayBuffer, device: str, first: int = START) -> None:
        self.buffer, self.device, self.first = buffer, device, first
        self.keys: list[int] = []
        self.error: Exception | None = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            count = 0
            while not self.stop.is_set():
                count = count % 23 + 1
                self.keys += self.buffer.add(**rows(self.first + len(self.keys), count, self.device)).tolist()
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


@pytest.mark.parametrize(
    "sampler",
    [
        Proportional(),
        RankBased(),
        RankBased(resort_every=5),
        Uniform(),
        Uniform(replacement=True),
        Latest(),
        Combined(Proportional(), 3),
    ],
    ids=repr,
)
def test_no_transition_is_torn_while_another_thread_adds(
    sampler: Proportional | RankBased | Uniform | Latest | Combined, device: str
) -> None:
    buffer = ReplayBuffer(START, WIDE, sampler=sampler, device=device)
    buffer.add(**rows(0, START, device))
    newest = 0
    with Adder(buffer, device) as adder:
        for _ in range(scale(300, 4)):
            batch = buffer.sample(24)
            check_whole(batch)
            keys = batch.key
            assert keys.max().item() - keys.min().item() < START
            # what was drawn can only become newer, up to the width of the ring
            assert keys.max().item() >= newest - START
            newest = max(newest, keys.max().item())
            buffer.update_priorities(keys, keys.double() % 5 + 0.5)
    assert adder.keys == list(range(START, buffer.added))
    assert buffer.added > START
    check_whole(buffer[list(range(buffer.added - START, buffer.added))])


def test_masses_and_total_stay_exact_while_another_thread_adds(device: str) -> None:
    # large enough for sums above the masses
    buffer = ReplayBuffer(5003, WIDE, sampler=Proportional(), device=device)
    buffer.add(**rows(0, START, device))
    with Adder(buffer, device):
        for _ in range(scale(300, 4)):
            keys = buffer.sample(64).key
            buffer.update_priorities(keys, torch.rand(64, device=device) * 10)
    assert buffer.total_mass() == sum(buffer.masses().tolist())
    assert buffer.masses()[: len(buffer)].min().item() > 0
    check_whole(buffer.sample(64))


def test_update_never_reaches_the_transition_that_takes_the_slot(device: str) -> None:
    settings = Proportional(alpha=1.0, eps=0.0, initial=1.0)
    buffer = ReplayBuffer(START, WIDE, sampler=settings, device=device)
    buffer.add(**rows(0, START, device))
    for _ in range(scale(60, 2)):
        with Adder(buffer, device, first=buffer.added):
            for _ in range(5):
                newest = buffer.added - 1
                keys = torch.arange(newest - START + 1, newest + 1, device=device)
                buffer.update_priorities(keys, torch.full((START,), 7.0, device=device))
        masses = buffer.masses().tolist()
        for key in range(newest + 1, buffer.added):
            if key >= buffer.added - START:
                assert masses[key % START] == 2**20, f"key {key} was never updated"


def test_late_updates_from_another_thread_are_counted_not_applied(device: str) -> None:
    buffer = ReplayBuffer(START, WIDE, sampler=Proportional(alpha=1.0, eps=0.0, initial=1.0), device=device)
    buffer.add(**rows(0, START, device))
    late = torch.arange(START, device=device)
    with Adder(buffer, device) as adder:
        while buffer.added < 2 * START and adder.thread.is_alive():
            pass
        for _ in range(scale(200, 4)):
            buffer.update_priorities(late, torch.full((START,), 1e6, device=device))
    assert buffer.masses().tolist() == [2**20] * START
    assert buffer.stats().stale_updates == START * scale(200, 4)


def test_looking_while_another_thread_adds(device: str) -> None:
    buffer = ReplayBuffer(START, WIDE, sampler=Proportional(), device=device)
    buffer.add(**rows(0, START, device))
    with Adder(buffer, device):
        for _ in range(scale(200, 4)):
            stats = buffer.stats()
            assert (stats.size, stats.max_age) == (START, START - 1)
            assert len(buffer) == START
            newest = buffer.added - 1
            try:
                check_whole(buffer[[newest]])
            except KeyError:
                assert buffer.added - newest > START
