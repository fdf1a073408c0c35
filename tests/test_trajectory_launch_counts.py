"""A call of a trajectory buffer makes few launches, whatever its fields, windows and sampler: counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launches import Launch, recorded
from torch import Tensor

from gpu_replay import (
    Combined,
    Field,
    Hindsight,
    Latest,
    LinearSchedule,
    Proportional,
    RankBased,
    TrajectoryReplayBuffer,
    Uniform,
)
from gpu_replay.ops.counters import Counter

EVERYTHING = Proportional(
    beta=LinearSchedule(0.4, 1.0, 10), clip=2.0, initial="stored", normalize="buffer", stratified=False
)
SAMPLERS: dict[str, Any] = {
    "uniform": Uniform(),
    "replacement": Uniform(replacement=True),
    "latest": Latest(),
    "proportional": Proportional(),
    "everything": EVERYTHING,
    "combined-uniform": Combined(Uniform()),
    "combined-everything": Combined(EVERYTHING, newest=3),
    "rank": RankBased(beta=LinearSchedule(0.4, 1.0, 10), initial="stored"),
    "combined-rank": Combined(RankBased(normalize="buffer", stratified=False), newest=3),
}
FIELDS = {"obs": Field((84, 84), torch.uint8), "action": Field((), torch.int64)}
MANY = {
    **{f"obs.part{i}": Field(((4, 6), (), (3,))[i % 3], (torch.float32, torch.uint8)[i % 2]) for i in range(6)},
    **{f"action.part{i}": Field(((), (5,))[i % 2], (torch.int64, torch.bfloat16)[i % 2]) for i in range(6)},
}


def made(
    capacity: int, num_envs: int, fields: dict[str, Field], sampler: Any, **settings: Any
) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(capacity, num_envs, fields, sampler=sampler, device="cpu", **settings)
    # launches that are not made count nothing
    buffer._counters[Counter.ELIGIBLE] = num_envs
    return buffer


def step_of(buffer: TrajectoryReplayBuffer, *, final: bool) -> dict[str, Tensor]:
    envs = buffer.num_envs
    step = {name: torch.zeros((envs, *field.shape), dtype=field.dtype) for name, field in buffer.fields.items()}
    if final:
        step |= {f"final_{name}": step[name] for name in buffer._streams.observations}
    flags = torch.zeros(envs, dtype=torch.bool)
    return step | {"reward": torch.zeros(envs), "terminated": flags, "truncated": flags}


def of_each_call(buffer: TrajectoryReplayBuffer, launches: list[Launch]) -> dict[str, list[str]]:
    """Names of the kernels that each call launches, in order."""
    counted = {}

    def count(call: str) -> None:
        counted[call] = [launch.name for launch in launches]
        launches.clear()

    launches.clear()
    buffer.add(**step_of(buffer, final=False))
    count("add")
    buffer.add(**step_of(buffer, final=True), priority=torch.ones(buffer.num_envs))
    count("add with final observations")
    buffer.sample(5)
    count("sample")
    buffer.sample(5, beta=0.5)
    count("sample with beta")
    buffer.sample_sequences(5, 2)
    count("sequences")
    buffer.update_priorities(torch.arange(3), torch.ones(3))
    count("update")
    return counted


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("fields", [FIELDS, MANY], ids=["atari", "many fields"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_launches_do_not_depend_on_fields_windows_and_levels(
    name: str, fields: dict[str, Field], autoreset: str
) -> None:
    by_mass = name in ("proportional", "everything", "combined-everything")
    by_rank = name in ("rank", "combined-rank")
    drawn = ["draw_by_mass_kernel"] if by_mass else ["draw_eligible_kernel"]
    # after an add the order is out of date; a sequence has an order of its own
    order = ["arrange_kernel", "list_kernel"] if by_rank else []
    if by_rank:
        drawn = ["rank_draw_kernel"]
    kept = ["keep_finals_kernel"] if autoreset == "same_step" else []
    settings = {"autoreset": autoreset, "random_shift": 2}
    # trees of one, two and three levels
    for capacity, stack, n_step in ((100, 1, 1), (5_000, 4, 3), (20_000, 8, 40)):
        with recorded() as launches:
            buffer = made(capacity, 10, fields, SAMPLERS[name], stack=stack, n_step=n_step, **settings)
            counted = of_each_call(buffer, launches)
        assert counted == {
            "add": ["write_kernel", "add_step_kernel"],
            "add with final observations": ["write_kernel", "add_step_kernel", *kept],
            "sample": [*order, *drawn, "gather_windows_kernel"],
            "sample with beta": [*drawn, "gather_windows_kernel"],
            "sequences": [*order, *drawn, "gather_windows_kernel"],
            "update": ["update_kernel"],
        }


def test_the_same_call_with_other_numbers_is_the_same_compiled_code() -> None:
    """Compiling takes a second, in which training stands: sizes and counts must not ask for it again."""
    variants: dict[str, set[str]] = {}
    with recorded() as launches:
        for num_envs, steps in ((1, 4_000), (16, 250), (50, 81), (300, 15)):
            buffer = made(num_envs * steps, num_envs, FIELDS, SAMPLERS["combined-everything"], autoreset="same_step")
            assert len(buffer._state.masses.levels) == 2
            # more keys in an update are different code
            for batch in (4, 16, 31, 250):
                buffer._counters[Counter.ELIGIBLE] = 300
                buffer.add(**step_of(buffer, final=True), priority=torch.ones(num_envs))
                buffer.sample(batch)
                buffer.update_priorities(torch.arange(batch), torch.ones(batch))
            for launch in launches:
                variants.setdefault(launch.name, set()).add(launch.variant)
                assert launch.specialised == [], launch.name
            launches.clear()
    assert {name: len(found) for name, found in variants.items()} == dict.fromkeys(variants, 1)
    assert len(variants) == 6


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_goals_of_hindsight_take_one_launch_more_whatever_the_numbers(autoreset: str) -> None:
    goals = {name: Field((3,), torch.float32) for name in ("obs.achieved_goal", "obs.desired_goal")}
    fields, variants = {**goals, "action": Field((), torch.int64)}, set()
    with recorded() as launches:
        for num_envs, steps in ((1, 4_000), (16, 250), (50, 81)):
            relabel = Hindsight(reward_fn=torch.dist)
            buffer = made(num_envs * steps, num_envs, fields, Uniform(), autoreset=autoreset, relabel=relabel)
            buffer.add(**step_of(buffer, final=False))
            assert [launch.name for launch in launches] == ["write_kernel", "add_step_kernel"]
            for batch in (1, 16, 300):
                launches.clear()
                # what is chosen is found by launches that are not made here
                keys = buffer._engine.sample(batch, None)["key"]
                buffer._engine.choose_goals(keys, batch, relabel.strategy)
                names = [launch.name for launch in launches]
                assert names == ["draw_eligible_kernel", "gather_windows_kernel", "choose_goals_kernel"]
                chosen = launches[-1]
                variants.add(chosen.variant)
                assert sum(isinstance(argument, int) for argument in chosen.arguments) == 6
                assert chosen.specialised == []
            launches.clear()
    assert len(variants) == 1
