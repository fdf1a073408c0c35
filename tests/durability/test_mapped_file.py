"""The file of a mapped ring: whose it is, when it goes, and what a disk or a folder that will not do says."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import host_only
from places import check_equal, live, make

from gpu_replay.engines import mapped_file
from gpu_replay.engines.mapped_file import FILE_NAME, MappedFile, folder_for_copy, free_on_disk

pytestmark = [pytest.mark.contract, pytest.mark.skipif(sys.platform == "win32", reason="POSIX locks and links")]

ROOT = Path(__file__).resolve().parents[2]


def test_the_file_goes_with_the_buffer_and_nothing_else_does(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    for folder in (tmp_path, tmp_path / "made" / "for it"):
        buffer = make("exact", storage_path=folder)
        assert (folder / FILE_NAME).stat().st_mode & 0o777 == 0o600
        view = buffer._storage.tensors["obs"]
        list(live(buffer, 1))
        expected = view.clone()
        del buffer
        assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
        # what is still referenced can still be read
        assert view.equal(expected)
    assert mine.read_text() == "mine"


def test_all_blocks_are_there_from_the_beginning(tmp_path: Path) -> None:
    file = MappedFile(tmp_path, 3_000_001)
    found = os.stat(tmp_path / FILE_NAME)
    assert found.st_size == 3_000_001
    # or a full disk would end the process when a page of the mapping is written
    assert found.st_blocks * 512 >= found.st_size
    assert not file.block.any()
    file.block[-1] = 7
    assert np.fromfile(tmp_path / FILE_NAME, dtype=np.uint8)[-1] == 7


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_an_error_when_the_buffer_is_made(code: int, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(MemoryError, match=r"no room for the fields at storage_path .*ring"):
        make("exact", storage_path=tmp_path / "a" / "ring")
    # and leaves nothing behind, the lock neither
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    make("exact", storage_path=tmp_path / "a" / "ring")


def test_blocks_are_written_where_they_cannot_be_reserved(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(mapped_file, "_PIECE", 1000)
    test_all_blocks_are_there_from_the_beginning(tmp_path)


def test_two_buffers_do_not_share_a_folder(tmp_path: Path) -> None:
    folder, link = tmp_path / "ring", tmp_path / "link"
    first, memory = make("exact", storage_path=folder), make("exact")
    link.symlink_to(folder)
    for path in (folder, str(folder) + "/", folder / ".." / "ring", link):
        with pytest.raises(RuntimeError, match="of another buffer that is in use"):
            make("uniform", storage_path=path)
    assert folder_for_copy(folder) == tmp_path / "ring-2"
    for buffer in (first, memory):
        list(live(buffer, 1))
    check_equal(first.sample(5), memory.sample(5))
    del first, buffer
    folder.mkdir()
    # the folder behind a link
    assert make("exact", storage_path=link).storage_path == link
    assert link.is_symlink()
    assert list(folder.iterdir()) == []


def test_what_a_dead_process_left_is_replaced_and_no_link_is_followed(tmp_path: Path) -> None:
    left, target = tmp_path / FILE_NAME, tmp_path / "target"
    left.write_bytes(b"left" * 10**5)
    # its blocks count as free: they will be
    assert (free_on_disk(tmp_path) or 0) > 0
    first = MappedFile(tmp_path, 5000)
    assert not first.block.any()
    del first
    target.write_text("another's")
    left.symlink_to(target)
    second = MappedFile(tmp_path, 5000)
    second.block[:] = 1
    assert target.read_text() == "another's"
    del second
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_file_that_was_moved_away_or_replaced_is_left_alone(tmp_path: Path) -> None:
    first = MappedFile(tmp_path / "a", 5000)
    (tmp_path / "a").rename(tmp_path / "b")
    second = MappedFile(tmp_path / "a", 5000)
    del first
    assert (tmp_path / "a" / FILE_NAME).exists()
    second.block[:] = 3
    del second
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["file", "file/below", "locked/below"])
def test_a_folder_that_cannot_be_is_an_error_that_says_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir(mode=0o500)
    if name.startswith("locked") and os.access(tmp_path / "locked", os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(OSError, match="Name a folder that can be written to"):
        make("exact", storage_path=tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "locked"}


def _race(folder: Path, rounds: int, ready: Any, failed: Any) -> None:
    for number in range(rounds):
        ready.wait(30)
        try:
            MappedFile(folder / str(number) / "ring" / f"rank{os.getpid()}", 5000)
        except BaseException as error:
            failed.put(repr(error))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_processes_that_make_the_folders_above_theirs_at_the_same_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, failed = context.Barrier(4), context.SimpleQueue()
    racing = [context.Process(target=_race, args=(tmp_path, 100, ready, failed)) for _ in range(4)]
    for each in racing:
        each.start()
    for each in racing:
        each.join(60)
    errors = []
    while not failed.empty():
        errors.append(failed.get())
    assert errors == []
    assert [each.exitcode for each in racing] == [0] * 4


def test_an_interrupt_while_folders_are_made_is_not_hidden(tmp_path: Path, monkeypatch: Any) -> None:
    make, remove = Path.mkdir, Path.rmdir

    def interrupted(folder: Path, *given: Any) -> None:
        if folder.name == "rank":
            # another process has come to the folder above
            make(folder.with_name("other"))
            raise KeyboardInterrupt
        make(folder, *given)

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        MappedFile(tmp_path / "a" / "rank", 5000)
    monkeypatch.undo()
    remove(tmp_path / "a" / "other")
    MappedFile(tmp_path / "a" / "rank", 5000)


def test_a_folder_named_as_the_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "ring" / FILE_NAME).mkdir(parents=True)
    with pytest.raises(OSError, match=f"a folder named {FILE_NAME}.*rename that"):
        make("exact", storage_path=tmp_path / "ring")
    assert (tmp_path / "ring" / FILE_NAME).is_dir()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_was_forked_removes_nothing_and_holds_no_lock(tmp_path: Path) -> None:
    (to_parent, from_child), (to_child, from_parent) = os.pipe(), os.pipe()
    buffer = make("exact", storage_path=tmp_path)
    list(live(buffer, 1))
    child = os.fork()
    if child == 0:
        os.close(from_parent)
        said = b"sampled"
        try:
            buffer.sample(3)
        except RuntimeError:
            said = b"refused"
        del buffer
        os.write(from_child, said)
        # lives until the parent has dropped its own, or has failed
        os.read(to_child, 1)
        os._exit(0)
    try:
        assert os.read(to_parent, 9) == b"refused"
        assert (tmp_path / FILE_NAME).exists()
        assert len(buffer.sample(3)) == 3
        del buffer
        again = make("exact", storage_path=tmp_path)
        assert (tmp_path / FILE_NAME).exists()
        del again
    finally:
        os.write(from_parent, b"x")
        assert os.waitpid(child, 0)[1] == 0
        for descriptor in (to_parent, from_child, to_child, from_parent):
            os.close(descriptor)


PROGRAM = """
import sys, time, torch
from gpu_replay import Field, ReplayBuffer
buffer = ReplayBuffer(100, {"x": Field((100,), torch.float32)}, device="cpu", storage_path=sys.argv[1])
buffer.add(x=torch.ones(10, 100))
print("ready", flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
"""


@pytest.mark.slow
@host_only
def test_a_process_that_ends_removes_the_file_and_one_that_is_killed_frees_the_folder(tmp_path: Path) -> None:
    def start(what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), what]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    with start("end") as ended:
        assert ended.wait(60) == 0
    assert list(tmp_path.iterdir()) == []
    with start("wait") as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "ready\n"
        with pytest.raises(RuntimeError, match="in use"):
            make("exact", storage_path=tmp_path)
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
    assert (tmp_path / FILE_NAME).exists()
    make("exact", storage_path=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@host_only
def test_a_limit_of_the_system_is_an_error_when_the_buffer_is_made(tmp_path: Path) -> None:
    program = f"""
import resource, torch
from gpu_replay import Field, ReplayBuffer
resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
try:
    ReplayBuffer(10_000, {{"x": Field((100,), torch.float32)}}, device="cpu", storage_path={str(tmp_path)!r})
except MemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "no room for the fields" in done.stdout
    assert list(tmp_path.iterdir()) == []


# read-ahead belongs to the host engine
@host_only
@pytest.mark.parametrize("kind", ["exact", "same_step"])
def test_pages_of_drawn_rows_are_asked_for_while_gathers_are_slow(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[tuple[int, int]] = []
    buffer, memory = make(kind, storage_path=tmp_path), make(kind)
    for each in (buffer, memory):
        list(live(each, 1))
    ahead, clock = buffer._engine._ahead, [0.0, 0.0]

    class Mapping:
        def madvise(self, option: int, begin: int, length: int) -> None:
            # as a mapping checks it
            ahead_of.madvise(option, begin, length)
            asked.append((begin, begin + length))

    ahead_of, ahead._mapping = ahead._mapping, Mapping()
    ahead.slow = False
    monkeypatch.setattr("time.perf_counter", lambda: clock.append(clock[-1] + clock[0]) or clock[-1])
    check_equal(buffer.sample(16), memory.sample(16))
    assert (asked, ahead.slow) == ([], False)
    # a second a gather: the next one asks
    clock[0] = 1.0
    check_equal(buffer.sample(16), memory.sample(16))
    assert (asked, ahead.slow) == ([], True)
    clock[0] = 0.0
    batch = buffer.sample(16)
    check_equal(batch, memory.sample(16))
    assert not ahead.slow
    base = buffer._storage._memory._block.ctypes.data
    for name, tensor in buffer._storage.tensors.items():
        row = tensor[0].nbytes
        for slot in (batch.key % buffer.capacity).tolist() if name != "reward" else ():
            begin = tensor.data_ptr() - base + slot * tensor.stride(0) * tensor.element_size()
            assert any(low <= begin and begin + row <= high for low, high in asked), name
    asked.clear()
    check_equal(buffer.sample(16), memory.sample(16))
    assert asked == []
