"""Every kernel against the host code of the same operation: integers are equal, nothing is written outside.

On CPU tensors the kernels are interpreted. In a process without `TRITON_INTERPRET=1` that part is done by one more
process, which the first test starts; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from guards import Guards, guarded
from tolerances import close
from torch import Tensor
from trees import check_sums, random_masses

from gpu_replay import Combined, Field, Latest, LinearSchedule, Proportional, ReplayBuffer, Uniform
from gpu_replay.ops.counters import NO_MASS, Counter, HostWords, new_counters
from gpu_replay.ops.mass_tree import STALE_EDGE, MassTree
from gpu_replay.ops.ring import carrier, gather_rows, launch_gather
from gpu_replay.ops.stratified_draw import draw_slots, importance_weights, launch_stratified_draw, launch_weigh
from gpu_replay.ops.uniform_draw import PERMUTATION_WORDS, independent_ranks, launch_uniform_draw, permuted_ranks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
SIZES = (1, 2, 127, 128, 129, 4095)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_the_interpreted_kernels_in_a_process_of_their_own() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Skip what cannot run in this process."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu" and not INTERPRETED:
        pytest.skip("interpreted in a process of its own")


@pytest.fixture
def guards() -> Iterator[Guards]:
    with guarded() as guards:
        yield guards


# the tree, and draws from it


def tree_of(masses: np.ndarray, device: str, **edges: bool) -> MassTree:
    tree = MassTree(masses.size, torch.device(device), "triton", **edges)
    tree.masses.copy_(torch.from_numpy(masses))
    tree.build()
    return tree


def host_tree_of(masses: np.ndarray) -> MassTree:
    tree = MassTree(masses.size, CPU, "host")
    tree.masses.copy_(torch.from_numpy(masses))
    tree.build()
    return tree


@pytest.mark.parametrize("slots", [*SIZES, 20_000, 100_003])
def test_building_a_tree(slots: int, device: str, guards: Guards) -> None:
    tree = tree_of(random_masses(slots, slots, 2**62 // slots), device, low=True, high=True)
    assert len(guards) > len(tree.levels)
    check_sums(tree)


@pytest.mark.parametrize("stratified", [True, False], ids=["stratified", "independent"])
@pytest.mark.parametrize(
    "slots, batch, drawn",
    [(1, 1, 1), (1, 129, 128), (2, 5, 5), (127, 128, 127), (129, 129, 129), (4095, 33, 30), (100_003, 257, 257)],
)
def test_draws_by_mass(slots: int, batch: int, drawn: int, stratified: bool, device: str, guards: Guards) -> None:
    masses = random_masses(slots, slots + batch, 2**62 // slots)
    tree = tree_of(masses, device, low=True)
    counters = new_counters(torch.device(device), seed=-9)
    added, block = 3 * slots + max(slots // 3, batch), 7
    counters[Counter.ADDED], counters[Counter.RANDOM] = added, block
    times_sampled = torch.zeros(slots, dtype=torch.int32, device=device)
    doubles = HostWords(-9).doubles(block, drawn)
    expected, drawn_masses, total = draw_slots(host_tree_of(masses), doubles, stratified)
    newest = np.arange(added - (batch - drawn), added)
    slots_expected = np.concatenate((expected, newest % slots))

    for lowest_of_all in (False, True):
        counters[Counter.EDGE_LOW] = NO_MASS
        times_sampled.zero_()
        found_slots, keys, found_masses, probability = launch_stratified_draw(
            tree, counters, times_sampled, drawn, batch, stratified=stratified, lowest_of_all=lowest_of_all
        )
        assert found_slots.tolist() == slots_expected.tolist()
        live = np.arange(added - slots, added)
        assert keys.tolist() == [*(int(live[live % slots == slot][0]) for slot in expected), *newest.tolist()]
        assert found_masses.tolist() == [*drawn_masses.tolist(), *[0] * (batch - drawn)]
        assert close(probability, [*(drawn_masses / total).tolist(), *[1.0] * (batch - drawn)], "probability")
        assert times_sampled.tolist() == np.bincount(slots_expected, minlength=slots).tolist()
        lowest = masses[masses > 0].min() if lowest_of_all else drawn_masses.min()
        assert int(counters[Counter.EDGE_LOW]) == lowest
        # the position of the stream moves on with the weights
        assert int(counters[Counter.RANDOM]) == block
    check_sums(tree)
    assert not (tree.low == STALE_EDGE).any()


def test_only_blocks_that_changed_are_looked_at_again(device: str, guards: Guards) -> None:
    masses = np.full(1000, 50, dtype=np.int64)
    tree = tree_of(masses, device, low=True)
    counters = new_counters(torch.device(device), seed=0)
    times_sampled = torch.zeros(1000, dtype=torch.int32, device=device)
    draw = {"drawn": 3, "batch": 3, "stratified": True, "lowest_of_all": True}
    launch_stratified_draw(tree, counters, times_sampled, **draw)
    assert int(counters[Counter.EDGE_LOW]) == 50
    assert tree.low.tolist() == [50] * 8
    # changed behind the tree's back: seen only where a mark says so
    tree.masses[130], tree.masses[700] = 3, 2
    tree.low[130 // 128] = STALE_EDGE
    counters[Counter.EDGE_LOW] = NO_MASS
    launch_stratified_draw(tree, counters, times_sampled, **draw)
    assert int(counters[Counter.EDGE_LOW]) == 3
    assert tree.low.tolist() == [50, 3, *[50] * 6]


@pytest.mark.parametrize("slots", [1, 129, 20_000])
def test_draws_from_a_tree_without_mass_stay_inside(slots: int, device: str, guards: Guards) -> None:
    """Only a replayed graph can ask for them; they mean nothing, and must harm nothing."""
    tree = tree_of(np.zeros(slots, dtype=np.int64), device)
    counters = new_counters(torch.device(device), seed=0)
    times_sampled = torch.zeros(slots, dtype=torch.int32, device=device)
    found, *_ = launch_stratified_draw(tree, counters, times_sampled, 9, 12, stratified=True, lowest_of_all=False)
    assert int(found.min()) >= 0
    assert int(found.max()) < slots
    assert int(times_sampled.sum()) == 12


@pytest.mark.parametrize("batch", SIZES)
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, 1 / 3, 1e35])
def test_weights(beta: float, batch: int, device: str, guards: Guards) -> None:
    masses = random_masses(batch, batch, 2**40)
    lowest = int(masses[masses > 0].min())
    counters = new_counters(torch.device(device), seed=0)
    counters[Counter.EDGE_LOW] = lowest
    weight = launch_weigh(torch.from_numpy(masses).to(device), counters, None, beta, batch)
    drawn = masses > 0
    expected = np.ones(batch, dtype=np.float32)
    with np.errstate(under="ignore", over="ignore"):
        expected[drawn] = importance_weights(masses[drawn], lowest, beta)
    assert close(weight, expected.tolist(), "weight")
    moved = [int(counters[place]) for place in (Counter.STEP, Counter.TICKET, Counter.EDGE_LOW, Counter.RANDOM)]
    assert moved == [1, 0, NO_MASS, -(-batch // 4)]


def test_weights_have_more_than_the_digits_of_a_float32_beta(device: str) -> None:
    beta, ratio = 0.3, 2.0**-40
    counters = new_counters(torch.device(device), seed=0)
    counters[Counter.EDGE_LOW] = 1
    weight = launch_weigh(torch.tensor([2**40], device=device), counters, None, beta, 1)
    # the nearest float32 to 0.3 would give this off by 2.2e-7
    assert abs(float(weight[0]) / ratio**beta - 1) < 6.1e-8


def test_the_schedule_is_that_of_the_settings(device: str) -> None:
    beta = LinearSchedule(0.25, 1.0, 6)
    schedule = torch.tensor([beta.start, beta.end - beta.start, 6.0], dtype=torch.float64, device=device)
    counters = new_counters(torch.device(device), seed=0)
    masses = torch.tensor([2**20, 1], device=device)
    for step in range(8):
        counters[Counter.EDGE_LOW] = 1
        weight = launch_weigh(masses, counters, schedule, 0.0, 2)
        assert close(weight, [2.0 ** (-20 * beta(step)), 1.0], "weight")


# uniform draws


@pytest.mark.parametrize("replacement", [False, True], ids=["distinct", "replacement"])
@pytest.mark.parametrize(
    "count, capacity, drawn, batch",
    [
        *((count, count, count, count) for count in (1, 2, 3, 5, 62, 63, 64, 65, 127, 128, 129)),
        (129, 4095, 100, 128),
        (4095, 4095, 129, 130),
        (100_003, 100_003, 127, 127),
        (3_000_001, 3_000_001, 4095, 4095),
    ],
)
def test_uniform_draws(
    count: int, capacity: int, drawn: int, batch: int, replacement: bool, device: str, guards: Guards
) -> None:
    added, block = 5 * capacity + 1, 3
    counters = new_counters(torch.device(device), seed=2**63 + 5)
    counters[Counter.ADDED], counters[Counter.FIRST], counters[Counter.RANDOM] = added, added - count, block
    times_sampled = torch.zeros(capacity, dtype=torch.int32, device=device)
    slots, keys, probability, weight = launch_uniform_draw(
        counters, times_sampled, drawn, batch, capacity, replacement=replacement
    )
    random_bits = HostWords(2**63 + 5)
    if replacement:
        ranks = independent_ranks(count, random_bits.doubles(block, drawn))
    else:
        ranks = permuted_ranks(count, drawn, random_bits.words(block, PERMUTATION_WORDS))
    expected = np.concatenate((added - count + ranks, np.arange(added - (batch - drawn), added)))
    assert keys.tolist() == expected.tolist()
    assert slots.tolist() == (expected % capacity).tolist()
    assert close(probability, [*[1 / count] * drawn, *[1.0] * (batch - drawn)], "probability")
    assert weight.tolist() == [1.0] * batch
    assert times_sampled.tolist() == np.bincount(expected % capacity, minlength=capacity).tolist()
    used = drawn if replacement else PERMUTATION_WORDS
    moved = [int(counters[place]) for place in (Counter.STEP, Counter.TICKET, Counter.RANDOM)]
    assert moved == [1, 0, block + -(-used // 4)]


@pytest.mark.parametrize("count", [0, 1, 3, 70])
def test_more_distinct_draws_than_there_are_end_and_stay_inside(count: int, device: str, guards: Guards) -> None:
    """Only a graph replayed after a `clear` can ask for them."""
    counters = new_counters(torch.device(device), seed=1)
    counters[Counter.ADDED], counters[Counter.FIRST] = 200, 200 - count
    times_sampled = torch.zeros(129, dtype=torch.int32, device=device)
    slots, keys, *_ = launch_uniform_draw(counters, times_sampled, 120, 128, 129, replacement=False)
    assert slots.tolist() == [key % 129 for key in keys.tolist()]
    assert set(keys.tolist()[:120]) == set(range(200 - count, 200) if count else [200])


def test_the_newest_of_a_buffer_younger_than_a_replayed_batch_stay_inside(device: str, guards: Guards) -> None:
    counters = new_counters(torch.device(device), seed=1)
    counters[Counter.ADDED] = 5
    times_sampled = torch.zeros(50, dtype=torch.int32, device=device)
    slots, keys, *_ = launch_uniform_draw(counters, times_sampled, 0, 9, 50, replacement=False)
    assert slots.tolist() == keys.tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4]


# rows

ROWS = {
    "float32 vectors": Field((4,), torch.float32),
    "odd float32": Field((7,), torch.float32, torch.float16),
    "scalars": Field((), torch.int64),
    "flags": Field((3,), torch.bool, torch.float32),
    "frames": Field((84, 84), torch.uint8),
    "scaled frames": Field((84, 84), torch.uint8, torch.float16, 1 / 255),
    "stacks": Field((2, 84, 50), torch.uint8, torch.float32, 1 / 255),
    "bytes": Field((16,), torch.int8),
    "brain": Field((5,), torch.bfloat16),
    "brain to float": Field((5,), torch.bfloat16, torch.float32, 3.0),
    "doubles": Field((2, 3), torch.float64, torch.float32, 0.1),
    "long to double": Field((3,), torch.int64, None, 0.1),
}


def rows_of(field: Field, count: int, seed: int) -> Tensor:
    """Rows of a dtype's own random values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, *field.shape)
    if field.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(field.dtype)
    high = {torch.bool: 2, torch.uint8: 256}.get(field.dtype, 128)
    return torch.randint(-high if field.dtype.is_signed and high > 2 else 0, high, shape, generator=generator).to(field.dtype)


@pytest.mark.parametrize("batch", [1, 127, 129])
@pytest.mark.parametrize("name", ROWS)
def test_gathered_rows(name: str, batch: int, device: str, guards: Guards) -> None:
    field = ROWS[name]
    store = guards.allocate((37, *field.shape), field.dtype, device)
    store.copy_(rows_of(field, 37, batch))
    slots = torch.from_numpy(np.random.default_rng(batch).integers(0, 37, batch))
    (found,) = launch_gather({"x": store}, {"x": field}, slots.to(device)).values()
    expected = gather_rows(carrier(store.cpu()), field, slots.numpy())
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("capacity", [1, 37, 129])
@pytest.mark.parametrize("name", ROWS)
def test_written_rows(name: str, capacity: int, device: str, guards: Guards) -> None:
    field = ROWS[name]
    buffers = [of_backend(backend, device, capacity, {"x": field, "n": ROWS["scalars"]}) for backend in ("host", "triton")]
    for rows in (2, 36, 2 * capacity + 3, 1):
        values = {"x": rows_of(field, rows, rows), "n": torch.arange(rows)}
        host, tested = (buffer.add(**{n: v.to(buffer.device) for n, v in values.items()}) for buffer in buffers)
        assert tested.tolist() == host.tolist()
        for part in ("x", "n"):
            host_rows, tested_rows = (buffer._storage.tensors[part] for buffer in buffers)
            used = min(capacity, buffers[0].added)
            assert torch.equal(tested_rows[:used].cpu(), host_rows[:used])
    guards.check()


# whole buffers

EVERYTHING = Proportional(0.5, LinearSchedule(0.4, 1.0, 9), clip=1000.0, initial="stored", normalize="buffer")
SAMPLERS: dict[str, Any] = {
    "uniform": Uniform(),
    "replacement": Uniform(replacement=True),
    "latest": Latest(),
    "proportional": Proportional(),
    "exact": Proportional(alpha=1.0, eps=0.0),
    "everything": EVERYTHING,
    "independent": Proportional(stratified=False, initial=3.0, normalize="buffer"),
    "combined-uniform": Combined(Uniform(), newest=2),
    "combined-everything": Combined(EVERYTHING, newest=3),
}


def of_backend(backend: str, device: str, capacity: int, fields: dict[str, Field], sampler: Any = None) -> ReplayBuffer:
    """A buffer of the host code, or one of the kernels on the device under test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_REPLAY_BACKEND", backend)
        place = "cpu" if backend == "host" else device
        return ReplayBuffer(capacity, fields, sampler=sampler or Latest(), device=place, seed=capacity)


def check_state(host: ReplayBuffer, tested: ReplayBuffer) -> None:
    """Fail unless both buffers hold the same integers."""
    assert tested._counters.tolist() == host._counters.tolist()
    assert torch.equal(tested._storage.times_sampled.cpu(), host._storage.times_sampled)
    if tested._tree is not None:
        assert torch.equal(tested._tree.masses.cpu(), host.masses())
        check_sums(tested._tree)
        assert (tested._engine._masses.stamps == -1).all()


def some_priorities(generator: random.Random, count: int, device: str) -> list[float]:
    """Priorities over ten orders of magnitude; on a GPU powers of 4, of which no library rounds a root differently."""
    if device == "cpu":
        return [generator.choice((1, -1)) * 10 ** generator.uniform(-5, 5) for _ in range(count)]
    return [4.0 ** generator.randint(-8, 8) for _ in range(count)]


def call(generator: random.Random, host: ReplayBuffer, tested: ReplayBuffer, device: str) -> None:
    """One random call to both buffers, with the same arguments."""
    capacity, added = host.capacity, host.added
    kind = generator.choice(("add", "add", "given", "sample", "sample", "update", "update", "clear"))
    if kind in ("add", "given"):
        rows = generator.choice((1, 2, capacity // 2 + 1, capacity, 2 * capacity + 1))
        given = torch.tensor(some_priorities(generator, rows, device), dtype=torch.float64) if kind == "given" else None
        keys = [
            buffer.add(
                n=torch.arange(added, added + rows, device=buffer.device),
                priority=None if given is None else given.to(buffer.device),
            )
            for buffer in (host, tested)
        ]
        assert keys[1].tolist() == keys[0].tolist()
    elif kind == "sample" and len(host):
        batch = min(generator.choice((3, 33, 129)), len(host) if isinstance(host.sampler, Uniform | Latest) else 129)
        batch = max(1, min(batch, len(host) + 2) if isinstance(host.sampler, Combined) else batch)
        if isinstance(host.sampler, Combined) and (len(host) < host.sampler.newest or batch < host.sampler.newest):
            return
        beta = generator.choice((None, None, 0.7))
        drawn, found = host.sample(batch, beta=beta), tested.sample(batch, beta=beta)
        assert found.key.tolist() == drawn.key.tolist() == found.n.tolist()
        assert close(found.probability, drawn.probability, "probability")
        assert close(found.weight, drawn.weight, "weight")
    elif kind == "update" and added:
        keys = [generator.randrange(max(0, added - capacity - 2), added + 2) for _ in range(generator.choice((1, 40, 129)))]
        keys += keys[: len(keys) // 2]
        priorities = some_priorities(generator, len(keys), device)
        for buffer in (host, tested):
            numbers = torch.tensor(priorities, dtype=torch.float64, device=buffer.device)
            buffer.update_priorities(torch.tensor(keys, device=buffer.device), numbers)
    elif kind == "clear" and generator.random() < 0.3:
        host.clear()
        tested.clear()


@pytest.mark.parametrize("capacity", [1, 2, 128, 129, 300])
@pytest.mark.parametrize("name", SAMPLERS)
def test_random_calls_leave_the_same_integers(name: str, capacity: int, device: str) -> None:
    generator = random.Random(f"{name} {capacity}")
    fields = {"n": Field((), torch.int64)}
    with guarded() as guards:
        host, tested = (of_backend(each, device, capacity, fields, SAMPLERS[name]) for each in ("host", "triton"))
        assert len(guards) >= 6
        for _ in range(16):
            call(generator, host, tested, device)
            check_state(host, tested)


@pytest.mark.parametrize("batch", SIZES)
def test_updates_of_awkward_sizes_with_many_repeated_keys(batch: int, device: str) -> None:
    fields = {"n": Field((), torch.int64)}
    with guarded():
        host, tested = (of_backend(each, device, 20_000, fields, EVERYTHING) for each in ("host", "triton"))
        generator = np.random.default_rng(batch)
        keys = torch.from_numpy(generator.integers(-3, 60 + batch // 4, batch))
        priorities = torch.from_numpy(4.0 ** generator.integers(-8, 8, batch))
        for buffer in (host, tested):
            buffer.add(n=torch.arange(batch + 5, device=buffer.device))
            buffer.update_priorities(keys.to(buffer.device), priorities.to(buffer.device))
        check_state(host, tested)
        assert host.stats().stale_updates > 0 or batch < 3


def test_a_priority_that_is_not_finite_changes_nothing_and_is_counted(device: str) -> None:
    """On the device nobody can raise: such an entry keeps its mass, also if an earlier one of its key was finite."""
    with guarded():
        tested = of_backend("triton", device, 129, {"n": Field((), torch.int64)}, EVERYTHING)
        engine = tested._engine
        given = torch.tensor([4.0, float("nan"), 16.0, float("inf")], dtype=torch.float64, device=device)
        engine.append({"n": torch.arange(4, device=device)}, 4, given)
        before = tested.masses()[:4].tolist()
        # the initial priority where the given one was not finite
        assert before == [tested._rule.mass(priority) for priority in (4.0, 1.0, 16.0, 1.0)]
        keys = torch.tensor([0, 2, 2, 0], device=device)
        given = torch.tensor([1.0, 1.0, float("-inf"), float("nan")], dtype=torch.float64, device=device)
        engine.update(keys, given)
        assert tested.masses()[:4].tolist() == before
        assert tested.stats().rejected_priorities == 4
        check_sums(tested._tree)
        assert (engine._masses.stamps == -1).all()


def test_launches_leave_no_trace_in_the_counters_they_share(device: str) -> None:
    with guarded():
        tested = of_backend("triton", device, 129, {"n": Field((), torch.int64)}, EVERYTHING)
        tested.add(n=torch.arange(300, device=device), priority=torch.ones(300, device=device))
        tested.sample(20)
        counters = tested._counters.tolist()
    rest = {place: counters[place] for place in (Counter.TICKET, Counter.PENDING_TOP, Counter.EDGE_HIGH, Counter.EDGE_LOW)}
    assert rest == {Counter.TICKET: 0, Counter.PENDING_TOP: 0, Counter.EDGE_HIGH: 0, Counter.EDGE_LOW: NO_MASS}


def test_what_the_guards_see(device: str) -> None:
    from gpu_replay.kernels.prefix_sum import block_sums_kernel

    with pytest.raises(AssertionError, match="written outside"), guarded():
        values = torch.zeros(256, dtype=torch.int64, device=device)
        sums = torch.zeros(4, dtype=torch.int64, device=device)
        # the kernel is told of more blocks than there is room for
        block_sums_kernel[(1,)](values, sums, 256, 8, BLOCK=32, ROWS=8)
