"""Buffers that draw by rank through kernels, against buffers of the host code, call by call: the same integers.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from guards import guarded
from interpreted import kernel_device as kernel_device
from test_kernels_in_buffers import BACKENDS, RANKED, call, check_state, of_backend
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


def check_batches(drawn: Batch, found: Batch) -> None:
    """Fail unless both backends drew the same rows."""
    assert list(found) == list(drawn)
    assert found.key.tolist() == drawn.key.tolist()
    assert torch.equal(found.probability.cpu(), drawn.probability)
    assert close(found.weight, drawn.weight, "weight")


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
    generator = random.Random(name)
    with guarded():
        host, tested = (of_backend(each, device, 17, NUMBER, SAMPLERS[name]) for each in BACKENDS)
        tested._engine.draws._ranks._unsure = True
        for _ in range(50):
            call(generator, host, tested, device, ("add", "given", "sample", "sample", "update", "clear"))


@pytest.mark.parametrize("seen", ["exact", "skip_sample"])
def test_a_captured_draw_that_makes_no_list_leaves_the_host_unsure(
    seen: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time its graph is replayed a sample goes by that the host does not see, and a list may be out of date."""
    lengths = sorts_of(monkeypatch)
    buffer = of_backend("triton", device, 20, NUMBER, RankBased(resort_every=3))
    buffer.add(n=torch.arange(30, device=device))
    buffer.sample(4)
    ranks: Any = buffer._engine.draws._ranks
    getattr(ranks, seen)(*((buffer._state.tree, 5) if seen == "exact" else ()), capturing=True)
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
                check_state(host, tested)
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
    check_state(host, tested)
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
        check_state(host, tested)
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
            numbers = torch.tensor(generator.choices(RANKED, k=rows), dtype=torch.float64)
            drawn = []
            for buffer in made:
                buffer.add(n=torch.arange(rows, device=buffer.device), priority=numbers.to(buffer.device))
                drawn.append(buffer.sample(130))
            check_batches(*drawn)
            check_state(*made)
    assert isinstance(made[0], ReplayBuffer)
