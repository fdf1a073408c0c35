"""What only a GPU shows of streams and threads, and of memory of the host.

The order of work is tested without one in `test_stream_order.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_twins import EVERYTHING, EXACT, FIELDS, NUMBER, OnGpu, busy, look_while_another_adds, powers
from torch import Tensor
from trees import check_sums

from gpu_replay import Batch, Field, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.engines.pinned_memory import pinned_block
from gpu_replay.graphs.stream_order import StreamOrder

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("kind", ["transitions", "next_step"])
def test_threads_on_streams_of_their_own_never_tear_a_row(kind: str) -> None:
    steps = kind != "transitions"
    both = OnGpu(4_000 if steps else 5_000, 400 if steps else 4_000, EXACT, kind, random_shift=0)
    both.add(20 if steps else 2)
    buffer, added = both.gpu, both.host.added
    torch.cuda.synchronize()

    def look() -> Tensor:
        batch = buffer.sample(1_024)
        buffer.update_priorities(batch.key, powers(batch.key))
        if not steps:
            return (batch.n == batch.key).all() & (batch.x[:, 0] == batch.n.float()).all()
        newest = (batch.key[:, None] * 31 + torch.arange(144, device="cuda")) % 251
        return (batch.action == batch.key).all() & (batch.obs[:, -1].flatten(1) == newest).all()

    look_while_another_adds(lambda time: buffer.add(**both.given(added + time * both.rows)), look)
    check_sums(buffer._state.masses)


def test_one_thread_adds_while_another_captures_and_replays() -> None:
    both = OnGpu(5_000, 5_000, EXACT)
    both.add(own=False)
    buffer = both.gpu

    def learn(batch: Batch) -> tuple[Tensor, Tensor]:
        whole = (batch.n == batch.key).all() & (batch.x[:, 0] == batch.n.float()).all()
        return powers(batch.key), whole

    step = buffer.capture(2_048, learn)
    look_while_another_adds(
        lambda time: buffer.add(**both.given(5_000 + 4_000 * time, rows=4_000)), step, lambda: step.captured
    )
    assert step.captured
    check_sums(buffer._state.masses)


LOOKS: dict[str, Callable[[ReplayBuffer], Any]] = {
    "len": len,
    "stats": lambda buffer: buffer.stats().added,
    "masses": lambda buffer: int(buffer.masses().count_nonzero()),
    "total mass": lambda buffer: buffer.total_mass(),
    "samples": lambda buffer: (buffer.sample(100), int(buffer._storage.times_sampled.sum()))[1],
    "state": lambda buffer: buffer.state_dict()["counters"]["ADDED"],
    "read": lambda buffer: buffer[torch.tensor([299], device="cuda")].n.tolist(),
    "clear": lambda buffer: (buffer.clear(), len(buffer), buffer.added),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_from_another_stream_sees_all_that_was_added(look: str) -> None:
    found = []
    for late in (True, False):
        rows = OnGpu(500, 300, EXACT).given(0, own=False)
        torch.cuda.synchronize()
        if late:
            busy()
        # what it is filled with at first comes before the add, though on another stream
        buffer = OnGpu(500, 300, EXACT).gpu
        with torch.cuda.stream(torch.cuda.Stream()):
            if late:
                busy()
            buffer.add(**rows)
        if not late:
            torch.cuda.synchronize()
        found.append(LOOKS[look](buffer))
        torch.cuda.synchronize()
    assert found[0] == found[1]


@pytest.mark.parametrize("what", ["buffer", "add", "update"])
def test_memory_has_no_new_owner_while_another_stream_uses_it(what: str) -> None:
    """Of a buffer that is written into, and of values that are yet to be read."""
    size = 1 << 22
    buffer = ReplayBuffer(size, NUMBER, sampler=EXACT, device="cuda")
    keys = buffer.add(n=torch.arange(size, device="cuda"))
    n = torch.full((size,), 3, dtype=torch.int64, device="cuda")
    priorities = torch.full((size,), 4.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        if what == "update":
            buffer.update_priorities(keys, priorities)
        else:
            buffer.add(n=n)
    if what == "buffer":
        del buffer
        gc.collect()
    else:
        del n, keys, priorities
    owned = [torch.full((size,), 5, dtype=dtype, device="cuda") for dtype in (torch.int64, torch.float32) * 2]
    torch.cuda.synchronize()
    if what == "buffer":
        assert all(bool((each == 5).all()) for each in owned)
    elif what == "add":
        assert bool((buffer._storage.tensors["n"] == 3).all())
    else:
        assert bool((buffer.masses() == 4 << 20).all())
    assert len(owned) == 4


# memory of the host


@pytest.mark.parametrize("kind", ["transitions", "steps"])
def test_pinned_memory_may_be_filled_anew_at_once(kind: str) -> None:
    field, zeros = Field((84, 84), torch.uint8), torch.zeros(2_000, dtype=torch.int64)
    flags: dict[str, Any] = {}
    if kind == "steps":
        buffer: Any = TrajectoryReplayBuffer(2_000 * 6, 2_000, {"obs": field, "action": NUMBER["n"]}, device="cuda")
        flags = {"action": zeros, "reward": zeros, "terminated": zeros > 0, "truncated": zeros > 0}
    else:
        buffer = ReplayBuffer(2_000 * 6, {"obs": field}, device="cuda")
    pinned = torch.empty((2_000, 84, 84), dtype=torch.uint8).pin_memory()
    for time in range(6):
        busy()
        pinned.fill_(time)
        buffer.add(obs=pinned, **flags)
        # the first add compiles; the others wait for their copy and for nothing before it
        assert time == 0 or not torch.cuda.current_stream().query()
        pinned.fill_(99)
    for time in range(6):
        assert bool((buffer._storage.tensors["obs"][2_000 * time : 2_000 * (time + 1)] == time).all())


def test_of_a_buffer_with_pinned_fields_only_the_batch_is_on_the_device() -> None:
    before = torch.cuda.memory_allocated()
    buffer = ReplayBuffer(100_000, FIELDS, device="cuda", storage_device="cpu")
    fields = 100_000 * sum(field.row_bytes for field in FIELDS.values())
    assert torch.cuda.memory_allocated() - before < fields / 2
    assert buffer.nbytes > fields


def test_memory_is_pinned_in_exactly_its_bytes_and_unpinned() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    block = pinned_block(5 * 2**20, device, StreamOrder(device).drain)
    tensor = torch.from_numpy(block)
    assert tensor.is_pinned()
    assert tensor[:3].is_pinned()
    tensor.fill_(7)
    assert int(tensor.to(device, non_blocking=True).sum()) == 7 * 5 * 2**20
    del tensor, block
    # the same pages again, which the driver refuses while they are pinned
    for _ in range(3):
        assert torch.from_numpy(pinned_block(5 * 2**20, device, StreamOrder(device).drain)).is_pinned()


# another GPU than the current one


@two_gpus
def test_a_buffer_on_another_gpu_than_the_current_one() -> None:
    rows = OnGpu(400, 400, EVERYTHING).given(0, "cuda:1")
    with torch.cuda.device(0):
        buffer = ReplayBuffer(300, FIELDS, sampler=EVERYTHING, device="cuda:1")
        keys = buffer.add(**rows)
        step = buffer.capture(64, lambda batch: (powers(batch.key), batch))
        drawn = [step() for _ in range(9)]
        assert torch.cuda.current_device() == 0
    assert step.captured
    assert keys.device == drawn[-1].x.device == torch.device("cuda", 1)
    assert all(batch.n.tolist() == batch.key.tolist() for batch in drawn[-1:])
    check_sums(buffer._state.masses)
