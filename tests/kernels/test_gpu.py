"""What only a GPU shows: no call waits for it, graphs replay, thousands of threads at once leave exact integers.

Arithmetic is tested without one, interpreted, by tests of this folder that run here too. Streams and threads are in
`test_gpu_streams.py`. What has an `amount` is rehearsed without a GPU by `test_capture_graphs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from gpu_twins import (
    CASES,
    EVERYTHING,
    EXACT,
    MODES,
    NUMBER,
    REHEARSED,
    SAMPLERS,
    OnGpu,
    amount,
    graph_of,
    powers,
    waiting_is_an_error,
)
from test_compile import inductor_warns
from tolerances import close
from torch import Tensor
from trees import check_sums
from twins import check_batches

from gpu_replay import Batch, RankBased, ReplayBuffer
from gpu_replay.graphs.cuda_graph import WARM_UPS
from gpu_replay.ops.counters import Counter

pytestmark = pytest.mark.gpu


def check_stats(both: OnGpu) -> None:
    mine, other = (asdict(buffer.stats()) for buffer in (both.gpu, both.host))
    # samplers without priorities have none to tell of
    numbers = [[0.0 if math.isnan(value) else value for value in each.values()] for each in (mine, other)]
    assert close(numbers[0], numbers[1], "statistic"), (mine, other)


# waiting


WAITS: list[Callable[[Tensor], object]] = [
    *(Tensor.item, Tensor.tolist, Tensor.cpu, bool, torch.nonzero, lambda x: x[x > 0], lambda x: torch.equal(x, x)),
    # what torch says nothing of on a GPU
    *(torch.unique, lambda x: x.to("cpu", non_blocking=True), lambda x: torch.cuda.synchronize())[: 3 * REHEARSED],
]


def test_torch_notices_a_wait() -> None:
    x = torch.ones(1, device="cuda")
    with waiting_is_an_error():
        for wait in WAITS:
            with pytest.raises(RuntimeError, match="synchroniz"):
                wait(x)


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
        if both.steps:
            buffer.begin_episodes(some)
            if both.draws_sequences:
                buffer.sample_sequences(rows, 6, 2)
        else:
            buffer.add(**odd)
            # casts, values with gaps between them
            buffer.add(**doubles)
            buffer.add(**{field: value[::2] for field, value in both.given(0, own=False).items()})

    for _ in range(amount(3, 1)):
        cycle()
    # the host asks once more, now that the ring is full
    assert buffer._engine.count_at_least(10**9, 0) > amount(1500, 30)
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
        return [batch, *([buffer.sample_sequences(9, 6, 3)] if both.draws_sequences else [])]

    def moving() -> list[Batch]:
        batches = cycle(both.gpu)
        first.add_(rows)
        return batches

    graph, batches = graph_of(moving)
    first.fill_(both.host.added)
    seen = set()
    for time in range(times := amount(150, 4)):
        expected = cycle(both.host)
        if time:
            graph.replay()
            for found, wanted in zip(batches, expected, strict=True):
                check_batches(found, wanted)
        else:
            first.add_(rows)
        seen.add(tuple(expected[0].key.tolist()))
    assert len(seen) == times
    both.check()
    check_stats(both)
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
        both.update_drawn(expected.key)
        check_batches(found, expected)
        assert step.captured == (time >= WARM_UPS)
        if time == amount(60, 4):
            gpu.load_state_dict(host.state_dict())
    both.check()
    check_stats(both)
    assert (gpu.added, step.replays) == (host.added, times - WARM_UPS)
    # the host counted the adds: it knows of enough without asking
    gpu._engine.count_at_least(10**9, 0)
    step()
    memory = torch.cuda.memory_allocated()
    with waiting_is_an_error():
        gpu.sample(amount(50, 9))
        for _ in range(amount(20, 2)):
            step()
    assert torch.cuda.memory_allocated() == memory


@pytest.mark.parametrize("what", ["item", "mask", "copy", "host add"])
def test_what_cannot_be_captured_is_named_and_harms_nothing(what: str) -> None:
    both = OnGpu(300, 300, EXACT)
    both.add(own=False)
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


# compiled steps; what compilers make of the operators is tested without a GPU in test_compile.py


@pytest.fixture(name="compiler")
def compiler_fixture() -> Iterator[Any]:
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


@inductor_warns
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("kind", ["transitions", "next_step"])
@pytest.mark.parametrize("name", ["uniform", "everything", "combined-rank"])
def test_compiled_steps_are_those_of_the_host(name: str, kind: str, mode: str, compiler: Any) -> None:
    """With graphs of the compiler's own, asked for or not, every call is made at every step."""
    both = OnGpu(1000, 8, SAMPLERS[name], kind)
    both.add(40)

    def step(buffer: Any, more: dict[str, Tensor]) -> tuple[Batch, Tensor]:
        buffer.add(**more)
        batch = buffer.sample(96)
        buffer.update_priorities(batch.key, powers(batch.key))
        return batch, (batch.weight * 3).tanh()

    quick = compiler(step, fullgraph=True, mode=mode)
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
def test_a_captured_step_may_learn_through_compiled_code(compiler: Any) -> None:
    both = OnGpu(1000, 100, EVERYTHING)
    both.add(7, own=False)

    def learn(batch: Batch) -> tuple[Tensor, Batch]:
        return powers(batch.key) + batch.x.abs().sum() * 0, batch

    step, plain = both.gpu.capture(64, compiler(learn, fullgraph=True)), both.host.capture(64, learn)
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
def test_a_million_updates_at_once(different: int) -> None:
    """The last of each repeated key wins, and no difference is lost on the way up."""
    capacity, batch = 1_000_003, 1 << 20
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
        buffer.sample(5)
        check_sums(buffer._state.masses)
    assert (buffer._engine.draws.masses.stamps == -1).all()


@pytest.mark.parametrize("batch", [1, 100_003, 1 << 20])
def test_a_million_draws_at_once_are_counted(batch: int) -> None:
    buffer = ReplayBuffer(3_000_001, NUMBER, sampler=EXACT, device="cuda")
    n = torch.arange(3_000_001, device="cuda")
    buffer.add(n=n, priority=torch.where(n % 1000 == 0, 2.0**11, 2.0**-4))
    drawn = buffer.sample(batch)
    keys = drawn.key
    assert bool((keys[1:] >= keys[:-1]).all())
    assert torch.equal(drawn.n, keys)
    counts = torch.bincount(keys, minlength=3_000_001)
    assert torch.equal(counts, buffer._storage.times_sampled.long())
    assert int(buffer._counters[Counter.TICKET]) == 0


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
