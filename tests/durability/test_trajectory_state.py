"""State of a trajectory buffer: saved in the middle of episodes and windows, it goes on exactly where it stopped."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale, thinned
from trajectory_pair import FIELDS, Pair, Script, columns, final_of, numbered, play
from transitions import ANNEALED, EXACT, NUMBER, leaves, make, same_draws
from transitions import same as same_batch

from gpu_replay import CheckpointError, Field, LinearSchedule, TrajectoryReplayBuffer
from gpu_replay.samplers import Combined, Latest, Proportional, RankBased, Uniform

pytestmark = pytest.mark.contract

KINDS: dict[str, Any] = {
    "uniform": Uniform(),
    "replacement": Uniform(replacement=True),
    "annealed": ANNEALED,
    "stored": Proportional(alpha=1.0, eps=0.0, initial="stored", stratified=False),
    "latest": Latest(),
    "combined": Combined(EXACT, newest=2),
    "rank": RankBased(beta=LinearSchedule(0.1, 1.0, steps=40), normalize="buffer"),
    "combined-rank": Combined(RankBased(initial="stored", stratified=False)),
}
MODES = ["next_step", "same_step", "disabled"]
DEEP: dict[str, Any] = {"stack": 3, "n_step": 4}


def built(sampler: Any, device: str, *, seed: int = 5, **changed: Any) -> TrajectoryReplayBuffer:
    """A ring of 11 steps of 3 environments."""
    settings: dict[str, Any] = {"capacity": 35, "num_envs": 3, "fields": FIELDS} | DEEP | changed
    return TrajectoryReplayBuffer(**settings, sampler=sampler, device=device, seed=seed)


def readable(buffer: TrajectoryReplayBuffer) -> dict[int, int]:
    """Keys of the starts that can be drawn, and their masses where the sampler has some."""
    live = range(buffer.added - len(buffer), buffer.added)
    sampler = buffer.sampler.base if isinstance(buffer.sampler, Combined) else buffer.sampler
    if isinstance(sampler, Proportional):
        masses = buffer.masses().tolist()
        return {key: masses[key % buffer.capacity] for key in live if masses[key % buffer.capacity]}
    found = {}
    for key in live:
        with contextlib.suppress(KeyError):
            found[int(buffer[key].key)] = 0
    return found


def same(one: TrajectoryReplayBuffer, other: TrajectoryReplayBuffer) -> None:
    """Fail unless both hold the same and would draw the same; the draws are made."""
    assert repr(one.stats()) == repr(other.stats())
    assert (one.added, len(one), one.capacity) == (other.added, len(other), other.capacity)
    keys = readable(one)
    assert (readable(other), one.stats().eligible) == (keys, len(keys))
    if keys:
        equal(one[list(keys)], other[list(keys)])
    count = min(4, len(keys))
    if count >= (one.sampler.newest if isinstance(one.sampler, Combined) else 1):
        equal(one.sample(count), other.sample(count))


def equal(one: Any, other: Any) -> None:
    """Fail unless two batches, or two lists of them, are equal."""
    for first, second in zip(one, other, strict=True) if isinstance(one, list) else [(one, other)]:
        same_batch(first, second)


@thinned("name, autoreset", scale(list(KINDS), ["annealed"]), MODES)
def test_loaded_buffer_goes_on_like_one_that_was_never_interrupted(name: str, autoreset: str, device: str) -> None:
    """At every place: in the middle of an episode, of a window, after an ending, with priorities that wait."""
    script = Script(seed=1, calls=60, num_envs=3)
    whole = built(KINDS[name], device, autoreset=autoreset)
    places, saved = scale([0, 1, 3, 7, 14, 27, 44, 59], [3, 27]), 0
    for place in places:
        script.play(whole, saved, place)
        saved, state = place, whole.state_dict()
        loaded = built(KINDS[name], device, autoreset=autoreset, seed=99)
        # what it held before is forgotten
        Script(seed=2, calls=20, num_envs=3).play(loaded, 0, scale(20, 6))
        loaded.load_state_dict(state)
        # the rest is played to the loaded one and to one that was played the same from the beginning
        twin = built(KINDS[name], device, autoreset=autoreset)
        for before, after in zip([0, *places], places, strict=False):
            if after <= place:
                script.play(twin, before, after)
        same(twin, loaded)
        ahead = min(60, place + scale(12, 8))
        equal(script.play(twin, place, ahead), script.play(loaded, place, ahead))
        same(twin, loaded)


@thinned("name, autoreset", scale(list(KINDS), ["annealed"]), MODES)
def test_buffer_from_disk_goes_on_like_the_saved_one(name: str, autoreset: str, device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    script = Script(seed=3, calls=scale(80, 40), num_envs=3)
    buffer, done = built(KINDS[name], device, autoreset=autoreset, padding="zero"), 0
    for place in (7, scale(45, 25)):
        script.play(buffer, done, place)
        done = place
        buffer.save(tmp_path / "checkpoint")
        loaded = TrajectoryReplayBuffer.load(tmp_path / "checkpoint", device=device)
        assert (loaded.capacity, loaded.num_envs, loaded.seed) == (33, 3, 5)
        assert ({name: loaded.fields[name] for name in FIELDS}, loaded._config()) == (FIELDS, buffer._config())
        same(buffer, loaded)
    equal(script.play(buffer, done, 80), script.play(loaded, done, 80))
    same(buffer, loaded)


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_final_observations_are_part_of_the_state(autoreset: str, device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    pair = Pair(12, 2, device=device, autoreset=autoreset, stack=2, n_step=2, final_capacity=3)
    for number in range(13):
        if number == 4:
            pair.buffer.save(tmp_path / "checkpoint")
            pair.buffer = TrajectoryReplayBuffer.load(tmp_path / "checkpoint", device=device)
        steps = [numbered(number, env, FIELDS, truncated=(number + env) % 3 == 1) for env in range(2)]
        pair.add([step | {"final": final_of(step, step["truncated"])} for step in steps])
        view = pair.check()
    pair.check_refusals(view)


WAITING: dict[str, tuple[dict[str, Any], str, str, list[int]]] = {
    "the step after a termination is dead": ({}, ".T", "...", [0, 1, 2, 3, 5, 6, 7]),
    "the step after a truncation is dead": ({}, ".U", "...", [0, 1, 2, 3, 5, 6, 7]),
    # what a user does whose environments start anew after an interruption
    "episodes begin before": ({"stack": 2, "n_step": 2}, ".U|", "....", [4, 5, 6, 7]),
    "episodes begin after": ({"stack": 2, "n_step": 2}, ".U", "|....", [4, 5, 6, 7]),
    "windows are open": ({"stack": 2, "n_step": 3}, "..", "....", [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("settings, before, after, eligible", WAITING.values(), ids=WAITING)
def test_what_waits_is_in_the_state(settings: Any, before: str, after: str, eligible: list[int], device: str) -> None:
    pair = Pair(20, 2, device=device, **settings)
    play(pair, before, before.replace("T", ".").replace("U", "."))
    loaded = TrajectoryReplayBuffer(20, 2, FIELDS, sampler=EXACT, device=device, **settings)
    loaded.load_state_dict(pair.buffer.state_dict())
    pair.buffer = loaded
    play(pair, after, after)
    view = pair.check()
    assert view.eligible() == eligible
    pair.check_refusals(view)


@pytest.mark.parametrize("calls", [0, scale(30, 9)])
def test_state_of_an_empty_and_of_a_cleared_buffer(calls: int, device: str) -> None:
    buffer, loaded = built(EXACT, device), built(EXACT, device, seed=1)
    Script(seed=4, calls=30, num_envs=3).play(buffer, 0, calls)
    buffer.clear()
    Script(seed=5, calls=30, num_envs=3).play(loaded, 0, scale(30, 6))
    loaded.load_state_dict(buffer.state_dict())
    assert (len(loaded), loaded.added, loaded.total_mass()) == (0, buffer.added, 0)
    with pytest.raises(RuntimeError):
        loaded.sample(1)
    script = Script(seed=6, calls=20, num_envs=3)
    for each in (buffer, loaded):
        script.play(each, 0, scale(20, 8))
    same(buffer, loaded)


def test_state_is_a_copy_and_loading_it_again_repeats_everything(device: str) -> None:
    script = Script(seed=7, calls=60, num_envs=3)
    buffer = built(ANNEALED, device, autoreset="same_step")
    first, last = scale((40, 60), (14, 34))
    script.play(buffer, 0, first)
    state = buffer.state_dict()
    assert {type(leaf) for leaf in leaves(state)} <= {torch.Tensor, int, float, str, bool, type(None)}
    once = script.play(buffer, first, last)
    buffer.load_state_dict(state)
    assert once
    equal(once, script.play(buffer, first, last))


def test_saving_changes_nothing(device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    script = Script(seed=8, calls=60, num_envs=3)
    buffer, twin = built(ANNEALED, device), built(ANNEALED, device)
    first, last = scale((30, 60), (8, 16))
    for each in (buffer, twin):
        script.play(each, 0, first)
    buffer.state_dict()
    buffer.save(tmp_path / "checkpoint")
    equal(script.play(buffer, first, last), script.play(twin, first, last))
    same(buffer, twin)


def test_buffer_from_disk_keeps_every_setting(device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    fields = {"obs.camera": Field((4, 5), torch.uint8, torch.float16, 1 / 255), "obs.speed": Field((), torch.float32)}
    fields |= {"action": Field((2,), torch.float32), "flag": Field((2,), torch.bool)}
    sampler = Combined(Proportional(0.3, LinearSchedule(0.2, 0.9, 7), 0.01, 5.0, 2.0, "buffer", False), newest=2)
    settings: dict[str, Any] = {"stack": 2, "n_step": 3, "gamma": 0.75, "autoreset": "disabled", "padding": "zero"}
    settings |= {"random_shift": 1, "final_capacity": 5}
    buffer = TrajectoryReplayBuffer(19, 2, fields, **settings, sampler=sampler, device=device, seed=2**63 + 5)
    for number in range(7):
        steps = [numbered(number, env, fields, truncated=number == 3 and env == 0) for env in range(2)]
        buffer.add(**columns([step | {"final": step} for step in steps], fields))
    buffer.save(tmp_path / "checkpoint")
    loaded = TrajectoryReplayBuffer.load(tmp_path / "checkpoint", device=device)
    assert (loaded._config(), {name: loaded.fields[name] for name in fields}) == (buffer._config(), fields)
    assert (loaded.sampler, loaded.seed, loaded.capacity) == (sampler, 2**63 + 5, 18)
    for _ in range(3):
        for each in (buffer, loaded):
            each.update_priorities(torch.arange(14), torch.arange(14) + 1)
        equal(buffer.sample(6), loaded.sample(6))
        equal(buffer.sample_sequences(3, 2), loaded.sample_sequences(3, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("autoreset", MODES)
def test_state_moves_between_cpu_and_cuda(autoreset: str) -> None:
    script = Script(seed=13, calls=80, num_envs=3)
    for source, target in (("cpu", "cuda"), ("cuda", "cpu")):
        buffer, loaded = built(EXACT, source, autoreset=autoreset), built(EXACT, target, autoreset=autoreset)
        script.play(buffer, 0, 50)
        loaded.load_state_dict(buffer.state_dict())
        equal(script.play(buffer, 50, 80), script.play(loaded, 50, 80))


# what is refused: other settings, another kind, damage

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "capacity": ({"capacity": 36}, r"(?s)capacity.*3[36]"),
    "num_envs": ({"num_envs": 1, "capacity": 33}, r"num_envs"),
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
