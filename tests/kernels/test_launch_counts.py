"""A call makes few launches, whatever the fields, windows, sampler and size of the tree: counted in one table.

That no call waits is what `test_no_stalls.py` and, on a GPU, `test_gpu.py` hold.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launches import recorded, rows_of

from gpu_replay import (
    Combined,
    Field,
    Hindsight,
    Latest,
    LinearSchedule,
    Proportional,
    RankBased,
    ReplayBuffer,
    TrajectoryReplayBuffer,
    Uniform,
)
from gpu_replay.ops.counters import Counter

BETA = LinearSchedule(0.4, 1.0, 10)
EVERYTHING = Proportional(beta=BETA, clip=2.0, initial="stored", normalize="buffer", stratified=False)
SAMPLERS: dict[str, Any] = {
    "uniform": Uniform(),
    "replacement": Uniform(replacement=True),
    "latest": Latest(),
    "proportional": Proportional(),
    "everything": EVERYTHING,
    "numbered": Proportional(initial=0.5),
    "combined-uniform": Combined(Uniform()),
    "combined-replacement": Combined(Uniform(replacement=True), newest=2),
    "combined-everything": Combined(EVERYTHING, newest=3),
}
BY_RANK: dict[str, Any] = {
    "rank": RankBased(),
    "rank-everything": RankBased(beta=BETA, initial="stored", normalize="buffer", stratified=False),
    "combined-rank": Combined(RankBased(normalize="buffer", initial="stored"), newest=3),
}
ALL = {**SAMPLERS, **BY_RANK}
# the most launches of a call, sorts by PyTorch among them
LAUNCHES = {"add": 2, "add with final observations": 3, "sample": 2, "sequences": 2, "goals": 1, "update": 1}
# of a long update, and of an order by rank that is made anew after a change
MORE = {"long update": 1, "rank": 2}
# with the fan-out of the kernels these give trees of two to five levels
CAPACITIES = {100: 2, 5_000: 3, 50_000: 4, 2_100_000: 5}
ATARI = {"obs": Field((84, 84), torch.uint8), "action": Field((), torch.int64)}
MANY = {
    **{f"obs.part{i}": Field(((4, 6), (), (3,))[i % 3], (torch.float32, torch.uint8)[i % 2]) for i in range(6)},
    **{f"action.part{i}": Field(((), (5,))[i % 2], (torch.int64, torch.bfloat16)[i % 2]) for i in range(6)},
}


def some_fields(count: int) -> dict[str, Field]:
    shapes = [(), (7,), (2, 3), (16,)]
    dtypes = [torch.float32, torch.uint8, torch.bool, torch.int64, torch.bfloat16]
    return {f"f{i}": Field(shapes[i % 4], dtypes[i % 5]) for i in range(count)}


def of_steps(capacity: int, num_envs: int, fields: Any, sampler: Any, **settings: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(capacity, num_envs, fields, sampler=sampler, device="cpu", **settings)
    # launches that are not made count nothing
    buffer._counters[Counter.ELIGIBLE] = num_envs
    return buffer


def check(buffer: Any, launches: list[Any], rows: int, *, given: bool, kept: bool = False) -> None:
    """Fail unless each call makes as many launches as the table says: sorts by PyTorch are among them.

    given: whether rows come with priorities; kept: whether final observations are stored.
    """
    steps = isinstance(buffer, TrajectoryReplayBuffer)
    # made anew after an add or an update; a sequence has an order of its own
    order = MORE["rank"] * isinstance(getattr(buffer.sampler, "base", buffer.sampler), RankBased)
    priority = torch.ones(rows) if given else None
    finals = rows_of(buffer, rows, final=True)
    calls: list[tuple[str, Any, int]] = [
        ("add", lambda: buffer.add(**rows_of(buffer, rows), priority=priority), 0),
        ("sample", lambda: buffer.sample(5), order),
        ("sample", lambda: buffer.sample(5, beta=0.5), 0),
        ("update", lambda: buffer.update_priorities(torch.arange(3), torch.ones(3)), 0),
        ("sample", lambda: buffer.sample(5), order),
    ]
    if steps:
        add = "add with final observations" if kept else "add"
        calls.append((add, lambda: buffer.add(**finals, priority=priority), 0))
        calls.append(("sequences", lambda: buffer.sample_sequences(5, 2), order))
    sort = torch.sort
    with pytest.MonkeyPatch.context() as patch:
        note = SimpleNamespace(name="sort")
        patch.setattr(torch, "sort", lambda *given, **named: (launches.append(note), sort(*given, **named))[1])
        for name, call, more in calls:
            launches.clear()
            call()
            assert len(launches) == LAUNCHES[name] + more, (name, [launch.name for launch in launches])


@pytest.mark.parametrize(
    ("sampler", "capacity", "count", "given"),
    [
        *((name, 100, count, given) for name in SAMPLERS for count in (1, 5, 20) for given in (False, True)),
        *(("everything", capacity, 2, True) for capacity in CAPACITIES),
        *((name, *sizes, True) for name in BY_RANK for sizes in ((100, 20), (5_000, 1), (20_000, 1), (2_100_000, 1))),
    ],
)
def test_launches_do_not_depend_on_fields_and_levels(sampler: str, capacity: int, count: int, given: bool) -> None:
    with recorded() as launches:
        buffer = ReplayBuffer(capacity, some_fields(count), sampler=ALL[sampler], device="cpu")
        if sampler == "everything":
            assert len(buffer._state.masses.levels) == CAPACITIES[capacity]
        check(buffer, launches, 10 if capacity == 100 else 4_000, given=given)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("fields", [ATARI, MANY], ids=["atari", "many fields"])
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("numbered", "combined-replacement")])
def test_launches_do_not_depend_on_windows(name: str, fields: dict[str, Field], autoreset: str) -> None:
    # trees of two and three levels
    for capacity, stack, n_step in ((100, 1, 1), (5_000, 4, 3), (20_000, 8, 40)):
        with recorded() as launches:
            settings = {"autoreset": autoreset, "random_shift": 2, "stack": stack, "n_step": n_step}
            buffer = of_steps(capacity, 10, fields, ALL[name], **settings)
            check(buffer, launches, 10, given=n_step > 1, kept=autoreset == "same_step")


@pytest.mark.parametrize("batch", [1, 256, 257, 1024, 1025, 65_536])
def test_an_update_of_more_keys_than_one_program_takes_is_two_launches(batch: int) -> None:
    for sampler in (EVERYTHING, BY_RANK["rank"]):
        with recorded() as launches:
            buffer = ReplayBuffer(5_000, some_fields(1), sampler=sampler, device="cpu")
            launches.clear()
            buffer.update_priorities(torch.arange(batch), torch.ones(batch))
            assert len(launches) == LAUNCHES["update"] + MORE["long update"] * (batch > 1024)


@pytest.mark.parametrize("rows", [1, 99, 100, 101, 250])
@pytest.mark.parametrize("sampler", ALL)
def test_adding_more_than_fits_or_around_the_end_takes_no_more(sampler: str, rows: int) -> None:
    with recorded() as launches:
        buffer = ReplayBuffer(100, some_fields(3), sampler=ALL[sampler], device="cpu")
        buffer.add(**rows_of(buffer, 70))
        launches.clear()
        buffer.add(**rows_of(buffer, rows))
        assert len(launches) == LAUNCHES["add"]


def test_an_update_of_nothing_launches_nothing() -> None:
    with recorded() as launches:
        buffer = ReplayBuffer(100, some_fields(1), sampler=Proportional(), device="cpu")
        buffer.update_priorities(torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert launches == []


@pytest.mark.parametrize("sampler", [EVERYTHING, BY_RANK["combined-rank"]], ids=["mass", "rank"])
def test_the_same_call_with_other_numbers_is_the_same_compiled_code(sampler: Any) -> None:
    """Compiling takes a second, in which training stands: sizes and counts must not ask for it again, but for updates,
    of which 256, 512 and 1024 keys, and more than one program takes, are different code."""
    variants, updates = set(), set()
    with recorded() as launches:
        buffer = ReplayBuffer(5_000, some_fields(5), sampler=sampler, device="cpu")
        for rows in (4, 6, 16, 31, 128, 300, 1000, 6_000):
            launches.clear()
            buffer.add(**rows_of(buffer, rows), priority=torch.ones(rows))
            buffer.sample(rows)
            buffer.update_priorities(torch.arange(rows), torch.ones(rows))
            updated = [launch for launch in launches if launch.name in ("settle_kernel", "update_kernel")]
            updates.add(tuple(launch.variant for launch in updated))
            variants.add(tuple(launch.variant for launch in launches if launch not in updated))
            for launch in launches:
                assert launch.specialised == [], launch.name
    assert len(variants) == 1
    assert len(updates) == 4


def test_the_same_call_of_streams_of_other_sizes_is_the_same_compiled_code() -> None:
    variants: dict[str, set[str]] = {}
    with recorded() as launches:
        for num_envs, steps in ((1, 4_000), (16, 250), (50, 81), (300, 15)):
            buffer = of_steps(num_envs * steps, num_envs, ATARI, ALL["combined-everything"], autoreset="same_step")
            assert len(buffer._state.masses.levels) == 3
            # more keys in an update are different code
            for batch in (4, 16, 31, 250):
                buffer._counters[Counter.ELIGIBLE] = 300
                buffer.add(**rows_of(buffer, num_envs, final=True), priority=torch.ones(num_envs))
                buffer.sample(batch)
                buffer.update_priorities(torch.arange(batch), torch.ones(batch))
        for launch in launches:
            variants.setdefault(launch.name, set()).add(launch.variant)
            assert launch.specialised == [], launch.name
    assert {name: len(found) for name, found in variants.items()} == dict.fromkeys(variants, 1)
    assert len(variants) == 6


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_goals_of_hindsight_take_one_launch_more_whatever_the_numbers(autoreset: str) -> None:
    goals = {name: Field((3,), torch.float32) for name in ("obs.achieved_goal", "obs.desired_goal")}
    fields, variants = {**goals, "action": Field((), torch.int64)}, set()
    with recorded() as launches:
        for num_envs, steps in ((1, 4_000), (16, 250), (50, 81)):
            relabel = Hindsight(reward_fn=torch.dist)
            buffer = of_steps(num_envs * steps, num_envs, fields, Uniform(), autoreset=autoreset, relabel=relabel)
            launches.clear()
            buffer.add(**rows_of(buffer, num_envs))
            assert len(launches) == LAUNCHES["add"]
            for batch in (1, 16, 300):
                launches.clear()
                # what is chosen is found by launches that are not made here
                keys = buffer._engine.sample(batch, None)["key"]
                buffer._engine.choose_goals(keys, batch, relabel.strategy)
                assert len(launches) == LAUNCHES["sample"] + LAUNCHES["goals"]
                variants.add(launches[-1].variant)
                assert launches[-1].specialised == []
    assert len(variants) == 1
