"""State: a buffer that was saved, in memory or on disk, goes on as if it never had been; other states are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale, thinned
from places import STEPS, check_equal, given, live, make
from trajectory_pair import FIELDS, Pair, columns, final_of, numbered, play
from transitions import ANNEALED, EXACT, NUMBER, SAMPLERS, check_rows, fill, leaves, same_draws
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

pytestmark = pytest.mark.contract

KINDS = ("transitions", *STEPS)
MORE: dict[str, Any] = {
    "annealed": ANNEALED,
    "stored": Proportional(alpha=1.0, eps=0.0, initial="stored", stratified=False),
    "rank-annealed": RankBased(beta=LinearSchedule(0.1, 1.0, steps=40), normalize="buffer"),
    "combined-rank": Combined(RankBased(initial="stored", stratified=False), newest=2),
}
ALL: dict[str, Any] = {**SAMPLERS, **MORE}
EVERY_SETTING = Combined(Proportional(0.3, LinearSchedule(0.2, 0.9, 7), 0.01, 5.0, 2.0, "buffer", False), newest=2)


def relabelled(buffer: Any) -> dict[str, Any]:
    """What `load` must be given again."""
    found = getattr(buffer, "relabel", None)
    return {} if found is None else {"relabel": found}


def loaded_into_another(buffer: Any, other: Any, folder: Path) -> Any:
    # what it held before is forgotten
    list(live(other, 1))
    other.load_state_dict(buffer.state_dict())
    return other


def from_disk(buffer: Any, other: Any, folder: Path) -> Any:
    pytest.importorskip("safetensors")
    buffer.save(folder / "checkpoint")
    return type(buffer).load(folder / "checkpoint", device=buffer.device, **relabelled(buffer))


WAYS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "state": loaded_into_another,
    "disk": from_disk,
    "copy": lambda buffer, other, folder: copy.deepcopy(buffer),
}


def check_alike(one: Any, other: Any) -> None:
    """Fail unless two buffers have the same settings and hold the same."""
    assert repr(one.stats()) == repr(other.stats())
    assert (one.added, len(one), one.capacity, dict(one.fields)) == (
        *(other.added, len(other), other.capacity),
        dict(other.fields),
    )
    assert (one.sampler, one.device) == (other.sampler, other.device)
    first, second = one.state_dict(), other.state_dict()
    assert first["counters"] == second["counters"]
    stored = torch.arange(one.added - len(one), one.added) % one.capacity
    for name, tensor in first["tensors"].items():
        # nothing is said of rows that were never written
        rows = stored if name.startswith("fields.") else ...
        assert torch.equal(tensor.cpu()[rows], second["tensors"][name].cpu()[rows]) or name.startswith("final."), name


def play_on(buffer: Any, place: int) -> None:
    """Use a buffer for so many rounds, and stop in the middle of episodes and windows."""
    list(live(buffer, place))
    for _ in range(place % 4 if place else 0):
        buffer.add(**given(buffer))


@thinned("way, kind, name", WAYS, KINDS, scale(list(ALL), ["annealed"]), times=2)
def test_a_saved_buffer_goes_on_as_if_it_never_had_been(
    way: str, kind: str, name: str, device: str, tmp_path: Path
) -> None:
    for place in scale((0, 1, 3, 6), (1,)):
        buffer, twin = (make(kind, sampler=ALL[name], device=device) for _ in range(2))
        for each in (buffer, twin):
            play_on(each, place)
        found = WAYS[way](buffer, make(kind, sampler=ALL[name], device=device, seed=99), tmp_path)
        check_alike(found, twin)
        lives = (live(each, scale(2, 1)) for each in (twin, found, buffer))
        for expected, after, saved in zip(*lives, strict=True):
            check_equal(after, expected)
            check_equal(saved, expected)
        check_alike(found, twin)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["uniform", "combined-proportional", "annealed"])
def test_state_moves_between_cpu_and_cuda(name: str, kind: str) -> None:
    for source, target in (("cpu", "cuda"), ("cuda", "cpu")):
        buffer, loaded = (make(kind, sampler=ALL[name], device=device) for device in (source, target))
        play_on(buffer, 3)
        loaded.load_state_dict(buffer.state_dict())
        for _ in range(3):
            assert buffer.sample(5).key.tolist() == loaded.sample(5).key.tolist()


@pytest.mark.parametrize("kind", ["transitions", "same_step"])
def test_state_is_a_copy_and_loading_it_again_repeats_everything(kind: str, device: str) -> None:
    buffer = make(kind, sampler=ANNEALED, device=device)
    play_on(buffer, 2)
    state = buffer.state_dict()
    assert {type(leaf) for leaf in leaves(state)} <= {torch.Tensor, int, float, str, bool, type(None)}
    once = list(live(buffer, 2))
    buffer.load_state_dict(state)
    for found, expected in zip(live(buffer, 2), once, strict=True):
        check_equal(found, expected)


@pytest.mark.parametrize("kind", ["transitions", "next_step"])
@pytest.mark.parametrize("used", [False, True])
def test_state_of_an_empty_and_of_a_cleared_buffer(used: bool, kind: str, device: str) -> None:
    buffer, loaded = (make(kind, sampler=EXACT, device=device, seed=seed) for seed in (3, 1))
    list(live(buffer, int(used)))
    buffer.clear()
    list(live(loaded, 1))
    loaded.load_state_dict(buffer.state_dict())
    assert (len(loaded), loaded.added, loaded.total_mass()) == (0, buffer.added, 0)
    with pytest.raises(RuntimeError):
        loaded.sample(1)
    for found, expected in zip(live(loaded, 1), live(buffer, 1), strict=True):
        check_equal(found, expected)


def test_running_maximum_is_part_of_the_state(device: str) -> None:
    buffer = make_numbered(4, EXACT, device=device)
    fill(buffer, 2, priority=[64, 1])
    buffer.update_priorities(torch.tensor([0], device=device), torch.tensor([2.0], device=device))
    loaded = make_numbered(4, EXACT, device=device)
    loaded.load_state_dict(buffer.state_dict())
    fill(loaded, 1)
    assert loaded.masses().tolist() == [2 << 20, 1 << 20, 64 << 20, 0]


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


# settings that a checkpoint keeps


def test_a_buffer_from_disk_keeps_every_setting(device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    fields = {
        "obs.camera": Field((3, 5), torch.uint8, torch.float16, 1 / 255),
        "obs.speed": Field((), torch.bfloat16),
        "flag": Field((2,), torch.bool),
        "wide": Field((), torch.float64, None, 0.5),
    }
    buffer = ReplayBuffer(9, fields, sampler=EVERY_SETTING, device=device, seed=2**63 + 5)
    for first in (0, 5, 10):
        number = torch.arange(first, first + 5, device=device)
        camera, flag = number[:, None, None].expand(5, 3, 5).to(torch.uint8), number[:, None].expand(5, 2) % 2 == 0
        obs = {"obs.camera": camera, "obs.speed": number.bfloat16()}
        buffer.add(**obs, flag=flag, wide=number.double() / 3)
        buffer.sample(3)
    check_kept(buffer, tmp_path, range(8, 15))


def test_a_trajectory_buffer_from_disk_keeps_every_setting(device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    fields = {"obs.camera": Field((4, 5), torch.uint8, torch.float16, 1 / 255), "obs.speed": Field((), torch.float32)}
    fields |= {"action": Field((2,), torch.float32), "flag": Field((2,), torch.bool)}
    settings: dict[str, Any] = {"stack": 2, "n_step": 3, "gamma": 0.75, "autoreset": "disabled", "padding": "zero"}
    settings |= {"random_shift": 1, "final_capacity": 5}
    buffer = TrajectoryReplayBuffer(19, 2, fields, **settings, sampler=EVERY_SETTING, device=device, seed=2**63 + 5)
    for number in range(7):
        steps = [numbered(number, env, fields, truncated=number == 3 and env == 0) for env in range(2)]
        buffer.add(**columns([step | {"final": step} for step in steps], fields))
    check_kept(buffer, tmp_path, range(14))


def check_kept(buffer: Any, folder: Path, keys: range) -> None:
    """Fail unless a buffer from disk has all settings of the saved one, and draws as it does."""
    buffer.save(folder / "checkpoint")
    loaded = type(buffer).load(folder / "checkpoint", device=buffer.device)
    assert (dict(loaded.fields), repr(loaded)) == (dict(buffer.fields), repr(buffer))
    assert (loaded.sampler, loaded.seed, loaded.capacity) == (EVERY_SETTING, 2**63 + 5, buffer.capacity)
    for _ in range(3):
        for each in (buffer, loaded):
            each.update_priorities(torch.tensor(keys, device=each.device), torch.arange(len(keys)) + 1)
        same_draws(buffer, loaded, 6, times=1)


def test_another_capacity_or_sampler_is_not_an_argument_of_load(tmp_path: Path) -> None:
    make("exact").save(tmp_path / "c")
    for setting in ({"capacity": 9}, {"sampler": EXACT}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            ReplayBuffer.load(tmp_path / "c", **setting)


def test_without_a_device_it_is_loaded_where_a_new_buffer_would_be(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    buffer = make_numbered(71, ANNEALED)
    fill(buffer, 80)
    buffer.save(tmp_path / "checkpoint")
    loaded = ReplayBuffer.load(tmp_path / "checkpoint")
    assert loaded.device == ReplayBuffer(1, NUMBER).device
    check_rows(loaded[list(range(9, 80))])


# what is refused: other settings, another kind, damage

OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "capacity": ("transitions", {"capacity": 72}, r"(?s)capacity.*7[12]"),
    "another field": ("transitions", {"fields": {"action": NUMBER["number"]}}, "(?i)field|action|number"),
    "field dtype": ("transitions", {"fields": {"number": Field((), torch.int32)}}, "number"),
    "field shape": ("transitions", {"fields": {"number": Field((2,), torch.int64)}}, "number"),
    "kind of sampler": ("transitions", {"sampler": Uniform()}, r"(?i)sampler|Uniform|Proportional"),
    "alpha": ("transitions", {"sampler": Proportional(alpha=0.5)}, r"(?i)alpha|sampler"),
    "capacity of steps": ("steps", {"capacity": 36}, r"(?s)capacity.*3[36]"),
    "num_envs": ("steps", {"num_envs": 1, "capacity": 33}, r"num_envs"),
    "stack": ("steps", {"stack": 4}, r"stack"),
    "n_step": ("steps", {"n_step": 3}, r"n_step"),
    "gamma": ("steps", {"gamma": 0.5}, r"gamma"),
    "autoreset": ("steps", {"autoreset": "disabled"}, r"autoreset"),
    "padding": ("steps", {"padding": "zero"}, r"padding"),
    "a field more": ("steps", {"fields": FIELDS | {"more": Field((), torch.int64)}}, r"(?i)more|field"),
    "field dtype of steps": ("steps", {"fields": FIELDS | {"action": Field((), torch.int32)}}, r"action"),
}


def made(kind: str, device: str, **changed: Any) -> Any:
    """A ring of 71 transitions, or of 11 steps of 3 environments."""
    fields = FIELDS if kind == "steps" else NUMBER
    named: dict[str, Any] = {"capacity": 71, "fields": fields, "sampler": ANNEALED, "device": device}
    if kind == "steps":
        named |= {"capacity": 35, "num_envs": 3, "stack": 3, "n_step": 4, "autoreset": "same_step"}
        return TrajectoryReplayBuffer(**{**named, **changed})
    return ReplayBuffer(**{**named, **changed})


@pytest.mark.parametrize("name", OTHERS)
def test_state_of_a_buffer_with_other_settings_is_refused(name: str, device: str) -> None:
    kind, changed, message = OTHERS[name]
    state, other = made(kind, device).state_dict(), made(kind, device, **changed)
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError), match=message):
        other.load_state_dict(state)
    assert (len(other), other.added) == (0, 0)


@pytest.mark.parametrize("kind", ["transitions", "same_step"])
@pytest.mark.parametrize("damage", ["empty", "a missing entry", "not a dict", "a missing tensor", "meta", "sparse"])
def test_state_that_is_no_state_is_refused_and_changes_nothing(damage: str, kind: str, device: str) -> None:
    buffer, twin = (make(kind, sampler=ANNEALED, device=device) for _ in range(2))
    for each in (buffer, twin):
        play_on(each, 1)
    state: Any = twin.state_dict()
    name, tensor = next((name, tensor) for name, tensor in state["tensors"].items() if name.startswith("fields."))
    message = "."
    if damage == "a missing entry":
        state.pop("counters")
    elif damage == "a missing tensor":
        state["tensors"].pop(name)
    elif damage in ("meta", "sparse"):
        state["tensors"][name] = tensor.to("meta") if damage == "meta" else tensor.to_sparse()
        message = f"'{name}' must be a dense tensor with memory; found a .*{damage}"
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError), match=message):
        buffer.load_state_dict({"empty": {}, "not a dict": 7}.get(damage, state))
    check_alike(buffer, twin)
    check_equal(buffer.sample(5), twin.sample(5))


def test_state_of_tensors_with_gradients_leaves_none_in_the_buffer(device: str) -> None:
    buffer = make_numbered(7, EXACT, device=device)
    fill(buffer, 3)
    state = buffer.state_dict()
    state["tensors"]["fields.obs"].requires_grad_()
    buffer.load_state_dict(state)
    assert not buffer.state_dict()["tensors"]["fields.obs"].requires_grad


def test_the_two_buffers_are_not_mistaken_for_each_other(device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    transitions, trajectories = (made(kind, device, sampler=Uniform()) for kind in ("transitions", "steps"))
    for one, other in ((transitions, trajectories), (trajectories, transitions)):
        with pytest.raises((ValueError, KeyError), match=r"kind|ReplayBuffer"):
            one.load_state_dict(other.state_dict())
        name = type(one).__name__
        one.save(tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"(?s){name}.*{name}\.load"):
            type(other).load(tmp_path / name)
