"""`buffer.exclude(keys)`: rows that are never sampled again, whatever comes later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import loops, scale
from interpreted import kernel_device as kernel_device
from pairs import RENEWED, RowPair, StepPair, live_through
from places import given, live, make
from programs import SAMPLERS

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
from gpu_replay.samplers import Sampler

pytestmark = pytest.mark.contract

# kernels are compared with the host by programs with these calls, see test_kernels_in_buffers.py
OF_STEPS = scale(list(SAMPLERS), ["uniform", "combined-proportional"])
KEEP_A_TREE = scale([name for name, sampler in SAMPLERS.items() if sampler.base.prioritized], ["combined-rank"])


def pair_of(kind: str, sampler: str, device: str) -> Any:
    """A pair that holds a few rows."""
    if kind == "rows":
        pair: Any = RowPair(24, SAMPLERS[sampler], seed=3, device=device)
        pair.add(30)
        return pair
    with loops():
        steps = StepPair(48, 2, sampler=SAMPLERS[sampler], seed=3, device=device, n_step=2, stack=2)
        live_through(steps, 40)
    steps.renew("state")
    return steps


@pytest.mark.parametrize("sampler", OF_STEPS)
def test_steps_are_excluded_under_every_sampler(sampler: str, device: str) -> None:
    pair = pair_of("steps", sampler, device)
    keys = pair.model.eligible()
    # the newest, one of the middle twice, one that is not live, one that is not eligible yet, and no key
    later = sorted(pair.model.later() - set(keys))
    pair.exclude([keys[-1], keys[3], keys[3], 0, later[0], -1])
    pair.check_all()
    for _ in range(3):
        pair.sample(5)
    pair.update([keys[-1], keys[3], later[0], keys[5]], [100.0, 200.0, 300.0, 2.0])
    pair.check_all()
    for seed in range(scale(6, 2)):
        live_through(pair, 5, seed)
        pair.sample(4)
    pair.check_all()


@pytest.mark.parametrize("sampler", KEEP_A_TREE)
def test_transitions_are_excluded_under_every_sampler_with_priorities(sampler: str, device: str) -> None:
    pair = pair_of("rows", sampler, device)
    keys = pair.model.eligible()
    pair.exclude([keys[-1], keys[-2], keys[-4], keys[3], keys[3], 0, -1])
    pair.check_all()
    pair.update([keys[-1], keys[3], keys[5]], [100.0, 200.0, 2.0])
    for _ in range(3):
        pair.sample(5)
    # what overwrites one is like any other
    pair.add(9)
    pair.sample(7)
    pair.check_all()
    pair.exclude(pair.model.eligible())
    pair.sample(4)
    pair.add(2)
    pair.sample(4)
    pair.check_all()


@pytest.mark.parametrize("kind", ["rows", "steps"])
@pytest.mark.parametrize("way", scale(["state", *RENEWED], ["state", "checkpoint"]))
def test_a_copy_or_a_checkpoint_keeps_it(way: str, kind: str, device: str) -> None:
    pair = pair_of(kind, "combined-proportional", device)
    keys = pair.model.eligible()
    pair.exclude(keys[2:5] + keys[-2:])
    pair.renew(way)
    pair.check_all()
    for _ in range(2):
        pair.sample(8)


def test_epochs_and_ranks_leave_them_out(device: str) -> None:
    for sampler in ("rank", "proportional"):
        pair = pair_of("rows", sampler, device)
        pair.sample(4)
        pair.exclude(pair.model.eligible()[4:9])
        pair.epoch(5)
        pair.epoch(5, shuffle=False)
        pair.sample(6)


@pytest.mark.parametrize("sequences", [None, Sequences(3), Sequences(4, strict=True)])
def test_steps_stay_excluded_as_rows_of_another_kind(sequences: Sequences | None, device: str, tmp_path: Path) -> None:
    pair = pair_of("steps", "proportional", device)
    keys = pair.model.eligible()
    pair.exclude(keys[:4])
    pair.buffer.save(tmp_path / "saved")
    found = TrajectoryReplayBuffer.load(tmp_path / "saved", device, sequences=sequences).keys(eligible=True).tolist()
    assert found
    assert not set(found) & set(keys[:4])


@pytest.mark.parametrize("sampler", [RankBased(), Proportional(alpha=0), Combined(Proportional(), newest=2)])
def test_rows_stay_excluded_under_another_sampler(sampler: Sampler, device: str, tmp_path: Path) -> None:
    pair = pair_of("rows", "proportional", device)
    left = pair.model.eligible()[5:]
    pair.exclude(pair.model.eligible()[:5])
    pair.buffer.save(tmp_path / "saved")
    other = ReplayBuffer.load(tmp_path / "saved", device, sampler=sampler)
    assert other.keys(eligible=True).tolist() == left
    assert set(other.sample(50).key.tolist()) <= set(left)
    with pytest.raises(ValueError, match=r"were excluded, .* Uniform\(.*Proportional\(alpha=0\)"):
        ReplayBuffer.load(tmp_path / "saved", device, sampler=Uniform())


@pytest.mark.parametrize("sampler", [Uniform(), Latest(), Combined(Uniform(), newest=2)])
def test_a_replay_buffer_without_a_tree_says_what_to_do(sampler: Sampler, device: str) -> None:
    buffer = make("exact", sampler=sampler, device=device)
    list(live(buffer, 2))
    with pytest.raises(RuntimeError, match=r"keeps no tree .*sampler=Proportional\(alpha=0\)"):
        buffer.exclude([0])
    buffer.sample(2)


def test_what_is_no_key_is_refused_and_changes_nothing(device: str) -> None:
    buffer = make("exact", sampler=Proportional(), device=device)
    buffer.add(**given(buffer))
    before = buffer.stats()
    for wrong in (0.5, [0.0], torch.zeros(1), "a"):
        with pytest.raises(TypeError):
            buffer.exclude(wrong)
    assert buffer.stats() == before
    buffer.exclude([])
    assert buffer.stats() == before
    buffer.exclude(0)
    assert buffer.stats().eligible == before.eligible - 1
