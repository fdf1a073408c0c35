"""Large gathers on several threads: the bytes of one thread, errors of any, and calls from many threads at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from children import in_a_child, needs_fork
from devices import host_only
from places import FIELDS, check_equal, live, make

from gpu_replay.ops import ring, threads

pytestmark = host_only


@pytest.fixture(name="on_threads", autouse=True)
def on_threads_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch uses; every gather is a large one."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "LARGE", 1)
    monkeypatch.setattr(ring, "LARGE", 1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": ("exact", {}),
    "uniform": ("combined", {}),
    "stacks": ("same_step", {"random_shift": 0}),
    "frames": ("same_step", {"random_shift": 0, "stack": 1}),
    "floats": (
        "same_step",
        {"random_shift": 0, "stack": 2, "fields": {name: FIELDS[name] for name in ("obs", "action")}},
    ),
}


def used(case: str) -> list[Any]:
    """All that comes back from a buffer."""
    kind, settings = CASES[case]
    return list(live(make(kind, **settings), 2))


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_one_thread(case: str, on_threads: Callable[[int], None]) -> None:
    expected = used(case)
    for count in (2, 5):
        on_threads(count)
        for one, other in zip(used(case), expected, strict=True):
            check_equal(one, other)
        assert torch.get_num_threads() == count


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
    expected = used("stacks")
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(used, ["stacks"] * 6):
            for one, other in zip(found, expected, strict=True):
                check_equal(one, other)
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
