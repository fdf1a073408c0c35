"""What only a GPU shows of `buffer.capture` and of calls from several streams.

The order of work is tested without one (test_stream_order.py), and so is what a step does (test_capture.py).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_twins import (
    EXACT,
    FIELDS,
    MODES,
    NUMBER,
    SAMPLERS,
    OnGpu,
    busy,
    look_while_another_adds,
    powers,
    scalar,
    waiting_is_an_error,
)
from test_gpu import check_stats
from torch import Tensor
from trees import check_sums
from twins import check_batches

from gpu_replay import Batch, Field, LinearSchedule, Proportional, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.graphs.cuda_graph import WARM_UPS
from gpu_replay.ops.counters import Counter

pytestmark = pytest.mark.gpu

REPLAYS = 60


def priorities_and_batch(batch: Batch) -> tuple[Tensor, Batch]:
    return powers(batch.key), batch


def warm(step: Any, more: int = 0) -> None:
    """Call a step until it is captured, and so often again."""
    for _ in range(WARM_UPS + more):
        step()


def full(sampler: Any = EXACT, rows: int = 300) -> OnGpu:
    """A ring of so many transitions."""
    both = OnGpu(rows, rows, sampler)
    both.add(own=False)
    return both


# a step


@pytest.mark.parametrize("name", SAMPLERS)
def test_replayed_steps_are_those_of_the_host(name: str) -> None:
    both = OnGpu(1000, 700, SAMPLERS[name])
    both.add(own=False)
    gpu, host = both.gpu, both.host
    step = gpu.capture(128, priorities_and_batch)
    for time in range(WARM_UPS + REPLAYS):
        found, expected = step(), host.sample(128)
        both.update_drawn(expected.key)
        check_batches(found, expected)
        assert step.captured == (time >= WARM_UPS)
        if time % 4 == 3:
            # past the end of the ring, between replays
            both.add(rows=37, own=False)
        if time == 30:
            gpu.load_state_dict(host.state_dict())
        if time == 40:
            both.call("clear")
            both.add(rows=150, own=False)
    assert step.replays == REPLAYS
    # the schedule has gone on, also past its end
    assert int(gpu._counters[Counter.STEP]) == WARM_UPS + REPLAYS
    both.check()
    check_stats(both)
    both.draw(33)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["uniform", "exact", "everything", "combined-everything", "rank", "rank-everything"])
def test_replayed_steps_that_add_are_those_of_the_host(name: str, mode: str) -> None:
    both, first = OnGpu(1000, 8, SAMPLERS[name], mode, random_shift=1), scalar(320)
    both.add(40)
    gpu, host = both.gpu, both.host

    def learn(batch: Batch) -> tuple[Tensor, Batch]:
        gpu.add(**both.given(first))
        first.add_(8)
        return powers(batch.key), batch

    step = gpu.capture(96, learn)
    for time in range(150):
        found, expected = step(), host.sample(96)
        host.add(**both.given(320 + 8 * time, "cpu"))
        both.update_drawn(expected.key)
        check_batches(found, expected)
        if time == 100:
            gpu.load_state_dict(host.state_dict())
    both.check()
    assert gpu.added == host.added
    # the host counted the adds: it knows of enough without asking
    gpu._engine.count_at_least(10**9, 0)
    step()
    with waiting_is_an_error():
        gpu.sample(50)
        gpu.sample_sequences(9, 3)
        step()


@pytest.mark.parametrize("name", SAMPLERS)
def test_replays_wait_for_nothing_and_take_no_more_memory(name: str) -> None:
    both = full(SAMPLERS[name], 600)
    rows = both.given(600, rows=7, own=False)
    step = both.gpu.capture(64, priorities_and_batch)
    warm(step, 1)
    with waiting_is_an_error():
        for _ in range(20):
            step()
            both.gpu.add(**rows)
    assert step.replays == 21
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        step()
    assert torch.cuda.memory_allocated() == before


def test_after_clear_a_step_has_nothing_to_draw() -> None:
    both = full()
    step = both.gpu.capture(32, priorities_and_batch)
    warm(step, 2)
    both.call("clear")
    with pytest.raises(RuntimeError, match="the buffer holds no transitions"):
        step()
    both.add(rows=40, own=False)
    assert set(step().key.tolist()) <= set(range(300, 340))


def test_a_network_learns_what_it_learns_in_a_loop() -> None:
    fields = {"x": Field((8,), torch.float32), "y": Field((), torch.float32)}
    sampler = Proportional(beta=LinearSchedule(0.4, 1.0, 50))
    first = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2000, 8, device="cuda", generator=generator)
    losses: list[list[float]] = []
    for captured in (True, False):
        buffer = ReplayBuffer(2000, fields, sampler=sampler, device="cuda", seed=1)
        buffer.add(x=x, y=x.square().sum(1))
        network = copy.deepcopy(first)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, capturable=True)

        def learn(batch: Batch, network: Any = network, optimizer: Any = optimizer) -> tuple[Tensor, Tensor]:
            error = network(batch.x).squeeze(1) - batch.y
            loss = (batch.weight * error.square()).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            return error.abs(), loss

        step = buffer.capture(256, learn)
        found = []
        for _ in range(60):
            if captured:
                loss = step()
            else:
                batch = buffer.sample(256)
                priorities, loss = learn(batch)
                buffer.update_priorities(batch.key, priorities)
            found.append(float(loss.detach()))
        assert step.captured == captured
        losses.append(found)
    assert losses[0][-1] < losses[0][0] / 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize("what", ["item", "mask", "copy", "host add"])
def test_what_cannot_be_captured_is_named_and_harms_nothing(what: str) -> None:
    both = full()
    buffer = both.gpu

    def learn(batch: Batch) -> Tensor:
        if what == "item":
            batch.weight.sum().item()
        elif what == "mask":
            batch.weight[batch.weight > 0.5]
        elif what == "copy":
            torch.tensor([1.0, 2.0], device="cuda")
        else:
            buffer.add(**both.given(300, "cpu", rows=2))
        return powers(batch.key)

    step = buffer.capture(32, learn)
    warm(step)
    before = buffer._counters.tolist()
    error, message = (RuntimeError, "learn cannot be captured as a CUDA graph: .*take out of learn")
    if what == "host add":
        error, message = (ValueError, "needs its tensors on cuda:0; found one on cpu")
    with pytest.raises(error, match=message):
        step()
    assert not step.captured
    # nothing ran, and what is called next does, random numbers included
    assert torch.randn(3, device="cuda").isfinite().all()
    assert buffer._counters.tolist() == before
    batch = buffer.sample(32)
    assert batch.n.tolist() == batch.key.tolist()


# streams and threads


def test_one_thread_adds_while_another_captures_and_replays() -> None:
    both = full(rows=5_000)
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


Look = Callable[[ReplayBuffer], Any]
LOOKS: dict[str, Look] = {
    "len": len,
    "stats": lambda buffer: buffer.stats().added,
    "masses": lambda buffer: int(buffer.masses().count_nonzero()),
    "total mass": lambda buffer: buffer.total_mass(),
    "state": lambda buffer: buffer.state_dict()["counters"]["ADDED"],
    "read": lambda buffer: buffer[torch.tensor([299], device="cuda")].n.tolist(),
    "clear": lambda buffer: (buffer.clear(), len(buffer), buffer.added),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_from_another_stream_sees_all_that_was_added(look: str) -> None:
    found = []
    for late in (True, False):
        both = OnGpu(500, 300, EXACT)
        rows = both.given(0, own=False)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            if late:
                busy()
            both.gpu.add(**rows)
        if not late:
            torch.cuda.synchronize()
        found.append(LOOKS[look](both.gpu))
        torch.cuda.synchronize()
    assert found[0] == found[1]


def test_a_new_buffer_is_whole_on_every_stream() -> None:
    """What it is filled with at first was sent on the stream that made it."""
    side, rows = torch.cuda.Stream(), full().given(0, own=False)
    torch.cuda.synchronize()
    busy()
    buffer = ReplayBuffer(500, FIELDS, sampler=EXACT, device="cuda")
    with torch.cuda.stream(side):
        buffer.add(**rows)
        assert buffer.sample(100).n.shape == (100,)
        assert (buffer.added, int(buffer._storage.times_sampled.sum())) == (300, 100)
    torch.cuda.synchronize()
    assert (buffer.added, int(buffer._storage.times_sampled.sum())) == (300, 100)


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_step_on_another_gpu_than_the_current_one() -> None:
    fields = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
    with torch.cuda.device(0):
        buffer = TrajectoryReplayBuffer(300, 3, fields, device="cuda:1")
        zeros = torch.zeros(3, dtype=torch.int64, device="cuda:1")
        for _ in range(20):
            buffer.add(obs=zeros, action=zeros, reward=zeros, terminated=zeros < 0, truncated=zeros < 0)
        step = buffer.capture(16, lambda batch: (None, batch.key))
        drawn = {tuple(step().tolist()) for _ in range(WARM_UPS + 5)}
        assert torch.cuda.current_device() == 0
    assert step.captured
    assert len(drawn) == WARM_UPS + 5
