"""Fields in pinned host memory beside a real GPU: the same bits as the host code, without a wait, in graphs too."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_twins import FIELDS, graph_of, powers, waiting_is_an_error
from places import KINDS, check_equal, given, make, same_life
from twins import Twins, check_batches

from gpu_replay import ReplayBuffer
from gpu_replay.engines.pinned_memory import pinned_block
from gpu_replay.graphs.stream_order import StreamOrder

pytestmark = pytest.mark.gpu


def pinned(kind: str, **more: Any) -> Any:
    return make(kind, device="cuda", storage_device="cpu", **more)


@pytest.mark.parametrize("kind", KINDS)
def test_pinned_fields_give_what_fields_on_the_device_give(kind: str) -> None:
    mine, other = pinned(kind), make(kind, device="cuda")
    assert (mine.device.type, mine.storage_device.type) == ("cuda", "cpu")
    for name, tensor in mine._storage.tensors.items():
        assert tensor.is_pinned() == (name != "reward"), name
    same_life(mine, other, 4)


@pytest.mark.parametrize("kind", ["exact", "uniform", "same_step", "next_step"])
def test_pinned_fields_give_what_the_host_gives(kind: str, tmp_path: Path) -> None:
    mine, host = pinned(kind), make(kind)
    same_life(mine, host, 3)
    mine.save(tmp_path / "saved")
    again = type(mine).load(tmp_path / "saved", "cuda", storage_device="cpu")
    back = type(mine).load(tmp_path / "saved", "cpu", storage_path=tmp_path / "ring")
    twin = copy.deepcopy(mine)
    assert twin.storage_device.type == "cpu"
    for _ in range(3):
        expected = host.sample(12)
        for each in (mine, again, back, twin):
            check_equal(each.sample(12), expected)


def test_only_the_batch_is_on_the_device() -> None:
    before = torch.cuda.memory_allocated()
    buffer = ReplayBuffer(100_000, FIELDS, device="cuda", storage_device="cpu")
    fields = 100_000 * sum(field.row_bytes for field in FIELDS.values())
    assert torch.cuda.memory_allocated() - before < fields / 2
    assert buffer.nbytes > fields


@pytest.mark.parametrize("kind", ["exact", "same_step"])
def test_no_call_waits_and_every_call_is_captured(kind: str) -> None:
    mine, host = pinned(kind), make(kind)
    # a device's copy of the rows, which a graph can read again
    for _ in range(20):
        rows = given(mine)
        mine.add(**rows)
        host.add(**given(host))
    check_batches(mine.sample(16), host.sample(16))

    def cycle(buffer: Any) -> Any:
        buffer.add(**{name: value.to(buffer.device) for name, value in rows.items()})
        batch = buffer.sample(16)
        buffer.update_priorities(batch.key, powers(batch.key))
        return batch

    check_batches(cycle(mine), cycle(host))
    with waiting_is_an_error():
        found = cycle(mine)
    check_batches(found, cycle(host))
    graph, batch = graph_of(lambda: cycle(mine))
    cycle(host)
    for _ in range(30):
        graph.replay()
        check_batches(batch, cycle(host))
    check_equal(mine.state_dict()["tensors"]["fields.action"], host.state_dict()["tensors"]["fields.action"])


def test_calls_from_two_streams_keep_their_order_and_a_dropped_buffer_is_not_read_again() -> None:
    def make_one(place: str) -> ReplayBuffer:
        where = {"storage_device": "cpu"} if place == "cuda" else {}
        return ReplayBuffer(64, FIELDS, device=place, seed=1, **where)  # type: ignore[arg-type]

    both = Twins(make_one, "cuda")
    side, found = torch.cuda.Stream(), []
    for number in range(40):
        key = torch.arange(32) + 32 * number
        rows = {"x": key[:, None].float().repeat(1, 4), "n": key}
        both.host.add(**rows)
        with torch.cuda.stream(side if number % 2 else torch.cuda.default_stream()):
            torch.cuda._sleep(100_000)
            both.tested.add(**rows)
        with torch.cuda.stream(torch.cuda.default_stream() if number % 2 else side):
            found.append((both.tested.sample(32), both.host.sample(32)))
    both.both.clear()
    del both.tested
    gc.collect()
    torch.cuda.synchronize()
    for mine, expected in found:
        check_batches(mine, expected)


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
