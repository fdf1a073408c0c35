"""A call makes few launches, whatever the fields, the size of the tree and the sampler: counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launches import Launch, recorded
from torch import Tensor

from gpu_replay import Combined, Field, Latest, LinearSchedule, Proportional, RankBased, ReplayBuffer, Uniform

SAMPLERS = {
    "uniform": Uniform(),
    "replacement": Uniform(replacement=True),
    "latest": Latest(),
    "proportional": Proportional(),
    "everything": Proportional(
        beta=LinearSchedule(0.4, 1.0, 10), clip=2.0, initial="stored", normalize="buffer", stratified=False
    ),
    "numbered": Proportional(initial=0.5),
    "combined-uniform": Combined(Uniform()),
    "combined-replacement": Combined(Uniform(replacement=True), newest=2),
    "combined-proportional": Combined(Proportional(normalize="buffer", initial="stored"), newest=3),
}
BY_RANK = {
    "rank": RankBased(),
    "rank-everything": RankBased(
        beta=LinearSchedule(0.4, 1.0, 10), initial="stored", normalize="buffer", stratified=False, resort_every=2
    ),
    "combined-rank": Combined(RankBased(normalize="buffer", initial="stored"), newest=3),
}
# with the fan-out of the kernels these give trees of one, two, three and four levels
CAPACITIES = {100: 1, 5_000: 2, 20_000: 3, 2_100_000: 4}


def values(buffer: ReplayBuffer, rows: int) -> dict[str, Tensor]:
    return {name: torch.zeros((rows, *field.shape), dtype=field.dtype) for name, field in buffer.fields.items()}


def some_fields(count: int) -> dict[str, Field]:
    shapes = [(), (7,), (2, 3), (16,)]
    dtypes = [torch.float32, torch.uint8, torch.bool, torch.int64, torch.bfloat16]
    return {f"f{i}": Field(shapes[i % 4], dtypes[i % 5]) for i in range(count)}


def of_each_call(buffer: ReplayBuffer, launches: list[Launch], rows: int, *, given: bool) -> dict[str, list[str]]:
    """Names of the kernels that each call launches, in order."""
    counted = {}

    def count(call: str) -> None:
        counted[call] = [launch.name for launch in launches]
        launches.clear()

    launches.clear()
    buffer.add(**values(buffer, rows), priority=torch.ones(rows) if given else None)
    count("add")
    buffer.sample(min(rows, 5))
    count("sample")
    buffer.sample(min(rows, 5), beta=0.5)
    count("sample with beta")
    buffer.update_priorities(torch.arange(3), torch.ones(3))
    count("update")
    return counted


def check(counted: dict[str, list[str]]) -> None:
    assert {call: len(kernels) for call, kernels in counted.items()} == {
        "add": 2,
        "sample": 2,
        "sample with beta": 2,
        "update": 1,
    }


@pytest.mark.parametrize("given", [False, True], ids=["initial", "given"])
@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_launches_do_not_depend_on_the_number_of_fields(sampler: str, count: int, given: bool) -> None:
    with recorded() as launches:
        buffer = ReplayBuffer(100, some_fields(count), sampler=SAMPLERS[sampler], device="cpu")
        check(of_each_call(buffer, launches, 10, given=given))


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_launches_do_not_depend_on_the_levels_of_the_tree(capacity: int) -> None:
    with recorded() as launches:
        buffer = ReplayBuffer(capacity, some_fields(2), sampler=SAMPLERS["everything"], device="cpu")
        assert len(buffer._state.masses.levels) == CAPACITIES[capacity]
        counted = of_each_call(buffer, launches, 4_000, given=True)
    assert counted == {
        "add": ["write_kernel", "insert_kernel"],
        "sample": ["stratified_draw_kernel", "gather_kernel"],
        "sample with beta": ["stratified_draw_kernel", "gather_kernel"],
        "update": ["update_kernel"],
    }


@pytest.mark.parametrize("batch, launched", [(1, 1), (256, 1), (257, 1), (1024, 1), (1025, 2), (65_536, 2)])
def test_an_update_of_more_keys_than_one_program_takes_is_two_launches(batch: int, launched: int) -> None:
    for sampler in (SAMPLERS["everything"], BY_RANK["rank"]):
        with recorded() as launches:
            buffer = ReplayBuffer(5_000, some_fields(1), sampler=sampler, device="cpu")
            launches.clear()
            buffer.update_priorities(torch.arange(batch), torch.ones(batch))
            assert [launch.name for launch in launches] == ["settle_kernel", "update_kernel"][2 - launched :]
            assert [launch.constants["SETTLES"] for launch in launches[launched - 1 :]] == [launched == 1]


@pytest.mark.parametrize("capacity, count", [(100, 20), (5_000, 1), (20_000, 1), (2_100_000, 1)])
@pytest.mark.parametrize("sampler", BY_RANK)
def test_draws_by_rank_are_two_launches_after_two_for_an_order_that_is_out_of_date(
    sampler: str, capacity: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorts = []
    plain = torch.sort
    with recorded() as launches:
        monkeypatch.setattr(
            torch, "sort", lambda *given, **named: (sorts.append(len(launches)), plain(*given, **named))[1]
        )
        buffer = ReplayBuffer(capacity, some_fields(count), sampler=BY_RANK[sampler], device="cpu")
        launches.clear()
        counted = of_each_call(buffer, launches, 10, given=True)
        buffer.sample(5)
    drawn = ["rank_draw_kernel", "gather_kernel"]
    assert counted == {
        "add": ["write_kernel", "insert_kernel"],
        "sample": ["arrange_kernel", "list_kernel", *drawn],
        "sample with beta": drawn,
        "update": ["update_kernel"],
    }
    # both were followed by an update or came to their end
    assert [launch.name for launch in launches] == ["arrange_kernel", "list_kernel", *drawn]
    assert sorts == [1, 1]


@pytest.mark.parametrize("rows", [1, 99, 100, 101, 250])
@pytest.mark.parametrize("sampler", [*SAMPLERS, *BY_RANK])
def test_adding_more_than_fits_or_around_the_end_takes_no_more(sampler: str, rows: int) -> None:
    with recorded() as launches:
        buffer = ReplayBuffer(100, some_fields(3), sampler={**SAMPLERS, **BY_RANK}[sampler], device="cpu")
        buffer.add(**values(buffer, 70))
        launches.clear()
        buffer.add(**values(buffer, rows))
        assert [launch.name for launch in launches] == ["write_kernel", "insert_kernel"]


def test_an_update_of_nothing_launches_nothing() -> None:
    with recorded() as launches:
        buffer = ReplayBuffer(100, some_fields(1), sampler=Proportional(), device="cpu")
        buffer.update_priorities(torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert launches == []


@pytest.mark.parametrize("sampler", [SAMPLERS["everything"], BY_RANK["combined-rank"]], ids=["mass", "rank"])
def test_the_same_call_with_other_numbers_is_the_same_compiled_code(sampler: Any) -> None:
    """Compiling takes a second, in which training stands: sizes and counts must not ask for it again, but for updates,
    of which few, many, and more keys than one program takes are different code."""
    variants, updates = set(), set()
    with recorded() as launches:
        buffer = ReplayBuffer(5_000, some_fields(5), sampler=sampler, device="cpu")
        launches.clear()
        for rows in (4, 6, 16, 31, 128, 1000, 6_000):
            buffer.add(**values(buffer, rows), priority=torch.ones(rows))
            buffer.sample(rows)
            keys = torch.arange(rows)
            buffer.update_priorities(keys, torch.ones(rows))
            updated = [launch for launch in launches if launch.name in ("settle_kernel", "update_kernel")]
            updates.add(tuple(launch.variant for launch in updated))
            variants.add(tuple(launch.variant for launch in launches if launch not in updated))
            for launch in launches:
                assert launch.specialised == [], launch.name
            launches.clear()
    assert len(variants) == 1
    assert len(updates) == 3
