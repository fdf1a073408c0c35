"""What is stored, read by key and in order (`keys`, `in`, `batches`), and what a buffer says of itself."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from tolerances import close
from transitions import EXACT, check_rows, fill, make

from gpu_replay import Proportional, ReplayBuffer, Stats

pytestmark = pytest.mark.contract


def wrapped(device: str) -> ReplayBuffer:
    """A ring of 8 that holds keys 5 to 12."""
    buffer = make(8, EXACT, device=device)
    fill(buffer, 13)
    return buffer


def test_in_says_whether_a_key_is_live(device: str) -> None:
    buffer = wrapped(device)
    assert [key for key in range(-3, 20) if key in buffer] == list(range(5, 13))
    assert all(key in buffer for key in (np.int64(5), torch.tensor(12), buffer.keys()[0]))
    assert 2**70 not in buffer
    assert (buffer.keys().dtype, buffer.keys().device.type) == (torch.int64, device)


def test_no_keys_give_a_batch_of_no_rows(device: str) -> None:
    buffer = make(4, Proportional(), device=device)
    assert list(buffer.batches(3)) == []
    for keys in (buffer.keys(), [], np.zeros(0, np.int64)):
        found = buffer[keys]
        assert (len(found), found.obs.shape, found.action.dtype) == (0, (0, 2, 3), torch.int64)
    fill(buffer, 3)
    assert len(buffer[[]]) == 0
    check_rows(buffer[[2]])


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


def test_without_a_device_the_buffer_is_on_the_gpu_where_there_is_one() -> None:
    assert make(4, device=None).device.type == ("cuda" if torch.cuda.is_available() else "cpu")


FORMS = {"numpy int64": np.array, "numpy int32": lambda keys: np.array(keys, np.int32), "list": list, "int": min}
FORMS["unsigned"] = lambda keys: torch.tensor(keys).to(torch.uint16)


@pytest.mark.parametrize("form", [*FORMS, "tensor", "device tensor"])
def test_keys_come_in_every_form(form: str, device: str) -> None:
    buffer, wanted = wrapped(device), [12] if form == "int" else [12, 5, 10, 10]
    tensor = torch.tensor(wanted, device=device if form == "device tensor" else "cpu")
    keys = FORMS[form](wanted) if form in FORMS else tensor
    batch = buffer[keys]
    assert (batch.key.tolist(), batch.key.dtype) == (wanted, torch.int64)
    assert all(tensor.device.type == device for tensor in batch.values())
    check_rows(batch)
    buffer.update_priorities(keys, [2.0] * len(wanted))
    found = buffer.priorities(keys)
    assert (found.tolist(), found.dtype, found.device.type) == ([2.0] * len(wanted), torch.float64, device)
    assert buffer.total_mass() == (8 + len(set(wanted))) * 2**20


# what a buffer says of itself


def test_stats_are_a_frozen_record_of_plain_numbers(device: str) -> None:
    buffer = make(5, EXACT, device=device)
    fill(buffer, 3, priority=[4, 4, 8])
    # looking at transitions is not sampling them
    buffer[[0, 1, 1]]
    stats = buffer.stats()
    assert isinstance(stats, Stats)
    assert all(isinstance(value, (int, float)) for value in dataclasses.astuple(stats))
    assert stats.max_times_sampled == 0
    # shares of 1/4, 1/4 and 1/2
    assert close([stats.entropy, stats.effective_sample_size], [1.5 * math.log(2), 8 / 3], "statistic")
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.size = 7
