"""What is stored, read by key and in order: `keys`, `in`, `batches`, `priorities`; and copies of a buffer."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from trajectory_pair import Pair, live_through
from transitions import SAMPLERS, STORED, check_rows, fill, make, same, transitions

from gpu_replay import (
    Batch,
    Combined,
    Field,
    Hindsight,
    Latest,
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


def test_keys_are_the_live_ones_oldest_first(device: str) -> None:
    buffer = make(8, device=device)
    assert buffer.keys().tolist() == []
    buffer.add(**transitions(range(3)))
    assert (buffer.keys().tolist(), buffer.keys().dtype, buffer.keys().device.type) == ([0, 1, 2], torch.int64, device)
    buffer.add(**transitions(range(3, 13)))
    assert buffer.keys().tolist() == list(range(5, 13))
    same(buffer[buffer.keys()], buffer[list(range(5, 13))])
    buffer.clear()
    assert buffer.keys().tolist() == []
    assert trajectory_pair(device).buffer.keys().tolist() == list(range(6, 18))


def test_in_says_whether_a_key_is_live(device: str) -> None:
    buffer = transition_buffer(device)
    assert [key for key in range(-3, 20) if key in buffer] == list(range(5, 13))
    assert np.int64(5) in buffer
    assert torch.tensor(12) in buffer
    assert buffer.keys()[0] in buffer
    assert 2**70 not in buffer
    for wrong in ("5", 5.0, True, None, torch.tensor(5.0), [5]):
        with pytest.raises(TypeError, match="needs a key, an int"):
            assert wrong in buffer


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
    for wrong, error in ((0, ValueError), (1.5, TypeError), (None, TypeError)):
        with pytest.raises(error, match="size"):
            buffer.batches(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sampler", [Proportional(alpha=0.6, eps=0.01), Combined(Proportional(alpha=1.3, clip=5.0))], ids=str
)
def test_priorities_are_what_the_masses_say(sampler: Any, device: str) -> None:
    buffer, rule = transition_buffer(device, sampler), sampler.base if isinstance(sampler, Combined) else sampler
    buffer.update_priorities([5, 6, 7, 8], [0.0, 0.5, -3.0, 8.0])
    found = buffer.priorities([8, 7, 6, 5])
    assert (found.dtype, found.device.type) == (torch.float64, device)
    masses = buffer.masses().cpu().double().numpy()[[0, 7, 6, 5]]
    expected = np.maximum((masses / 2**20) ** (1 / rule.alpha) - rule.eps, 0)
    assert found.tolist() == expected.tolist()
    given = np.array([min(8.0 + rule.eps, rule.clip or 99) - rule.eps, 3.0, 0.5, 0.0])
    assert np.allclose(found.cpu(), given, atol=1e-4)
    # the largest given yet, where none was given
    assert buffer.priorities(12).tolist() == buffer.priorities(torch.tensor([9])).tolist()


def test_priorities_that_cannot_be_read_are_refused(device: str) -> None:
    buffer = transition_buffer(device, Proportional())
    for keys, first in (([5, 4, 13], 4), ([13], 13), (-1, -1)):
        with pytest.raises(KeyError, match=rf"key {first} is not live"):
            buffer.priorities(keys)
    with pytest.raises(TypeError, match="keys"):
        buffer.priorities([0.5])
    for sampler in (Uniform(), Latest(), Combined(Uniform()), Proportional(alpha=0.0)):
        with pytest.raises(RuntimeError, match="no priorities"):
            make(4, sampler, device=device).priorities([])


COPIES = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer))}


@pytest.mark.parametrize("sampler", scale(list(SAMPLERS.values()), [RankBased()]), ids=str)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_draws_the_same_and_is_independent(way: str, sampler: Any, device: str) -> None:
    for buffer in (transition_buffer(device, sampler), trajectory_pair(device, sampler).buffer):
        buffer.sample(2)
        buffer.update_priorities(buffer.keys()[-4:], torch.arange(1.0, 5.0))
        twin = COPIES[way](buffer)
        assert type(twin) is type(buffer)
        assert (twin.device, twin.seed, twin.fields, twin.sampler) == (
            buffer.device,
            buffer.seed,
            buffer.fields,
            sampler,
        )
        assert repr(twin.stats()) == repr(buffer.stats())
        for _ in range(2):
            same(twin.sample(3), buffer.sample(3))
        before = buffer.sample(2).key.tolist(), twin.clear(), len(buffer)
        assert (len(twin), before[2]) == (0, len(buffer))


def close_by(achieved: Any, desired: Any) -> Any:
    return (achieved == desired).all(1).float()


def test_a_copy_relabels_as_the_buffer_does(device: str) -> None:
    goal = Field((1,), torch.float32)
    fields = {"obs": {"achieved_goal": goal, "desired_goal": goal}, "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(20, 1, fields, relabel=Hindsight(reward_fn=close_by), device=device)
    for step in range(6):
        obs = {"achieved_goal": [[step]], "desired_goal": [[9]]}
        buffer.add(obs=obs, action=[0], reward=[0.0], terminated=[False], truncated=[False])
    for twin in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy({"agent": [buffer]})["agent"][0]):
        assert twin.relabel == buffer.relabel
    same(twin.sample(5), buffer.sample(5))


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
