"""Buffers that draw by rank through kernels, against buffers of the host code, call by call: the same integers.

On CPU tensors the kernels are interpreted, in a process of their own; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from guards import guarded
from interpreted import first_process, run_interpreted
from interpreted import kernel_device as kernel_device
from test_kernels_in_buffers import BACKENDS, of_backend
from tolerances import close
from trajectory_pair import FIELDS, Script

from gpu_replay import Batch, Combined, Field, LinearSchedule, RankBased, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.ops.counters import Counter

NUMBER = {"n": Field((), torch.int64)}
SAMPLERS: dict[str, Any] = {
    "exact": RankBased(),
    "everything": RankBased(1.0, LinearSchedule(0.4, 1.0, 9), initial="stored", normalize="buffer"),
    "independent": RankBased(2.0, stratified=False, initial=3.0),
    "outdated": RankBased(resort_every=3, normalize="buffer"),
    "outdated for long": RankBased(resort_every=1000, stratified=False, initial="stored"),
    "combined": Combined(RankBased(normalize="buffer"), newest=2),
    "combined outdated": Combined(RankBased(resort_every=4), newest=3),
}
# many are equal; the ends of what a priority can be are among them
PRIORITIES = (0.0, -0.0, 5e-324, 0.5, 1.0, -1.0, 2.0, 7.25, 1e-3, 1.7976931348623157e308)


@pytest.mark.slow
@first_process
def test_the_interpreted_kernels_in_a_process_of_their_own() -> None:
    run_interpreted(__file__)


def check_batches(drawn: Batch, found: Batch) -> None:
    """Fail unless both backends drew the same rows."""
    assert list(found) == list(drawn)
    assert found.key.tolist() == drawn.key.tolist()
    assert torch.equal(found.probability.cpu(), drawn.probability)
    assert close(found.weight, drawn.weight, "weight")


def check_states(host: Any, tested: Any) -> None:
    """Fail unless both hold the same integers, also the list where it outlives a call."""
    assert tested._counters.tolist() == host._counters.tolist()
    mine, other = (buffer._state_tensors(host.added) for buffer in (tested, host))
    assert mine.keys() == other.keys()
    for name in mine.keys() - {"fields.obs", "fields.action", "fields.note"}:
        # nothing is said of what comes after the end of the list
        said = host._counters[Counter.RANKED] if name == "ranked" else len(mine[name])
        assert torch.equal(mine[name][:said].cpu(), other[name][:said]), name
    base = host.sampler.base if isinstance(host.sampler, Combined) else host.sampler
    assert ("ranked" in mine) == (base.resort_every > 1)


class Twins:
    """A buffer of the host code and one of the kernels, which get the same random calls."""

    def __init__(self, name: str, capacity: int, device: str) -> None:
        self.random = random.Random(f"{name} {capacity}")
        self.sampler, self.capacity = SAMPLERS[name], capacity
        self.host, self.tested = (of_backend(each, device, capacity, NUMBER, self.sampler) for each in BACKENDS)

    def priorities(self, count: int) -> torch.Tensor:
        return torch.tensor(self.random.choices(PRIORITIES, k=count), dtype=torch.float64)

    def call(self) -> None:
        kind = self.random.choice(("add", "given", "sample", "sample", "sample", "update", "update", "clear", "move"))
        getattr(self, kind)()
        check_states(self.host, self.tested)

    def add(self, given: bool = False) -> None:
        rows = self.random.choice((1, 2, self.capacity // 2 + 1, self.capacity + 3))
        priorities = self.priorities(rows) if given else None
        first = self.host.added
        for buffer in (self.host, self.tested):
            own = None if priorities is None else priorities.to(buffer.device)
            buffer.add(n=torch.arange(first, first + rows, device=buffer.device), priority=own)

    def given(self) -> None:
        self.add(given=True)

    def sample(self) -> None:
        newest = getattr(self.sampler, "newest", 0)
        if len(self.host) < max(newest, 1):
            return
        batch = max(newest, self.random.choice((1, 5, 33)))
        beta = self.random.choice((None, None, 0.7))
        drawn, found = self.host.sample(batch, beta=beta), self.tested.sample(batch, beta=beta)
        check_batches(drawn, found)
        assert found.n.tolist() == drawn.key.tolist()

    def update(self) -> None:
        added = self.host.added
        keys = [self.random.randrange(max(0, added - self.capacity - 2), added + 2) for _ in range(9)]
        priorities = self.priorities(9)
        for buffer in (self.host, self.tested):
            buffer.update_priorities(torch.tensor(keys, device=buffer.device), priorities.to(buffer.device))

    def clear(self) -> None:
        if self.random.random() < 0.3:
            self.host.clear()
            self.tested.clear()

    def move(self) -> None:
        """The state of one becomes that of both."""
        source, target = self.random.sample((self.host, self.tested), 2)
        target.load_state_dict(source.state_dict())


@pytest.mark.parametrize("name", SAMPLERS)
def test_random_calls_at_every_small_capacity(name: str, device: str) -> None:
    # every size with one of the samplers, every sampler with small and large ones
    for capacity in range(1 + list(SAMPLERS).index(name), 41, len(SAMPLERS)):
        with guarded():
            twins = Twins(name, capacity, device)
            for _ in range(5):
                twins.call()


@pytest.mark.parametrize("name", SAMPLERS)
def test_random_calls_of_a_longer_life(name: str, device: str) -> None:
    with guarded():
        twins = Twins(name, 300, device)
        for _ in range(20):
            twins.call()


def test_a_priority_that_is_not_finite_changes_nothing_and_is_counted(device: str) -> None:
    """On the device nobody can raise: such an entry keeps its place in the order."""
    with guarded():
        tested = of_backend("triton", device, 8, NUMBER, SAMPLERS["exact"])
        engine = tested._engine
        given = torch.tensor([4.0, float("nan"), 16.0, float("inf")], dtype=torch.float64, device=device)
        engine.append({"n": torch.arange(4, device=device)}, 4, given)
        before = tested._state.tree.masses[:4].tolist()
        assert before == [tested._state.rule.mass(priority) for priority in (4.0, 1.0, 16.0, 1.0)]
        keys = torch.tensor([0, 2, 2, 0], device=device)
        given = torch.tensor([1.0, 1.0, float("-inf"), float("nan")], dtype=torch.float64, device=device)
        engine.draws.update(keys, given)
        assert tested._state.tree.masses[:4].tolist() == before
        assert tested.stats().rejected_priorities == 4
        # one draw for each rank there is
        assert tested.sample(4).key.tolist() != []
        assert tested._engine.draws._ranks.list.slots[:4].tolist() == [2, 0, 1, 3]


# when the order is made anew


def sorts_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the length of each sort."""
    lengths: list[int] = []
    plain = torch.sort

    def noted(*given: Any, **named: Any) -> Any:
        lengths.append(given[0].numel())
        return plain(*given, **named)

    monkeypatch.setattr(torch, "sort", noted)
    return lengths


def test_an_order_is_sorted_once_for_all_samples_between_two_changes(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = sorts_of(monkeypatch)
    buffer = of_backend("triton", device, 20, NUMBER, RankBased())
    changes = (
        lambda: buffer.add(n=torch.arange(30, device=device)),
        lambda: buffer.update_priorities(buffer.sample(3).key, torch.ones(3, device=device)),
        lambda: buffer.load_state_dict(buffer.state_dict()),
        lambda: (buffer.clear(), buffer.add(n=torch.arange(3, device=device))),
    )
    for time, change in enumerate(changes):
        change()
        assert len(lengths) == time
        for _ in range(3):
            buffer.sample(5)
        assert lengths == [20] * (time + 1)


@pytest.mark.parametrize("every", [2, 3, 10])
def test_an_order_for_several_samples_is_sorted_when_it_is_time(
    every: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = sorts_of(monkeypatch)
    buffer = of_backend("triton", device, 20, NUMBER, Combined(RankBased(resort_every=every), newest=2))
    buffer.add(n=torch.arange(30, device=device))
    due = []
    for time in range(25):
        before = len(lengths)
        # newest rows alone need no order, but count as a sample
        buffer.sample(2 if time == 1 else 4)
        if len(lengths) > before:
            due.append(time)
        buffer.add(n=torch.arange(1, device=device))
        if time == 12:
            buffer.load_state_dict(buffer.state_dict())
    assert due == list(range(0, 25, every))
    buffer.clear()
    buffer.add(n=torch.arange(4, device=device))
    buffer.sample(4)
    assert len(lengths) == len(due) + 1


@pytest.mark.parametrize("name", ["exact", "outdated", "combined outdated"])
def test_where_only_the_device_knows_whether_it_is_time_the_draws_are_the_same(name: str, device: str) -> None:
    """So it is after a graph that samples was captured: the sort is always made, and taken only when it is due."""
    with guarded():
        twins = Twins(name, 17, device)
        twins.tested._engine.draws._ranks._unsure = True
        for _ in range(50):
            kind = twins.random.choice(("add", "given", "sample", "sample", "update", "clear"))
            getattr(twins, kind)()
            check_states(twins.host, twins.tested)


@pytest.mark.parametrize("call", ["exact", "skip_sample"])
def test_a_captured_draw_that_makes_no_list_leaves_the_host_unsure(
    call: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time its graph is replayed a sample goes by that the host does not see, and a list may be out of date."""
    lengths = sorts_of(monkeypatch)
    buffer = of_backend("triton", device, 20, NUMBER, RankBased(resort_every=3))
    buffer.add(n=torch.arange(30, device=device))
    buffer.sample(4)
    ranks: Any = buffer._engine.draws._ranks
    getattr(ranks, call)(*((buffer._state.tree, 5) if call == "exact" else ()), capturing=True)
    lengths.clear()
    made = ranks.list.slots.tolist()
    buffer.update_priorities(torch.arange(12, 15, device=device), torch.ones(3, device=device) * 9)
    # as if two replays had gone by
    buffer._counters[Counter.STEP] += 1
    buffer.sample(4)
    assert ranks.list.slots.tolist() == made
    buffer.sample(4)
    assert ranks.list.slots.tolist()[:3] == [12, 13, 14]
    assert lengths == [20, 20]


# streams

CALLS = 40


def streams(backend: str, device: str, capacity: int, sampler: Any, **settings: Any) -> TrajectoryReplayBuffer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_REPLAY_BACKEND", backend)
        place = "cpu" if backend == "host" else device
        return TrajectoryReplayBuffer(capacity, 3, FIELDS, sampler=sampler, device=place, seed=capacity, **settings)


SETTINGS: dict[str, dict[str, Any]] = {
    "next_step": {"n_step": 2, "stack": 2},
    "same_step": {"autoreset": "same_step", "final_capacity": 3},
    "shifted": {"n_step": 3, "autoreset": "disabled"},
}


# some samplers with all settings, the others with one
STREAMS = [
    (name, settings)
    for place, name in enumerate(SAMPLERS)
    for turn, settings in enumerate(SETTINGS)
    if name in ("everything", "combined outdated") or place % 3 == turn
]


@pytest.mark.parametrize(("name", "settings"), STREAMS)
def test_random_streams(name: str, settings: str, device: str) -> None:
    # the ring of few steps with every option, the others where windows are long
    for capacity in (3, 21) if name == "everything" else (21,):
        with guarded():
            host, tested = (streams(each, device, capacity, SAMPLERS[name], **SETTINGS[settings]) for each in BACKENDS)
            script = Script(capacity, CALLS, 3)
            sampled = 0
            for call in range(CALLS):
                batches = [script.play(buffer, call, call + 1) for buffer in (host, tested)]
                assert len(batches[0]) == len(batches[1])
                for drawn, found in zip(*batches, strict=True):
                    check_batches(drawn, found)
                    sampled += 1
                check_states(host, tested)
                if call % 7 == 3:
                    sampled += sequences(host, tested, 1 + call % 4)
                if call % 20 == 19:
                    tested.load_state_dict(host.state_dict())
            # in a ring of a single step no window is ever complete
            assert sampled > 3 or capacity == 3


def sequences(host: Any, tested: Any, length: int) -> int:
    """Draw windows of so many steps from both where there are any; returns how often that was done."""
    newest = getattr(host.sampler, "newest", 1)
    first, added = host._engine.span_of_steps()
    if added - first < length or host._engine.count_at_least(newest, (length - 1) * 3) < newest:
        return 0
    check_batches(host.sample_sequences(newest + 2, length), tested.sample_sequences(newest + 2, length))
    check_states(host, tested)
    return 1


def test_a_list_of_starts_that_were_all_lost_leaves_the_oldest_one(device: str) -> None:
    """The list was made of a ring that has gone round since, and of its slots none holds a start now."""
    sampler = RankBased(resort_every=100)
    host, tested = (streams(each, device, 12, sampler, autoreset="next_step") for each in BACKENDS)

    def add(number: int, *, ends: tuple[bool, bool, bool] = (False, False, False)) -> None:
        for buffer in (host, tested):
            buffer.add(
                obs=np.zeros((3, 2), dtype=np.int16),
                action=np.full(3, number),
                note=np.zeros((3, 2), dtype=np.float32),
                reward=np.zeros(3),
                terminated=np.array(ends),
                truncated=np.zeros(3, dtype=bool),
            )

    def sample() -> list[int]:
        drawn, found = host.sample(6), tested.sample(6)
        check_batches(drawn, found)
        check_states(host, tested)
        return found.key.tolist()

    add(0)
    add(1)
    assert set(sample()) == {0, 1, 2}
    add(2)
    add(3, ends=(True, True, True))
    # the step after an ending is no start, and takes the slots of the list
    add(4)
    assert sample() == [3] * 6


def test_ranks_of_small_programs_in_a_large_ring(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from launches import use_sizes_of_a_gpu

    use_sizes_of_a_gpu(monkeypatch)
    with guarded():
        made = [of_backend(each, device, 2500, NUMBER, SAMPLERS["everything"]) for each in BACKENDS]
        generator = random.Random(0)
        for rows in (1020, 1500, 700):
            numbers = torch.tensor(generator.choices(PRIORITIES, k=rows), dtype=torch.float64)
            drawn = []
            for buffer in made:
                buffer.add(n=torch.arange(rows, device=buffer.device), priority=numbers.to(buffer.device))
                drawn.append(buffer.sample(130))
            check_batches(*drawn)
            check_states(*made)
    assert isinstance(made[0], ReplayBuffer)
