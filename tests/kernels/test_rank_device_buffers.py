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
from test_kernels_in_buffers import some_priorities, twins
from trajectory_pair import FIELDS, Script
from twins import Twins, check_batches

from gpu_replay import Combined, Field, LinearSchedule, RankBased, TrajectoryReplayBuffer

NUMBER = {"n": Field((), torch.int64)}
SAMPLERS: dict[str, Any] = {
    "exact": RankBased(),
    "everything": RankBased(1.0, LinearSchedule(0.4, 1.0, 9), initial="stored", normalize="buffer"),
    "independent": RankBased(2.0, stratified=False, initial=3.0),
    "combined": Combined(RankBased(normalize="buffer"), newest=2),
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
    """After a graph that changes something every sample sorts: the host does not see its replays."""
    lengths, buffer = sorts_of(monkeypatch), of_kernels(device, RankBased())
    if after_graph:
        buffer._engine.draws._ranks.changed(capturing=True)
    changes = (
        lambda: buffer.add(n=torch.arange(30, device=device)),
        lambda: buffer.update_priorities(buffer.sample(3).key, torch.ones(3, device=device)),
        lambda: buffer.load_state_dict(buffer.state_dict()),
        lambda: (buffer.clear(), buffer.add(n=torch.arange(3, device=device))),
    )
    for change in changes:
        change()
        lengths.clear()
        for _ in range(3):
            buffer.sample(5)
        assert lengths == [20] * (3 if after_graph else 1)


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


def test_ranks_of_small_programs_in_a_large_ring(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_sizes_of_a_gpu(monkeypatch)
    with guarded():
        both, generator = twins(device, 2500, NUMBER, SAMPLERS["everything"]), random.Random(0)
        for rows in (1020, 1500, 700):
            both.insert(n=torch.arange(rows), priority=some_priorities(generator, rows, device, both.host.sampler))
            both.draw(130)
            both.check()
