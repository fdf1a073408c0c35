"""States in memory and on disk: settings are kept, and a state that is another's or was edited changes nothing.

That a buffer goes on from a state, a copy or a checkpoint as if it never had been saved, random programs hold:
`contract/test_programs.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit, pieces_of, spoiled
from devices import loops, scale
from pairs import FIELDS as SCRIPTED
from pairs import StepPair, live_through, numbered
from places import FIELDS, STEPS, check_equal, given, live, make, used
from refusals import whole_state
from transitions import ANNEALED, EXACT, fill, leaves
from transitions import make as make_numbered

from gpu_replay import (
    CheckpointError,
    Combined,
    Field,
    LinearSchedule,
    Proportional,
    RankBased,
    ReplayBuffer,
    TrajectoryReplayBuffer,
    Uniform,
)
from gpu_replay.checkpoint.format import write_checkpoint
from gpu_replay.training.checkpoints import latest

pytestmark = pytest.mark.contract

State = dict[str, Any]
Edit = Callable[[State], object]
EVERY_SETTING = Combined(Proportional(0.3, LinearSchedule(0.2, 0.9, 7), 0.01, 5.0, 2.0, "buffer", False), newest=2)
REFUSED = (ValueError, KeyError, TypeError, RuntimeError)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["transitions", *STEPS])
@pytest.mark.parametrize("sampler", [Uniform(), EVERY_SETTING, ANNEALED], ids=repr)
def test_state_moves_between_cpu_and_cuda(sampler: Any, kind: str) -> None:
    for source, target in (("cpu", "cuda"), ("cuda", "cpu")):
        buffer, loaded = used(kind, 3, sampler=sampler, device=source), make(kind, sampler=sampler, device=target)
        loaded.load_state_dict(buffer.state_dict())
        for _ in range(3):
            assert buffer.sample(5).key.tolist() == loaded.sample(5).key.tolist()


def test_state_is_a_copy_and_loading_it_again_repeats_everything(device: str) -> None:
    buffer = used("same_step", scale(2, 1), sampler=ANNEALED, device=device)
    state = buffer.state_dict()
    assert {type(leaf) for leaf in leaves(state)} <= {torch.Tensor, int, float, str, bool, type(None)}
    once = list(live(buffer, scale(2, 1)))
    buffer.load_state_dict(state)
    for found, expected in zip(live(buffer, scale(2, 1)), once, strict=True):
        check_equal(found, expected)


@pytest.mark.parametrize("begins", [False, True])
def test_a_load_after_which_environments_were_reset_begins_episodes(begins: bool, device: str, tmp_path: Path) -> None:
    pair = StepPair(40, 2, stack=2, n_step=3, device=device)
    for number in range(12):
        if number == 6:
            pair.buffer.save(tmp_path / "c")
            pair.buffer = TrajectoryReplayBuffer.load(tmp_path / "c", device, begin_episodes=begins)
            if begins:
                pair.model.begin_episodes()
        pair.add([numbered(number, env, pair.fields) for env in range(2)])
    # no window and no stack crosses the load, or all do
    pair.check_contents()
    assert len(pair.model.eligible()) == (12 if begins else 18)
    with pytest.raises(TypeError, match="begin_episodes must be True or False; found 1"):
        TrajectoryReplayBuffer.load(tmp_path / "c", device, begin_episodes=1)


# states of other buffers

OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "capacity": ("exact", {"capacity": 72}, r"(?s)capacity.*(50|72)"),
    "another field": ("exact", {"fields": {"action": FIELDS["action"]}}, "(?i)field|obs"),
    "field dtype": ("exact", {"fields": FIELDS | {"action": Field((), torch.int32)}}, "action"),
    "kind of sampler": ("exact", {"sampler": Uniform()}, r"(?i)sampler|Uniform|Proportional"),
    "alpha": ("exact", {"sampler": Proportional(alpha=0.5)}, r"(?i)alpha|sampler"),
    "num_envs": ("same_step", {"num_envs": 1}, r"num_envs"),
    "stack": ("same_step", {"stack": 4}, r"stack"),
    "n_step": ("same_step", {"n_step": 3}, r"n_step"),
    "gamma": ("same_step", {"gamma": 0.5}, r"gamma"),
    "autoreset": ("same_step", {"autoreset": "disabled"}, r"autoreset"),
    "padding": ("same_step", {"padding": "zero"}, r"padding"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_state_of_a_buffer_with_other_settings_is_refused(name: str, device: str) -> None:
    kind, changed, message = OTHERS[name]
    state, other = make(kind, device=device).state_dict(), make(kind, device=device, **changed)
    with pytest.raises(REFUSED, match=message):
        other.load_state_dict(state)
    assert (len(other), other.added) == (0, 0)


def test_the_two_buffers_are_not_mistaken_for_each_other(device: str, tmp_path: Path) -> None:
    both = [make(kind, device=device, sampler=Uniform()) for kind in ("exact", "same_step")]
    for one, other in (both, both[::-1]):
        with pytest.raises((ValueError, KeyError), match=r"kind|ReplayBuffer"):
            one.load_state_dict(other.state_dict())
        with pytest.raises(REFUSED):
            one.load_state_dict(7)
        name = type(one).__name__
        one.save(tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"(?s){name}.*{name}\.load"):
            type(other).load(tmp_path / name)


# states that somebody edited, with checksums that are right


def ring(sampler: Any) -> ReplayBuffer:
    """A ring of 11 that is full, with a clear behind it."""
    buffer = make_numbered(11, sampler)
    fill(buffer, 9)
    buffer.clear()
    fill(buffer, 7)
    buffer.sample(3)
    return buffer


def steps(sampler: Any, **others: Any) -> TrajectoryReplayBuffer:
    """A ring of 11 steps of 3 environments with final observations."""
    settings: dict[str, Any] = {"stack": 3, "n_step": 2, "autoreset": "same_step", "sampler": sampler, "device": "cpu"}
    with loops():
        pair = live_through(StepPair(33, 3, fields=SCRIPTED, **settings | others), 50, seed=1)
    pair.renew("state")
    for _ in range(2):
        pair.update(pair.sample(3), [0.5, 1.5, 3.0])
    return pair.buffer


BUFFERS: dict[str, Callable[[], Any]] = {
    "mass": lambda: ring(EXACT),
    "rank": lambda: ring(RankBased()),
    "steps": lambda: steps(EXACT),
    "steps-uniform": lambda: steps(Uniform()),
    "steps-rank": lambda: steps(RankBased()),
    "steps-disabled": lambda: steps(EXACT, autoreset="disabled", final_capacity=0),
}


@functools.cache
def made(kind: str) -> Any:
    """One buffer for all tests: nothing that is refused changes it."""
    return BUFFERS[kind]()


def put(name: str, value: Any, place: Any = slice(None)) -> Edit:
    """Write into a tensor."""
    return lambda state: state["tensors"][name].__setitem__(place, value)


def become(name: str, change: Callable[[torch.Tensor], Any]) -> Edit:
    """Put something else in the place of a tensor."""
    return lambda state: state["tensors"].update({name: change(state["tensors"][name])})


def count(name: str, value: Any) -> Edit:
    """Write a counter."""
    return lambda state: state["counters"].update({name: value})


# which buffer, and what is done to its state: numbers that would lead out of its memory
EDITS: dict[str, tuple[str, Edit]] = {
    "a mass below 0": ("mass", put("masses", -(2**63), 8)),
    "a mass above the limit": ("mass", put("masses", 2**62 // 11 + 1, 8)),
    "a negative count of draws": ("mass", put("times_sampled", -1, 0)),
    "FIRST after ADDED": ("mass", count("FIRST", 17)),
    "ADDED beyond all": ("mass", count("ADDED", 2**63 - 1)),
    "a largest mass beyond the limit": ("mass", count("TOP", 2**62)),
    "a code of no number": ("rank", put("masses", 2**63 - 1, 8)),
    "half a step": ("steps", count("ADDED", 1001)),
    "half a step forgotten": ("steps", count("FIRST", 1)),
    "marks that are larger": ("steps-uniform", become("marks", lambda marks: marks * 2)),
    "unknown flags": ("steps", put("streams.flags", 255, 0)),
    "steps before the first": ("steps", put("streams.depth", -5, 0)),
    "a final observation elsewhere": ("steps", put("streams.final", 10**6, 0)),
    "a final observation before all": ("steps", put("streams.final", -1, 0)),
    "the final observation of a step to come": ("steps", put("streams.owner", 10**9, 0)),
    "a negative mass to come": ("steps", put("streams.pending", -1, (0, 0))),
    "steps deep in episodes": ("steps", put("streams.depth", 2**31 - 1)),
    "final observations where none are kept": ("steps-disabled", put("streams.flags", 9, 0)),
}
# numbers that lie: draws mean nothing then, and stay in the memory of the buffer
NONSENSE: dict[str, tuple[str, Edit]] = {
    "masses all 0": ("mass", put("masses", 0)),
    "codes all 0": ("rank", put("masses", 0)),
    "a mass of what was forgotten": ("mass", put("masses", 1, 7)),
    "codes of what was forgotten": ("rank", put("masses", 1)),
    "a mass of a step that cannot be drawn": ("steps", become("masses", lambda masses: masses.clamp(min=1))),
    "codes of steps that cannot be drawn": ("steps-rank", become("masses", lambda masses: masses.clamp(min=1))),
    "a mark of a step that cannot be drawn": ("steps-uniform", put("marks", 1)),
    "no truncated step followed": ("steps", put("streams.flags", 2)),
    "all steps dead": ("steps", put("streams.flags", 4)),
    "every ending kept in the same place": ("steps-uniform", put("streams.flags", 10)),
    "all steps first ones": ("steps", put("streams.depth", 0)),
    "all steps far from the first": ("steps-uniform", put("streams.depth", 12)),
    "another count of final observations": ("steps", count("FINALS", 2**61)),
}
# what a disk cannot hold, or what has lost a part, and words of the message
PARTS: dict[str, tuple[Edit, str]] = {
    "empty": (dict.clear, "."),
    "a missing entry": (lambda state: state.pop("counters"), "."),
    "a missing tensor": (lambda state: state["tensors"].pop("masses"), "."),
    "a tensor without memory": (become("masses", lambda tensor: tensor.to("meta")), "'masses' .*meta"),
    "a sparse tensor": (become("masses", torch.Tensor.to_sparse), "'masses' .*sparse"),
    "a list for a tensor": (become("masses", torch.Tensor.tolist), "'masses' must be a tensor; found list"),
    **{
        f"{value} for {part}": (lambda state, part=part, value=value: state.update({part: value}), part[:-1])
        for part in ("settings", "counters", "tensors", "seed")
        for value in (None, [1])
    },
}
# changes after which the file is that of a buffer: of other settings, of defaults, or of a version that lacked a
# counter; and what says nothing
COULD_BE = re.compile(
    r"more$|scale: |shape: {}|sampler: |gamma: 0|final_capacity|relabel|seed: (-|\d)"
    r"|counters: (\w+: 0$|no (FLAWED|NONFINITE|TERMINALS|LOST_TERMINALS))"
    r"|settings: .*\bno (?!kind|capacity|num_envs|sampler|fields|dtype|shape)|pieces: 0: .*(bytes|modified_ns)"
)


def save(state: State, path: Path) -> Path:
    """A checkpoint of a state, whatever it holds."""
    write_checkpoint(path, {name: value for name, value in state.items() if name != "tensors"}, state["tensors"])
    return path


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_state_that_nobody_edited_is_loaded(kind: str, tmp_path: Path) -> None:
    buffer = made(kind)
    assert type(buffer).load(save(buffer.state_dict(), tmp_path / "c"), device="cpu").added == buffer.added


# and what loading them raises
REFUSALS: dict[str, tuple[str, Edit, Any, str]] = {
    **{name: (kind, edit, ValueError, r"state|counter|tensor") for name, (kind, edit) in EDITS.items()},
    **{name: ("steps", edit, REFUSED, message) for name, (edit, message) in PARTS.items()},
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_edited_state_is_refused(name: str, tmp_path: Path) -> None:
    kind, edit, error, message = REFUSALS[name]
    buffer = made(kind)
    state, before = buffer.state_dict(), whole_state(buffer)
    edit(state)
    with pytest.raises(error, match=message):
        buffer.load_state_dict(state)
    assert whole_state(buffer) == before
    if name in EDITS:
        with pytest.raises(CheckpointError):
            type(buffer).load(save(state, tmp_path / "wrong"), device="cpu")


@pytest.mark.parametrize("name", NONSENSE)
def test_a_state_that_lies_is_loaded_and_every_call_stays_in_the_memory_of_the_buffer(name: str) -> None:
    kind, edit = NONSENSE[name]
    buffer = copy.deepcopy(made(kind))
    state = buffer.state_dict()
    edit(state)
    buffer.load_state_dict(state)
    # the ring goes round
    for _ in range(scale(40, 12)):
        with contextlib.suppress(RuntimeError):
            keys = buffer.sample(5).key
            assert ((keys >= 0) & (keys < buffer.added)).all()
            buffer.update_priorities(keys, torch.arange(5.0))
        assert sum(len(batch.key) for batch in buffer.batches(scale(7, 40))) == len(buffer)
        buffer.add(**given(buffer, 3))


@pytest.mark.parametrize("kind", ["mass", "steps"])
def test_an_edited_manifest_is_refused_or_that_of_a_buffer(kind: str, tmp_path: Path, full: bool) -> None:
    path = tmp_path / "c"
    made(kind).save(path)
    # what lies outside is never read, however right it is
    shutil.copy(pieces_of(path)[0], tmp_path / "outside")
    whole = (path / "manifest.json").read_bytes()
    ways = list(spoiled(json.loads(whole)["body"]))
    loaded = []
    for way, changed in ways if full else random.Random(0).sample(ways, scale(120, 40)):
        if not isinstance(changed, dict) or "relabel" in way:
            continue
        (path / "manifest.json").write_bytes(whole)
        edit(path, lambda body, changed=changed: (body.clear(), body.update(changed)))
        try:
            type(made(kind)).load(path, device="cpu").sample(1)
        except (CheckpointError, MemoryError):
            continue
        loaded.append(way)
    assert [way for way in loaded if not COULD_BE.search(way)] == []


def test_a_state_of_a_newer_version_says_so(tmp_path: Path) -> None:
    state = made("mass").state_dict() | {"version": 2}
    with pytest.raises(CheckpointError, match="version 2; .* reads version 1. A newer gpu_replay wrote it"):
        ReplayBuffer.load(save(state, tmp_path / "c"))
    with pytest.raises(ValueError, match="version 2.*newer"):
        made("mass").load_state_dict(state)
    write_checkpoint(tmp_path / "000000000007" / "state", {"version": 5}, {})
    with pytest.raises(CheckpointError, match="version 5.*newer"):
        latest(tmp_path)
