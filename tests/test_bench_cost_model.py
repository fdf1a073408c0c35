"""The cost model of a GPU: its counts of launches and bytes, held against the code that makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_records import ENVIRONMENT, GPU, record
from launches import recorded
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_replay import Field, Proportional, TrajectoryReplayBuffer
from gpu_replay.bench import baselines, cost_model, ours, report
from gpu_replay.bench.cost_model import Cost, targets, targets_first
from gpu_replay.bench.frames import stream_cases
from gpu_replay.bench.kernel_inputs import Inputs
from gpu_replay.bench.kernels import KernelCase, kernel_cases
from gpu_replay.bench.record import Record
from gpu_replay.bench.results import read, recorded_files
from gpu_replay.ops.counters import Counter, new_counters
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.prefix_sum import inclusive_prefix_sum
from gpu_replay.ops.rank_draw import DeviceRanks
from gpu_replay.ops.ring import plan_gather

CPU = torch.device("cpu")
DOCUMENT = Path(__file__).parents[1] / "bench" / "README.md"


def launches_of(call: Callable[[], object]) -> int:
    """Launches that a call would make on a GPU; what it needs must have been made within `recorded`."""
    with recorded() as launches:
        call()
        return len(launches)


@pytest.mark.parametrize("slots, count", [(100, 1), (10**4, 2), (10**6, 3), (10**7, 4), (10**8, 4)])
def test_the_levels_are_those_of_the_trees_that_kernels_descend(slots: int, count: int) -> None:
    assert len(cost_model.levels(slots)) == count
    if slots <= 10**6:
        assert cost_model.levels(slots) == [level.numel() for level in MassTree(slots, CPU, "triton").levels]


def test_launches_of_draws_and_updates_are_those_that_are_made() -> None:
    inputs = Inputs(5_000, 32, CPU)
    with recorded() as launches:
        index = ours.DeviceIndex(inputs)
        launches.clear()
        slots = index.draw(32)
        assert len(launches) == cost_model.draw(5_000, 32).launches
        index.update(slots, torch.ones(32))
        assert len(launches) == cost_model.draw_and_update(5_000, 32).launches
        launches.clear()
        index.update(slots.repeat(100), torch.ones(3200))
        assert len(launches) == cost_model.update(5_000, 3200).launches
        launches.clear()
        with _Counted() as ran:
            index.tree.build()
        assert (len(launches), ran.names) == (cost_model.build(5_000).launches, [])
        for length in (2_000, 5_000):
            launches.clear()
            with _Counted() as ran:
                inclusive_prefix_sum(torch.zeros(length, dtype=torch.int64))
            # one was what the numbers are made of, one is the output
            assert len(launches) + len(ran.names) - 2 == cost_model.scan(length).launches


@pytest.mark.parametrize("slots", [1_000, 5_000, 40_000])
def test_launches_of_ranks_are_those_that_are_made(slots: int) -> None:
    with recorded() as launches:
        tree, counters = MassTree(slots, CPU, "triton", summed=False), new_counters(CPU, 0)
        ranks = DeviceRanks(slots, 0.7, 1, counters)
        launches.clear()
        ranks.current(tree, capturing=True)
        # and the fill of a counter
        assert len(launches) + 1 == cost_model.merged_ranks(slots, 3).launches


def test_launches_of_an_atari_step_are_those_that_are_made() -> None:
    fields = {"obs": Field((84, 84), torch.uint8, torch.bfloat16, 1 / 255), "action": Field((), torch.int64)}
    step = {name: torch.zeros((4, *field.shape), dtype=field.dtype) for name, field in fields.items()}
    step |= {name: torch.zeros(4, dtype=torch.bool) for name in ("terminated", "truncated")}
    with recorded() as launches:
        buffer = TrajectoryReplayBuffer(40, 4, fields, sampler=Proportional(), stack=4, device="cpu")
        launches.clear()
        buffer.add(**step, reward=torch.zeros(4))
        # what no launch has counted
        buffer._counters[Counter.ELIGIBLE] = 10
        batch = buffer.sample(8)
        buffer.update_priorities(batch.key, torch.ones(8))
        assert len(launches) == cost_model.atari_step(40, 4, 8).launches
    gather = plan_gather({"x": step["obs"]}, {"x": fields["obs"]}, 2, CPU, weighed=False)
    assert launches_of(lambda: gather(torch.zeros(2).long(), None)) == 1
    assert cost_model.gather_rows(1).launches == cost_model.gather_frames(1, 2).launches == 1


class _Counted(TorchDispatchMode):
    """Counts operations that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_operations_of_torch_are_those_of_the_baseline() -> None:
    work = baselines.draw_update(Inputs(1_000, 32, CPU))
    with _Counted() as ran:
        work.call()
    assert len(ran.names) == cost_model.by_torch(1_000, 32).launches, ran.names


def test_the_bytes_of_one_block_by_hand() -> None:
    # one block of 128 masses for four draws; each writes slot, key, mass and probability, counts itself in a sector,
    # and its mass becomes a weight
    assert cost_model.draw(128, 4).touched == 128 * 8 + 4 * (8 + 8 + 8 + 4 + 2 * 32 + 8 + 4)
    # no level above: key, stamp; key, stamp, priority, leaf
    assert cost_model.update(128, 4).touched == 4 * (8 + 2 * 32 + 8 + 2 * 32 + 4 + 2 * 32)
    # two levels: 79 blocks of leaves and the root
    assert cost_model.draw(10_000, 256).touched - 256 * 104 == (79 + 1) * 1024
    assert cost_model.gather_rows(1).touched == 8 + 5 * 32 + 45


@pytest.mark.parametrize(
    "operation, work",
    [
        ("draw", cost_model.draw(10**6, 256)),
        ("update", cost_model.update(10**6, 256)),
        ("draw-update", cost_model.draw_and_update(10**6, 256)),
        ("prefix-sum", cost_model.scan(10**6)),
        ("tree-build", cost_model.build(10**6)),
        ("row-gather", cost_model.gather_rows(256)),
        ("frame-gather-bf16", cost_model.gather_frames(256, 2)),
    ],
)
def test_what_must_move_is_what_the_records_count(operation: str, work: Cost) -> None:
    assert work.must == KernelCase(operation, 10**6, 256).bytes
    assert work.touched >= work.must


def test_times_are_bytes_launches_and_dependent_loads() -> None:
    work = Cost(must=1, touched=int(cost_model.DATA_SHEET), launches=2, dependent=3)
    assert work.microseconds == pytest.approx((1e6 + 4, 1e6 + 6 + 2.4))
    assert work + Cost(launches=1) == replace(work, launches=3)


def made(case: str, median: float, implementation: str = "gpu_replay") -> Record:
    return record(case, median, implementation, suite="kernels", environment=GPU, timing="graph", copy_share=0.5)


def test_records_of_a_gpu_fill_the_last_column_and_others_do_not() -> None:
    case, other = "draw-update/N=1M/B=256", "cumsum + searchsorted + scatter"
    records = [made(case, 8.0), made(case, 40.0, other), made("empty", 2.0), made("tree-build/N=100M", 9.0)]
    lines = cost_model.targets_table(records).splitlines()
    measured = {line.split("|")[2].strip(): line.split("|")[-2].strip() for line in lines}
    assert (measured["≥ 3x torch"], measured["≤ 4x empty kernel"]) == ("5.00x (8.0 µs)", "4.00x (8.0 µs)")
    assert measured["≥ 70% of copy bandwidth"] == "50.0% (9.0 µs)"
    assert measured["≥ 10x torch"] == cost_model.NOT_MEASURED
    on_cpu = [replace(each, environment=ENVIRONMENT) for each in records]
    nothing = cost_model.targets_table(on_cpu).splitlines()[2:]
    assert len(nothing) == len(cost_model.targets())
    assert all(line.split("|")[-2].strip() == cost_model.NOT_MEASURED for line in nothing)


def test_cases_with_a_target_come_first() -> None:
    cases = kernel_cases("cuda")
    ordered = [case.name for case in targets_first(cases)]
    assert sorted(ordered) == sorted(case.name for case in cases)
    named = [target.name for target in targets() if "/N=" in target.name]
    assert {*named, "empty", "draw-update/N=10k/B=256"} == set(ordered[: len(set(named)) + 2])
    assert next(case.name for case in targets_first(stream_cases(1000, (512,), 128))) == "frame-cycle/N=1k/B=512"


def test_the_table_in_the_document_is_the_one_that_is_made() -> None:
    records, text = [each for file in recorded_files() for each in read(file)], DOCUMENT.read_text()
    assert "<!-- bench:cost-model -->" in text
    assert cost_model.section(records) in text
    emptied = text.replace(cost_model.section(records), "")
    assert report.updated(emptied, records) == text
