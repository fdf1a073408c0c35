"""A state that somebody edited, its checksums made right, is refused, in memory and on disk, and nothing is changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trajectory_pair import FIELDS, Script
from transitions import EXACT, contents, fill, make

from gpu_replay import CheckpointError, RankBased, ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.checkpoint.format import write_checkpoint
from gpu_replay.training.checkpoints import latest

State = dict[str, Any]


def transitions(sampler: Any) -> ReplayBuffer:
    """A ring of 11 that is full, with a clear behind it."""
    buffer = make(11, sampler)
    fill(buffer, 9)
    buffer.clear()
    fill(buffer, 7)
    buffer.sample(3)
    return buffer


def steps(sampler: Any) -> TrajectoryReplayBuffer:
    """A ring of 11 steps of 3 environments with final observations."""
    settings: dict[str, Any] = {"stack": 3, "n_step": 2, "autoreset": "same_step", "sampler": sampler, "device": "cpu"}
    buffer = TrajectoryReplayBuffer(33, 3, FIELDS, **settings)
    Script(seed=1, calls=70, num_envs=3).play(buffer, 0, 70)
    return buffer


MADE: dict[str, Callable[[], Any]] = {
    "mass": lambda: transitions(EXACT),
    "rank": lambda: transitions(RankBased()),
    "steps": lambda: steps(EXACT),
    "steps-uniform": lambda: steps(Uniform()),
}


@functools.cache
def made(kind: str) -> Any:
    """One buffer for all tests: nothing that is refused changes it."""
    return MADE[kind]()


def put(name: str, value: Any, place: Any = slice(None)) -> Callable[[State], object]:
    """Write into a tensor."""
    return lambda state: state["tensors"][name].__setitem__(place, value)


def count(name: str, value: int) -> Callable[[State], object]:
    """Write a counter."""
    return lambda state: state["counters"].update({name: value})


def of_not_drawable(state: State) -> None:
    """Give a mass to every step."""
    masses = state["tensors"]["masses"]
    masses.copy_(masses.clamp(min=1))


# which buffer, and what is done to its state
EDITS: dict[str, tuple[str, Callable[[State], object]]] = {
    "masses all 0": ("mass", put("masses", 0)),
    "a mass below 0": ("mass", put("masses", -(2**63), 8)),
    "a mass above the limit": ("mass", put("masses", 2**62 // 11 + 1, 8)),
    "a mass of what was forgotten": ("mass", put("masses", 1, 7)),
    "a negative count of draws": ("mass", put("times_sampled", -1, 0)),
    "FIRST after ADDED": ("mass", count("FIRST", 17)),
    "ADDED beyond all": ("mass", count("ADDED", 2**63 - 1)),
    "a largest mass beyond the limit": ("mass", count("TOP", 2**62)),
    "a code of no number": ("rank", put("masses", 2**63 - 1, 8)),
    "half a step": ("steps", count("ADDED", 1001)),
    "half a step forgotten": ("steps", count("FIRST", 1)),
    "a mass of a step that cannot be drawn": ("steps", of_not_drawable),
    "a mark of a step that cannot be drawn": ("steps-uniform", put("marks", 1)),
    "marks that are larger": ("steps-uniform", lambda state: state["tensors"]["marks"].mul_(2)),
    "unknown flags": ("steps", put("streams.flags", 255, 0)),
    "steps before the first": ("steps", put("streams.depth", -5, 0)),
    "a final observation elsewhere": ("steps", put("streams.final", 10**6, 0)),
    "a final observation before all": ("steps", put("streams.final", -1, 0)),
    "the final observation of a step to come": ("steps", put("streams.owner", 10**9, 0)),
    "a negative mass to come": ("steps", put("streams.pending", -1, (0, 0))),
    "no truncated step followed": ("steps", put("streams.flags", 2)),
    "all steps dead": ("steps", put("streams.flags", 4)),
    "steps deep in episodes": ("steps", put("streams.depth", 2**31 - 1)),
}


def save(state: State, path: Path) -> Path:
    """A checkpoint of a state, whatever it holds."""
    manifest = {name: value for name, value in state.items() if name != "tensors"}
    write_checkpoint(path, manifest, state["tensors"])
    return path


@pytest.mark.parametrize("kind", MADE)
def test_a_state_that_nobody_edited_is_loaded(kind: str, tmp_path: Path) -> None:
    buffer = made(kind)
    assert type(buffer).load(save(buffer.state_dict(), tmp_path / "c"), device="cpu").added == buffer.added


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_state_is_refused(name: str, tmp_path: Path) -> None:
    kind, edit = EDITS[name]
    buffer = made(kind)
    state = buffer.state_dict()
    edit(state)
    before = contents(buffer) if kind in ("mass", "rank") else repr(buffer.stats())
    with pytest.raises(ValueError, match=r"state|counter|tensor"):
        buffer.load_state_dict(state)
    assert (contents(buffer) if kind in ("mass", "rank") else repr(buffer.stats())) == before
    save(state, tmp_path / "wrong")
    with pytest.raises(CheckpointError):
        type(buffer).load(tmp_path / "wrong", device="cpu")


def setting(**values: Any) -> Callable[[State], object]:
    """Write settings."""
    return lambda state: state["settings"].update(values)


def of_field(**values: Any) -> Callable[[State], object]:
    """Write what is said of a field."""
    return lambda state: state["settings"]["fields"]["action"].update(values)


SETTINGS: dict[str, Callable[[State], object]] = {
    "no settings": lambda state: state.pop("settings"),
    "a list": lambda state: state.update(settings=[1]),
    "a text": lambda state: state.update(settings="kind"),
    "no kind": lambda state: state["settings"].pop("kind"),
    "no capacity": lambda state: state["settings"].pop("capacity"),
    "no room": setting(capacity=0),
    "a capacity in words": setting(capacity="many"),
    "another capacity": setting(capacity=36),
    "no sampler": setting(sampler=None),
    "a sampler of another kind": setting(sampler={"kind": "system"}),
    "a sampler with more": setting(sampler={"kind": "Uniform", "more": 1}),
    "a sampler of samplers": setting(sampler={"kind": "Combined", "base": {"kind": "Latest"}, "newest": 1}),
    "no fields": setting(fields={}),
    "fields in a list": setting(fields=[1]),
    "a field in words": setting(fields={"obs": "frames"}),
    "a dtype that is a function": of_field(dtype="load"),
    "a dtype of another package": of_field(dtype="nothing"),
    "a shape in words": of_field(shape="wide"),
    "another shape": of_field(shape=[7]),
    "a field with more": of_field(more=1),
    "more": setting(more=1),
    "no environments": setting(num_envs=0),
    "other environments": setting(num_envs=4),
    "a gamma in words": setting(gamma="less"),
    "another padding": setting(padding="none"),
    "hindsight in words": setting(relabel="future"),
    "hindsight in a list": setting(relabel=[1]),
    "a seed in words": lambda state: state.update(seed="yes"),
    "no seed": lambda state: state.pop("seed"),
    "counters in a list": lambda state: state.update(counters=[1]),
    "a counter less": lambda state: state["counters"].pop("ADDED"),
    "a counter in words": count("ADDED", "many"),  # type: ignore[arg-type]
    "a tensor less": lambda state: state["tensors"].pop("masses"),
    "no version": lambda state: state.update(version=None),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_were_edited_are_refused(name: str, tmp_path: Path) -> None:
    state = made("steps").state_dict()
    SETTINGS[name](state)
    save(state, tmp_path / "c")
    with pytest.raises(CheckpointError):
        TrajectoryReplayBuffer.load(tmp_path / "c", device="cpu")


def test_a_state_of_a_newer_version_says_so(tmp_path: Path) -> None:
    state = made("mass").state_dict() | {"version": 2}
    with pytest.raises(CheckpointError, match="version 2; .* reads version 1. A newer gpu_replay wrote it"):
        ReplayBuffer.load(save(state, tmp_path / "c"))
    with pytest.raises(ValueError, match="version 2.*newer"):
        make(11, EXACT).load_state_dict(state)
    write_checkpoint(tmp_path / "000000000007" / "state", {"version": 3}, {})
    with pytest.raises(CheckpointError, match="version 3.*newer"):
        latest(tmp_path)


@pytest.mark.parametrize("part", ["settings", "counters", "tensors", "seed"])
def test_a_state_with_parts_of_other_types_is_refused(part: str) -> None:
    buffer = made("mass")
    before = contents(buffer)
    for state in (buffer.state_dict() | {part: None}, buffer.state_dict() | {part: [1]}):
        with pytest.raises((TypeError, ValueError), match=part.removesuffix("s")):
            buffer.load_state_dict(state)
    state = buffer.state_dict()
    state["tensors"]["masses"] = state["tensors"]["masses"].tolist()
    with pytest.raises(TypeError, match="'masses' must be a tensor; found list"):
        buffer.load_state_dict(state)
    assert contents(buffer) == before
