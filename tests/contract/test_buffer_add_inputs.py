"""What `add` accepts: arrays of every origin and layout, lossless and same-kind casts, and how values leave again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from tolerances import close
from transitions import EXACT, check_rows, make, transitions

from gpu_replay import Field, Proportional, ReplayBuffer, Uniform

pytestmark = pytest.mark.contract

FLOAT_CASTS = [
    *((torch.float64, torch.float32), (torch.float32, torch.float64)),
    *((torch.float32, torch.float16), (torch.float16, torch.float32)),
    *((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)),
]
INTEGER_CASTS = [
    *((torch.int32, torch.int64), (torch.uint8, torch.int64), (torch.uint8, torch.int16)),
    *((torch.int8, torch.int32), (torch.int16, torch.int32), (torch.uint8, torch.float32)),
]
CASTS = FLOAT_CASTS + INTEGER_CASTS
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
STORED = [torch.bool, *INTEGERS, *FLOATS]


def short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("origin", ["numpy", "cpu", "device", "mixed"])
def test_numpy_cpu_and_device_inputs_store_the_same(origin: str, device: str) -> None:
    buffer = make(8, device=device)
    for first, count in ((0, 3), (3, 6), (9, 1)):
        fields = transitions(range(first, first + count))
        if origin in ("device", "mixed"):
            fields = {name: value.to(device) for name, value in fields.items()}
        if origin == "mixed":
            fields["obs"] = fields["obs"].cpu().numpy()
        keys = buffer.add(**{name: value.numpy() if origin == "numpy" else value for name, value in fields.items()})
        assert keys.tolist() == list(range(first, first + count))
        assert keys.device.type == device
    check_rows(buffer[list(range(2, 10))])


@pytest.mark.parametrize("dtype", STORED, ids=short)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (17,)], ids=str)
def test_every_dtype_and_shape_comes_back_unchanged(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    buffer = ReplayBuffer(5, {"value": Field(shape, dtype)}, sampler=Uniform(replacement=True), device=device)
    values = torch.randint(0, 256, (8, *shape), generator=torch.Generator().manual_seed(1))
    values = (values % 2 == 0) if dtype is torch.bool else (values % 128).to(dtype)
    buffer.add(value=values[:3].to(device))
    buffer.add(value=values[3:].to(device))
    batch = buffer.sample(5)
    assert batch.value.dtype == dtype
    assert torch.equal(batch.value.cpu(), values[batch.key.cpu()])
    assert torch.equal(buffer[[7, 3]].value.cpu(), values[[7, 3]])


@pytest.mark.parametrize("given, stored", CASTS, ids=short)
def test_lossless_and_same_kind_casts_are_made(given: torch.dtype, stored: torch.dtype, device: str) -> None:
    buffer = ReplayBuffer(4, {"value": Field((2,), stored)}, device=device)
    values = torch.tensor([[1, 2], [3, 100]], dtype=given)
    buffer.add(value=values.to(device))
    if given is not torch.bfloat16:
        buffer.add(value=values.numpy())
    found = buffer[list(range(len(buffer)))].value
    assert found.dtype == stored
    assert found.cpu().tolist() == (values.to(stored).tolist() * 2)[: len(buffer)]


@pytest.mark.parametrize(
    "values, stored",
    [
        # wide integers that fit, wide floats that are rounded, and special floats, which are data
        (torch.tensor([-(2**31), 2**31 - 1, 0]), torch.int32),
        (np.array([0.1, 1 / 3]), torch.float32),
        (torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]), torch.float32),
    ],
    ids=short,
)
def test_values_at_the_edges_of_a_type(values: Any, stored: torch.dtype, device: str) -> None:
    buffer = ReplayBuffer(4, {"value": Field((), stored)}, device=device)
    buffer.add(value=values)
    assert repr(buffer[list(range(len(values)))].value.tolist()) == repr(torch.as_tensor(values).to(stored).tolist())


GIVEN = [
    np.bool_,
    *(np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64),
    *(np.float16, np.float32, np.float64),
    *(np.complex64, np.object_, np.str_),
]


@pytest.mark.parametrize("shape", [(), (8, 8)], ids=str)
@pytest.mark.parametrize("stored", STORED, ids=short)
def test_numpy_arrays_of_any_type_are_stored_by_value_or_refused(
    stored: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    for given in GIVEN:
        values = (np.arange(3 * 64) % (2 if given is np.bool_ else 5)).reshape(3, 8, 8).astype(given)
        values = values[(slice(None), *[1] * (2 - len(shape)))]
        buffer = ReplayBuffer(4, {"value": Field(shape, stored)}, device=device)
        # all values fit, so only the kind is a reason to refuse: fractions into whole numbers, numbers into truths
        kinds = {np.bool_: 0, np.float16: 2, np.float32: 2, np.float64: 2, np.complex64: 3, np.object_: 3, np.str_: 3}
        kind = kinds.get(given, 1)
        if kind > (0 if stored is torch.bool else 2 if stored.is_floating_point else 1):
            with pytest.raises((TypeError, ValueError), match="value"):
                buffer.add(value=values)
            assert len(buffer) == 0
        else:
            buffer.add(value=values)
            assert buffer[[0, 1, 2]].value.double().tolist() == values.astype(np.float64).tolist()


def test_layouts_that_are_not_contiguous(device: str) -> None:
    base = torch.arange(4 * 3 * 2, dtype=torch.float32).reshape(4, 3, 2)
    for layout, values in (
        (base.transpose(1, 2).contiguous().transpose(1, 2).to(device), base),
        (torch.stack([base, base + 100], dim=1).to(device)[:, 0], base),
        (base[:1].to(device).expand(4, 3, 2), base[:1].expand(4, 3, 2)),
        (base.numpy()[::-1], base.flip(0)),
        (np.asfortranarray(base.numpy()), base),
    ):
        buffer = ReplayBuffer(4, {"value": Field((3, 2), torch.float32)}, device=device)
        buffer.add(value=layout)
        assert torch.equal(buffer[[0, 1, 2, 3]].value.cpu(), values)


def test_big_endian_and_read_only_arrays(device: str) -> None:
    frozen = np.array([7.0, 8.0, 9.0], dtype=np.float32)
    frozen.flags.writeable = False
    buffer = ReplayBuffer(6, {"value": Field((), torch.float32)}, device=device)
    buffer.add(value=np.array([1.5, -2.25, 3.0], dtype=">f4"))
    buffer.add(value=frozen)
    assert buffer[list(range(6))].value.tolist() == [1.5, -2.25, 3.0, 7.0, 8.0, 9.0]


def test_values_that_require_grad_are_stored_without_a_graph(device: str) -> None:
    buffer = ReplayBuffer(2, {"value": Field((2,), torch.float32)}, sampler=Proportional(), device=device)
    value = torch.tensor([[1.0, 2.0]], device=device, requires_grad=True) * 2
    buffer.add(value=value, priority=torch.tensor([1.0], device=device, requires_grad=True))
    batch = buffer.sample(1)
    assert batch.value.tolist() == [[2.0, 4.0]]
    assert not any(tensor.requires_grad for tensor in batch.values())


SCALED = [
    Field((3,), torch.uint8, torch.float16, 1 / 255),
    Field((3,), torch.uint8, torch.float32, 1 / 255),
    Field((3,), torch.int16, torch.float32, 0.5),
    Field((3,), torch.uint8, torch.bfloat16),
    Field((3,), torch.uint8, torch.bfloat16, 0.5),
    Field((3,), torch.bfloat16, torch.float32, 0.5),
    Field((3,), torch.uint8, torch.int64),
    Field((3,), torch.float32, torch.float16),
    Field((3,), torch.float32, None, -2.0),
    Field((3,), torch.bool, torch.float32),
]


@pytest.mark.parametrize("field", SCALED, ids=str)
def test_sample_dtype_and_scale(field: Field, device: str) -> None:
    buffer = ReplayBuffer(7, {"value": field}, sampler=Proportional(), device=device)
    values = torch.tensor([[0, 1, 2], [3, 50, 127], [1, 0, 1], [255, 254, 128]])
    stored = values.bool() if field.dtype is torch.bool else values.to(field.dtype)
    buffer.add(value=stored.to(device))
    batch = buffer.sample(16)
    expected = stored[batch.key.cpu()].double() * (field.scale if field.scale is not None else 1.0)
    assert batch.value.dtype == (field.sample_dtype or field.dtype)
    assert close(
        batch.value.cpu(),
        expected,
        "half" if field.scale == 1 / 255 and batch.value.dtype is torch.float16 else "scaled",
    )
    # what is stored keeps its width
    assert buffer.nbytes < 99 * (field.row_bytes + 32) + 4096


def test_a_scale_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    field = Field((), torch.uint8, torch.float32, np.float32(0.5))
    assert (field, type(field.scale)) == (Field((), torch.uint8, torch.float32, 0.5), float)
    buffer = ReplayBuffer(2, {"value": field}, device="cpu")
    buffer.add(value=[3])
    buffer.save(tmp_path / "c")
    assert ReplayBuffer.load(tmp_path / "c", device="cpu").sample(1).value.tolist() == [1.5]


def test_many_fields_of_odd_sizes_keep_their_rows_together(device: str) -> None:
    sides = [1, 2, 3, 5, 8, 13, 31, 33, 64, 127, 129]
    fields = {f"part{side}": Field((side,), STORED[1 + side % 9]) for side in sides}
    buffer = ReplayBuffer(10, fields, device=device)
    number = torch.arange(23)
    for rows in number.split(9):
        buffer.add(**{f"part{side}": rows[:, None].expand(-1, side).to(fields[f"part{side}"].dtype) for side in sides})
    batch = buffer.sample(10)
    for side in sides:
        expected = batch.key.cpu()[:, None].expand(-1, side)
        assert torch.equal(batch[f"part{side}"].cpu().long(), expected), side


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, np.float32], ids=short)
def test_priority_of_any_number_type(dtype: Any, device: str) -> None:
    buffer = make(4, EXACT, device=device)

    def given(values: list[int]) -> Any:
        return np.array(values, dtype) if dtype is np.float32 else torch.tensor(values, dtype=dtype, device=device)

    buffer.add(**transitions(range(3)), priority=given([1, 2, 4]))
    assert buffer.masses().tolist() == [1 << 20, 2 << 20, 4 << 20, 0]
    buffer.update_priorities(torch.tensor([2, 0], device=device), given([8, 16]))
    assert buffer.masses().tolist() == [16 << 20, 2 << 20, 8 << 20, 0]
