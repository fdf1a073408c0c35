"""Buffers of the kernels against buffers of the host code, call by call: the same integers, nothing written outside.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from devices import thinned
from guards import Guards, guarded
from interpreted import kernel_device as kernel_device
from launches import use_sizes_of_a_gpu
from torch import Tensor
from trees import check_sums
from twins import Twins

from gpu_replay import (
    Combined,
    Field,
    Latest,
    LinearSchedule,
    Proportional,
    RankBased,
    ReplayBuffer,
    TrajectoryReplayBuffer,
    Uniform,
)
from gpu_replay.ops.counters import NO_MASS, Counter
from gpu_replay.ops.mass_tree import DIRTY
from gpu_replay.ops.ring import as_numpy, gather_rows, plan_gather

SIZES = (1, 2, 127, 128, 129, 4095)
NUMBER = {"n": Field((), torch.int64)}


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
    low, high = {torch.bool: (0, 2), torch.uint8: (0, 256)}.get(field.dtype, (-128, 128))
    return torch.randint(low, high, shape, generator=generator).to(field.dtype)


@pytest.mark.parametrize("batch", [1, 127, 129])
@pytest.mark.parametrize("name", ROWS)
def test_gathered_rows(name: str, batch: int, device: str, guards: Guards) -> None:
    field = ROWS[name]
    store = guards.allocate((37, *field.shape), field.dtype, device)
    store.copy_(rows_of(field, 37, batch))
    slots = torch.from_numpy(np.random.default_rng(batch).integers(0, 37, batch))
    gather = plan_gather({"x": store}, {"x": field}, batch, store.device, weighed=False)
    (found,) = gather(slots.to(device), None).values()
    expected = gather_rows(as_numpy(store.cpu()), field, slots.numpy())
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("capacity", [1, 37, 129])
@pytest.mark.parametrize("name", ROWS)
def test_written_rows(name: str, capacity: int, device: str, guards: Guards) -> None:
    field = ROWS[name]
    both = twins(device, capacity, {"x": field, "n": ROWS["scalars"]})
    for rows in (2, 36, 2 * capacity + 3, 1):
        both.insert(x=rows_of(field, rows, rows), n=torch.arange(rows))
        both.check()
    guards.check()


@pytest.mark.parametrize("field", [ROWS["frames"], ROWS["scaled frames"], ROWS["stacks"], Field((3001,), torch.int8)])
def test_rows_longer_than_a_program_of_a_gpu_moves(field: Field, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_sizes_of_a_gpu(monkeypatch)
    with guarded():
        both = twins(device, 5, {"x": field})
        for rows in (3, 4, 7):
            both.insert(x=rows_of(field, rows, rows))
            both.draw(3)
        both.check()


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
    "rank": RankBased(),
    "rank-everything": RankBased(1.0, LinearSchedule(0.4, 1.0, 9), initial="stored", normalize="buffer"),
    "rank-independent": RankBased(2.0, stratified=False, initial=3.0),
    "combined-rank": Combined(RankBased(stratified=False), newest=3),
}
# of ranks: many are equal, and the ends of what a priority can be are among them
RANKED = (0.0, -0.0, 5e-324, 0.5, 1.0, -1.0, 2.0, 7.25, 1e-3, 1.7976931348623157e308)
CALLS = ("add", "add", "given", "sample", "sample", "sample", "update", "update", "clear", "move")


def twins(device: str, capacity: int, fields: dict[str, Field], sampler: Any = None) -> Twins:
    return Twins(
        lambda place: ReplayBuffer(capacity, fields, sampler=sampler or Latest(), device=place, seed=capacity), device
    )


def some_priorities(generator: random.Random, count: int, device: str, sampler: Any = None) -> Tensor:
    """Priorities over ten orders of magnitude; on a GPU powers of 4, of which no library rounds a root differently."""
    if isinstance(getattr(sampler, "base", sampler), RankBased):
        drawn = generator.choices(RANKED, k=count)
    elif device == "cpu":
        drawn = [generator.choice((1, -1)) * 10 ** generator.uniform(-5, 5) for _ in range(count)]
    else:
        drawn = [4.0 ** generator.randint(-8, 8) for _ in range(count)]
    return torch.tensor(drawn, dtype=torch.float64)


def call(generator: random.Random, both: Twins, device: str, calls: Sequence[str] = CALLS) -> None:
    """One random call to both buffers, with the same arguments, after which they hold the same integers."""
    host, sampler = both.host, both.host.sampler
    capacity, added, newest = host.capacity, host.added, getattr(sampler, "newest", 0)
    kind = generator.choice(calls)
    if kind in ("add", "given"):
        rows = generator.choice((1, 2, capacity // 2 + 1, capacity, 2 * capacity + 1))
        given = some_priorities(generator, rows, device, sampler) if kind == "given" else None
        both.insert(n=torch.arange(added, added + rows), priority=given)
    elif kind == "sample" and len(host):
        batch = min(generator.choice((3, 33, 129)), len(host) if isinstance(sampler, Uniform | Latest) else 129)
        batch = max(1, min(batch, len(host) + 2) if newest else batch)
        if len(host) >= newest and batch >= newest:
            drawn = both.draw(batch, beta=generator.choice((None, None, 0.7)))
            assert drawn.n.tolist() == drawn.key.tolist()
    elif kind == "update" and added:
        oldest, count = max(0, added - capacity - 2), generator.choice((1, 40, 129))
        keys = [generator.randrange(oldest, added + 2) for _ in range(count)]
        keys += keys[: len(keys) // 2]
        both.update(torch.tensor(keys), some_priorities(generator, len(keys), device, sampler))
    elif kind == "clear" and generator.random() < 0.3:
        both.call("clear")
    elif kind == "move":
        # the state of one becomes that of both
        source, target = generator.sample(both.both, 2)
        target.load_state_dict(source.state_dict())
    both.check()


@thinned("name, capacity", SAMPLERS, [1, 2, 17, 40, 128, 129, 300], times=2)
def test_random_calls_leave_the_same_integers(name: str, capacity: int, device: str) -> None:
    generator = random.Random(f"{name} {capacity}")
    with guarded() as guards:
        both = twins(device, capacity, NUMBER, SAMPLERS[name])
        assert len(guards) >= 6
        for _ in range(16):
            call(generator, both, device)


@pytest.mark.parametrize("name", ["uniform", "everything", "rank"])
def test_programs_as_small_as_on_a_gpu_leave_the_same_integers(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_sizes_of_a_gpu(monkeypatch)
    generator = random.Random(name)
    with guarded():
        both = twins(device, 2500, {**NUMBER, "x": Field((24,), torch.float32)}, SAMPLERS[name])
        # one block more than the rows fill, at both ends of a segment, and in two segments
        for rows in (1020, 1024, 1, 8 * 128, 600, 2501):
            n = torch.arange(both.host.added, both.host.added + rows)
            both.insert(n=n, x=n[:, None] % 1000 + torch.zeros(24), priority=some_priorities(generator, rows, device))
            both.check()
        for batch in (9, 130):
            drawn = both.draw(batch)
            assert drawn.n.tolist() == drawn.key.tolist()
            keys = torch.cat((drawn.key, drawn.key[:50]))
            both.update(keys, some_priorities(generator, len(keys), device))
            both.check()


@pytest.mark.parametrize("batch", [*SIZES, 1024, 1025])
def test_updates_of_awkward_sizes_with_many_repeated_keys(batch: int, device: str) -> None:
    with guarded():
        both = twins(device, 20_000, NUMBER, EVERYTHING)
        generator = np.random.default_rng(batch)
        both.insert(n=torch.arange(batch + 5))
        keys = torch.from_numpy(generator.integers(-3, 60 + batch // 4, batch))
        both.update(keys, torch.from_numpy(4.0 ** generator.integers(-8, 8, batch)))
        both.check()
        assert both.host.stats().stale_updates > 0 or batch < 3


def test_the_largest_stored_priority_is_found_in_a_block_that_did_not_change(device: str) -> None:
    priorities = torch.full((1000,), 2.0, dtype=torch.float64)
    priorities[700] = 64.0
    with guarded():
        both = twins(device, 1000, NUMBER, EVERYTHING)
        tested = both.tested
        both.insert(n=torch.arange(1000), priority=priorities)
        # the first looks at all blocks, the second only at the one that has changed since
        for number in (1000, 1001):
            key = both.insert(n=torch.tensor([number]))
            assert tested.masses()[number - 1000].item() == tested._state.rule.mass(64.0)
            both.update(key, torch.ones(1))
        both.check()
        # and it goes with its transition
        both.insert(n=torch.arange(1002, 1702))
        both.update(torch.arange(1000, 1702), torch.full((702,), 4.0))
        both.insert(n=torch.tensor([1702]))
        both.check()
        assert tested.masses()[702].item() == tested._state.rule.mass(4.0)
        assert tested._state.tree.high.tolist().count(DIRTY) == 1


@pytest.mark.parametrize("name", ["everything", "rank"])
def test_a_priority_that_is_not_finite_changes_nothing_and_is_counted(name: str, device: str) -> None:
    """Kernels cannot raise: such an entry keeps its mass or its rank, also if an earlier one of its key was finite."""
    with guarded():
        tested = twins(device, 129, NUMBER, SAMPLERS[name]).tested
        engine = tested._engine
        given = torch.tensor([4.0, float("nan"), 16.0, float("inf")], dtype=torch.float64, device=device)
        engine.append({"n": torch.arange(4, device=device)}, 4, given)
        before = tested._state.tree.masses[:4].tolist()
        # the initial priority where the given one was not finite
        assert before == [tested._state.rule.mass(priority) for priority in (4.0, 1.0, 16.0, 1.0)]
        keys = torch.tensor([0, 2, 2, 0], device=device)
        given = torch.tensor([1.0, 1.0, float("-inf"), float("nan")], dtype=torch.float64, device=device)
        engine.draws.update(keys, given)
        assert tested._state.tree.masses[:4].tolist() == before
        assert tested.stats().rejected_priorities == 4
        check_sums(tested._state.tree)
        assert (engine.draws.masses.stamps == -1).all()
        if name == "rank":
            tested.sample(4)
            ages = engine.draws._ranks.current(tested._state.tree, False).ages[:4]
            assert [(4 + age) % 129 for age in ages.tolist()] == [2, 0, 1, 3]


def test_a_priority_of_too_much_mass_is_cut_and_counted_by_itself(device: str) -> None:
    with guarded():
        tested = twins(device, 129, NUMBER, Proportional()).tested
        keys = tested.add(n=torch.arange(4, device=device))
        given = torch.tensor([1e300, float("nan"), 1e300, 1.0], dtype=torch.float64, device=device)
        tested._engine.draws.update(keys, given)
        stats = tested.stats()
        assert (stats.saturated_priorities, stats.rejected_priorities, stats.stale_updates) == (2, 1, 0)
        assert tested._state.tree.masses[:4:2].tolist() == [tested._state.rule.limit] * 2


def test_launches_leave_no_trace_in_the_counters_they_share(device: str) -> None:
    with guarded():
        tested = twins(device, 129, NUMBER, EVERYTHING).tested
        tested.add(n=torch.arange(300, device=device), priority=torch.ones(300, device=device))
        tested.sample(20)
        counters = tested._counters.tolist()
    shared = (Counter.TICKET, Counter.PENDING_MAX_MASS, Counter.HIGHEST, Counter.LOWEST)
    assert [counters[place] for place in shared] == [0, 0, 0, NO_MASS]


@pytest.mark.parametrize("steps", [False, True], ids=["transitions", "steps"])
def test_kernels_draw_nothing_that_was_forgotten(steps: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own count of what a device holds is made anew with `clear`."""
    monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")
    number: dict[str, Any] = {"action": torch.arange(3, device=device)}
    fields = {"action": Field((), torch.int64)}
    buffer: Any = ReplayBuffer(6, fields, sampler=Uniform(replacement=True), device=device)
    if steps:
        flags = torch.zeros(3, dtype=torch.bool, device=device)
        number |= {"obs": number["action"].float(), "reward": number["action"].float()}
        number |= {"terminated": flags, "truncated": flags}
        fields = {"obs": Field((), torch.float32), **fields}
        buffer = TrajectoryReplayBuffer(12, 3, fields, sampler=Uniform(replacement=True), device=device)
    for _ in range(2):
        buffer.add(**number)
        buffer.add(**number)
        assert buffer.sample(2).key.min() >= buffer.added - len(buffer)
        buffer.clear()
        with pytest.raises(RuntimeError, match="holds no"):
            buffer.sample(2)
