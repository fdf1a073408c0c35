"""Buffers that draw by rank through kernels, against buffers of the host code, call by call: the same integers.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from devices import thinned
from guards import guarded
from interpreted import kernel_device as kernel_device
from launches import use_sizes_of_a_gpu
from test_kernels_in_buffers import call, some_priorities, twins
from trajectory_pair import FIELDS, Script
from twins import Twins, check_batches

from gpu_replay import Combined, Field, LinearSchedule, RankBased, TrajectoryReplayBuffer
from gpu_replay.ops import rank_draw
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


# when the order is made anew


def of_kernels(device: str, sampler: Any) -> Any:
    """A buffer of twenty numbers."""
    return twins(device, 20, NUMBER, sampler).tested


def sorts_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the length of each sort."""
    lengths: list[int] = []
    plain = torch.sort

    def noted(*given: Any, **named: Any) -> Any:
        lengths.append(given[0].numel())
        return plain(*given, **named)

    monkeypatch.setattr(torch, "sort", noted)
    return lengths


@pytest.mark.parametrize("after_graph", [False, True])
def test_an_order_is_sorted_once_for_all_samples_between_two_changes(
    after_graph: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a graph the other samples merge what the host has not seen to change."""
    lengths, buffer = sorts_of(monkeypatch), of_kernels(device, RankBased())
    buffer._engine.draws._ranks._unsure = after_graph
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


@pytest.mark.parametrize(
    "every", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(10, marks=pytest.mark.slow)]
)
def test_an_order_for_several_samples_is_sorted_when_it_is_time(
    every: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = sorts_of(monkeypatch)
    buffer = of_kernels(device, Combined(RankBased(resort_every=every), newest=2))
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


@pytest.mark.parametrize("name", [pytest.param("exact", marks=pytest.mark.slow), "outdated", "combined outdated"])
def test_where_only_the_device_knows_whether_it_is_time_the_draws_are_the_same(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is after a graph that samples was captured: a sort is always made, and taken only when it is due.

    Where ranks are of the moment, changes are merged however many they are, as in a graph.
    """
    monkeypatch.setattr(rank_draw, "_CHANGED", 0)
    generator = random.Random(name)
    with guarded():
        both = twins(device, 17, NUMBER, SAMPLERS[name])
        both.tested._engine.draws._ranks._unsure = True
        for _ in range(50):
            call(generator, both, device, ("add", "given", "sample", "sample", "update", "clear"))


@pytest.mark.parametrize("seen", ["exact", "skip_sample"])
def test_a_captured_draw_that_makes_no_list_leaves_the_host_unsure(
    seen: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time its graph is replayed a sample goes by that the host does not see, and a list may be out of date."""
    lengths, buffer = sorts_of(monkeypatch), of_kernels(device, RankBased(resort_every=3))
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
    assert (ranks.list.slots.tolist()[:3], lengths) == ([12, 13, 14], [20, 20])


# streams

CALLS = 30


def streams(device: str, capacity: int, sampler: Any, **settings: Any) -> Twins:
    return Twins(
        lambda place: TrajectoryReplayBuffer(
            capacity, 3, FIELDS, sampler=sampler, device=place, seed=capacity, **settings
        ),
        device,
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "next_step": {"n_step": 2, "stack": 2},
    "same_step": {"autoreset": "same_step", "final_capacity": 3},
    "shifted": {"n_step": 3, "autoreset": "disabled"},
}


@thinned("name, settings", SAMPLERS, SETTINGS)
def test_random_streams(name: str, settings: str, device: str) -> None:
    # the ring of few steps with every option, the others where windows are long
    for capacity in (3, 21) if name == "everything" else (21,):
        with guarded():
            both = streams(device, capacity, SAMPLERS[name], **SETTINGS[settings])
            script, sampled = Script(capacity, CALLS, 3), 0
            for time in range(CALLS):
                batches = [script.play(buffer, time, time + 1) for buffer in both.both]
                for drawn, found in zip(*batches, strict=True):
                    check_batches(found, drawn, ("weight", "next_"))
                    sampled += 1
                both.check()
                if time % 7 == 3:
                    sampled += sequences(both, 1 + time % 4)
                if time % 20 == 19:
                    both.tested.load_state_dict(both.host.state_dict())
            # in a ring of a single step no window is ever complete
            assert sampled > 3 or capacity == 3


def sequences(both: Twins, length: int) -> int:
    """Draw windows of so many steps from both where there are any; returns how often that was done."""
    newest, engine = getattr(both.host.sampler, "newest", 1), both.host._engine
    first, added = engine.span_of_steps()
    if added - first < length or engine.count_at_least(newest, (length - 1) * 3) < newest:
        return 0
    drawn, found = both.call("sample_sequences", newest + 2, length)
    check_batches(found, drawn, ("weight", "next_"))
    both.check()
    return 1


def test_a_list_of_starts_that_were_all_lost_leaves_the_oldest_one(device: str) -> None:
    """The list was made of a ring that has gone round since, and of its slots none holds a start now."""
    both = streams(device, 12, RankBased(resort_every=100), autoreset="next_step")
    zeros = torch.zeros(3, 2)

    def add(number: int, *, ends: bool = False) -> None:
        flags = torch.full((3,), ends)
        both.insert(
            obs=zeros.to(torch.int16),
            action=torch.full((3,), number),
            note=zeros,
            reward=zeros[:, 0],
            terminated=flags,
            truncated=flags & False,
        )

    def sample() -> list[int]:
        drawn = both.draw(6)
        both.check()
        return drawn.key.tolist()

    add(0)
    add(1)
    assert set(sample()) == {0, 1, 2}
    add(2)
    add(3, ends=True)
    # the step after an ending is no start, and takes the slots of the list
    add(4)
    assert sample() == [3] * 6


def test_ranks_of_small_programs_in_a_large_ring(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_sizes_of_a_gpu(monkeypatch)
    with guarded():
        both, generator = twins(device, 2500, NUMBER, SAMPLERS["everything"]), random.Random(0)
        for rows in (1020, 1500, 700):
            both.insert(n=torch.arange(rows), priority=some_priorities(generator, rows, device, both.host.sampler))
            both.draw(130)
            both.check()
