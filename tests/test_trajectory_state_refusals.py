"""States and checkpoints that a trajectory buffer must not take over: other settings, another kind, damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from trajectory_pair import FIELDS, Script
from transitions import NUMBER, make, same_draws

from gpu_replay import CheckpointError, Field, LinearSchedule, Proportional, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract

ANNEALED = Proportional(alpha=0.7, beta=LinearSchedule(0.1, 1.0, steps=40), normalize="buffer")


def built(sampler: Any, device: str, **changed: Any) -> TrajectoryReplayBuffer:
    """A ring of 11 steps of 3 environments."""
    settings: dict[str, Any] = {"capacity": 35, "num_envs": 3, "fields": FIELDS, "stack": 3, "n_step": 4} | changed
    return TrajectoryReplayBuffer(**settings, sampler=sampler, device=device)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "capacity": ({"capacity": 36}, r"(?s)capacity.*3[36]"),
    "num_envs": ({"num_envs": 11}, r"num_envs"),
    "stack": ({"stack": 4}, r"stack"),
    "n_step": ({"n_step": 3}, r"n_step"),
    "gamma": ({"gamma": 0.5}, r"gamma"),
    "autoreset": ({"autoreset": "disabled"}, r"autoreset"),
    "padding": ({"padding": "zero"}, r"padding"),
    "a field more": ({"fields": FIELDS | {"more": Field((), torch.int64)}}, r"(?i)more|field"),
    "field dtype": ({"fields": FIELDS | {"action": Field((), torch.int32)}}, r"action"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_state_of_a_buffer_with_other_settings_is_refused(name: str, device: str) -> None:
    changed, message = OTHERS[name]
    buffer = built(ANNEALED, device, autoreset="same_step")
    Script(seed=10, calls=20, num_envs=3).play(buffer, 0, scale(20, 6))
    other = built(ANNEALED, device, **({"autoreset": "same_step"} | changed))
    with pytest.raises((ValueError, KeyError), match=message):
        other.load_state_dict(buffer.state_dict())
    assert (len(other), other.added) == (0, 0)


@pytest.mark.parametrize("damage", ["empty", "a missing entry", "not a dict", "a missing tensor"])
def test_state_that_is_no_state_is_refused_and_changes_nothing(damage: str, device: str) -> None:
    script = Script(seed=25, calls=40, num_envs=3)
    buffer, twin = built(ANNEALED, device), built(ANNEALED, device)
    first, last = scale((25, 40), (9, 15))
    for each in (buffer, twin):
        script.play(each, 0, first)
    state: Any = dict(buffer.state_dict())
    if damage == "a missing entry":
        state.pop("counters")
    if damage == "a missing tensor":
        state["tensors"] = dict(list(state["tensors"].items())[1:])
    with pytest.raises((ValueError, KeyError, TypeError)):
        buffer.load_state_dict({"empty": {}, "not a dict": 7}.get(damage, state))
    for each in (buffer, twin):
        script.play(each, first, last)
    assert buffer.masses().tolist() == twin.masses().tolist()
    same_draws(buffer, twin, 4, times=1)


def test_the_two_buffers_are_not_mistaken_for_each_other(device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    transitions, trajectories = make(33, Uniform(), device=device, **NUMBER), built(Uniform(), device)
    for one, other in ((transitions, trajectories), (trajectories, transitions)):
        with pytest.raises((ValueError, KeyError), match=r"kind|ReplayBuffer"):
            one.load_state_dict(other.state_dict())
        name = type(one).__name__
        one.save(tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"(?s){name}.*{name}\.load"):
            type(other).load(tmp_path / name)


def test_a_damaged_checkpoint_is_refused(device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    buffer = built(ANNEALED, device, autoreset="same_step")
    Script(seed=12, calls=30, num_envs=3).play(buffer, 0, scale(30, 8))
    buffer.save(tmp_path / "checkpoint")
    piece = max((tmp_path / "checkpoint").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(piece.read_bytes())
    content[-3] ^= 0xFF
    piece.write_bytes(content)
    with pytest.raises(CheckpointError, match=piece.name):
        TrajectoryReplayBuffer.load(tmp_path / "checkpoint", device=device)
