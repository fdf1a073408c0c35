"""Fields in a mapped file or in pinned memory: the same keys, batches, weights, states and checkpoints as in memory."""

from __future__ import annotations

import copy
import gc
import pickle  # noqa: TID251 - what users pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import INTERPRETED, host_only
from fake_cuda import FakeCuda
from places import KINDS, check_equal, given, live, make, pinned_on_the_cpu, same_life

from gpu_replay import CheckpointError, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.cli import main
from gpu_replay.engines import storage
from gpu_replay.engines.pinned_memory import pinned_block
from gpu_replay.engines.placement import Placement, check_placement
from gpu_replay.graphs.stream_order import StreamOrder

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]


def files_of(folder: Path) -> dict[str, bytes]:
    """What the shards of a checkpoint hold, whatever their names."""
    return {path.name.split("-")[-1]: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.contract
@pytest.mark.skipif(INTERPRETED, reason="only buffers on the CPU have files, and kernels never work on those")
@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_in_a_file_is_one_in_memory(kind: str, tmp_path: Path) -> None:
    memory, mapped = make(kind), make(kind, storage_path=tmp_path / "ring")
    same_life(mapped, memory, 4)
    assert repr(mapped.stats()) == repr(memory.stats())
    assert (mapped.storage_path, memory.storage_path) == (tmp_path / "ring", None)
    assert mapped.device == mapped.storage_device == CPU
    assert mapped.nbytes == memory.nbytes
    for buffer, name in ((memory, "memory"), (mapped, "mapped")):
        buffer.save(tmp_path / name)
    assert files_of(tmp_path / "mapped") == files_of(tmp_path / "memory")
    state = memory.state_dict()
    for name, tensor in mapped.state_dict()["tensors"].items():
        assert torch.equal(tensor, state["tensors"][name]), name
    # from one to the other
    relabel = {"relabel": memory.relabel} if kind == "goals" else {}
    back = type(memory).load(tmp_path / "mapped", "cpu", **relabel)
    there = type(memory).load(tmp_path / "memory", "cpu", storage_path=tmp_path / "second", **relabel)
    assert (back.storage_path, there.storage_path) == (None, tmp_path / "second")
    same_life(there, back, 1)
    mapped.load_state_dict(state)
    check_equal(mapped.sample(9), memory.sample(9))
    for buffer in (mapped, memory):
        buffer.clear()
    same_life(mapped, memory, 1)


@pytest.mark.contract
def test_copies_are_in_folders_of_their_own(tmp_path: Path) -> None:
    # with functions no pickle
    for kind in ("exact", "same_step"):
        buffer = make(kind, storage_path=tmp_path / kind)
        list(live(buffer, 2))
        twin = copy.deepcopy(buffer)
        twin.add(**given(twin))
        dumped = pickle.dumps(buffer)
        expected = buffer.sample(8)
        second = pickle.loads(dumped)
        assert twin.storage_path == tmp_path / f"{kind}-2"
        assert second.storage_path == tmp_path / f"{kind}-3"
        check_equal(second.sample(8), expected)
        del buffer, twin, second
        # in the place of one that is gone
        third = pickle.loads(dumped)
        assert third.storage_path == tmp_path / kind
        check_equal(third.sample(8), expected)
        del third
        assert list(tmp_path.iterdir()) == []


@pytest.mark.contract
def test_a_checkpoint_is_not_written_where_the_fields_are(tmp_path: Path) -> None:
    buffer = make("exact", storage_path=tmp_path / "ring")
    list(live(buffer, 1))
    with pytest.raises(CheckpointError, match="storage_path of a buffer"):
        buffer.save(tmp_path / "ring")
    buffer.sample(4)


@pytest.mark.contract
def test_every_way_of_making_a_buffer_takes_the_path(tmp_path: Path) -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    box, actions = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)
    path = str(tmp_path / "ring")
    assert ReplayBuffer.from_spaces(9, box, actions, device="cpu", storage_path=path).storage_path == Path(path)
    vector = pytest.importorskip("gymnasium").make_vec("CartPole-v1", num_envs=2)
    steps = TrajectoryReplayBuffer.from_env(vector, 8, device="cpu", storage_path=path)
    assert f"fields on the disk at {path}" in repr(steps)
    vector.close()
    del steps
    captured = make("exact", storage_path=path)
    captured.add(**given(captured))
    step = captured.capture(4, lambda batch: batch.weight + 1)
    step()
    assert captured.stats().max_times_sampled > 0


@pytest.mark.contract
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_defaults_are_the_device_itself(device: str) -> None:
    for named in ({}, {"storage_device": device}, {"storage_device": None, "storage_path": None}):
        buffer = make("exact", device=device, **named)
        assert buffer.storage_device == buffer.device
        assert not buffer._placement.apart


REFUSED: dict[str, tuple[torch.device, Any, Any, type[Exception], str]] = {
    "another GPU": (CUDA, "cuda:1", None, ValueError, r'host memory with storage_device="cpu"'),
    "a GPU beside the CPU": (CPU, "cuda", None, ValueError, "give device='cuda'"),
    "a file beside a GPU": (CUDA, None, "ring", ValueError, r'Give device="cpu".*pinned host memory'),
    "a file and a GPU": (CPU, "cuda", "ring", ValueError, "found storage_device 'cuda'"),
    "a file, pinned": (CUDA, "cpu", "ring", ValueError, 'storage_device="cpu" and without storage_path'),
    "no device": (CPU, "gpu", None, ValueError, "not one that torch knows"),
    "a number": (CPU, 0, None, TypeError, "storage_device must be a device"),
    "no path": (CPU, None, "", ValueError, "empty"),
    "bytes": (CPU, None, b"ring", TypeError, "path of a folder"),
    "a path of another type": (CPU, None, 3, TypeError, "path of a folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_places_that_cannot_be_are_refused(case: str) -> None:
    device, storage_device, path, error, message = REFUSED[case]
    with pytest.raises(error, match=f"(?s){message}"):
        check_placement(device, storage_device, path)


def test_places_that_can_be() -> None:
    assert check_placement(CUDA, "cpu", None) == Placement(CUDA, pinned=True)
    assert check_placement(CUDA, "cuda", None) == check_placement(CUDA, CUDA, None) == Placement(CUDA)
    assert check_placement(CPU, "cpu", "ring").path == Path.cwd() / "ring"


# bytes of each place

SIZES = {"obs": 30 * 10**9, "action": 10**9, "times_sampled": 4 * 10**8, "priorities": 9 * 10**8}


@pytest.mark.parametrize(
    "placement, free, short",
    [
        (Placement(CUDA), (10, 99, 99), r"32,300,000,000 bytes on cuda:0(?s:.*)obs(?s:.*)storage_device=\"cpu\""),
        (Placement(CUDA, pinned=True), (1, 99, 0), r"1,300,000,000 bytes on cuda:0"),
        (Placement(CUDA, pinned=True), (2, 10, 99), r"31,000,000,000 bytes in pinned host memory, where 10,000"),
        (Placement(CPU), (0, 10, 99), "on cpu(?s:.*)storage_path"),
        (Placement(CPU, path=Path("/d")), (0, 1, 99), "1,300,000,000 bytes on cpu"),
        (Placement(CPU, path=Path("/d")), (0, 2, 10), "31,000,000,000 bytes on the disk at /d"),
        (Placement(CUDA, pinned=True), (2, 32, 0), None),
        (Placement(CPU, path=Path("/d")), (0, 2, 32), None),
    ],
)
def test_the_place_that_is_short_is_named(
    placement: Placement, free: tuple[int, int, int], short: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"cuda": free[0] * 10**9, "cpu": free[1] * 10**9}
    monkeypatch.setattr(storage, "free_bytes", lambda device: places[device.type])
    monkeypatch.setattr(storage, "free_on_disk", lambda path: free[2] * 10**9)
    if short is None:
        storage.check_room(SIZES, placement, {"obs", "action", "alignment"})
        return
    with pytest.raises(MemoryError, match=short):
        storage.check_room(SIZES, placement, {"obs", "action", "alignment"})


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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


@pytest.mark.parametrize("kind", ["exact", "same_step", "goals"])
def test_kernels_work_on_pinned_fields(kind: str, cuda: FakeCuda, tmp_path: Path, monkeypatch: Any) -> None:
    memory = make(kind)
    monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")
    with pinned_on_the_cpu():
        pinned = make(kind)
    same_life(pinned, memory, 1)
    pinned.save(tmp_path / "pinned")
    memory.save(tmp_path / "memory")
    assert files_of(tmp_path / "pinned") == files_of(tmp_path / "memory")
    # all fields lie in the one block, and nothing else does
    ((address, nbytes),) = cuda.pinned.items()
    inside = {name: tensor.data_ptr() for name, tensor in pinned._storage.tensors.items() if name != "reward"}
    ends = [inside[name] + pinned._storage.tensors[name].nbytes for name in inside]
    assert address == min(inside.values())
    assert 0 <= address + nbytes - max(ends) < 4096
    assert not any(place % 4096 for place in inside.values())
    others = [pinned._counters, pinned._storage.times_sampled]
    others += [pinned._storage.tensors["reward"]] if kind != "exact" else []
    assert not any(address <= tensor.data_ptr() < address + nbytes for tensor in others)
    assert pinned.storage_device == CPU
    assert "in pinned host memory" in repr(pinned)
    del pinned, others
    gc.collect()
    assert cuda.pinned == {}


def test_pinned_memory_is_released_after_the_last_call_that_uses_it(cuda: FakeCuda) -> None:
    order, side = StreamOrder(CUDA), cuda.Stream()
    block = pinned_block(5000, CUDA, order.drain)
    assert list(cuda.pinned.values()) == [5000]
    with order.ordered():
        cuda.work("write")
    with cuda.stream(side), order.ordered():
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
    with order.ordered():
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
        with cuda.stream(stream), order.ordered():
            cuda.work(f"call {number}")
    with order.ordered():
        order.settle()
        assert cuda.waited == {"call 0", "call 1", "call 2"}
    with StreamOrder(CPU).ordered():
        StreamOrder(CPU).settle()


# the command


def test_estimate_counts_each_place_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "estimate",
        "--device",
        "cpu",
        "--capacity",
        "1000",
        "--field",
        "obs=4x3:uint8",
        "--field",
        "action=int64",
    ]
    assert main([*arguments, "--storage-path", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    here, there = out.split(f"on the disk at {tmp_path}:", 1)
    assert "priorities" in here
    assert "obs" not in here.split("on cpu:")[1]
    assert "priorities" not in there
    # a record of twelve bytes beside eight, padded to a multiple of eight
    totals = [int(part.split("total")[1].split()[0].replace(",", "")) for part in (here, there)]
    assert totals[1] == 24_000
    assert f"the buffer alone takes {sum(totals):,} bytes" in out
    assert out.count(" GB are free ") == 2
    assert main([*arguments, "--storage-device", "cuda"]) == 2
    assert "give device='cuda'" in capsys.readouterr().err


# larger than memory


@pytest.mark.slow
@host_only
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets RLIMIT_DATA")
def test_a_ring_larger_than_the_memory_of_its_process(tmp_path: Path) -> None:
    program = f"""
import resource, torch, gpu_replay
from gpu_replay import Field, Proportional, ReplayBuffer
torch.set_num_threads(1)
fields = {{"obs": Field((7056,), torch.uint8), "action": Field((), torch.int64)}}
# 700 MB of fields, 300 MB of memory beside what is loaded
warm = ReplayBuffer(100, fields, sampler=Proportional(), device="cpu", storage_path={str(tmp_path / "warm")!r})
rows = torch.zeros((1000, 7056), dtype=torch.uint8)
held = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (held + 300 * 10**6,) * 2)
try:
    ReplayBuffer(100_000, fields, sampler=Proportional(), device="cpu")
except MemoryError:
    print("refused")
ring = ReplayBuffer(100_000, fields, sampler=Proportional(), device="cpu", storage_path={str(tmp_path / "ring")!r})
for begin in range(0, 120_000, 1000):
    keys = torch.arange(begin, begin + 1000)
    rows[:] = (keys % 251).to(torch.uint8)[:, None]
    ring.add(obs=rows, action=keys)
for _ in range(50):
    batch = ring.sample(256)
    assert (batch.obs == (batch.action % 251)[:, None]).all() and (batch.action == batch.key).all()
    ring.update_priorities(batch.key, torch.rand(256))
print("served", len(ring))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["refused", "served", "100000"], done.stderr
