"""Where fields lie: in a mapped file or pinned memory as in memory; when a file is gone, and what a bad folder says."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle  # noqa: TID251 - what users pickle
import random
import resource
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from children import ended, forked, in_a_child, memory_of
from devices import INTERPRETED, host_only
from fake_cuda import FakeCuda
from places import check_equal, given, live, make, pinned_on_the_cpu
from programs import KINDS as PROGRAMS
from programs import any_program, run

from gpu_replay import Field, Proportional, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.cli import main
from gpu_replay.engines import memory
from gpu_replay.engines.memory import Placement, check_placement, pinned_block
from gpu_replay.graphs.stream_order import StreamOrder

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def of_a_file(test: Any) -> Any:
    """Part of the contract, where /proc tells which files are open."""
    return pytest.mark.contract(pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks into /proc")(test))


def open_in(folder: Path) -> list[os.stat_result]:
    """The files in a folder that this process has open, with and without a name."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/"):
                found.append(os.fstat(int(number)))
    return found


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


@pytest.mark.skipif(INTERPRETED, reason="says itself that kernels are interpreted")
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_buffer_in_pinned_memory_is_one_in_memory(kind: str, cuda: FakeCuda, monkeypatch: Any) -> None:
    """That one in a file is, random programs hold: `contract/test_programs.py`."""
    monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")
    with pinned_on_the_cpu():
        run(any_program(random.Random(kind), kind, "proportional", calls=10, capacity=7))
        gc.collect()
        assert cuda.pinned == {}
        other = make("exact")
    assert "in pinned host memory" in repr(other)
    assert other.device == other.storage_device == CPU
    # all fields lie in the one block, each on pages of its own, and nothing else does
    (nbytes,) = cuda.pinned.values()
    payload = sum(field.row_bytes for field in other.fields.values()) * other.capacity
    assert payload <= nbytes <= payload + 4096 * len(other.fields)


@pytest.mark.contract
@pytest.mark.skipif(INTERPRETED, reason="only buffers on the CPU have files, and kernels never work on those")
def test_fields_move_between_memory_and_files(tmp_path: Path) -> None:
    memory, mapped = make("same_step"), make("same_step", storage_path=tmp_path / "ring")
    assert mapped.nbytes == memory.nbytes
    list(live(memory, 1))
    mapped.load_state_dict(memory.state_dict())
    mapped.save(tmp_path / "c")
    back, there = (type(memory).load(tmp_path / "c", "cpu", storage_path=path) for path in (None, tmp_path / "second"))
    found = [each.storage_path for each in (memory, mapped, back, there)]
    assert found == [None, tmp_path / "ring", None, tmp_path / "second"]
    expected = memory.sample(9)
    for each in (mapped, back, there):
        check_equal(each.sample(9), expected)


@pytest.mark.contract
def test_copies_and_other_buffers_share_a_folder(tmp_path: Path) -> None:
    buffer, other = make("exact", storage_path=tmp_path), make("exact", storage_path=str(tmp_path) + "/")
    list(live(buffer, 2))
    twins = {"copy": copy.deepcopy(buffer), "pickle": pickle.loads(pickle.dumps(buffer))}
    assert {each.storage_path for each in (buffer, other, *twins.values())} == {tmp_path}
    memory = make("exact")
    memory.load_state_dict(buffer.state_dict())
    # each goes on by itself
    for each in (other, *twins.values()):
        each.add(**given(other, 50))
    for _ in range(2):
        check_equal(buffer.sample(8), memory.sample(8))
    check_equal(twins["copy"].sample(8), twins["pickle"].sample(8))
    assert len(other) == 50


@pytest.mark.contract
def test_a_checkpoint_may_be_written_where_the_fields_are(tmp_path: Path) -> None:
    buffer = make("exact", storage_path=tmp_path)
    list(live(buffer, 1))
    for _ in range(2):
        buffer.save(tmp_path)
        check_equal(type(buffer).load(tmp_path, "cpu", storage_path=tmp_path).sample(5), buffer.sample(5))


@pytest.mark.contract
def test_every_way_of_making_a_buffer_takes_the_path(tmp_path: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    box, path = gymnasium.spaces.Box(-1, 1, (3,)), str(tmp_path / "ring")
    one = ReplayBuffer.from_spaces(9, box, gymnasium.spaces.Discrete(2), device="cpu", storage_path=path)
    assert one.storage_path == Path(path)
    del one
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2)
    steps = TrajectoryReplayBuffer.from_env(vector, 8, device="cpu", storage_path=path)
    assert f"fields on the disk at {path}" in repr(steps)
    vector.close()


@pytest.mark.parametrize("kind", ["rows", "next_step"])
def test_a_tilde_is_the_home_folder(kind: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path / "here")
    buffer = make(kind, storage_path="~/ring")
    assert buffer.storage_path == tmp_path / "ring"
    buffer.add(**given(buffer))
    buffer.save(Path("~/saves/c"))
    assert type(buffer).load("~/saves/c", "cpu").added == buffer.added
    buffer.plot("~/buffer.png")
    assert main(["inspect", "~/saves/c", "--output=~/inspected.png"]) == main(["inspect", "~/saves/c"]) == 0
    estimate = ["estimate", "--capacity=9", "--field=a=int8", "--device=cpu", "--storage-path=~/ring"]
    assert main(estimate) == 0
    assert f"on the disk at {tmp_path / 'ring'}" in capsys.readouterr().out
    del buffer
    # libraries keep what they cache there
    found = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert found == {"here", "saves", "buffer.png", "inspected.png", "ring"}
    # its file has no name
    assert list((tmp_path / "ring").iterdir()) == []
    assert {path.name for path in (tmp_path / "saves").iterdir()} == {"c", "c.png"}
    assert list((tmp_path / "here").iterdir()) == []


PLACES: dict[str, tuple[torch.device, Any, Any, Any]] = {
    "another GPU": (CUDA, "cuda:1", None, (ValueError, r'host memory with storage_device="cpu"')),
    "a GPU beside the CPU": (CPU, "cuda", None, (ValueError, "give device='cuda'")),
    "a file beside a GPU": (CUDA, None, "ring", (ValueError, r'(?s)Give device="cpu".*pinned host memory')),
    "a file and a GPU": (CPU, "cuda", "ring", (ValueError, "found storage_device 'cuda'")),
    "a file, pinned": (CUDA, "cpu", "ring", (ValueError, 'storage_device="cpu" and without storage_path')),
    "a number": (CPU, 0, None, (TypeError, "storage_device must be a device")),
    "no path": (CPU, None, "", (ValueError, "empty")),
    "bytes": (CPU, None, b"ring", (TypeError, "path of a folder")),
    "pinned": (CUDA, "cpu", None, Placement(CUDA, pinned=True)),
    "the GPU": (CUDA, CUDA, None, Placement(CUDA)),
    "a file": (CPU, "cpu", "ring", Placement(CPU, path=Path.cwd() / "ring")),
}


@pytest.mark.parametrize("case", PLACES)
def test_places_that_can_be_and_those_that_cannot(case: str) -> None:
    *asked, expected = PLACES[case]
    if isinstance(expected, Placement):
        assert check_placement(*asked) == expected
        return
    with pytest.raises(expected[0], match=expected[1]):
        check_placement(*asked)


# bytes of each place

SIZES = {"obs": 30 * 10**9, "action": 10**9, "times_sampled": 4 * 10**8, "priorities": 9 * 10**8}


@pytest.mark.parametrize(
    "placement, free, short",
    [
        (Placement(CUDA), (10, 99, 99), r"32,300,000,000 bytes on cuda:0(?s:.*)obs(?s:.*)storage_device=\"cpu\""),
        (Placement(CUDA, pinned=True), (1, 99, 0), r"1,300,000,000 bytes on cuda:0"),
        (Placement(CUDA, pinned=True), (2, 10, 99), r"31,000,000,000 bytes in pinned host memory, where 10,000"),
        (Placement(CPU, path=Path("/d")), (0, 2, 10), "31,000,000,000 bytes on the disk at /d"),
        (Placement(CPU, path=Path("/d")), (0, 2, 32), None),
    ],
)
def test_the_place_that_is_short_is_named(placement: Placement, free: Any, short: str | None, monkeypatch: Any) -> None:
    places = {"cuda": free[0] * 10**9, "cpu": free[1] * 10**9}
    monkeypatch.setattr(memory, "free_bytes", lambda device: places[device.type])
    monkeypatch.setattr(memory, "free_on_disk", lambda path: free[2] * 10**9)
    if short is None:
        memory.check_room(SIZES, placement, {"obs", "action", "alignment"})
        return
    with pytest.raises(MemoryError, match=short):
        memory.check_room(SIZES, placement, {"obs", "action", "alignment"})


def test_a_state_larger_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, memory = make("exact", storage_path=tmp_path / "ring"), make("exact")
    monkeypatch.setattr("gpu_replay.base.state.free_bytes", lambda device: 100)
    for call in (mapped.state_dict, lambda: pickle.dumps(mapped)):
        mapped.add(**given(mapped))
        with pytest.raises(MemoryError, match=r"where 100 are free. Use save\(path\)"):
            call()
    # what says that the memory is there has it
    memory.state_dict()
    copy.deepcopy(mapped)


# pinned memory, without a GPU


def test_pinned_memory_is_released_after_the_last_call_that_uses_it(cuda: FakeCuda) -> None:
    order, side = StreamOrder(CUDA), cuda.Stream()
    block = pinned_block(5000, CUDA, order.drain)
    assert list(cuda.pinned.values()) == [5000]
    with order:
        cuda.work("write")
    with cuda.stream(side), order:
        cuda.work("gather")
    cuda.work("other")
    assert cuda.waited == set()
    view = block[10:20]
    del block
    assert cuda.unpinned == []
    del view
    # the driver does not wait by itself
    assert cuda.unpinned == [{"write", "gather"}]
    # nobody has worked on this one
    pinned_block(100, CUDA, StreamOrder(CUDA).drain)
    assert len(cuda.unpinned) == 2


def test_pinned_memory_that_is_dropped_during_a_capture_is_released_later(cuda: FakeCuda) -> None:
    order = StreamOrder(CUDA)
    with order:
        cuda.work("call")
    block = pinned_block(100, CUDA, order.drain)
    with cuda.graph(cuda.CUDAGraph(), capture_error_mode="thread_local"):
        del block
    assert (len(cuda.pinned), cuda.waited) == (1, set())
    later = pinned_block(200, CUDA, order.drain)
    assert list(cuda.pinned.values()) == [later.nbytes] == [200]
    assert cuda.unpinned == [{"call"}]


def test_memory_that_cannot_be_pinned_is_refused(cuda: FakeCuda) -> None:
    cuda.answer = 2
    with pytest.raises(MemoryError, match="5,000 bytes of host memory could not be pinned for cuda:0"):
        pinned_block(5000, CUDA, StreamOrder(CUDA).drain)
    assert cuda.unpinned == []
    # the runtime keeps the error of such a call, and the next launch of anybody would raise it
    assert cuda.error == 0


def test_the_host_waits_for_all_calls_before_it_touches_pinned_fields(cuda: FakeCuda) -> None:
    order, side = StreamOrder(CUDA), cuda.Stream()
    for number, stream in enumerate((side, cuda.default, side)):
        with cuda.stream(stream), order:
            cuda.work(f"call {number}")
    with order:
        order.synchronize()
        assert cuda.waited == {"call 0", "call 1", "call 2"}
    with StreamOrder(CPU):
        StreamOrder(CPU).synchronize()


# the command


def test_estimate_counts_each_place_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split("estimate --device cpu --capacity 1000 --field obs=4x3:uint8 --field action=int64")
    assert main([*arguments, "--storage-path", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    here, there = out.split(f"on the disk at {tmp_path}:", 1)
    assert ["priorities" in part for part in (here, there)] == [True, False]
    assert "obs" not in here.split("on cpu:")[1]
    # a record of twelve bytes beside eight, padded to a multiple of eight
    totals = [int(part.split("total")[1].split()[0].replace(",", "")) for part in (here, there)]
    assert totals[1] == 24_000
    assert f"the buffer alone takes {sum(totals):,} bytes" in out


# larger than memory


@pytest.mark.slow
@host_only
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets RLIMIT_DATA")
def test_a_ring_larger_than_the_memory_of_its_process(tmp_path: Path) -> None:
    fields = {"obs": Field((7056,), torch.uint8), "action": Field((), torch.int64)}
    settings: dict[str, Any] = {"sampler": Proportional(), "device": "cpu"}

    def served() -> int:
        # 700 MB of fields, 300 MB of memory beside what is loaded
        warm = ReplayBuffer(100, fields, storage_path=tmp_path / "warm", **settings)
        rows = torch.zeros((1000, 7056), dtype=torch.uint8)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_of("VmData") + 300 * 10**6,) * 2)
        with pytest.raises(MemoryError):
            ReplayBuffer(100_000, fields, **settings)
        ring = ReplayBuffer(100_000, fields, storage_path=tmp_path / "ring", **settings)
        for begin in range(0, 120_000, 1000):
            keys = torch.arange(begin, begin + 1000)
            rows[:] = (keys % 251).to(torch.uint8)[:, None]
            ring.add(obs=rows, action=keys)
        for _ in range(50):
            batch = ring.sample(256)
            assert (batch.obs == (batch.action % 251)[:, None]).all()
            assert torch.equal(batch.action, batch.key)
            ring.update_priorities(batch.key, torch.rand(256))
        return len(ring) + len(warm)

    assert in_a_child(served) == 100_000


# the file of a mapped ring


@of_a_file
def test_the_file_has_no_name_and_goes_with_the_buffer(tmp_path: Path) -> None:
    folder, mine = tmp_path / "made" / "for it", tmp_path / "made" / "mine.txt"
    buffer = make("exact", storage_path=folder)
    mine.write_text("mine")
    (file,) = open_in(folder)
    # nobody else can open it
    assert (file.st_nlink, file.st_mode & 0o777, list(folder.iterdir())) == (0, 0o600, [])
    view = buffer._storage.tensors["obs"]
    list(live(buffer, 1))
    expected = view.clone()
    del buffer
    # what is still referenced can still be read
    assert len(open_in(folder)) == 1
    assert view.equal(expected)
    del view
    if INTERPRETED:
        # Triton's interpreter keeps the arguments of a launch in a cycle
        gc.collect()
    assert open_in(folder) == []
    assert set(folder.parent.rglob("*")) == {folder, mine}


@of_a_file
def test_all_blocks_are_there_from_the_beginning(tmp_path: Path) -> None:
    buffer = ReplayBuffer(1001, {"x": Field((3001,), torch.uint8)}, device="cpu", storage_path=tmp_path)
    (file,) = open_in(tmp_path)
    assert 1001 * 3001 <= file.st_size <= 1001 * 3001 + 4096
    # or a full disk would end the process when a page of the mapping is written
    assert file.st_blocks * 512 >= file.st_size
    assert not buffer._storage.tensors["x"].any()


@of_a_file
def test_blocks_are_written_where_they_cannot_be_reserved(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(memory, "_PIECE", 1000)
    test_all_blocks_are_there_from_the_beginning(tmp_path)


@of_a_file
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_an_error_when_the_buffer_is_made(code: int, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(MemoryError, match=r"no room for the fields at storage_path .*ring"):
        make("exact", storage_path=tmp_path / "a" / "ring")
    assert open_in(tmp_path) == []
    monkeypatch.undo()
    make("exact", storage_path=tmp_path / "a" / "ring")


@of_a_file
def test_a_file_larger_than_the_system_allows_is_an_error_when_the_buffer_is_made(tmp_path: Path) -> None:
    def refused() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(MemoryError) as error:
            make("exact", storage_path=tmp_path)
        return str(error.value)

    assert f"no room for the fields at storage_path {tmp_path}" in in_a_child(refused)


@of_a_file
@pytest.mark.parametrize("name", ["file", "file/below", "locked/below"])
def test_a_folder_that_cannot_be_is_an_error_that_says_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir(mode=0o500)
    if name.startswith("locked") and os.access(tmp_path / "locked", os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(OSError, match="Name a folder that can be written to"):
        make("exact", storage_path=tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "locked"}


# how one ends by itself: `test_checkpoints.py`
@of_a_file
@host_only
def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    def used() -> None:
        buffer = make("exact", storage_path=tmp_path)
        buffer.add(**given(buffer))
        assert list(tmp_path.iterdir()) == []
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(forked(used)) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


# read-ahead belongs to the host engine
@of_a_file
@host_only
def test_pages_of_drawn_rows_are_asked_for_while_gathers_read_from_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    buffer, memory = make("exact", storage_path=tmp_path), make("exact")
    for each in (buffer, memory):
        list(live(each, 1))
    ahead, asked = buffer._engine._ahead, []
    ask, ahead.reads = ahead._ask, False
    monkeypatch.setattr(ahead, "_ask", lambda slots: (asked.extend(slots.tolist()), ask(slots)))
    # blocks read before and after each gather: the second one waits, so the third asks, and after that no more
    read = iter((0, 0, 0, 8, 8, 8, 8, 8))
    monkeypatch.setattr(ahead, "_usage", lambda: SimpleNamespace(ru_inblock=next(read)))
    for asks in (False, False, True, False):
        asked.clear()
        batch = buffer.sample(16)
        check_equal(batch, memory.sample(16))
        assert set(asked) == (set((batch.key % buffer.capacity).tolist()) if asks else set())
