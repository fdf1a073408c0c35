"""Memory: what a buffer takes is what it says, and what does not fit is refused before anything is allocated."""

from __future__ import annotations

import re
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import in_a_child, memory_of
from devices import host_only, scale
from pairs import FIELDS, RENEWED, StepPair, live_through
from places import STEPS, live
from places import make as made
from programs import SAMPLERS
from refusals import REFUSALS
from transitions import STORED, fill, make

from gpu_replay import CheckpointError, Field, Proportional, ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.engines import memory
from gpu_replay.engines.memory import Placement, check_room

pytestmark = pytest.mark.contract

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")


@pytest.mark.slow
@needs_proc
@host_only
def test_resident_memory_of_one_million_transitions_is_the_payload() -> None:
    fields = {"obs": Field((32,), torch.float32), "action": Field((), torch.int64), "reward": Field((), torch.float32)}
    fields |= {"next_obs": Field((32,), torch.float32), "terminated": Field((), torch.bool)}
    rows = {name: torch.ones((1000, *field.shape), dtype=field.dtype) for name, field in fields.items()}

    def used(capacity: int, adds: int) -> ReplayBuffer:
        buffer = ReplayBuffer(capacity, fields, sampler=Proportional(), device="cpu")
        for _ in range(adds):
            buffer.add(**rows)
        for _ in range(20):
            buffer.update_priorities(buffer.sample(256).key, torch.ones(256))
        return buffer

    def taken() -> list[int]:
        # everything that is loaded at first use is loaded by a small buffer
        used(2000, 1)
        before = memory_of("VmRSS")
        buffer = used(1_000_000, 1005)
        return [memory_of("VmRSS") - before, memory_of("VmHWM") - before, buffer.nbytes]

    resident, peak, nbytes = in_a_child(taken)
    payload = 1_000_000 * sum(field.row_bytes for field in fields.values())
    assert payload == 269_000_000
    assert 0.95 * payload < resident < 1.1 * payload
    assert peak < 1.1 * payload
    assert payload <= nbytes < 1.1 * payload
    assert abs(nbytes - resident) < 0.05 * payload


@pytest.mark.parametrize("name", SAMPLERS)
def test_nbytes_holds_the_payload_and_little_more(name: str, device: str) -> None:
    capacity = 10_007
    buffer = make(capacity, SAMPLERS[name], device=device)
    payload = capacity * sum(field.row_bytes for field in STORED.values())
    # beside the payload: a mass and its share of the tree, a count, and a constant; or the order of what is stored
    most = 64 if "rank" in name else 32
    assert payload <= buffer.nbytes <= payload + most * capacity + 65_536
    fill(buffer, 100)
    # on a device, the first sample of a size makes what its draw works in
    buffer.sample(50)
    before = buffer.nbytes
    assert payload <= before <= payload + most * capacity + 65_536
    fill(buffer, 100)
    buffer.sample(50)
    assert buffer.nbytes == before


def test_memory_that_torch_keeps_of_a_dropped_buffer_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    # 3 GB of 100 are free, 80 are torch's, of which a tensor of 1 GB is left
    cuda, sizes = Placement(torch.device("cuda")), {"obs": 70 * 10**9}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 10**9, 100 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 80 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10**9)
    check_room(sizes, cuda, ())
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * 10**9)
    with pytest.raises(MemoryError, match="needs 70,000,000,000 bytes on cuda, where 63,000,000,000 are free"):
        check_room(sizes, cuda, ())


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("kind", ["transitions", *STEPS])
def test_a_buffer_takes_what_its_refusal_says(kind: str, name: str, device: str, monkeypatch: Any) -> None:
    takes = made(kind, sampler=SAMPLERS[name], device=device).nbytes
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    with pytest.raises(MemoryError, match="bytes on") as error:
        made(kind, sampler=SAMPLERS[name], device=device)
    said = re.findall(r"([\d,]+) bytes", str(error.value))
    needed, *parts, total = [int(each.replace(",", "")) for each in said]
    assert needed == sum(parts) == total
    # counters and a few numbers of the sampler are left out
    assert 0 < takes - needed < 512


@needs_proc
@host_only
def test_nothing_is_allocated_before_the_refusal() -> None:
    def allocated() -> int:
        before = memory_of("VmPeak")
        # the first field alone would fit
        fields = {"small": Field((4,), torch.uint8), "large": Field((1024, 1024), torch.float32)}
        with pytest.raises(MemoryError):
            ReplayBuffer(500_000_000, fields, device="cpu")
        return memory_of("VmPeak") - before

    assert in_a_child(allocated) < 1_000_000_000


# an Atari transition of a trajectory buffer: each observation once, and 72 bytes for everything else
FRAME = 84 * 84
ATARI = {"obs": Field((84, 84), torch.uint8), "action": Field((), torch.int64)}


# whatever the sampler, and however deep stacks and windows are
@pytest.mark.parametrize("sampler", [Proportional(), Uniform()], ids=repr)
@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize(
    "capacity, num_envs, stack, n_step", [(1_000_000, 64, 4, 3), (100_000, 1, 1, 1), (100_000, 8, 16, 20)]
)
def test_an_atari_transition_takes_a_frame_and_72_bytes(
    capacity: int, num_envs: int, stack: int, n_step: int, autoreset: str, sampler: Any, device: str
) -> None:
    settings = {"stack": stack, "n_step": n_step, "autoreset": autoreset, "sampler": sampler, "device": device}
    try:
        # the pages of what is never written are never there
        buffer = TrajectoryReplayBuffer(capacity, num_envs, ATARI, **settings)
    except MemoryError:
        pytest.skip("needs 7.1 GB of memory to be free, though it uses none of it")
    # of every 32 steps one final observation is kept, where none is a step of its own
    finals = 0 if autoreset == "next_step" else FRAME / 32
    assert FRAME <= buffer.nbytes / buffer.capacity <= FRAME + finals + 72


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_nothing_grows_with_use(autoreset: str, device: str) -> None:
    pair = StepPair(61, 3, sampler=Proportional(), device=device, stack=3, n_step=2, autoreset=autoreset)
    live_through(pair, 10, end=0.3, final=1.0)
    # on a device, the first sample of a size makes what its draw works in
    pair.buffer.sample(5)
    before = pair.buffer.nbytes
    assert before >= 61 // 3 * 3 * sum(kind.row_bytes for kind in FIELDS.values())
    live_through(pair, scale(50, 20), end=0.3, final=1.0)
    pair.buffer.sample(5)
    assert pair.buffer.nbytes == before


def test_final_observations_take_what_they_are_given(device: str) -> None:
    none, few, all_of_them = (
        TrajectoryReplayBuffer(1000, 4, ATARI, autoreset="same_step", final_capacity=rows, device=device).nbytes
        for rows in (0, 10, 1000)
    )
    assert 9 * FRAME <= few - none <= 11 * FRAME
    assert 989 * FRAME <= all_of_them - few <= 1001 * FRAME


@host_only
def test_an_extend_reads_a_file_piece_by_piece(device: str, tmp_path: Path) -> None:
    shape, stored = (4_000, 1, 10_240), 100
    written = np.lib.format.open_memmap(tmp_path / "obs.npy", "w+", np.uint8, shape)
    written[-stored:] = np.arange(stored)[:, None, None] % 251
    written.flush()
    # read-only, as most are opened
    obs = np.load(tmp_path / "obs.npy", mmap_mode="r")
    fields = {"obs": Field(shape[2:], torch.uint8), "action": Field((), torch.float32)}
    buffer = TrajectoryReplayBuffer(stored, 1, fields, autoreset="next_step", sampler=Uniform(), device=device)
    none, zero = np.zeros(shape[:2], np.bool_), np.zeros(shape[:2], np.float32)
    # what is loaded at first use
    buffer.extend(obs=obs[:1], action=zero[:1], reward=zero[:1], terminated=none[:1], truncated=none[:1])
    tracemalloc.start()
    keys = buffer.extend(obs=obs, action=zero, reward=zero, terminated=none, truncated=none)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.2 * obs.nbytes
    assert torch.equal(buffer[keys[-stored:-1, 0]].obs.cpu(), torch.from_numpy(written[-stored:-1, 0]))


# what is dropped


def captured(buffer: Any, folder: Path) -> list[Any]:
    """A step that was called, and one that failed."""
    step, wrong = (
        buffer.capture(4, learn) for learn in (lambda batch: (batch.weight, batch.key), lambda batch: "words")
    )
    step()
    with suppress(TypeError):
        wrong()
    return [step, wrong]


def copied(buffer: Any, folder: Path) -> list[Any]:
    buffer.load_state_dict(buffer.state_dict())
    return [renewed(buffer) for renewed in RENEWED.values()]


def refused(buffer: Any, folder: Path) -> list[Any]:
    kind = "steps" if hasattr(buffer, "num_envs") else "rows"
    for refusal in REFUSALS:
        if kind in refusal.kinds:
            refusal.check(buffer)
    with suppress(CheckpointError):
        type(buffer).load(folder)
    return []


def plotted(buffer: Any, folder: Path) -> list[Any]:
    buffer.plot(folder / "buffer.png")
    return []


def stored_in_a_file(buffer: Any, folder: Path) -> list[Any]:
    return [made("rows", storage_path=folder / "ring")] if buffer.device.type == "cpu" else []


USES: dict[str, Callable[[Any, Path], list[Any]]] = {
    "lived": lambda buffer, folder: [next(buffer.batches(3)), *live(buffer, 1)][:0],
    **{use.__name__: use for use in (captured, copied, refused, plotted, stored_in_a_file)},
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ["rows", *scale([*STEPS], ["same_step"])])
@pytest.mark.usefixtures("collector_off")
def test_a_dropped_buffer_is_freed_at_once(kind: str, use: str, device: str, tmp_path: Path) -> None:
    if use == "plotted":
        pytest.importorskip("matplotlib")
        # what is caught while matplotlib is imported keeps the frames that import it
        made("rows").plot(tmp_path / "first.png")
    buffer = made(kind, device=device)
    for _ in live(buffer, 1):
        pass
    more = USES[use](buffer, tmp_path)
    kept = [weakref.ref(each) for each in (buffer, buffer._engine, buffer._storage, *more)]
    del buffer, more
    assert [each() for each in kept] == [None] * len(kept)
