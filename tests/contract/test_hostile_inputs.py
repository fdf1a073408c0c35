"""Tensors without memory of their own, names that hide attributes, huge numbers, modes of torch, forked processes.

Each is taken for what it says or refused, and leaves the buffer as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from torch import Tensor
from transitions import contents, fill, make, same_draws

from gpu_replay import Combined, Field, Proportional, RankBased, ReplayBuffer
from gpu_replay import TrajectoryReplayBuffer as Trajectories

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:The PyTorch API of (nested|MaskedTensors):UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*"),
]
STORED = {"a": Field((), torch.float32), "b": Field((2,), torch.float32)}


def negated(values: Tensor) -> Tensor:
    """The same numbers, in memory with the other sign."""
    lazy = torch.complex(torch.ones_like(values), -values).conj().imag
    assert lazy.is_neg()
    return lazy


def fake(values: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(values.shape)


def masked(values: Tensor) -> Tensor:
    return torch.masked.masked_tensor(values, values > 0)


TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": negated,
    "zeros": lambda values: torch._efficientzerotensor(values.shape),
    "parameter": torch.nn.Parameter,
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "coo": Tensor.to_sparse,
    "csr": lambda values: values.reshape(len(values), -1).to_sparse_csr(),
    "mkldnn": Tensor.to_mkldnn,
    "nested": lambda values: torch.nested.nested_tensor(list(values)),
    "fake": fake,
    "masked": masked,
    "masked array": lambda values: np.ma.masked_equal(values.numpy(), 5),
    "masked rows": lambda values: list(np.ma.masked_equal(values.numpy(), 5)),
    "masked values": lambda values: [[np.ma.masked, 1.0] for _ in values],
    "quantized": lambda values: torch.quantize_per_tensor(values, 1.0, 0, torch.qint8),
    "float8": lambda values: values.to(torch.float8_e5m2),
    "uint64": lambda values: values.abs().to(torch.uint64),
}
VALUES = torch.tensor([[5.0, -7.0]])


def filled(device: str) -> ReplayBuffer:
    buffer = make(4, Proportional(), device=device, **STORED)
    buffer.add(a=torch.arange(5.0), b=torch.arange(10.0).reshape(5, 2))
    return buffer


@pytest.mark.parametrize("name", TAKEN)
def test_a_lazy_tensor_is_stored_by_its_numbers(name: str, device: str) -> None:
    if name == "zeros":
        with suppress(RuntimeError):
            torch._efficientzerotensor(1).numpy()
            pytest.skip("this torch itself gives memory that is not there, as 2.8 does, instead of an error")
    lazy, buffer, other = TAKEN[name], filled(device), filled(device)
    wanted = lazy(VALUES).detach().clone()
    for each, given, priorities in ((buffer, lazy(VALUES), lazy(VALUES[0])), (other, wanted, wanted[0])):
        each.add(a=torch.zeros(1), b=given)
        each.add(a=torch.zeros(2), b=torch.zeros(2, 2), priority=priorities)
        each.update_priorities(torch.tensor([4, 3]), priorities)
    assert contents(buffer, prioritized=True) == contents(other, prioritized=True)
    assert torch.equal(buffer[5].b.cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32], ids=str)
def test_unsigned_numbers_of_torch_are_taken_as_those_of_numpy(dtype: torch.dtype, device: str) -> None:
    buffer, most = filled(device), torch.iinfo(dtype).max
    keys = buffer.add(
        a=torch.tensor([3]).to(dtype), b=torch.tensor([[7, most]]).to(dtype), priority=torch.ones(1).to(dtype)
    )
    buffer.update_priorities(keys.to(dtype), torch.tensor([9]).to(dtype))
    assert buffer[keys.to(dtype)].b.tolist() == [[7.0, float(torch.tensor(float(most)))]]
    assert buffer.priorities(keys).item() == pytest.approx(9.0, abs=1e-4)
    small = make(4, device=device, n=Field((), torch.uint8))
    with pytest.raises((TypeError, ValueError), match="'n'"):
        small.add(n=torch.tensor([256]).to(dtype))
    assert small.added == 0


def test_a_list_of_tensors_that_numpy_cannot_read_is_refused() -> None:
    buffer = filled("cpu")
    before = contents(buffer, prioritized=True)
    for wrong in (torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.bfloat16)):
        with pytest.raises(TypeError, match="'b' must be a tensor or an array; found list"):
            buffer.add(a=[1.0], b=[wrong])
    assert contents(buffer, prioritized=True) == before


def test_a_key_may_be_a_zero_without_memory(device: str) -> None:
    buffer, zero = make(4, Proportional(), device=device, **STORED), torch._efficientzerotensor((1,), dtype=torch.int64)
    buffer.add(a=torch.arange(2.0), b=torch.arange(4.0).reshape(2, 2))
    assert buffer[zero].b.tolist() == [[0, 1]]
    buffer.update_priorities(zero, torch.tensor([3.0]))
    assert buffer.masses().argmax() == 0


# what makes a fake tensor takes seconds to import
@pytest.mark.parametrize(
    "name", [pytest.param("fake", marks=pytest.mark.slow), *(each for each in REFUSED if each != "fake")]
)
def test_what_is_no_dense_tensor_is_refused_and_changes_nothing(name: str, device: str) -> None:
    buffer, given = filled(device), REFUSED[name]
    before = contents(buffer, prioritized=True)
    steps = Trajectories(4, 1, {"obs": STORED["b"], "action": Field((), torch.float32)}, device=device)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("b", lambda: buffer.add(a=torch.ones(1), b=given(VALUES))),
        ("obs", lambda: steps.add(obs=given(VALUES), action=np.ones(1), **ENDED)),
    ]
    if name not in ("csr", "nested"):
        row = VALUES[0]
        calls += [
            ("priorit", lambda: buffer.add(a=torch.ones(2), b=torch.ones(2, 2), priority=given(row))),
            ("priorit", lambda: buffer.update_priorities([3, 4], given(row))),
            ("a", lambda: buffer.add(a=given(row), b=torch.ones(2, 2))),
        ]
    if name[:4] not in ("uint", "mask"):
        calls += [("keys", lambda: buffer.update_priorities(given(VALUES[0].abs()), [1.0, 1.0]))]
        calls += [("keys", lambda: buffer[given(VALUES[0].abs())])] if name not in ("csr", "nested") else []
    for named, call in calls:
        with pytest.raises(TypeError, match=named) as refused:
            call()
        assert "found" in str(refused.value)
    assert contents(buffer, prioritized=True) == before
    assert steps.added == 0


ENDED = {"reward": np.zeros(1, np.float32), "terminated": np.zeros(1, bool), "truncated": np.zeros(1, bool)}


# `__class__` and the like are found in place of a field of that name
def test_a_shape_from_an_iterator_is_whole() -> None:
    assert Field(iter((3, 4)), torch.uint8).shape == (3, 4)  # type: ignore[arg-type]


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


SAMPLERS = [Proportional(normalize="buffer"), RankBased(), Combined(Proportional())]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_default_device_changes_nothing(sampler: Any, tmp_path: Any) -> None:
    """All of a life of both buffers where torch makes tensors elsewhere."""
    row = {"a": np.arange(6, dtype=np.float32), "b": np.arange(12, dtype=np.float32).reshape(6, 2)}
    flags = {"terminated": np.zeros(2, bool), "truncated": np.ones(2, bool), "reward": np.ones(2, np.float32)}
    fields = {"obs": Field((2,), torch.float32, torch.float16), "action": Field((), torch.int64)}
    found = []
    for place in ("meta", "cpu"):
        with default_device(place):
            buffer = make(4, sampler, **STORED)
            buffer.add(**row, priority=row["a"])
            buffer.update_priorities([3, 4], [1.0, 2.0])
            steps = Trajectories(8, 2, fields, stack=2, autoreset="same_step", sampler=sampler, device="cpu")
            for number in range(5):
                last = [np.full(2, 9.0, np.float32), [8.0, 8.0]] if number % 2 else np.full((2, 2), 7.0)
                steps.add(obs=np.full((2, 2), float(number)), action=np.arange(2), **flags, final_obs=last)
            buffer.save(tmp_path / place)
            loaded = ReplayBuffer.load(tmp_path / place, device="cpu")
            drawn = [buffer.sample(3), loaded.sample(3), steps.sample(3), steps.sample_sequences(2, 1)]
            found.append([*map(repr, drawn), *(str(dict(batch.items())) for batch in drawn), str(buffer.stats())])
    assert found[0] == found[1]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_buffer_made_in_inference_mode_works_outside(sampler: Any, device: str) -> None:
    with torch.inference_mode():
        buffer = make(4, sampler, device=device, **STORED)
        buffer.add(a=torch.arange(6.0), b=torch.ones(6, 2))
        buffer.sample(2)
    state = buffer.state_dict()
    buffer.clear()
    buffer.load_state_dict(state)
    twin = make(4, sampler, device=device, **STORED)
    twin.load_state_dict(state)
    buffer.add(a=torch.ones(1), b=torch.ones(1, 2))
    twin.add(a=torch.ones(1), b=torch.ones(1, 2))
    same_draws(buffer, twin, 3)


CALLS: dict[str, Callable[[ReplayBuffer], Any]] = {
    "add": lambda buffer: fill(buffer, 1),
    "sample": lambda buffer: buffer.sample(1),
    "update": lambda buffer: buffer.update_priorities([0], [1.0]),
    "read": lambda buffer: buffer[0],
    "length": len,
    "added": lambda buffer: buffer.added,
    "clear": lambda buffer: buffer.clear(),
    "stats": lambda buffer: buffer.stats(),
    "state": lambda buffer: buffer.state_dict(),
    "save": lambda buffer: buffer.save("/nowhere"),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_calls_in_a_forked_process_are_refused_and_say_what_to_do() -> None:
    buffer = make(4, Proportional())
    fill(buffer, 3)
    reader, writer = os.pipe()
    # the lock is held while the process is forked: the child does not wait for it
    with buffer._lock:
        child = os.fork()
    if child == 0:
        said = []
        for name, call in CALLS.items():
            try:
                call(buffer)
                said.append(f"{name} did not raise")
            except RuntimeError as error:
                if "queue" not in str(error) or "examples/async_actors.py" not in str(error):
                    said.append(f"{name}: {error}")
            except BaseException as error:
                said.append(f"{name}: {error!r}")
        own = make(4)
        fill(own, 2)
        os.write(writer, f"{said} {len(own)}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "[] 2"
    fill(buffer, 1)
    assert len(buffer) == 4
