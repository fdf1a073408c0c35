"""Stored data under another sampler: `load(path, sampler=...)`, compared with the model of each."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
from devices import scale, thinned
from model import UNIT, RowModel, StepModel, mass_of
from pairs import StepPair, live_through
from programs import SAMPLERS
from refusals import whole_state
from test_distributions import lived
from test_sequences import with_rows
from transitions import NUMBER, fill, make, same

from gpu_replay import (
    Combined,
    Latest,
    Proportional,
    RankBased,
    ReplayBuffer,
    Sequences,
    TrajectoryReplayBuffer,
    Uniform,
)

pytestmark = pytest.mark.contract
OF_SAMPLER = ("sampler", "base", "newest", "by_mass", "by_rank", "rank_masses")


def with_sampler(model: Any, sampler: Any) -> Any:
    """The model of a buffer that was loaded with this sampler: priorities as the old one tells them, if both have some;
    those that still wait too.
    """
    after, fresh = copy.deepcopy(model), RowModel(model.capacity, sampler)
    vars(after).update({name: getattr(fresh, name) for name in OF_SAMPLER})
    kept = (model.by_mass or model.by_rank) and model.base.alpha and (after.by_mass or after.by_rank)

    def told(priority: float | None) -> float | None:
        if priority is None or not kept or model.by_rank:
            return priority if kept else None
        return max((mass_of(priority, model.base, model.capacity) / UNIT) ** (1 / model.base.alpha) - model.base.eps, 0)

    after.running = told(model.running)
    for key in model.live() if isinstance(model, StepModel) else ():
        env, number = model.view().place(key)
        after.steps[env][number]["priority"] = told(model._own(key) if model.waits(key) else None)
    held = {key: told(priority) for key, priority in model.held.items()}
    after.held = {key: priority for key, priority in held.items() if priority is not None}
    initial = after.initial()
    after.held = {key: initial if priority is None else priority for key, priority in held.items()}
    return after


def go_on(pair: Any, turn: int) -> None:
    """Add rows or steps, and give the newest ones priorities, those too that wait for their steps."""
    if isinstance(pair, StepPair):
        live_through(pair, 7, turn, end=0.1)
    else:
        pair.add(7)
    keys = list(pair.model.live())[-9:]
    pair.update(keys, [0.25 * (1 + key % 5) for key in keys])


@thinned("name, kind", SAMPLERS, ["rows", "steps", "windows"])
def test_priorities_go_on_where_both_samplers_have_them(name: str, kind: str, device: str, tmp_path: Path) -> None:
    draw = random.Random(f"{name} {kind}")
    others = [each for each in SAMPLERS if each != name]
    for case, other in enumerate(draw.sample(others, scale(5, 1))):
        pair, _ = lived(kind, SAMPLERS[name], device, seed=case)
        pair.sample(5)
        go_on(pair, case)
        if kind != "rows" or {SAMPLERS[name].base.prioritized, SAMPLERS[other].base.prioritized} == {True}:
            pair.exclude(pair.model.eligible()[2:5])
        rows: dict[str, Any] = {}
        if kind == "windows" and case % 2 == 0:
            rows = {"sequences": draw.choice((None, Sequences(2, strict=True)))}
        pair.buffer.save(tmp_path / str(case))
        pair.buffer = type(pair.buffer).load(tmp_path / str(case), device, sampler=SAMPLERS[other], **rows)
        pair.model, pair.warned = with_sampler(pair.model, SAMPLERS[other]), None
        if rows:
            pair.model = with_rows(pair.model, rows["sequences"])
        pair.arguments |= {"sampler": SAMPLERS[other], **rows}
        assert pair.buffer.sampler == SAMPLERS[other]
        for turn in range(2):
            pair.check_all()
            pair.check_contents()
            pair.sample(5)
            pair.renew(("state", "checkpoint")[turn])
            go_on(pair, turn)
        pair.check_all()


@pytest.mark.parametrize(
    "sampler", [Proportional(), RankBased(), Uniform(), Latest(), Combined(Proportional(), 2)], ids=repr
)
def test_the_same_sampler_changes_nothing(sampler: Any, device: str, tmp_path: Path) -> None:
    buffer = make(20, sampler, device=device)
    fill(buffer, 30, [0.1 * number for number in range(30)])
    buffer.sample(4)
    buffer.save(tmp_path / "b")
    again = ReplayBuffer.load(tmp_path / "b", device, sampler=sampler)
    assert whole_state(again) == whole_state(buffer)
    same(again.sample(4), buffer.sample(4))


def test_priorities_survive_to_the_resolution_of_a_mass(device: str, tmp_path: Path) -> None:
    given = [0.01 * 1.6**number for number in range(20)]
    buffer = make(20, Proportional(alpha=0.6), device=device, **NUMBER)
    buffer.add(number=range(20), priority=given)
    buffer.save(tmp_path / "b")
    for other in (Proportional(alpha=0.9, eps=1e-3), RankBased(), Combined(Proportional(alpha=0.3))):
        again = ReplayBuffer.load(tmp_path / "b", device, sampler=other)
        assert again.priorities(again.keys()).tolist() == pytest.approx(given, rel=1e-4)
        # the largest that was ever given is that of new rows
        key = again.add(number=[20])
        assert again.priorities(key).item() == pytest.approx(given[-1], rel=1e-4)


def test_a_sampler_without_a_trace_of_priorities_gives_none(device: str, tmp_path: Path) -> None:
    buffer = make(9, Proportional(alpha=0.0), device=device)
    fill(buffer, 9, [float(number) for number in range(9)])
    buffer.save(tmp_path / "b")
    again = ReplayBuffer.load(tmp_path / "b", device, sampler=Proportional(initial=3.0))
    assert again.priorities(again.keys()).tolist() == pytest.approx([3.0] * 9, rel=1e-5)


def test_what_is_no_sampler_is_refused_and_so_is_a_sampler_elsewhere(device: str, tmp_path: Path) -> None:
    rows = live_through(StepPair(12, 2, device=device), 4).buffer
    rows.save(tmp_path / "b")
    for wrong in (1, Proportional, "uniform"):
        with pytest.raises(TypeError, match=r"sampler must be Uniform\(\).*found"):
            TrajectoryReplayBuffer.load(tmp_path / "b", device, sampler=wrong)
    with pytest.raises(ValueError, match="the state is of another buffer: sampler is"):
        TrajectoryReplayBuffer.load(tmp_path / "b", device, sampler=Uniform()).load_state_dict(rows.state_dict())
