"""What only a GPU shows: no call waits for it, graphs replay, thousands of threads at once leave exact integers.

The kernels' arithmetic is tested without one, interpreted (test_kernels_against_host.py); the same tests run here too.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from tolerances import close
from torch import Tensor
from trees import check_sums

from gpu_replay import Combined, Field, Latest, LinearSchedule, Proportional, RankBased, ReplayBuffer, Uniform
from gpu_replay.ops.counters import Counter

pytestmark = pytest.mark.gpu

FIELDS = {"x": Field((4,), torch.float32), "n": Field((), torch.int64)}
# masses that no library rounds differently come from powers of two and alpha 1
EXACT = Proportional(alpha=1.0, beta=LinearSchedule(0.0, 1.0, 40), eps=0.0)
EVERYTHING = Proportional(1.0, LinearSchedule(0.4, 1.0, 30), 0.0, 2.0**12, initial="stored", normalize="buffer")
SAMPLERS: dict[str, Any] = {
    "uniform": Uniform(),
    "replacement": Uniform(replacement=True),
    "latest": Latest(),
    "exact": EXACT,
    "everything": EVERYTHING,
    "independent": Proportional(alpha=1.0, eps=0.0, stratified=False),
    "combined-uniform": Combined(Uniform()),
    "combined-everything": Combined(EVERYTHING, newest=3),
    "rank": RankBased(beta=LinearSchedule(0.0, 1.0, 40)),
    "rank-outdated": RankBased(initial="stored", normalize="buffer", resort_every=3),
    "rank-independent": RankBased(alpha=1.0, initial=3.0, stratified=False),
    "combined-rank": Combined(RankBased(resort_every=2), newest=3),
}


def pair(capacity: int, sampler: Any, fields: dict[str, Field] | None = None) -> tuple[ReplayBuffer, ReplayBuffer]:
    """A buffer on the GPU and one of the host code with the same seed."""
    made = [ReplayBuffer(capacity, fields or FIELDS, sampler=sampler, device=d, seed=5) for d in ("cuda", "cpu")]
    return made[0], made[1]


def numbered(first: int | Tensor, rows: int, device: torch.device | str) -> dict[str, Tensor]:
    """Transitions that carry their number in every field; `first` may be on the device."""
    n = torch.arange(rows, device=device) + first
    return {"x": n[:, None].float() + torch.arange(4, device=device) / 4, "n": n}


def powers(keys: Tensor) -> Tensor:
    """A priority for each key, a power of two from 2**-4 to 2**11, without waiting."""
    return torch.bitwise_left_shift(torch.ones_like(keys), (keys * 7919) % 16).double() / 16


def check_same(gpu: ReplayBuffer, host: ReplayBuffer) -> None:
    """Fail unless both hold the same integers and the same transitions."""
    assert gpu._counters.tolist() == host._counters.tolist()
    for mine, other in zip(gpu._storage.tensors.values(), host._storage.tensors.values(), strict=True):
        stored = min(host.added, host.capacity)
        assert torch.equal(mine[:stored].cpu(), other[:stored])
    assert torch.equal(gpu._storage.times_sampled.cpu(), host._storage.times_sampled)
    if gpu._state.tree is not None:
        assert torch.equal(gpu._state.tree.masses.cpu(), host._state.tree.masses)
        check_sums(gpu._state.tree)
    if gpu._plan.kind == "mass":
        assert torch.equal(gpu.masses(), gpu._state.tree.masses)
        assert gpu.total_mass() == host.total_mass()


def check_stats(gpu: ReplayBuffer, host: ReplayBuffer) -> None:
    mine, other = asdict(gpu.stats()), asdict(host.stats())
    # samplers without priorities have none to tell of
    numbers = [[0.0 if math.isnan(value) else value for value in each.values()] for each in (mine, other)]
    assert close(numbers[0], numbers[1], "statistic"), (mine, other)


def check_drawn(found: Any, expected: Any) -> None:
    assert found.key.tolist() == expected.key.tolist()
    assert found.n.tolist() == found.key.tolist()
    assert torch.equal(found.x.cpu(), expected.x)
    assert close(found.probability.cpu(), expected.probability, "probability")
    assert close(found.weight.cpu(), expected.weight, "weight")


# waiting


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch says once that this mode does not see everything
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_torch_notices_a_wait() -> None:
    x = torch.ones(3, device="cuda")
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_call_waits_for_the_device(name: str) -> None:
    buffer = ReplayBuffer(1000, FIELDS, sampler=SAMPLERS[name], device="cuda")
    transitions = numbered(0, 300, "cuda")
    odd = numbered(300, 7, "cuda")
    doubles = {"x": torch.zeros(5, 4, dtype=torch.float64, device="cuda"), "n": odd["n"][:5].to(torch.int32)}
    late = torch.tensor([-1, 5, 5, 10**12], device="cuda")
    given = torch.tensor([1.0, 2.0, float("nan"), 1.0], device="cuda")
    with waiting_is_an_error():
        for _ in range(4):
            buffer.add(**transitions, priority=powers(transitions["n"]))
            buffer.add(**odd)
            # casts, values with gaps between them
            buffer.add(**doubles)
            buffer.add(**{field: value[::2] for field, value in transitions.items()})
            batch = buffer.sample(64)
            buffer.sample(200, beta=0.5)
            buffer.update_priorities(batch.key, powers(batch.key))
            buffer.update_priorities(batch.key, batch.weight.requires_grad_())
            buffer.update_priorities(late, given)
    assert buffer.added == 4 * (300 + 7 + 5 + 150)
    assert buffer.stats().stale_updates >= 8


def test_memory_does_not_grow() -> None:
    buffer = ReplayBuffer(1000, FIELDS, sampler=EVERYTHING, device="cuda")
    transitions = numbered(0, 100, "cuda")

    def cycle() -> None:
        buffer.add(**transitions)
        keys = buffer.sample(128).key
        buffer.update_priorities(keys, powers(keys))

    cycle()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        cycle()
    assert torch.cuda.memory_allocated() == before


# graphs


def graph_of(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Make the call once on a stream of its own, so that all is compiled, then capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_replayed_sample_draws_anew(name: str) -> None:
    gpu, host = pair(500, SAMPLERS[name])
    for buffer in (gpu, host):
        rows = numbered(0, 620, buffer.device)
        buffer.add(**rows, priority=powers(rows["n"]))
    graph, batch = graph_of(lambda: gpu.sample(65))
    host.sample(65)
    seen = set()
    for _ in range(45):
        graph.replay()
        expected = host.sample(65)
        check_drawn(batch, expected)
        seen.add(tuple(expected.key.tolist()))
    assert len(seen) == (1 if name == "latest" else 45)
    # the schedule has gone on, also past its end
    assert int(gpu._counters[Counter.STEP]) == 46
    check_same(gpu, host)
    check_drawn(gpu.sample(33), host.sample(33))


@pytest.mark.parametrize("rows", [1, 7, 64, 150])
@pytest.mark.parametrize("name", ["uniform", "exact", "everything"])
def test_a_replayed_add_moves_the_ring(name: str, rows: int) -> None:
    gpu, host = pair(100, SAMPLERS[name])
    first = torch.zeros((), dtype=torch.int64, device="cuda")

    def add() -> Tensor:
        transitions = numbered(first, rows, "cuda")
        first.add_(rows)
        return gpu.add(**transitions, priority=powers(transitions["n"]))

    graph, keys = graph_of(add)
    for time in range(12):
        if time:
            graph.replay()
        transitions = numbered(time * rows, rows, "cpu")
        expected = host.add(**transitions, priority=powers(transitions["n"]))
        if time:
            assert keys.tolist() == expected.tolist()
    assert (gpu.added, len(gpu)) == (12 * rows, min(100, 12 * rows))
    check_same(gpu, host)
    live = torch.arange(host.added - len(host), host.added)
    assert torch.equal(gpu[live.cuda()].x.cpu(), host[live].x)
    # more than the host knows of: it asks the device
    check_drawn(gpu.sample(min(100, 12 * rows)), host.sample(min(100, 12 * rows)))
    check_stats(gpu, host)


def test_a_replayed_update_takes_what_lies_in_its_tensors() -> None:
    gpu, host = pair(300, EVERYTHING)
    for buffer in (gpu, host):
        buffer.add(**numbered(0, 450, buffer.device))
    keys = torch.arange(120, 220, device="cuda")
    priorities = powers(keys)
    graph, _ = graph_of(lambda: gpu.update_priorities(keys, priorities))
    host.update_priorities(keys.cpu(), priorities.cpu())
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        # late and repeated ones among them
        drawn = torch.randint(100, 460, (100,), generator=generator)
        keys.copy_(drawn)
        priorities.copy_(powers(drawn * 3))
        graph.replay()
        host.update_priorities(drawn, powers(drawn * 3))
        check_same(gpu, host)
    assert gpu.stats().stale_updates > 0


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_replayed_cycle_of_add_sample_and_update(name: str) -> None:
    gpu, host = pair(1000, SAMPLERS[name])
    first = torch.full((), 600, dtype=torch.int64, device="cuda")
    for buffer in (gpu, host):
        buffer.add(**numbered(0, 600, buffer.device))

    def cycle() -> Any:
        gpu.add(**numbered(first, 8, "cuda"))
        first.add_(8)
        batch = gpu.sample(256)
        gpu.update_priorities(batch.key, powers(batch.key))
        return batch

    graph, batch = graph_of(cycle)
    for time in range(100):
        if time:
            graph.replay()
        host.add(**numbered(600 + 8 * time, 8, "cpu"))
        expected = host.sample(256)
        host.update_priorities(expected.key, powers(expected.key))
        if time:
            check_drawn(batch, expected)
    check_same(gpu, host)
    check_stats(gpu, host)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_graph_replayed_after_clear_harms_nothing(name: str) -> None:
    """There is nothing right to draw then; it must end, stay inside, and leave a buffer that works."""
    buffer = ReplayBuffer(300, FIELDS, sampler=SAMPLERS[name], device="cuda")
    buffer.add(**numbered(0, 400, "cuda"))
    graph, batch = graph_of(lambda: buffer.sample(128))
    buffer.clear()
    graph.replay()
    torch.cuda.synchronize()
    assert batch.x.shape == (128, 4)
    buffer.add(**numbered(400, 10, "cuda"))
    graph.replay()
    torch.cuda.synchronize()
    if not name.startswith(("latest", "combined")):
        assert set(batch.key.tolist()) <= set(range(400, 410))
    buffer.add(**numbered(410, 300, "cuda"))
    assert len(buffer) == 300
    found = buffer.sample(200)
    assert found.n.tolist() == found.key.tolist()
    if buffer._state.tree is not None:
        check_sums(buffer._state.tree)


# many threads at once


@pytest.mark.parametrize("name", SAMPLERS)
def test_long_sequences_draw_what_the_host_draws(name: str) -> None:
    gpu, host = pair(100_003, SAMPLERS[name])
    for time in range(60):
        rows = (1, 8, 4096, 70_001)[time % 4]
        for buffer in (gpu, host):
            transitions = numbered(buffer.added, rows, buffer.device)
            buffer.add(**transitions, priority=powers(transitions["n"]) if time % 3 == 0 else None)
        if time < 3:
            continue
        found, expected = gpu.sample(4096), host.sample(4096)
        check_drawn(found, expected)
        keys = torch.cat((expected.key, expected.key[:100], expected.key[::7] - 50_000))
        priorities = powers(keys + time)
        gpu.update_priorities(keys.cuda(), priorities.cuda())
        host.update_priorities(keys, priorities)
    check_same(gpu, host)


@pytest.mark.parametrize("different", [1, 130, 5_000, 900_000])
def test_a_million_updates_at_once(different: int) -> None:
    """The last of each repeated key wins, and no difference is lost on the way up."""
    capacity, batch = 1_000_003, 1 << 20
    buffer = ReplayBuffer(capacity, {"n": FIELDS["n"]}, sampler=EVERYTHING, device="cuda")
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
        buffer.sample(5)
        check_sums(buffer._state.masses)
    assert (buffer._engine.draws.masses.stamps == -1).all()


@pytest.mark.parametrize("batch", [1, 100_003, 1 << 20])
def test_a_million_draws_at_once_are_counted(batch: int) -> None:
    buffer = ReplayBuffer(3_000_001, {"n": FIELDS["n"]}, sampler=EXACT, device="cuda")
    n = torch.arange(3_000_001, device="cuda")
    buffer.add(n=n, priority=torch.where(n % 1000 == 0, 2.0**11, 2.0**-4))
    drawn = buffer.sample(batch)
    keys = drawn.key
    assert bool((keys[1:] >= keys[:-1]).all())
    assert torch.equal(drawn.n, keys)
    counts = torch.bincount(keys, minlength=3_000_001)
    assert torch.equal(counts, buffer._storage.times_sampled.long())
    assert int(buffer._counters[Counter.TICKET]) == 0


def test_large_adds_around_the_end_keep_all_sums() -> None:
    gpu, host = pair(1_000_003, EVERYTHING, {"n": FIELDS["n"]})
    for rows in (600_000, 1, 700_000, 3_000_000, 129):
        for buffer in (gpu, host):
            n = torch.arange(rows, device=buffer.device) + buffer.added
            buffer.add(n=n, priority=powers(n))
        check_same(gpu, host)


# streams, threads, memory of others


def look_while_another_adds(
    add: Callable[[int], Any], look: Callable[[], Any], enough: Callable[[], bool] = lambda: True
) -> None:
    """Add 200 times, or until there was enough, in a thread and a stream; fail if a look in another one is not true."""
    failures: list[str] = []
    done = threading.Event()

    def run() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                turn = 0
                while (turn < 200 or not enough()) and not failures:
                    add(turn)
                    turn += 1
        except Exception as error:
            failures.append(repr(error))
        finally:
            done.set()

    thread = threading.Thread(target=run)
    thread.start()
    with torch.cuda.stream(torch.cuda.Stream()):
        while not done.is_set() and not failures:
            if not bool(look()):
                failures.append("torn")
    thread.join()
    assert failures == []
    torch.cuda.synchronize()


def test_threads_on_streams_of_their_own_never_tear_a_transition() -> None:
    buffer = ReplayBuffer(5_000, FIELDS, sampler=EXACT, device="cuda")
    buffer.add(**numbered(0, 5_000, "cuda"))
    torch.cuda.synchronize()

    def look() -> Tensor:
        batch = buffer.sample(2_048)
        buffer.update_priorities(batch.key, powers(batch.key))
        return (batch.n == batch.key).all() & (batch.x[:, 0] == batch.n.float()).all()

    look_while_another_adds(lambda turn: buffer.add(**numbered(buffer.added, 4_000, "cuda")), look)
    check_sums(buffer._state.masses)


def test_pinned_memory_may_be_filled_anew_at_once() -> None:
    buffer = ReplayBuffer(100_000, {"x": Field((512,), torch.float32)}, device="cuda")
    pinned = torch.empty(20_000, 512).pin_memory()
    # keeps the device busy, so that a copy that is not waited for comes late
    busy = torch.randn(4096, 4096, device="cuda")
    for time in range(4):
        for _ in range(20):
            busy = busy @ busy / 4096
        pinned.fill_(time)
        buffer.add(x=pinned)
        pinned.fill_(-1)
    for time in range(4):
        assert bool((buffer._storage.tensors["x"][20_000 * time : 20_000 * (time + 1)] == time).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_buffer_on_another_gpu_than_the_current_one() -> None:
    with torch.cuda.device(0):
        buffer = ReplayBuffer(300, FIELDS, sampler=EVERYTHING, device="cuda:1")
        keys = buffer.add(**numbered(0, 400, "cuda:1"))
        batch = buffer.sample(64)
        buffer.update_priorities(batch.key, powers(batch.key))
        assert torch.cuda.current_device() == 0
    assert keys.device == batch.x.device == torch.device("cuda", 1)
    assert batch.n.tolist() == batch.key.tolist()
    check_sums(buffer._state.masses)
