"""What is stored, read by key and in order: `keys`, `in`, `batches`; what a buffer says of itself; and copies of it."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from pairs import RENEWED
from tolerances import close
from trajectory_pair import FIELDS, Pair, live_through
from transitions import EXACT, STORED, check_rows, fill, make, same

from gpu_replay import (
    Batch,
    Field,
    Latest,
    Proportional,
    RankBased,
    ReplayBuffer,
    Stats,
    TrajectoryReplayBuffer,
    Uniform,
)

pytestmark = pytest.mark.contract


def wrapped(device: str, sampler: Any = None) -> ReplayBuffer:
    """A ring of 8 that holds keys 5 to 12."""
    buffer = make(8, sampler, device=device, seed=3)
    fill(buffer, 13)
    return buffer


def test_in_says_whether_a_key_is_live(device: str) -> None:
    buffer = wrapped(device)
    assert [key for key in range(-3, 20) if key in buffer] == list(range(5, 13))
    assert all(key in buffer for key in (np.int64(5), torch.tensor(12), buffer.keys()[0]))
    assert 2**70 not in buffer
    assert (buffer.keys().dtype, buffer.keys().device.type) == (torch.int64, device)


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_batches_walk_over_everything_in_the_order_of_keys(size: int, device: str) -> None:
    buffer = wrapped(device)
    found = list(buffer.batches(size))
    assert [len(batch) for batch in found] == [min(size, 8 - done) for done in range(0, 8, size)]
    same(Batch.cat(found), buffer[buffer.keys()])
    assert list(make(8, device=device).batches(size)) == []


def test_no_keys_give_a_batch_of_no_rows(device: str) -> None:
    buffer = make(4, Proportional(), device=device)
    for keys in (buffer.keys(), [], np.zeros(0, np.int64)):
        found = buffer[keys]
        assert (len(found), found.obs.shape, found.action.dtype) == (0, (0, 2, 3), torch.int64)
    fill(buffer, 3)
    assert len(buffer[[]]) == 0
    check_rows(buffer[[2]])


def test_batches_are_converted_as_samples_are(device: str) -> None:
    fields = {"obs": Field((2,), torch.uint8, torch.float32, 0.5), "action": Field((), torch.int32, torch.int64)}
    buffer = TrajectoryReplayBuffer(4, 1, fields, stack=2, device=device)
    for step in range(3):
        buffer.add(obs=[[step, step]], action=[step], reward=[step], terminated=[step == 1], truncated=[False])
    (batch,) = buffer.batches(4)
    assert set(batch) == {"obs", "action", "reward", "terminated", "truncated", "key"}
    assert (batch.obs.dtype, batch.action.dtype) == (torch.float32, torch.int64)
    assert batch.obs.tolist() == [[0, 0], [0.5, 0.5], [1, 1]]
    assert batch.terminated.tolist() == [False, True, False]


def test_what_is_added_or_overwritten_while_walking_is_left_out(device: str) -> None:
    buffer = wrapped(device)
    walk = buffer.batches(3)
    assert next(walk).key.tolist() == [5, 6, 7]
    fill(buffer, 4)
    assert [batch.key.tolist() for batch in walk] == [[9, 10, 11], [12]]
    walk = buffer.batches(3)
    next(walk)
    buffer.clear()
    assert list(walk) == []


COPIES = RENEWED | {"copy.copy": copy.copy}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_independent(way: str, device: str) -> None:
    """That it goes on as the buffer does is in test_programs.py."""
    steps = live_through(Pair(12, 2, sampler=RankBased(), device=device, stack=2, seed=3), 9).buffer
    for buffer in (wrapped(device, RankBased()), steps):
        twin = COPIES[way](buffer)
        known = ("device", "seed", "fields", "sampler", "capacity")
        assert [getattr(twin, name) for name in known] == [getattr(buffer, name) for name in known]
        before = next(buffer.batches(3))
        twin.clear()
        assert (type(twin), len(twin)) == (type(buffer), 0)
        same(next(buffer.batches(3)), before)


def test_without_a_device_the_buffer_is_on_the_gpu_where_there_is_one() -> None:
    assert make(4, device=None).device.type == ("cuda" if torch.cuda.is_available() else "cpu")


FORMS = {"numpy int64": np.array, "numpy int32": lambda keys: np.array(keys, np.int32), "list": list, "int": min}
FORMS["unsigned"] = lambda keys: torch.tensor(keys).to(torch.uint16)


@pytest.mark.parametrize("form", [*FORMS, "tensor", "device tensor"])
def test_stored_transitions_come_back_by_key(form: str, device: str) -> None:
    buffer, wanted = wrapped(device), [12] if form == "int" else [12, 5, 10, 10]
    tensor = torch.tensor(wanted, device=device if form == "device tensor" else "cpu")
    batch = buffer[FORMS[form](wanted) if form in FORMS else tensor]
    assert (batch.key.tolist(), batch.key.dtype) == (wanted, torch.int64)
    assert all(tensor.device.type == device for tensor in batch.values())
    check_rows(batch)


# what a buffer says of itself


def test_attributes_say_what_was_asked(device: str) -> None:
    rows = make(11, device=device)
    assert (rows.capacity, rows.device, dict(rows.fields)) == (11, torch.empty(0, device=device).device, STORED)
    assert (rows.added, len(rows)) == (0, 0)
    assert rows.nbytes >= 11 * sum(field.row_bytes for field in STORED.values())
    pair = Pair(31, 3, device=device, stack=4, n_step=3, seed=5)
    assert (pair.buffer.capacity, pair.buffer.num_envs, len(pair.buffer), pair.buffer.added) == (30, 3, 0, 0)
    assert {name: pair.buffer.fields[name] for name in FIELDS} == FIELDS
    live_through(pair, 12)
    assert (len(pair.buffer), pair.buffer.added) == (30, 36)
    said = "num_envs=3, stack=4, n_step=3, gamma=0.99, autoreset='next_step'"
    assert repr(pair.buffer).startswith("TrajectoryReplayBuffer(")
    assert said in repr(pair.buffer)


def test_stats_are_a_frozen_record_of_plain_numbers(device: str) -> None:
    buffer = make(5, EXACT, device=device)
    fill(buffer, 3)
    # looking at transitions is not sampling them
    buffer[[0, 1, 1]]
    stats = buffer.stats()
    assert isinstance(stats, Stats)
    assert all(isinstance(value, (int, float)) for value in dataclasses.astuple(stats))
    assert stats.max_times_sampled == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.size = 7


@pytest.mark.parametrize("sampler", [Uniform(), Latest(), Proportional(alpha=0.0), EXACT, RankBased(1.0)], ids=repr)
def test_stats_worked_out_by_hand(sampler: Any, device: str) -> None:
    buffer, known = make(9, sampler, device=device), sampler in (EXACT, RankBased(1.0))
    fill(buffer, 3, priority=[4, 4, 8] if sampler == EXACT else [3, 2, 1])
    stats = buffer.stats()
    entropy, effective, mean = math.log(3), 3.0, 2.0
    if sampler == EXACT:
        # shares of 1/4, 1/4 and 1/2
        entropy, effective, mean = 1.5 * math.log(2), 8 / 3, 16 / 3
    elif known:
        # of 6/11, 3/11 and 2/11
        entropy, effective = math.log(11) - (6 * math.log(6) + 3 * math.log(3) + 2 * math.log(2)) / 11, 121 / 49
    assert close([stats.entropy, stats.effective_sample_size], [entropy, effective], "statistic")
    assert close(stats.mean_priority, mean, "statistic") if known else math.isnan(stats.mean_priority)
    assert (stats.size, stats.mean_age, stats.max_age) == (3, 1.0, 2)


# a batch


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
