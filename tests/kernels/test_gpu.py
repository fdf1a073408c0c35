"""What only a GPU shows: no call waits for it, graphs replay, thousands of threads at once leave exact integers.

The kernels' arithmetic is tested without one, interpreted (test_kernels_against_host.py, test_trajectory_kernels_*.py);
the same tests run here too.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from gpu_twins import (
    EVERYTHING,
    EXACT,
    FIELDS,
    KINDS,
    MODES,
    NUMBER,
    SAMPLERS,
    OnGpu,
    busy,
    graph_of,
    look_while_another_adds,
    powers,
    scalar,
    waiting_is_an_error,
)
from tolerances import close
from torch import Tensor
from trees import check_sums
from twins import check_batches

from gpu_replay import Field, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.ops.counters import Counter

pytestmark = pytest.mark.gpu


def check_stats(both: OnGpu) -> None:
    mine, other = (asdict(buffer.stats()) for buffer in (both.gpu, both.host))
    # samplers without priorities have none to tell of
    numbers = [[0.0 if math.isnan(value) else value for value in each.values()] for each in (mine, other)]
    assert close(numbers[0], numbers[1], "statistic"), (mine, other)


def check_sequences(both: OnGpu, *sizes: int) -> None:
    """Fail unless both draw the same sequences."""
    expected, found = both.call("sample_sequences", *sizes)
    check_batches(found, expected)


# waiting


def test_torch_notices_a_wait() -> None:
    x = torch.ones(3, device="cuda")
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_no_call_waits_for_the_device(name: str, kind: str) -> None:
    steps = kind != "transitions"
    rows = 16 if steps else 300
    both = OnGpu(4096 if steps else 1000, rows, SAMPLERS[name], kind, random_shift=2)
    buffer, first = both.gpu, scalar(0)
    some = torch.arange(16, device="cuda") == 3
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
        batch = buffer.sample(64)
        buffer.sample(200, beta=0.5)
        buffer.update_priorities(batch.key, powers(batch.key))
        buffer.update_priorities(batch.key, batch.weight.requires_grad_())
        buffer.update_priorities(late, given)
        if steps:
            buffer.sample_sequences(16, 6, 2)
            buffer.begin_episodes(some)
        else:
            buffer.add(**odd)
            # casts, values with gaps between them
            buffer.add(**doubles)
            buffer.add(**{field: value[::2] for field, value in both.given(0, own=False).items()})

    before = 0
    if steps:
        for _ in range(260):
            add(True)
        for _ in range(3):
            cycle()
        # the host asks once more, now that the ring is full
        assert buffer._engine.count_at_least(10**9, 0) > 1500
        before = (260 + 2 * 3) * rows
    with waiting_is_an_error():
        for _ in range(8):
            cycle()
    assert buffer.added == before + 8 * (2 * rows + (0 if steps else 7 + 5 + 150))
    assert buffer.stats().stale_updates >= 8


@pytest.mark.parametrize("kind", ["transitions", "same_step"])
def test_memory_does_not_grow(kind: str) -> None:
    both = OnGpu(1000, 8, EVERYTHING, kind)
    both.add(20)
    buffer, first = both.gpu, scalar(160)

    def cycle() -> None:
        buffer.add(**both.given(first))
        first.add_(8)
        keys = buffer.sample(128).key
        buffer.update_priorities(keys, powers(keys))

    cycle()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        cycle()
    assert torch.cuda.memory_allocated() == before


# graphs


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_replayed_sample_draws_anew(name: str) -> None:
    both = OnGpu(500, 620, SAMPLERS[name])
    both.add()
    graph, batch = graph_of(lambda: both.gpu.sample(65))
    both.host.sample(65)
    seen = set()
    for _ in range(45):
        graph.replay()
        expected = both.host.sample(65)
        check_batches(batch, expected)
        assert batch.n.tolist() == batch.key.tolist()
        seen.add(tuple(expected.key.tolist()))
    assert len(seen) == (1 if name == "latest" else 45)
    # the schedule has gone on, also past its end
    assert int(both.gpu._counters[Counter.STEP]) == 46
    both.check()
    both.draw(33)


@pytest.mark.parametrize("name", ["uniform", "everything", "combined-everything", "rank", "combined-rank"])
def test_a_replayed_draw_of_sequences(name: str) -> None:
    both = OnGpu(600, 4, SAMPLERS[name], "next_step")
    both.add(190)
    graph, batch = graph_of(lambda: both.gpu.sample_sequences(20, 6, 3))
    both.host.sample_sequences(20, 6, 3)
    for _ in range(20):
        graph.replay()
        check_batches(batch, both.host.sample_sequences(20, 6, 3))
    both.check()


@pytest.mark.parametrize("rows", [1, 7, 64, 150])
@pytest.mark.parametrize("name", ["uniform", "exact", "everything"])
def test_a_replayed_add_moves_the_ring(name: str, rows: int) -> None:
    both, first = OnGpu(100, rows, SAMPLERS[name]), scalar(0)
    gpu, host = both.gpu, both.host

    def add() -> Tensor:
        given = both.given(first)
        first.add_(rows)
        return gpu.add(**given)

    graph, keys = graph_of(add)
    for time in range(12):
        expected = host.add(**both.given(time * rows, "cpu"))
        if time:
            graph.replay()
            assert keys.tolist() == expected.tolist()
    assert (gpu.added, len(gpu)) == (12 * rows, min(100, 12 * rows))
    both.check()
    live = torch.arange(host.added - len(host), host.added)
    assert torch.equal(gpu[live.cuda()].x.cpu(), host[live].x)
    # more than the host knows of: it asks the device
    both.draw(min(100, 12 * rows))
    check_stats(both)


def test_a_replayed_add_of_a_step_takes_what_lies_in_its_tensors() -> None:
    both = OnGpu(60, 6, EVERYTHING, "few finals", every=3)
    given = both.given(0)
    graph, keys = graph_of(lambda: both.gpu.add(**given))
    both.host.add(**both.given(0, "cpu"))
    for number in range(1, 40):
        for name, value in both.given(6 * number).items():
            given[name].copy_(value)
        graph.replay()
        expected = both.host.add(**both.given(6 * number, "cpu"))
        assert keys.tolist() == expected.tolist()
        both.check()
    assert int(both.gpu._counters[Counter.FINALS]) > 9


def test_a_replayed_update_takes_what_lies_in_its_tensors() -> None:
    both = OnGpu(300, 450, EVERYTHING)
    both.add(own=False)
    keys = torch.arange(120, 220, device="cuda")
    priorities = powers(keys)
    graph, _ = graph_of(lambda: both.gpu.update_priorities(keys, priorities))
    both.update_drawn(keys.cpu())
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        # late and repeated ones among them
        drawn = torch.randint(100, 460, (100,), generator=generator)
        keys.copy_(drawn)
        priorities.copy_(powers(drawn * 3))
        graph.replay()
        both.host.update_priorities(drawn, powers(drawn * 3))
        both.check()
    assert both.gpu.stats().stale_updates > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_replayed_cycle_of_add_sample_and_update(name: str, kind: str) -> None:
    both, first = OnGpu(1000, 8, SAMPLERS[name], kind, random_shift=1), scalar(600)
    both.add(75)
    gpu, host = both.gpu, both.host

    def cycle() -> Any:
        gpu.add(**both.given(first))
        first.add_(8)
        batch = gpu.sample(200)
        gpu.update_priorities(batch.key, powers(batch.key))
        return batch

    graph, batch = graph_of(cycle)
    for time in range(150):
        host.add(**both.given(600 + 8 * time, "cpu"))
        expected = host.sample(200)
        both.update_drawn(expected.key)
        if time:
            graph.replay()
            check_batches(batch, expected)
    both.check()
    check_stats(both)
    # the host does not know how often the add was replayed, and asks
    both.draw(50)
    if kind != "transitions":
        check_sequences(both, 9, 3)
    both.add(3)
    both.check()


@pytest.mark.parametrize("kind", ["transitions", "next_step"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_graph_replayed_after_clear_harms_nothing(name: str, kind: str) -> None:
    """There is nothing right to draw then; it must end, stay inside, and leave a buffer that works."""
    both = OnGpu(300, 5, SAMPLERS[name], kind)
    both.add(80)
    gpu = both.gpu
    graph, batch = graph_of(lambda: gpu.sample(128))
    both.call("clear")
    graph.replay()
    torch.cuda.synchronize()
    assert batch["x" if kind == "transitions" else "obs"].shape[0] == 128
    both.add(2)
    graph.replay()
    torch.cuda.synchronize()
    if kind == "transitions" and not name.startswith(("latest", "combined")):
        assert set(batch.key.tolist()) <= set(range(400, 410))
    both.add(60)
    assert (len(gpu), gpu.stats().eligible) == (len(both.host), both.host.stats().eligible)
    found = gpu.sample(100)
    assert found["n" if kind == "transitions" else "action"].tolist() == found.key.tolist()
    for tree in (gpu._state.tree, gpu._state.eligible_tree):
        if tree is not None:
            check_sums(tree)


# many threads at once


@pytest.mark.parametrize("name", SAMPLERS)
def test_long_sequences_draw_what_the_host_draws(name: str) -> None:
    both = OnGpu(100_003, 1, SAMPLERS[name])
    for time in range(60):
        both.add(rows=(1, 8, 4096, 70_001)[time % 4], own=time % 3 == 0)
        if time < 3:
            continue
        expected = both.draw(4096)
        assert expected.n.tolist() == expected.key.tolist()
        keys = torch.cat((expected.key, expected.key[:100], expected.key[::7] - 50_000))
        both.update(keys, powers(keys + time))
    both.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["uniform", "exact", "combined-everything", "rank", "rank-everything"])
def test_thousands_of_environments_at_once(name: str, mode: str) -> None:
    """Every sum is right though thousands of threads change it, and rows of final observations go by environment."""
    both = OnGpu(5003 * 20, 5003, SAMPLERS[name], mode, every=5)
    for time in range(9):
        both.add(5, own=time % 2 > 0)
        both.check()
        both.draw(4096)


@pytest.mark.parametrize("mode", MODES)
def test_shifted_pictures_are_those_of_the_host(mode: str) -> None:
    both = OnGpu(500, 5, EXACT, mode, random_shift=3)
    both.add(120)
    for _ in range(5):
        both.draw(130)
        check_sequences(both, 7, 4)
    both.check()


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


def test_large_adds_around_the_end_keep_all_sums() -> None:
    both = OnGpu(1_000_003, 1, EVERYTHING, fields=NUMBER)
    for rows in (600_000, 1, 700_000, 3_000_000, 129):
        both.add(rows=rows)
        both.check()


# streams, threads, memory of others


@pytest.mark.parametrize("kind", ["transitions", "next_step"])
def test_threads_on_streams_of_their_own_never_tear_a_row(kind: str) -> None:
    steps = kind != "transitions"
    both = OnGpu(4_000 if steps else 5_000, 400 if steps else 4_000, EXACT, kind)
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_buffer_on_another_gpu_than_the_current_one() -> None:
    rows = OnGpu(400, 400, EVERYTHING).given(0, "cuda:1")
    with torch.cuda.device(0):
        buffer = ReplayBuffer(300, FIELDS, sampler=EVERYTHING, device="cuda:1")
        keys = buffer.add(**rows)
        batch = buffer.sample(64)
        buffer.update_priorities(batch.key, powers(batch.key))
        assert torch.cuda.current_device() == 0
    assert keys.device == batch.x.device == torch.device("cuda", 1)
    assert batch.n.tolist() == batch.key.tolist()
    check_sums(buffer._state.masses)
