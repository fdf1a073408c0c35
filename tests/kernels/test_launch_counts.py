"""A call makes few launches, whatever the fields, windows, sampler and size of the tree: counted in one table.

That no call waits is what `test_capture_graphs.py` and, on a GPU, `test_gpu.py` hold.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import CASES, GOALS, MORE_CASES, SAME_STEP, TWENTY, launches_of, made
from launches import recorded, rows_of
from programs import SAMPLERS

from gpu_replay import Field, Hindsight, Proportional, RankBased
from gpu_replay.ops.counters import Counter

# the most launches of a call; by rank, an order that is made anew after a change is one more and a sort of PyTorch
LAUNCHES = dict.fromkeys(("add", "add with priority", "sample", "sample with beta"), 2)
LAUNCHES |= dict.fromkeys(("step", "step with priority", "step with final observation", "starts", "sequences"), 2)
LAUNCHES |= dict.fromkeys(
    ("later goals", "update", "update of starts", "update of hundreds", "update of a thousand"), 1
)
KEPT = {"step with final observation": 3}
SETTLED = {"update of thousands": 2}
ORDERED = {"sample": 3, "starts": 3, "sequences": 3}
WINDOWS = {"random_shift": 2, "stack": 8, "n_step": 40, **SAME_STEP}
PICTURES = {"obs": Field((6, 6), torch.uint8), "action": Field((), torch.int64)}
BUFFERS = {
    **CASES,
    # trees of two to five levels, of one and of many fields, all samplers
    **{name: case for name, case in MORE_CASES.items() if case[0] < 2_000_000},
    "5 levels": (2_100_000, {"x": Field((), torch.int64)}, SAMPLERS["annealed"]),
    **{f"rows, {name}": (5_000, TWENTY, sampler) for name, sampler in SAMPLERS.items()},
    **{f"steps, {name}": (5_000, PICTURES, sampler, WINDOWS) for name, sampler in SAMPLERS.items()},
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_call_makes_few_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, sorts = BUFFERS[name], []
    sort = torch.sort
    monkeypatch.setattr(torch, "sort", lambda *given, **named: (sorts.append(1), sort(*given, **named))[1])
    base = getattr(case[2], "base", case[2])
    by_rank, prioritized = isinstance(base, RankBased), isinstance(base, RankBased | Proportional)
    keeps = len(case) == 4 and case[3].get("autoreset", "next_step") != "next_step"
    wanted = LAUNCHES | (KEPT if keeps else {}) | (ORDERED if by_rank else {})
    wanted |= SETTLED if prioritized else {"update of thousands": 1}
    found = {call: len(launches) for call, launches in launches_of(case, updates=True).items()}
    assert found == {call: wanted[call] for call in found}
    # of one sample, and of one sequence, which has an order of its own
    assert len(sorts) == by_rank * len(ORDERED.keys() & found.keys())


@pytest.mark.parametrize("rows", [1, 99, 100, 101, 250])
@pytest.mark.parametrize("name", SAMPLERS)
def test_adding_more_than_fits_or_around_the_end_takes_no_more(name: str, rows: int) -> None:
    with recorded() as launches:
        buffer = made(100, TWENTY, SAMPLERS[name])
        buffer.add(**rows_of(buffer, 70))
        launches.clear()
        buffer.add(**rows_of(buffer, rows))
        assert len(launches) == LAUNCHES["add"]


def test_an_update_of_nothing_launches_nothing() -> None:
    with recorded() as launches:
        made(100, TWENTY, SAMPLERS["proportional"]).update_priorities(torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert launches == []


def check_variants(launches: list[Any], kernels: int) -> None:
    """Fail unless each kernel was compiled once, and for no number alone."""
    variants: dict[str, set[str]] = {}
    for launch in launches:
        variants.setdefault(launch.name, set()).add(launch.variant)
        assert launch.specialised == [], launch.name
    assert {name: len(found) for name, found in variants.items()} == dict.fromkeys(variants, 1)
    assert len(variants) == kernels


@pytest.mark.parametrize("name, kernels", [("annealed", 4), ("combined-rank", 5)])
def test_the_same_call_with_other_numbers_is_the_same_compiled_code(name: str, kernels: int) -> None:
    """Compiling takes a second, in which training stands: sizes and counts must not ask for it again, but for updates,
    of which 256, 512 and 1024 keys, and more than one program takes, are different code."""
    updates, others = set(), []
    with recorded() as launches:
        buffer = made(5_000, TWENTY, SAMPLERS[name])
        for rows in (4, 6, 16, 31, 128, 300, 1000, 6_000):
            launches.clear()
            buffer.add(**rows_of(buffer, rows), priority=torch.ones(rows))
            buffer.sample(rows)
            others += launches
            launches.clear()
            buffer.update_priorities(torch.arange(rows), torch.ones(rows))
            updates.add(tuple(launch.variant for launch in launches))
            assert all(launch.specialised == [] for launch in launches)
    check_variants(others, kernels)
    assert len(updates) == 4


@pytest.mark.parametrize("goals, kernels", [(False, 6), (True, 6)])
def test_the_same_call_of_streams_of_other_sizes_is_the_same_compiled_code(goals: bool, kernels: int) -> None:
    settings = {"relabel": Hindsight(reward_fn=torch.dist)} if goals else {}
    sampler = SAMPLERS["uniform" if goals else "combined-proportional"]
    with recorded() as launches:
        for num_envs, steps in ((1, 4_000), (16, 250), (50, 81), (300, 15)):
            case = (num_envs * steps, GOALS if goals else PICTURES, sampler, {**settings, **SAME_STEP}, num_envs)
            buffer = made(*case)
            for batch in (4, 16, 31, 250):
                buffer._counters[Counter.ELIGIBLE] = 300
                buffer.add(**rows_of(buffer, num_envs, final=True), priority=torch.ones(num_envs))
                keys = buffer._engine.sample(batch, None)["key"]
                if goals:
                    buffer._engine.choose_goals(keys, batch, "future")
                else:
                    buffer.update_priorities(torch.arange(batch), torch.ones(batch))
    check_variants(launches, kernels)
