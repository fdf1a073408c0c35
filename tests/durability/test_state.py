"""State: what was saved goes on exactly where it stopped, in memory and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from transitions import ANNEALED, EXACT, NUMBER, SAMPLERS, STORED, check_rows, contents, fill, leaves, make, same_draws

from gpu_replay import Combined, Field, LinearSchedule, Proportional, ReplayBuffer, Uniform

pytestmark = pytest.mark.contract

KINDS = SAMPLERS | {"annealed": ANNEALED, "stored": Proportional(alpha=1.0, eps=0.0, initial="stored")}


def used(sampler: Any, *, device: str, seed: int = 5, capacity: int = 71) -> ReplayBuffer:
    """A buffer in the middle of its life: wrapped, updated, with late updates, and sampled an odd number of times."""
    buffer = make(capacity, sampler, device=device, seed=seed)
    for count in (66, 30, 1):
        fill(buffer, count)
        for size in scale((2, 5, 7), (5,)):
            keys = buffer.sample(size).key
            buffer.update_priorities(keys, (keys % 7).float() + 0.5)
        buffer.update_priorities(torch.tensor([0, 1], device=device), torch.tensor([3.0, 4.0], device=device))
    return buffer


def go_on(one: ReplayBuffer, other: ReplayBuffer) -> None:
    """Fail unless both buffers stay equal through everything that can happen next."""
    for count in scale((3, 90), (90,)):
        same_draws(one, other, 5, times=scale(2, 1))
        for each in (one, other):
            keys = fill(each, count)
            each.update_priorities(keys, (keys % 5).float() * 9)
    same_draws(one, other, 6, times=scale(3, 1))
    assert one.stats() == other.stats() or repr(one.stats()) == repr(other.stats())
    check_rows(other[list(range(other.added - len(other), other.added))])


@pytest.mark.parametrize("name", KINDS)
def test_loaded_buffer_goes_on_like_the_saved_one(name: str, device: str) -> None:
    buffer, loaded = used(KINDS[name], device=device), make(71, KINDS[name], device=device, seed=99)
    fill(loaded, 3)
    loaded.load_state_dict(buffer.state_dict())
    assert (repr(loaded.stats()), contents(loaded)) == (repr(buffer.stats()), contents(buffer))
    go_on(buffer, loaded)


@pytest.mark.parametrize("name", ["uniform", "annealed", "combined-proportional"])
def test_state_is_a_copy_and_loading_it_again_repeats_the_draws(name: str, device: str) -> None:
    buffer, loaded = used(KINDS[name], device=device), make(71, KINDS[name], device=device)
    state = buffer.state_dict()
    assert {type(leaf) for leaf in leaves(state)} <= {torch.Tensor, int, float, str, bool, type(None)}
    loaded.load_state_dict(state)
    before, first, keys = contents(loaded), [buffer.sample(4) for _ in range(3)], fill(buffer, 11)
    buffer.update_priorities(keys, keys.float())
    assert contents(loaded) == before
    buffer.load_state_dict(state)
    for batch in first:
        again = buffer.sample(4)
        assert all(torch.equal(batch[field], again[field]) for field in batch)
        check_rows(again)


def test_state_of_an_empty_and_of_a_cleared_buffer(device: str) -> None:
    empty, cleared = make(6, EXACT, device=device), used(EXACT, device=device, capacity=6)
    cleared.clear()
    for buffer in (empty, cleared):
        loaded = make(6, EXACT, device=device, seed=1)
        fill(loaded, 4)
        loaded.load_state_dict(buffer.state_dict())
        assert (len(loaded), loaded.added, loaded.total_mass()) == (0, buffer.added, 0)
        with pytest.raises(RuntimeError):
            loaded.sample(1)
        go_on_from = fill(loaded, 2).tolist()
        assert go_on_from == [buffer.added, buffer.added + 1]
        fill(buffer, 2)
        same_draws(buffer, loaded, 2)


def test_running_maximum_is_part_of_the_state(device: str) -> None:
    buffer = make(4, EXACT, device=device)
    fill(buffer, 2, priority=[64, 1])
    buffer.update_priorities(torch.tensor([0], device=device), torch.tensor([2.0], device=device))
    loaded = make(4, EXACT, device=device)
    loaded.load_state_dict(buffer.state_dict())
    fill(loaded, 1)
    assert loaded.masses().tolist() == [2 << 20, 1 << 20, 64 << 20, 0]


def prioritized(device: str, alpha: float = 0.7, capacity: int = 71, **fields: Field) -> ReplayBuffer:
    settings = Proportional(alpha=alpha, beta=ANNEALED.beta, normalize="buffer")
    return make(capacity, settings, device=device, **(STORED | fields))


OTHERS: dict[str, tuple[Any, str]] = {
    "capacity": (lambda device: prioritized(device, capacity=72), r"(?s)capacity.*7[12]"),
    "missing field": (lambda device: make(71, ANNEALED, device=device, **NUMBER), "(?i)field|obs|number"),
    "field dtype": (lambda device: prioritized(device, action=Field((), torch.int32)), "action"),
    "field shape": (lambda device: prioritized(device, obs=Field((3, 2), torch.float32)), "obs"),
    "kind of sampler": (lambda device: make(71, Uniform(), device=device), r"(?i)sampler|Uniform|Proportional"),
    "alpha": (lambda device: prioritized(device, alpha=0.5), r"(?i)alpha|sampler"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_state_of_a_buffer_with_other_settings_is_refused(name: str, device: str) -> None:
    build, message = OTHERS[name]
    state, other = used(ANNEALED, device=device).state_dict(), build(device)
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError), match=message):
        other.load_state_dict(state)
    assert (len(other), other.added) == (0, 0)


@pytest.mark.parametrize("damage", ["empty", "a missing entry", "not a dict"])
def test_state_that_is_no_state_is_refused_and_changes_nothing(damage: str, device: str) -> None:
    buffer = used(EXACT, device=device)
    before = contents(buffer, prioritized=True)
    state: Any = dict(buffer.state_dict())
    if damage == "a missing entry":
        state.pop(next(iter(state)))
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError)):
        buffer.load_state_dict({"a missing entry": state, "empty": {}, "not a dict": 7}[damage])
    assert contents(buffer, prioritized=True) == before


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_state_of_tensors_that_cannot_be_copied_is_refused_and_changes_nothing(kind: str, device: str) -> None:
    buffer, state = used(EXACT, device=device), used(EXACT, seed=3, device=device).state_dict()
    before = contents(buffer, prioritized=True)
    name, given = list(state["tensors"].items())[1]
    state["tensors"][name] = given.to("meta") if kind == "meta" else given.to_sparse()
    with pytest.raises(TypeError, match=f"'{name}' must be a dense tensor with memory; found a .*{kind}"):
        buffer.load_state_dict(state)
    assert contents(buffer, prioritized=True) == before


def test_state_of_tensors_with_gradients_leaves_none_in_the_buffer(device: str) -> None:
    buffer = used(EXACT, device=device)
    state = buffer.state_dict()
    state["tensors"]["fields.obs"].requires_grad_()
    buffer.load_state_dict(state)
    assert not buffer.state_dict()["tensors"]["fields.obs"].requires_grad


@pytest.mark.parametrize("name", scale(list(KINDS), ["uniform", "annealed"]))
def test_buffer_from_disk_goes_on_like_the_saved_one(name: str, device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    buffer = used(KINDS[name], device=device)
    buffer.save(tmp_path / "checkpoint")
    loaded = ReplayBuffer.load(tmp_path / "checkpoint", device=device)
    assert (loaded.capacity, dict(loaded.fields), loaded.device) == (71, STORED, buffer.device)
    assert contents(loaded) == contents(buffer)
    go_on(buffer, loaded)


def test_buffer_from_disk_keeps_every_setting(device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    fields = {
        "obs.camera": Field((3, 5), torch.uint8, torch.float16, 1 / 255),
        "obs.speed": Field((), torch.bfloat16),
        "flag": Field((2,), torch.bool),
        "wide": Field((), torch.float64, None, 0.5),
    }
    sampler = Combined(Proportional(0.3, LinearSchedule(0.2, 0.9, 7), 0.01, 5.0, 2.0, "buffer", False), newest=2)
    buffer = ReplayBuffer(9, fields, sampler=sampler, device=device, seed=2**63 + 5)
    for first in (0, 5, 10):
        number = torch.arange(first, first + 5, device=device)
        camera, flag = number[:, None, None].expand(5, 3, 5).to(torch.uint8), number[:, None].expand(5, 2) % 2 == 0
        obs = {"obs.camera": camera, "obs.speed": number.bfloat16()}
        buffer.add(**obs, flag=flag, wide=number.double() / 3)
        buffer.sample(3)
    buffer.save(tmp_path / "checkpoint")
    loaded = ReplayBuffer.load(tmp_path / "checkpoint", device=device)
    assert dict(loaded.fields) == fields
    for _ in range(3):
        for each in (buffer, loaded):
            each.update_priorities(torch.arange(8, 15, device=device), torch.arange(7, device=device))
        same_draws(buffer, loaded, 6, times=1)


def test_another_capacity_or_sampler_is_not_an_argument_of_load(tmp_path: Path) -> None:
    used(EXACT, device="cpu").save(tmp_path / "c")
    for setting in ({"capacity": 9}, {"sampler": EXACT}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            ReplayBuffer.load(tmp_path / "c", **setting)


def test_saving_changes_nothing_in_the_buffer(device: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    buffer, twin = used(ANNEALED, device=device), used(ANNEALED, device=device)
    buffer.save(tmp_path / "checkpoint")
    buffer.state_dict()
    go_on(buffer, twin)


def test_without_a_device_it_is_loaded_where_a_new_buffer_would_be(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    buffer = used(ANNEALED, device="cpu")
    buffer.save(tmp_path / "checkpoint")
    loaded = ReplayBuffer.load(tmp_path / "checkpoint")
    assert loaded.device == ReplayBuffer(1, NUMBER).device
    go_on(buffer, ReplayBuffer.load(tmp_path / "checkpoint", device="cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["uniform", "combined-proportional", "annealed"])
def test_state_moves_between_cpu_and_cuda(name: str) -> None:
    for source, target in (("cpu", "cuda"), ("cuda", "cpu")):
        buffer, loaded = used(KINDS[name], device=source), make(71, KINDS[name], device=target)
        loaded.load_state_dict(buffer.state_dict())
        for _ in range(3):
            assert buffer.sample(5).key.tolist() == loaded.sample(5).key.tolist()
