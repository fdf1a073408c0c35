"""Errors are for people: the right type, what was asked, what was found, and nothing stored by a call that raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from devices import INTERPRETED
from devices import device_fixture as device_fixture
from transitions import EXACT, FIELDS, NUMBER, contents, fill, make, same_draws, transitions

from gpu_replay import Combined, Field, Latest, LinearSchedule, Proportional, ReplayBuffer, Uniform

pytestmark = pytest.mark.contract


def without(*names: str) -> dict[str, Any]:
    return transitions(range(3), [name for name in FIELDS if name not in names])


def with_(**changed: Any) -> dict[str, Any]:
    return without() | changed


LOSSY = (TypeError, ValueError)
BAD_ADDS: dict[str, tuple[dict[str, Any], Any, str]] = {
    **{f"missing {name}": (without(name), KeyError, name) for name in FIELDS},
    "no fields": ({}, KeyError, "obs"),
    "unknown field": (with_(rewards=torch.zeros(3)), KeyError, "rewards"),
    "wrong shape": (with_(obs=torch.zeros(3, 3, 2)), ValueError, r"obs.*2, 3.*3, 2|obs.*3, 2.*2, 3"),
    "missing batch dimension": (with_(obs=torch.zeros(2, 3)), ValueError, r"obs.*2, 3"),
    "scalar": (with_(reward=torch.tensor(0.5)), ValueError, "reward"),
    "extra dimension": (with_(reward=torch.zeros(3, 1)), ValueError, r"reward.*3, 1"),
    "other batch length": (with_(reward=torch.zeros(4)), ValueError, r"(?s)reward.*4|4.*reward"),
    "last field of other length": (with_(terminated=torch.zeros(2).bool()), ValueError, "terminated"),
    "nothing to add": ({name: value[:0] for name, value in without().items()}, ValueError, r"(?i)at least|0|empty"),
    "float into int": (with_(action=torch.zeros(3)), LOSSY, r"action.*(float32.*int64|int64.*float32)"),
    "float into bool": (with_(terminated=torch.zeros(3)), LOSSY, r"terminated.*float32"),
    "complex": (with_(reward=torch.zeros(3, dtype=torch.complex64)), LOSSY, "reward"),
    "numpy float into int": (with_(action=np.zeros(3)), LOSSY, "action"),
    "numpy strings": (with_(action=np.array(["a", "b", "c"])), LOSSY, "action"),
    "numpy objects": (with_(action=np.array([1, None, 2])), LOSSY, "action"),
    "text": (with_(action="abc"), LOSSY, "action"),
    "None": (with_(action=None), LOSSY, "action"),
    "priority of other length": (with_(priority=torch.ones(2)), ValueError, r"priorit.*2"),
    "priority with an extra dimension": (with_(priority=torch.ones(3, 1)), ValueError, "priorit"),
    "priority that is text": (with_(priority="high"), LOSSY, "priorit"),
    "complex priority": (with_(priority=torch.ones(3).cfloat()), LOSSY, "priorit"),
}


@pytest.mark.parametrize("name", BAD_ADDS)
@pytest.mark.parametrize("stored", [7] if INTERPRETED else [0, 3, 9])
def test_add_refuses_and_stores_nothing(name: str, stored: int, device: str) -> None:
    fields, error, message = BAD_ADDS[name]
    buffer = make(5, EXACT, device=device, **FIELDS)
    if stored:
        fill(buffer, stored)
    before = contents(buffer, prioritized=True)
    with pytest.raises(error, match=message):
        buffer.add(**fields)
    assert contents(buffer, prioritized=True) == before
    assert fill(buffer, 1).tolist() == [stored]


OUT_OF_RANGE = [
    (torch.int32, torch.tensor([1, 2**31])),
    (torch.int32, torch.tensor([-(2**31) - 1, 0])),
    (torch.uint8, torch.tensor([0, 256])),
    (torch.uint8, torch.tensor([-1, 0])),
    (torch.uint8, torch.tensor([0, -1], dtype=torch.int8)),
    (torch.int8, torch.tensor([128, 0])),
    (torch.int8, torch.tensor([0, 200], dtype=torch.uint8)),
    (torch.int16, torch.tensor([0, 40_000], dtype=torch.int32)),
    (torch.float16, torch.tensor([1.0, 70_000.0])),
    (torch.float16, torch.tensor([1, 70_000])),
    (torch.float32, torch.tensor([1.0, 1e39], dtype=torch.float64)),
]


@pytest.mark.parametrize("stored, values", OUT_OF_RANGE, ids=lambda value: str(value).replace("torch.", ""))
def test_values_out_of_range_are_refused(stored: torch.dtype, values: torch.Tensor) -> None:
    for given in (values, values.numpy()):
        buffer = ReplayBuffer(4, {"good": Field((), torch.int64), "value": Field((), stored)}, device="cpu")
        with pytest.raises((TypeError, ValueError), match="value"):
            buffer.add(good=torch.arange(2), value=given)
        assert (len(buffer), buffer.added) == (0, 0)


@pytest.mark.parametrize("stored", [torch.uint8, torch.int32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("given", [torch.float16, torch.float32, torch.float64], ids=str)
def test_floats_into_integers_are_refused_even_when_they_are_whole(
    stored: torch.dtype, given: torch.dtype, device: str
) -> None:
    buffer = ReplayBuffer(4, {"value": Field((), stored)}, device=device)
    with pytest.raises((TypeError, ValueError), match=r"value.*float"):
        buffer.add(value=torch.ones(2, dtype=given, device=device))
    assert len(buffer) == 0


BAD_SIZES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch_size": 0}, ValueError, "0"),
    ({"batch_size": -3}, ValueError, "-3"),
    ({"batch_size": True}, TypeError, "(?i)bool|True"),
    ({"batch_size": 2.0}, TypeError, "(?i)float|2.0"),
    ({"batch_size": "4"}, TypeError, "(?i)str|4"),
    ({"batch_size": None}, TypeError, "(?i)None"),
    ({"beta": -0.5}, ValueError, "beta"),
    ({"beta": float("nan")}, ValueError, "beta"),
    ({"beta": "0.5"}, TypeError, "beta"),
]


@pytest.mark.parametrize("sampler", [Uniform(True), Proportional(), Latest(), Combined(Proportional())], ids=repr)
@pytest.mark.parametrize("given, error, message", BAD_SIZES, ids=str)
def test_samples_that_mean_nothing_are_refused(
    given: dict[str, Any], error: type[Exception], message: str, sampler: Any, device: str
) -> None:
    buffer, twin = make(5, sampler, device=device, seed=3), make(5, sampler, device=device, seed=3)
    fill(buffer, 5)
    fill(twin, 5)
    with pytest.raises(error, match=message):
        buffer.sample(**({"batch_size": 2} | given))
    same_draws(buffer, twin, 3, times=1)


@pytest.mark.parametrize("sampler", [Uniform(), Proportional(), Latest(), Combined(Uniform())], ids=repr)
def test_sampling_an_empty_buffer_is_a_runtime_error(sampler: Any, device: str) -> None:
    buffer = make(5, sampler, device=device)
    with pytest.raises(RuntimeError, match=r"(?i)empty|no transitions|holds nothing|holds 0|add"):
        buffer.sample(2)
    fill(buffer, 3)
    assert buffer.sample(2).key.shape == (2,)


BAD_UPDATES: dict[str, tuple[Any, Any, Any, str]] = {
    "float keys": (torch.tensor([0.0, 1.0]), torch.ones(2), TypeError, r"(?i)key.*float"),
    "bool keys": (torch.tensor([True, False]), torch.ones(2), TypeError, r"(?i)key.*bool"),
    "text keys": ("01", torch.ones(2), TypeError, "(?i)key"),
    "no keys": (None, torch.ones(2), TypeError, "(?i)key"),
    "two dimensions of keys": (torch.zeros(2, 1, dtype=torch.int64), torch.ones(2), ValueError, "(?i)key"),
    "fewer priorities": (torch.tensor([0, 1]), torch.ones(1), ValueError, r"(?s)2.*1|1.*2"),
    "more priorities": (torch.tensor([0, 1]), torch.ones(3), ValueError, r"(?s)2.*3|3.*2"),
    "column of priorities": (torch.tensor([0, 1]), torch.ones(2, 1), ValueError, r"(?i)priorit"),
    "one priority for all": (torch.tensor([0, 1]), torch.tensor(1.0), ValueError, r"(?i)priorit"),
    "complex priorities": (torch.tensor([0, 1]), torch.ones(2).cfloat(), (TypeError, ValueError), r"(?i)priorit"),
    "text priorities": (torch.tensor([0, 1]), "ab", (TypeError, ValueError), r"(?i)priorit"),
}


@pytest.mark.parametrize("sampler", [EXACT, Uniform(), Latest()], ids=repr)
@pytest.mark.parametrize("keys, priorities, error, message", BAD_UPDATES.values(), ids=BAD_UPDATES)
def test_update_refuses_and_changes_nothing(
    keys: Any, priorities: Any, error: Any, message: str, sampler: Any, device: str
) -> None:
    buffer = make(5, sampler, device=device)
    fill(buffer, 3)
    before = contents(buffer, prioritized=sampler is EXACT)
    with pytest.raises(error, match=message):
        buffer.update_priorities(keys, priorities)
    assert contents(buffer, prioritized=sampler is EXACT) == before


BAD_PROPORTIONAL = {"alpha": [-0.1, float("nan")], "beta": [-1.0], "eps": [-1e-9], "clip": [0.0]}
BAD_PROPORTIONAL |= {"initial": ["largest", float("inf")], "normalize": ["none"]}
BAD_KEYS = [torch.tensor([0.0]), torch.tensor([True]), np.array([0.5]), [0.5], 1.0, "0", None, True]


def filled() -> ReplayBuffer:
    buffer = make(5, device="cpu")
    fill(buffer, 3)
    return buffer


BAD_SETTINGS: list[tuple[Callable[[], Any], Any, str]] = [
    *((lambda keys=keys: filled()[keys], TypeError, r"(?i)key") for keys in BAD_KEYS),
    *((lambda size=size: ReplayBuffer(size, NUMBER), ValueError, "(?i)capacity") for size in (0, -1, 2**31)),
    *((lambda size=size: ReplayBuffer(size, NUMBER), TypeError, "(?i)capacity") for size in (True, 2.5, "9")),
    *(
        (lambda name=name: ReplayBuffer(4, {name: Field((), torch.float32)}), (ValueError, KeyError), name)
        for name in ("key", "weight", "probability", "priority")
    ),
    (lambda: ReplayBuffer(4, {}), ValueError, "(?i)field"),
    (lambda: ReplayBuffer(4, [Field((), torch.float32)]), TypeError, "(?i)field"),
    (lambda: ReplayBuffer(4, {"obs": torch.float32}), TypeError, "obs"),
    (lambda: ReplayBuffer(4, {"obs": Field((2,), torch.complex64)}), LOSSY, "complex64"),
    (lambda: Field((2,), np.float32), TypeError, "dtype"),
    (lambda: Field(4, torch.float32), LOSSY, "4"),
    (lambda: Field((3, -1), torch.float32), ValueError, "-1"),
    (lambda: Field((), torch.uint8, None, float("nan")), ValueError, "scale"),
    *(
        (lambda name=name, value=value: Proportional(**{name: value}), ValueError, rf"{name}.*{value}")
        for name, values in BAD_PROPORTIONAL.items()
        for value in values
    ),
    (lambda: Proportional(stratified=1), TypeError, "stratified"),
    (lambda: Uniform(replacement="no"), TypeError, "replacement"),
    (lambda: Combined(Uniform(), newest=0), ValueError, "newest"),
    (lambda: Combined(Uniform(), newest=1.5), TypeError, "newest"),
    (lambda: Combined("uniform"), TypeError, "base"),
    (lambda: LinearSchedule(0.4, 1.0, 0), ValueError, "steps"),
    (lambda: LinearSchedule(0.4, float("inf"), 10), ValueError, "end"),
    (lambda: LinearSchedule("0.4", 1.0, 10), TypeError, "start"),
    (lambda: ReplayBuffer(4, NUMBER, sampler="uniform", device="cpu"), TypeError, "sampler"),
    (lambda: ReplayBuffer(4, NUMBER, sampler=Uniform, device="cpu"), TypeError, "sampler"),
    (lambda: ReplayBuffer(4, NUMBER, seed=0.5, device="cpu"), TypeError, "seed"),
    (lambda: ReplayBuffer(4, NUMBER, device="abacus"), (ValueError, RuntimeError, TypeError), "abacus"),
]


@pytest.mark.parametrize("call, error, message", BAD_SETTINGS)
def test_settings_and_keys_that_mean_nothing_are_refused(call: Callable[[], Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
def test_without_a_device_the_buffer_is_on_the_gpu_where_there_is_one() -> None:
    assert ReplayBuffer(4, NUMBER).device.type == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_buffer_is_on_the_cpu_where_there_is_no_gpu() -> None:
    assert ReplayBuffer(4, NUMBER).device.type == "cpu"


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_calls_within_a_transform_of_torch_are_refused(transform: str) -> None:
    """There tensors have no memory that could be read."""
    buffer = make(4, Proportional(), device="cpu", a=Field((), torch.float32))
    keys = buffer.add(a=torch.ones(3))

    def stores(value: torch.Tensor) -> torch.Tensor:
        buffer.add(a=value.reshape(1))
        return value.sum()

    def updates(value: torch.Tensor) -> torch.Tensor:
        buffer.update_priorities(keys[:1], value.reshape(1))
        return value.sum()

    transformed, given = (
        (torch.func.grad, torch.tensor(2.0)) if transform == "grad" else (torch.func.vmap, torch.ones(2))
    )
    for call in (stores, updates):
        with pytest.raises(TypeError, match=r"memory.*torch\.func"):
            transformed(call)(given)
    assert buffer.added == 3
