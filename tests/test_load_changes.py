"""`load` with another capacity or sampler: what was saved goes on as in a buffer that had these settings all along."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from devices import device_fixture as device_fixture
from devices import scale, thinned
from hindsight_oracle import GOALS, MODES, check_batch, hindsight, live_with_goals
from test_trajectory_random_streams import SAMPLERS, run
from trajectory_pair import FIELDS, Pair, live_through
from transitions import EXACT, check_rows, fill, make, same_draws

from gpu_replay import (
    CheckpointError,
    Combined,
    Latest,
    Proportional,
    RankBased,
    ReplayBuffer,
    TrajectoryReplayBuffer,
    Uniform,
)

KINDS: dict[str, Any] = {
    "uniform": Uniform(),
    "exact": EXACT,
    "roots": Proportional(alpha=0.5, eps=0.25, initial="stored", normalize="buffer"),
    "number": Proportional(alpha=1.0, eps=0.0, clip=8.0, initial=3.0),
    "flat": Proportional(alpha=0.0),
    "rank": RankBased(),
    "rank-outdated": Combined(RankBased(resort_every=3), newest=2),
    "latest": Latest(),
}
WITHOUT = ("uniform", "latest")


def loaded(buffer: Any, path: Path, **changes: Any) -> Any:
    """What `load` makes of the buffer."""
    buffer.save(path / "checkpoint")
    return type(buffer).load(path / "checkpoint", device=buffer.device, **changes)


def filled(capacity: int, name: str, device: str, given: bool) -> ReplayBuffer:
    """50 transitions, half of them with a priority where `given`."""
    buffer = make(capacity, KINDS[name], device=device, seed=3)
    priorities = [0.5 + (key * 7 % 30) / 4 for key in range(25)] if given else None
    fill(buffer, 25, priorities)
    fill(buffer, 25, [2 * each for each in priorities] if priorities else None)
    return buffer


@thinned("source, target, capacity", ["uniform", "exact", "rank"], list(KINDS), [20, 33, 64])
def test_a_buffer_with_another_sampler_and_capacity_is_as_if_made_with_them(
    source: str, target: str, capacity: int, device: str, tmp_path: Path
) -> None:
    # more than all were never stored, so that nothing is missing in the larger one
    given = source not in WITHOUT
    buffer, twin = filled(50, source, device, given), filled(capacity, target, device, given)
    found = loaded(buffer, tmp_path, sampler=KINDS[target], capacity=capacity)
    assert (found.sampler, found.capacity, len(found), found.added) == (KINDS[target], capacity, len(twin), 50)
    for _ in range(2):
        # what was given to transitions that are gone counts for the largest ever given
        if getattr(KINDS[target], "initial", "") != "running" or given:
            assert found._counters.tolist() == twin._counters.tolist()
        same_draws(found, twin, 5, times=2)
        check_rows(found[list(range(found.added - len(found), found.added))])
        for each in (found, twin):
            fill(each, 9)


@pytest.mark.contract
def test_a_larger_buffer_keeps_what_there_was_and_its_keys(device: str, tmp_path: Path) -> None:
    buffer = make(7, EXACT, device=device)
    fill(buffer, 17, [1 + key for key in range(17)])
    found = loaded(buffer, tmp_path, capacity=12)
    for more in (3, 4, 5, 40):
        live = list(range(max(10, found.added - 12), found.added))
        assert (len(found), found.added) == (len(live), live[-1] + 1)
        check_rows(found[live])
        masses = found.masses().tolist()
        assert [masses[key % 12] for key in live if key < 17] == [(1 + key) << 20 for key in live if key < 17]
        assert sum(1 for mass in masses if mass) == len(live)
        check_rows(found.sample(9))
        with pytest.raises(KeyError, match=f"key {live[0] - 1} is not live"):
            found[[live[0] - 1]]
        fill(found, more)
    again = loaded(found, tmp_path, capacity=5)
    check_rows(again[list(range(again.added - 5, again.added))])


def moved(pair: Pair, path: Path, steps: int, **more: Any) -> None:
    """Save the buffer of a pair and load it with so many steps; the oracle forgets what does not fit or is gone."""
    history = pair.history
    pair.buffer = loaded(pair.buffer, path, capacity=steps * history.num_envs, **more)
    history.cleared.append(max(0, history.count - min(steps, history.turn)))
    history.final_capacity = min(steps, history.turn) * history.num_envs
    history.turn, history.capacity = steps, steps * history.num_envs
    if pair.priorities is not None:
        eligible = history.view().eligible()
        pair.priorities.held = {key: pair.priorities.held[key] for key in eligible}


@thinned("steps, autoreset, name", [3, 8, 21, 30], ["next_step", "same_step", "disabled"], ["running", "uniform"])
def test_steps_in_another_capacity_agree_with_the_oracle(
    steps: int, autoreset: str, name: str, device: str, tmp_path: Path
) -> None:
    draw = random.Random(f"{steps} {autoreset} {name}")
    settings: dict[str, Any] = {"stack": 3, "n_step": 2, "autoreset": autoreset, "sampler": SAMPLERS[name]}
    for before in (14, 40):
        pair = Pair(13 * 3, 3, device=device, **settings)
        run(pair, draw, steps=before, end=0.15, final=0.8, own=0.3, check=0.1)
        moved(pair, tmp_path, steps)
        pair.check_refusals(pair.check())
        run(pair, draw, steps=15, end=0.15, final=0.8, own=0.3, check=0.3)
        moved(pair, tmp_path, 6)
        run(pair, draw, steps=4, end=0.15, final=0.8, own=0.3, check=0.3)


@thinned("steps, mode, strategy", [4, 9, 25], ["next_step", "same_step"], ["future", "final", "episode"])
def test_goals_in_another_capacity_are_those_of_the_episode(
    steps: int, mode: str, strategy: str, device: str, tmp_path: Path
) -> None:
    draw, relabel = random.Random(f"{steps} {mode} {strategy}"), hindsight(strategy)
    pair = Pair(
        2 * 12, 2, sampler=Uniform(replacement=True), fields=GOALS, device=device, relabel=relabel, **MODES[mode]
    )
    live_with_goals(pair, 30, draw, end=0.15)
    moved(pair, tmp_path, steps, relabel=relabel)
    for _ in range(8):
        view = pair.history.view()
        if pair.buffer.stats().eligible:
            check_batch(pair.buffer.sample(60), view, strategy)
        assert pair.buffer.stats().eligible == len(view.eligible())
        live_with_goals(pair, 3, draw, end=0.15)


@pytest.mark.contract
@thinned("source, target", scale(["exact", "rank", "uniform"], ["uniform"]), scale(list(KINDS)[:-1], ["exact"]))
def test_steps_with_another_sampler_stay_eligible(source: str, target: str, device: str, tmp_path: Path) -> None:
    pair = live_through(Pair(13 * 3, 3, device=device, sampler=KINDS[source], stack=2, n_step=2), 20)
    found = loaded(pair.buffer, tmp_path, sampler=KINDS[target])
    eligible = pair.history.view().eligible()
    pair.buffer, pair.priorities = found, None
    pair.check()
    assert found.stats().eligible == len(eligible)
    assert set(found.sample(min(9, len(eligible))).key.tolist()) <= set(eligible)
    live_through(pair, 30, seed=1).check()


def test_what_cannot_be_asked_for_is_refused(device: str, tmp_path: Path) -> None:
    buffer = make(7, EXACT, device=device)
    fill(buffer, 9)
    buffer.save(tmp_path / "c")
    for changes, error in (
        ({"capacity": 0}, ValueError),
        ({"capacity": "7"}, TypeError),
        ({"sampler": "uniform"}, TypeError),
        ({"device": "nowhere"}, ValueError),
    ):
        with pytest.raises(error):
            ReplayBuffer.load(tmp_path / "c", **changes)
    steps = TrajectoryReplayBuffer(12, 4, FIELDS, device=device)
    steps.save(tmp_path / "s")
    with pytest.raises(ValueError, match="capacity 3 does not hold one step of num_envs=4"):
        TrajectoryReplayBuffer.load(tmp_path / "s", device=device, capacity=3)


def test_a_damaged_checkpoint_is_refused_with_other_settings_too(device: str, tmp_path: Path) -> None:
    buffer = make(50, EXACT, device=device)
    fill(buffer, 30)
    buffer.save(tmp_path / "c")
    (piece,) = (tmp_path / "c").glob("*.safetensors")
    content = bytearray(piece.read_bytes())
    content[-1] ^= 1
    piece.write_bytes(content)
    for changes in ({"capacity": 9}, {"sampler": Uniform()}):
        with pytest.raises(CheckpointError, match=piece.name):
            ReplayBuffer.load(tmp_path / "c", device=device, **changes)
