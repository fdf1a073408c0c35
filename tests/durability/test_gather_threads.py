"""Large gathers on several threads: the bytes of one thread, errors of any, and calls from many threads at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from children import in_a_child, needs_fork
from devices import host_only

from gpu_replay import Field, Proportional, ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.ops import ring, threads

pytestmark = host_only
FIELDS = {"obs": Field((9, 7), torch.uint8), "half": Field((3,), torch.float16, torch.float32, 0.5)}
FIELDS["action"] = Field((), torch.int64)


@pytest.fixture(name="on_threads", autouse=True)
def on_threads_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch uses; every gather is a large one."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "LARGE", 1)
    monkeypatch.setattr(ring, "LARGE", 1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def rows() -> ReplayBuffer:
    buffer = ReplayBuffer(300, FIELDS, sampler=Proportional(), device="cpu", seed=1)
    buffer.add(**values(300))
    return buffer


def uniform() -> ReplayBuffer:
    buffer = ReplayBuffer(300, FIELDS, sampler=Uniform(replacement=True), device="cpu", seed=1)
    buffer.add(**values(300))
    return buffer


def stacks(stack: int = 3) -> TrajectoryReplayBuffer:
    obs = Field((9, 7), torch.uint8, torch.float32, 1 / 255) if stack == 2 else FIELDS["obs"]
    fields = {"obs": obs, "action": FIELDS["action"]}
    buffer = TrajectoryReplayBuffer(600, 2, fields, stack=stack, sampler=Proportional(), device="cpu", seed=1)
    for step in range(150):
        one = {name: value for name, value in values(2, step).items() if name != "half"}
        flags = np.array([step % 20 == 19, step % 31 == 30])
        buffer.add(**one, reward=np.ones(2, np.float32), terminated=flags, truncated=np.zeros(2, bool))
    return buffer


MAKERS: dict[str, Callable[[], Any]] = {
    "rows": rows,
    "uniform": uniform,
    "stacks": stacks,
    "floats": lambda: stacks(2),
    "frames": lambda: stacks(1),
}


def values(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "obs": random.integers(0, 256, (count, 9, 7), dtype=np.uint8),
        "half": random.standard_normal((count, 3)).astype(np.float16),
        "action": np.arange(count),
    }


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_bytes_are_those_of_one_thread(make: Callable[[], Any], on_threads: Callable[[int], None]) -> None:
    found = []
    for count in (1, 2, 5):
        on_threads(count)
        buffer = make()
        found.append([buffer.sample(67), buffer.sample(3), buffer[buffer.sample(40).key]])
        assert torch.get_num_threads() == count
    for others in found[1:]:
        for one, two in zip(found[0], others, strict=True):
            assert list(one) == list(two)
            assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_one_thread_raises_is_raised_when_all_are_done() -> None:
    done: list[int] = []
    together = threading.Barrier(3, timeout=20)

    def work(begin: int, end: int) -> None:
        if begin == 0:
            together.wait()
            raise ValueError("of row 0")
        if len(done) < 2:
            # two others have begun
            together.wait()
        time.sleep(0.01)
        done.extend(range(begin, end))

    with pytest.raises(ValueError, match="of row 0"):
        threads.in_parts(work, 60, 3)
    count = len(done)
    assert count > 0
    # and the threads are still there
    found: list[int] = []
    threads.in_parts(lambda begin, end: found.extend(range(begin, end)), 60, 3)
    assert sorted(found) == list(range(60))
    assert len(done) == count


def test_a_piece_in_another_thread_is_waited_for() -> None:
    """Also when a helper that came late and found no piece has ended: batches held rows of earlier ones."""
    begun = threading.Event()
    done: list[int] = []
    occupied = threading.Thread(target=threads.in_parts, args=(lambda *_: time.sleep(0.4), 2, 2))
    occupied.start()
    time.sleep(0.1)

    def work(begin: int, end: int) -> None:
        if threading.current_thread() is threading.main_thread():
            begun.wait(5)
        elif not begun.is_set():
            begun.set()
            time.sleep(1)
        done.extend(range(begin, end))

    threads.in_parts(work, 3, 3)
    assert sorted(done) == [0, 1, 2]
    occupied.join()


@pytest.mark.parametrize("wanted", [2, 3, 16])
@pytest.mark.parametrize("count", [2, 3, 67, 256, 65_536])
def test_pieces_are_all_rows_once(count: int, wanted: int) -> None:
    pieces: list[tuple[int, int]] = []
    threads.in_parts(lambda begin, end: pieces.append((begin, end)), count, wanted)
    pieces.sort()
    assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == count
    assert min(count, wanted) <= len(pieces) <= 4 * wanted


def test_buffers_of_several_threads_share_them(on_threads: Callable[[int], None]) -> None:
    on_threads(2)
    wanted = stacks().sample(64)

    def draw(_: int) -> bool:
        found = stacks().sample(64)
        return all(torch.equal(found[name], wanted[name]) for name in wanted)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(draw, range(6)))
    names = [thread.name.startswith("gpu_replay gather") for thread in threading.enumerate()]
    assert 0 < sum(names) <= (os.cpu_count() or 1)


@needs_fork
def test_a_forked_process_makes_its_own() -> None:
    threads.in_parts(lambda *_: None, 2, 2)
    found: list[int] = []

    def rows_of_all() -> list[int]:
        threads.in_parts(lambda begin, end: found.extend(range(begin, end)), 6, 3)
        return sorted(found)

    assert in_a_child(rows_of_all) == list(range(6))
