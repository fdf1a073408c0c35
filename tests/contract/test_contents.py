"""What is stored, read by key and in order: `keys`, `in`, `batches`, `priorities`; and copies of a buffer."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from trajectory_pair import Pair, live_through
from transitions import STORED, check_rows, fill, make, same, transitions

from gpu_replay import (
    Batch,
    Field,
    Proportional,
    RankBased,
    ReplayBuffer,
    TrajectoryReplayBuffer,
    Uniform,
)

pytestmark = pytest.mark.contract
# whoever copies a buffer to another process does it so
pickle = importlib.import_module("pickle")


def transition_buffer(device: str, sampler: Any = None, rows: int = 13) -> ReplayBuffer:
    buffer = make(8, sampler, device=device, seed=3)
    for first in range(0, rows, 4):
        buffer.add(**transitions(range(first, min(first + 4, rows))))
    return buffer


def trajectory_pair(device: str, sampler: Any = None) -> Pair:
    settings: dict[str, Any] = {"stack": 2, "n_step": 2, "autoreset": "same_step", "seed": 3}
    return live_through(Pair(12, 2, sampler=sampler or Proportional(), device=device, **settings), 9, end=0.2)


def test_in_says_whether_a_key_is_live(device: str) -> None:
    buffer = transition_buffer(device)
    assert [key for key in range(-3, 20) if key in buffer] == list(range(5, 13))
    assert np.int64(5) in buffer
    assert torch.tensor(12) in buffer
    assert buffer.keys()[0] in buffer
    assert 2**70 not in buffer
    assert (buffer.keys().dtype, buffer.keys().device.type) == (torch.int64, device)


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_batches_walk_over_everything_in_the_order_of_keys(size: int, device: str) -> None:
    buffer = transition_buffer(device)
    found = list(buffer.batches(size))
    assert [len(batch) for batch in found] == [min(size, 8 - done) for done in range(0, 8, size)]
    same(Batch.cat(found), buffer[buffer.keys()])
    assert list(make(8, device=device).batches(size)) == []


def test_no_keys_give_a_batch_of_no_rows(device: str) -> None:
    buffer = make(4, Proportional(), device=device)
    for keys in (buffer.keys(), [], np.zeros(0, np.int64)):
        found = buffer[keys]
        assert (len(found), found.obs.shape, found.action.dtype) == (0, (0, 2, 3), torch.int64)
    buffer.add(**transitions(range(3), buffer.fields))
    assert len(buffer[[]]) == 0
    assert buffer[[2]].action.tolist() == [2 * 1_000_003]


def test_batches_are_converted_as_samples_are(device: str) -> None:
    fields = {"obs": Field((2,), torch.uint8, torch.float32, 0.5), "action": Field((), torch.int32, torch.int64)}
    buffer = TrajectoryReplayBuffer(4, 1, fields, stack=2, random_shift=0, device=device)
    for step in range(3):
        buffer.add(obs=[[step, step]], action=[step], reward=[step], terminated=[step == 1], truncated=[False])
    (batch,) = buffer.batches(4)
    expected = {"obs", "action", "reward", "terminated", "truncated", "key"}
    assert set(batch) == expected
    assert (batch.obs.dtype, batch.action.dtype) == (torch.float32, torch.int64)
    assert batch.obs.tolist() == [[0, 0], [0.5, 0.5], [1, 1]]
    assert batch.terminated.tolist() == [False, True, False]


def test_what_is_added_or_overwritten_while_walking_is_left_out(device: str) -> None:
    buffer = transition_buffer(device)
    walk = buffer.batches(3)
    assert next(walk).key.tolist() == [5, 6, 7]
    buffer.add(**transitions(range(13, 17)))
    assert [batch.key.tolist() for batch in walk] == [[9, 10, 11], [12]]
    walk = buffer.batches(3)
    next(walk)
    buffer.clear()
    assert list(walk) == []


COPIES = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer))}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_independent(way: str, device: str) -> None:
    """That it goes on as the buffer does is in test_programs.py."""
    for buffer in (transition_buffer(device, RankBased()), trajectory_pair(device, RankBased()).buffer):
        twin = COPIES[way](buffer)
        known = ("device", "seed", "fields", "sampler", "capacity")
        assert [getattr(twin, name) for name in known] == [getattr(buffer, name) for name in known]
        before = next(buffer.batches(3))
        twin.clear()
        assert (type(twin), len(twin)) == (type(buffer), 0)
        same(next(buffer.batches(3)), before)


@pytest.mark.gpu
def test_without_a_device_the_buffer_is_on_the_gpu_where_there_is_one() -> None:
    assert make(4, device=None).device.type == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_buffer_is_on_the_cpu_where_there_is_no_gpu() -> None:
    assert make(4, device=None).device.type == "cpu"


FORMS = {"numpy int64": np.array, "numpy int32": lambda keys: np.array(keys, dtype=np.int32), "list": list}


@pytest.mark.parametrize("form", [*FORMS, "tensor", "device tensor", "int"])
def test_stored_transitions_come_back_by_key(form: str, device: str) -> None:
    buffer = make(10, device=device)
    fill(buffer, 25)
    wanted = [24, 15, 20, 20] if form != "int" else [24]
    tensor = torch.tensor(wanted, device=device if form == "device tensor" else "cpu")
    batch = buffer[FORMS[form](wanted) if form in FORMS else 24 if form == "int" else tensor]
    assert (batch.key.tolist(), batch.key.dtype) == (wanted, torch.int64)
    assert all(tensor.device.type == device for tensor in batch.values())
    check_rows(batch)


@pytest.mark.parametrize("keys, named", [([20, 14, 9], 14), ([25], 25), ([-1, 20], -1), ([24, 2**62, 3], 2**62)])
def test_key_error_names_the_first_key_that_is_not_live(keys: list[int], named: int, device: str) -> None:
    buffer = make(10, device=device)
    fill(buffer, 25)
    with pytest.raises(KeyError, match=rf"(?<![\d-]){named}(?!\d)"):
        buffer[torch.tensor(keys)]


def test_batch_is_a_snapshot(device: str) -> None:
    buffer = make(6, Proportional(), device=device)
    fill(buffer, 6)
    batches = buffer.sample(4), buffer[[0, 1, 2]]
    before = [{name: value.clone() for name, value in batch.items()} for batch in batches]
    buffer.update_priorities(fill(buffer, 6), torch.full((6,), 9.0, device=device))
    buffer.sample(4)
    for batch, old in zip(batches, before, strict=True):
        same(batch, old)


def test_what_was_added_and_what_was_drawn_are_the_callers_to_change(device: str) -> None:
    buffer = make(4, Uniform(), device=device)
    given = {name: value.to(device) for name, value in transitions(range(4)).items()}
    buffer.add(**given)
    for tensors in (given, buffer.sample(4), buffer[[0, 1, 2, 3]]):
        tensors["obs"].fill_(-1)
    check_rows(buffer[buffer.keys()])


def test_attributes_say_what_was_asked(device: str) -> None:
    buffer = make(11, device=device)
    assert (buffer.capacity, buffer.device, dict(buffer.fields)) == (11, torch.empty(0, device=device).device, STORED)
    assert (buffer.added, len(buffer)) == (0, 0)
    assert buffer.nbytes >= 11 * sum(field.row_bytes for field in STORED.values())


def test_batch_is_reached_by_name_and_by_attribute(device: str) -> None:
    buffer = make(3, device=device)
    fill(buffer, 3)
    batch = buffer.sample(2)
    assert batch.obs is batch["obs"]
    assert set(batch) == {*STORED, "key", "probability", "weight"}
    with pytest.raises(KeyError, match=r"nothing.*obs"):
        batch["nothing"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = batch.nothing


def test_dotted_fields_are_reached_as_a_group(device: str) -> None:
    fields = {"obs.camera": Field((2,), torch.uint8), "obs.speed": Field((), torch.float32)}
    buffer = ReplayBuffer(3, fields, device=device)
    buffer.add(**{"obs.camera": torch.tensor([[1, 2], [3, 4]]), "obs.speed": torch.tensor([0.5, 1.5])})
    batch = buffer[[1, 0]]
    assert batch["obs.camera"].tolist() == batch["obs"]["camera"].tolist() == [[3, 4], [1, 2]]
    assert batch.obs.speed.tolist() == [1.5, 0.5]
