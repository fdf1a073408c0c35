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


BAD_ADDS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "missing field": (without("reward"), KeyError, "reward"),
    "no fields": ({}, KeyError, "obs"),
    "unknown field": (without() | {"rewards": torch.zeros(3)}, KeyError, "rewards"),
    "wrong shape": (without() | {"obs": torch.zeros(3, 3, 2)}, ValueError, r"obs.*2, 3.*3, 2|obs.*3, 2.*2, 3"),
    "missing batch dimension": (without() | {"obs": torch.zeros(2, 3)}, ValueError, r"obs.*2, 3"),
    "scalar": (without() | {"reward": torch.tensor(0.5)}, ValueError, "reward"),
    "extra dimension": (without() | {"reward": torch.zeros(3, 1)}, ValueError, r"reward.*3, 1"),
    "other batch length": (without() | {"reward": torch.zeros(4)}, ValueError, r"(?s)reward.*4|4.*reward"),
    "last field of other length": (without() | {"terminated": torch.zeros(2).bool()}, ValueError, "terminated"),
    "nothing to add": ({name: value[:0] for name, value in without().items()}, ValueError, r"(?i)at least|0|empty"),
    "float into int": (
        without() | {"action": torch.zeros(3)},
        (TypeError, ValueError),
        r"action.*(float32.*int64|int64.*float32)",
    ),
    "float into bool": (without() | {"terminated": torch.zeros(3)}, (TypeError, ValueError), r"terminated.*float32"),
    "complex": (without() | {"reward": torch.zeros(3, dtype=torch.complex64)}, (TypeError, ValueError), "reward"),
    "numpy float into int": (without() | {"action": np.zeros(3)}, (TypeError, ValueError), "action"),
    "numpy strings": (without() | {"action": np.array(["a", "b", "c"])}, (TypeError, ValueError), "action"),
    "numpy objects": (without() | {"action": np.array([1, None, 2])}, (TypeError, ValueError), "action"),
    "text": (without() | {"action": "abc"}, (TypeError, ValueError), "action"),
    "None": (without() | {"action": None}, (TypeError, ValueError), "action"),
    "priority of other length": (without() | {"priority": torch.ones(2)}, ValueError, r"priorit.*2"),
    "priority with an extra dimension": (without() | {"priority": torch.ones(3, 1)}, ValueError, "priorit"),
    "priority that is text": (without() | {"priority": "high"}, (TypeError, ValueError), "priorit"),
    "complex priority": (without() | {"priority": torch.ones(3).cfloat()}, (TypeError, ValueError), "priorit"),
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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_add_with_a_priority_that_is_not_finite_stores_nothing(value: float) -> None:
    buffer = make(5, EXACT, device="cpu")
    fill(buffer, 3)
    before = contents(buffer, prioritized=True)
    with pytest.raises(ValueError, match=r"(?i)finite|nan|inf"):
        fill(buffer, 3, priority=[1.0, value, 2.0])
    assert contents(buffer, prioritized=True) == before


BAD_SIZES: list[tuple[Any, type[Exception], str]] = [
    (0, ValueError, "0"),
    (-3, ValueError, "-3"),
    (True, TypeError, "(?i)bool|True"),
    (2.0, TypeError, "(?i)float|2.0"),
    ("4", TypeError, "(?i)str|4"),
    (None, TypeError, "(?i)None"),
]


@pytest.mark.parametrize("sampler", [Uniform(True), Proportional(), Latest(), Combined(Proportional())], ids=repr)
@pytest.mark.parametrize("size, error, message", BAD_SIZES, ids=[repr(size) for size, _, _ in BAD_SIZES])
def test_batch_size_that_is_no_count_is_refused(
    size: Any, error: type[Exception], message: str, sampler: Any, device: str
) -> None:
    buffer, twin = make(5, sampler, device=device, seed=3), make(5, sampler, device=device, seed=3)
    fill(buffer, 5)
    fill(twin, 5)
    with pytest.raises(error, match=message):
        buffer.sample(size)
    same_draws(buffer, twin, 3, times=1)


@pytest.mark.parametrize("sampler", [Uniform(), Proportional(), Latest(), Combined(Uniform())], ids=repr)
def test_sampling_an_empty_buffer_is_a_runtime_error(sampler: Any, device: str) -> None:
    buffer = make(5, sampler, device=device)
    with pytest.raises(RuntimeError, match=r"(?i)empty|no transitions|holds nothing|holds 0|add"):
        buffer.sample(2)
    fill(buffer, 3)
    assert buffer.sample(2).key.shape == (2,)


@pytest.mark.parametrize("beta, error", [(-0.5, ValueError), (float("nan"), ValueError), ("0.5", TypeError)])
def test_beta_that_is_no_exponent_is_refused(beta: Any, error: type[Exception], device: str) -> None:
    buffer = make(5, Proportional(), device=device)
    fill(buffer, 3)
    with pytest.raises(error, match="beta"):
        buffer.sample(2, beta=beta)


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
@pytest.mark.parametrize("name", BAD_UPDATES)
def test_update_refuses_and_changes_nothing(name: str, sampler: Any, device: str) -> None:
    keys, priorities, error, message = BAD_UPDATES[name]
    prioritized = isinstance(sampler, Proportional)
    buffer = make(5, sampler, device=device)
    fill(buffer, 3)
    before = contents(buffer, prioritized=prioritized)
    with pytest.raises(error, match=message):
        buffer.update_priorities(keys, priorities)
    assert contents(buffer, prioritized=prioritized) == before


@pytest.mark.parametrize(
    "keys", [torch.tensor([0.0]), torch.tensor([True]), np.array([0.5]), [0.5], 1.0, "0", None, True]
)
def test_keys_of_another_type_are_refused(keys: Any, device: str) -> None:
    buffer = make(5, device=device)
    fill(buffer, 3)
    with pytest.raises(TypeError, match=r"(?i)key"):
        buffer[keys]


@pytest.mark.parametrize(
    "capacity, error",
    [(0, ValueError), (-1, ValueError), (2**31, ValueError), (True, TypeError), (2.5, TypeError), ("9", TypeError)],
)
def test_capacity_that_is_no_count_is_refused(capacity: Any, error: type[Exception], device: str) -> None:
    with pytest.raises(error, match=r"(?i)capacity"):
        ReplayBuffer(capacity, NUMBER, device=device)


BAD_FIELDS: dict[str, tuple[Callable[[], Any], Any, str]] = {
    **{
        f"reserved {name}": (lambda name=name: {name: Field((), torch.float32)}, (ValueError, KeyError), name)
        for name in ("key", "weight", "probability", "priority")
    },
    "no fields": (dict, ValueError, "(?i)field"),
    "a list": (lambda: [Field((), torch.float32)], TypeError, "(?i)field"),
    "no Field": (lambda: {"obs": torch.float32}, TypeError, "obs"),
    "a dtype that cannot be stored": (
        lambda: {"obs": Field((2,), torch.complex64)},
        (TypeError, ValueError),
        "complex64",
    ),
    "a dtype of numpy": (lambda: {"obs": Field((2,), np.float32)}, TypeError, "dtype"),
    "an int for a shape": (lambda: {"obs": Field(4, torch.float32)}, (TypeError, ValueError), "4"),
    "a negative side": (lambda: {"obs": Field((3, -1), torch.float32)}, ValueError, "-1"),
    "a scale that is not finite": (lambda: {"obs": Field((), torch.uint8, None, float("nan"))}, ValueError, "scale"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_fields_that_cannot_be_stored_are_refused(name: str, device: str) -> None:
    fields, error, message = BAD_FIELDS[name]
    with pytest.raises(error, match=message):
        ReplayBuffer(4, fields(), device=device)


BAD_SETTINGS: list[tuple[Callable[[], Any], Any, str]] = [
    (lambda: Proportional(alpha=-0.1), ValueError, "alpha"),
    (lambda: Proportional(alpha=float("nan")), ValueError, "alpha"),
    (lambda: Proportional(beta=-1.0), ValueError, "beta"),
    (lambda: Proportional(eps=-1e-9), ValueError, "eps"),
    (lambda: Proportional(clip=0.0), ValueError, "clip"),
    (lambda: Proportional(initial="largest"), ValueError, r"initial.*largest"),
    (lambda: Proportional(initial=float("inf")), ValueError, "initial"),
    (lambda: Proportional(normalize="none"), ValueError, r"normalize.*none"),
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


@pytest.mark.parametrize("number", range(len(BAD_SETTINGS)))
def test_settings_that_mean_nothing_are_refused(number: int) -> None:
    build, error, message = BAD_SETTINGS[number]
    with pytest.raises(error, match=message):
        build()


@pytest.mark.gpu
def test_without_a_device_the_buffer_is_on_the_gpu_where_there_is_one() -> None:
    assert ReplayBuffer(4, NUMBER).device.type == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_buffer_is_on_the_cpu_where_there_is_no_gpu() -> None:
    assert ReplayBuffer(4, NUMBER).device.type == "cpu"


@pytest.mark.parametrize("field", FIELDS)
def test_every_missing_field_is_named(field: str, device: str) -> None:
    buffer = make(4, device=device, **FIELDS)
    with pytest.raises(KeyError, match=field):
        buffer.add(**without(field))
    assert len(buffer) == 0
