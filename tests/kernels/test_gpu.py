"""What only a GPU shows: no call waits for it, graphs replay, thousands of threads at once leave exact integers.

Arithmetic is tested without one, interpreted, by tests of this folder that run here too, and the order of work on
several streams by `test_stream_order.py`. What has an `amount` is rehearsed by `test_capture_graphs.py`.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from freed import collector_off_fixture as collector_off_fixture
from gpu_twins import (
    CASES,
    EVERYTHING,
    EXACT,
    FIELDS,
    KINDS,
    MODES,
    NUMBER,
    SAMPLERS,
    OnGpu,
    amount,
    busy,
    graph_of,
    look_while_another_adds,
    powers,
    waiting_is_an_error,
)
from test_compile import inductor_warns
from torch import Tensor
from trees import check_sums
from twins import check_batches

from gpu_replay import Batch, Field, RankBased, ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.graphs.capture import WARM_UPS

pytestmark = pytest.mark.gpu


# every operation once, in small, beside the host code


def filled(kind: str, name: str) -> OnGpu:
    both = OnGpu(100, 5, SAMPLERS[name], kind)
    both.add(30)
    return both


@pytest.mark.parametrize(
    "kind, name", [(kind, name) for kind in KINDS for name in ("everything", "uniform", "combined-rank")]
)
def test_every_call_once(kind: str, name: str) -> None:
    both = filled(kind, name)
    both.update(both.draw(16).key, torch.arange(16.0) ** 2)
    both.draw(16)
    both.check()
    assert both.gpu.stats().size == both.host.stats().size
    for buffer in both.both:
        buffer.clear()
        assert len(buffer) == 0


def test_rows_of_the_host_in_pinned_memory_and_without() -> None:
    both = filled("transitions", "uniform")
    given = both.given(150, "cpu", own=False)
    both.host.add(**given)
    both.gpu.add(**given)
    both.host.add(**given)
    both.gpu.add(**{name: value.pin_memory() for name, value in given.items()})
    both.check()


@pytest.mark.parametrize("kind, kept", [("transitions", ReplayBuffer), ("same_step", TrajectoryReplayBuffer)])
def test_a_checkpoint_goes_from_the_gpu_to_the_host(kind: str, kept: type, tmp_path: Path) -> None:
    both = filled(kind, "everything")
    both.gpu.save(tmp_path / "saved")
    both.host = kept.load(tmp_path / "saved", device="cpu")
    both.check()


# no call waits


@pytest.mark.parametrize("kind, name", CASES)
def test_no_call_waits_for_the_device_or_keeps_memory(kind: str, name: str) -> None:
    rows = amount(16, 4)
    both = OnGpu(amount(4096, 120), rows, SAMPLERS[name], kind)
    buffer, first = both.gpu, both.fill(amount(260, 33))
    some = torch.arange(rows, device="cuda") == 3
    late = torch.tensor([-1, 5, 5, 10**12], device="cuda")
    given = torch.tensor([1.0, 2.0, float("nan"), 1.0], device="cuda")
    odd = both.given(300, rows=7, own=False)
    doubles = {"x": torch.zeros(5, 4, dtype=torch.float64, device="cuda"), "n": late.to(torch.int32)[[0, 1, 2, 2, 2]]}

    def add(own: bool) -> None:
        buffer.add(**both.given(first, own=own))
        first.add_(rows)

    def cycle() -> None:
        add(False)
        add(True)
        batch = buffer.sample(amount(64, 5))
        buffer.sample(amount(200, 9), beta=0.5)
        buffer.update_priorities(batch.key, powers(batch.key))
        buffer.update_priorities(batch.key, batch.weight.requires_grad_())
        buffer.update_priorities(late, given)
        both.write(buffer, torch.cat((batch.key, late)))
        if both.steps:
            buffer.begin_episodes(some)
        else:
            buffer.add(**odd)
            # casts, values with gaps between them
            buffer.add(**doubles)
            buffer.add(**{field: value[::2] for field, value in both.given(0, own=False).items()})

    for _ in range(amount(3, 1)):
        cycle()
    # the host asks once more, now that the ring is full
    assert buffer._engine.count_at_least(10**9) > amount(1500, 30)
    before, memory = buffer.added, torch.cuda.memory_allocated()
    with waiting_is_an_error():
        for _ in range(cycles := amount(8, 2)):
            cycle()
    assert buffer.added == before + cycles * (2 * rows + (0 if both.steps else 7 + 5 + rows // 2))
    assert buffer.stats().stale_updates >= cycles
    assert torch.cuda.memory_allocated() == memory


# graphs


@pytest.mark.parametrize("kind, name", CASES)
def test_a_replayed_cycle_of_add_sample_and_update(kind: str, name: str) -> None:
    both = OnGpu(amount(1000, 80), rows := amount(8, 4), SAMPLERS[name], kind)
    first = both.fill(amount(75, 20))

    def cycle(buffer: Any) -> list[Batch]:
        buffer.add(**both.given(first.to(buffer.device), buffer.device))
        batch = buffer.sample(amount(200, 12))
        buffer.update_priorities(batch.key, powers(batch.key))
        both.write(buffer, batch.key)
        return [batch]

    def moving() -> list[Batch]:
        batches = cycle(both.gpu)
        first.add_(rows)
        return batches

    graph, batches = graph_of(moving)
    first.fill_(both.host.added)
    for time in range(amount(150, 4)):
        expected = cycle(both.host)
        if time:
            graph.replay()
            for found, wanted in zip(batches, expected, strict=True):
                check_batches(found, wanted)
        else:
            first.add_(rows)
    both.check()
    # the host does not know how often the add was replayed, and asks
    both.draw(amount(50, 9))
    both.add(3)
    # nor do the graph and the calls see what the other has changed, such as an order by rank
    keys = both.host.keys()[-9:]
    both.update(keys, powers(keys + 1))
    first.fill_(both.host.added)
    expected = cycle(both.host)
    graph.replay()
    check_batches(batches[0], expected[0])
    both.check()


def test_the_host_counts_rows_of_replayed_adds() -> None:
    buffer = ReplayBuffer(64, {"n": NUMBER["n"]}, sampler=Uniform(), device="cuda")
    numbers = torch.arange(4, device="cuda")
    graph, _ = graph_of(lambda: buffer.add(n=numbers))
    buffer.clear()
    for _ in range(3):
        graph.replay()
    # the host counts no more than the adds that it made itself, and asks
    assert buffer.sample(12).n.sort().values.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    with pytest.raises(ValueError, match="12"):
        buffer.sample(13)


@pytest.mark.parametrize("kind, name", CASES)
def test_captured_steps_are_those_of_the_host_and_wait_for_nothing(kind: str, name: str) -> None:
    both = OnGpu(amount(1000, 80), rows := amount(8, 4), SAMPLERS[name], kind)
    gpu, host, first = both.gpu, both.host, both.fill(amount(40, 20))

    def learn(batch: Batch) -> tuple[Tensor, Batch]:
        gpu.add(**both.given(first))
        first.add_(rows)
        return powers(batch.key), batch

    step = gpu.capture(batch_size := amount(96, 9), learn)
    for time in range(times := amount(100, 6)):
        found, expected = step(), host.sample(batch_size)
        host.add(**both.given(host.added, "cpu"))
        host.update_priorities(expected.key, powers(expected.key))
        check_batches(found, expected)
        if time == amount(60, 4):
            gpu.load_state_dict(host.state_dict())
    both.check()
    assert (gpu.added, step.replays) == (host.added, times - WARM_UPS)
    # the host counted the adds: it knows of enough without asking
    gpu._engine.count_at_least(10**9)
    step()
    # the first sample of a size makes what the next ones keep
    gpu.sample(amount(50, 9))
    gc.collect()
    memory = torch.cuda.memory_allocated()
    with waiting_is_an_error():
        gpu.sample(amount(50, 9))
        for _ in range(amount(20, 2)):
            step()
    assert torch.cuda.memory_allocated() == memory


@pytest.mark.usefixtures("collector_off")
def test_the_memory_of_a_graph_is_free_when_its_step_and_buffer_are_dropped() -> None:
    def live() -> None:
        both = OnGpu(300, 300, EXACT)
        both.add(own=False)
        step = both.gpu.capture(32, lambda batch: powers(batch.key))
        for _ in range(WARM_UPS + 2):
            step()
        kept.extend([weakref.ref(both.gpu), weakref.ref(step)])

    kept: list[Any] = []
    # what is loaded and kept at the first use
    live()
    before = torch.cuda.memory_allocated()
    live()
    assert torch.cuda.memory_allocated() == before
    assert [each() for each in kept] == [None] * 4


@pytest.mark.parametrize("what", ["item", "host add"])
def test_what_cannot_be_captured_is_named_and_harms_nothing(what: str) -> None:
    both = OnGpu(300, 300, EXACT)
    both.add(own=False)
    buffer = both.gpu

    def learn(batch: Batch) -> Tensor:
        if what == "item":
            batch.weight.sum().item()
        else:
            buffer.add(**both.given(300, "cpu", rows=2))
        return powers(batch.key)

    step = buffer.capture(32, learn)
    for _ in range(WARM_UPS):
        step()
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


# compiled steps; test_compile.py tests without a GPU that calls are made in their place


@inductor_warns
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("kind", ["transitions", "next_step"])
def test_compiled_steps_are_those_of_the_host(kind: str, mode: str) -> None:
    """With graphs of the compiler's own, asked for or not, every call is made at every step."""
    torch._dynamo.reset()
    both = OnGpu(1000, 8, EVERYTHING, kind)
    both.add(40)

    def step(buffer: Any, more: dict[str, Tensor]) -> tuple[Batch, Tensor]:
        buffer.add(**more)
        batch = buffer.sample(96)
        buffer.update_priorities(batch.key, powers(batch.key))
        return batch, (batch.weight * 3).tanh()

    quick = torch.compile(step, mode=mode)
    for first in range(320, 1280, 8):
        found, result = quick(both.gpu, both.given(first))
        expected, wanted = step(both.host, both.given(first, "cpu"))
        check_batches(found, expected)
        assert torch.allclose(result.cpu(), wanted, rtol=1e-5, atol=1e-6)
    both.check()
    given = both.given(1280)
    with waiting_is_an_error():
        for _ in range(5):
            quick(both.gpu, given)


@inductor_warns
def test_a_captured_step_may_learn_through_compiled_code() -> None:
    torch._dynamo.reset()
    both = OnGpu(1000, 100, EVERYTHING)
    both.add(7, own=False)

    def learn(batch: Batch) -> tuple[Tensor, Batch]:
        return powers(batch.key) + batch.x.abs().sum() * 0, batch

    step, plain = both.gpu.capture(64, torch.compile(learn, fullgraph=True)), both.host.capture(64, learn)
    for _ in range(20):
        check_batches(step(), plain())
    both.check()


# many threads at once


# small sorts are other code than large ones
SIZES = [
    *((name, 100_003) for name in SAMPLERS),
    ("rank", 4_000),
    ("rank-independent", 3_000_001),
    ("everything", 3_001),
]


@pytest.mark.parametrize("name, capacity", SIZES)
def test_long_sequences_draw_what_the_host_draws(name: str, capacity: int) -> None:
    """Adds around the end of the ring, of all sizes; most priorities are equal, and by rank the oldest comes first."""
    both = OnGpu(capacity, 1, SAMPLERS[name])
    rounds = 8 if capacity < 10**6 else 1
    for time, rows in enumerate((capacity // 3, capacity, 1, 8, 4096, 70_001, 3 * capacity + 17) * rounds):
        both.add(rows=rows, own=time % 3 == 0)
        expected = both.draw(min(4096, len(both.host)))
        assert expected.n.tolist() == expected.key.tolist()
        keys = torch.cat((expected.key, expected.key[:100], expected.key[::7] - capacity // 2))
        both.update(keys, powers(keys + time))
    both.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["uniform", "proportional", "combined-proportional", "rank", "rank-independent"])
def test_thousands_of_environments_at_once(name: str, mode: str) -> None:
    """Every sum is right though thousands of threads change it, and rows of final observations go by environment."""
    both = OnGpu(5003 * 20, 5003, SAMPLERS[name], mode, every=5)
    for time in range(9):
        both.add(5, own=time % 2 > 0)
        both.check()
        both.draw(4096)


@pytest.mark.parametrize("different", [1, 130, 5_000, 900_000])
def test_a_million_updates_and_draws_at_once(different: int) -> None:
    """The last of each repeated key wins, no difference is lost on the way up, and every draw is counted."""
    capacity, batch = 1_000_003, 1 << 20
    drawn: list[Tensor] = []
    buffer = ReplayBuffer(capacity, NUMBER, sampler=EVERYTHING, device="cuda")
    buffer.add(n=torch.arange(capacity, device="cuda"))
    masses = buffer.masses().cpu().numpy()
    generator = np.random.default_rng(different)
    for _ in range(10):
        keys = generator.integers(0, different, batch)
        exponents = generator.integers(-10, 12, batch)
        buffer.update_priorities(torch.from_numpy(keys).cuda(), torch.from_numpy(2.0**exponents).cuda())
        # of repeated indices NumPy keeps the last
        masses[keys] = 2 ** (20 + exponents)
        assert np.array_equal(buffer.masses().cpu().numpy(), masses)
        assert buffer.total_mass() == int(masses.sum())
        drawn.append(buffer.sample(batch).key)
        check_sums(buffer._state.masses)
    assert (buffer._engine.sampling.masses.stamps == -1).all()
    counts = torch.bincount(torch.cat(drawn), minlength=capacity)
    assert torch.equal(counts, buffer._storage.times_sampled.long())


def test_what_a_sort_takes_is_given_back_and_stays_below_what_is_said() -> None:
    capacity = 1_000_003
    buffer = ReplayBuffer(capacity, NUMBER, sampler=RankBased(), device="cuda")
    buffer.add(n=torch.arange(capacity, device="cuda"))
    # kernels are compiled, and memory of the sort is found, by the first draw
    buffer.sample(64)
    buffer.add(n=torch.arange(1, device="cuda"))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    batch = buffer.sample(64)
    assert torch.cuda.max_memory_allocated() - before < 56 * capacity
    assert torch.cuda.memory_allocated() - before < 64 * 1024
    assert batch.n.shape == (64,)


# streams, threads and memory of the host


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", ["transitions", "next_step"])
def test_threads_on_streams_of_their_own_never_tear_a_row(kind: str, captured: bool) -> None:
    steps = kind != "transitions"
    both = OnGpu(4_000 if steps else 5_000, 400 if steps else 4_000, EXACT, kind)
    both.add(20 if steps else 2)
    buffer, added = both.gpu, both.host.added
    torch.cuda.synchronize()

    def learn(batch: Batch) -> tuple[Tensor, Tensor]:
        if steps:
            newest = (batch.key[:, None] * 31 + torch.arange(144, device="cuda")) % 251
            whole = (batch.action == batch.key).all() & (batch.obs[:, -1].flatten(1) == newest).all()
        else:
            whole = (batch.n == batch.key).all() & (batch.x[:, 0] == batch.n.float()).all()
        return powers(batch.key), whole

    # a step that is never warm makes its calls
    step = buffer.capture(1_024, learn, warm_ups=WARM_UPS if captured else 10**9)
    look_while_another_adds(
        lambda time: buffer.add(**both.given(added + time * both.rows)), step, lambda: step.captured == captured
    )
    check_sums(buffer._state.masses)


@pytest.mark.parametrize("what", ["buffer", "values"])
def test_memory_has_no_new_owner_while_another_stream_uses_it(what: str) -> None:
    """Of a buffer that is written into, and of values that are yet to be read."""
    size = 1 << 22
    buffer = ReplayBuffer(size, NUMBER, sampler=EXACT, device="cuda")
    buffer.add(n=torch.arange(size, device="cuda"))
    n = torch.full((size,), 3, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        buffer.add(n=n)
    if what == "buffer":
        del buffer
        gc.collect()
    else:
        del n
    owned = [torch.full((size,), 5, dtype=dtype, device="cuda") for dtype in (torch.int64, torch.float32) * 2]
    torch.cuda.synchronize()
    assert all(bool((each == 5).all()) for each in owned)
    assert what == "buffer" or bool((buffer._storage.tensors["n"] == 3).all())


def test_pinned_memory_may_be_filled_anew_at_once() -> None:
    buffer = ReplayBuffer(2_000 * 6, {"obs": Field((84, 84), torch.uint8)}, device="cuda")
    pinned = torch.empty((2_000, 84, 84), dtype=torch.uint8).pin_memory()
    for time in range(6):
        busy()
        pinned.fill_(time)
        buffer.add(obs=pinned)
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_buffer_on_another_gpu_than_the_current_one() -> None:
    buffer = ReplayBuffer(300, FIELDS, sampler=EVERYTHING, device="cuda:1")
    keys = buffer.add(**OnGpu(400, 400, EVERYTHING).given(0, "cuda:1"))
    step = buffer.capture(64, lambda batch: (powers(batch.key), batch))
    for _ in range(9):
        drawn = step()
    assert (step.captured, torch.cuda.current_device()) == (True, 0)
    assert keys.device == drawn.x.device == torch.device("cuda", 1)
    assert drawn.n.tolist() == drawn.key.tolist()
    check_sums(buffer._state.masses)
