"""What is stored, read by key and in order (`keys`, `in`, `batches`), and the `Batch` that it comes in."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tolerances import close
from torch import Tensor
from torch.utils import _pytree
from transitions import EXACT, check_rows, fill, make, same

from gpu_replay import Batch, Field, Proportional, ReplayBuffer, Stats, TrajectoryReplayBuffer

pytestmark = pytest.mark.contract


def made(rows: int = 6, first: int = 0) -> Batch:
    key = torch.arange(first, first + rows)
    return Batch({"obs.image": torch.stack((key, -key), 1), "obs.state": key * 0.5, "key": key})


@pytest.mark.parametrize(
    "index, expected",
    [
        (slice(2, 5), [2, 3, 4]),
        (slice(-2, None), [4, 5]),
        (torch.tensor([True, False] * 3), [0, 2, 4]),
        (torch.tensor([-1, 2, 2], dtype=torch.int32), [5, 2, 2]),
        (np.array([4, 1]), [4, 1]),
        ([], []),
    ],
    ids=str,
)
def test_rows_are_a_batch(index: Any, expected: list[int]) -> None:
    batch = made()
    rows = batch[index]
    assert isinstance(rows, Batch)
    assert rows.key.tolist() == expected
    assert rows.obs.image.tolist() == [[key, -key] for key in expected]
    assert list(rows) == list(batch)
    assert len(rows) == len(expected)
    if isinstance(index, slice) and expected:
        assert rows.key.data_ptr() == batch.key[index].data_ptr()


@pytest.mark.parametrize("count", [1, 2, np.int64(3), 6])
def test_minibatches_take_every_kth_row(count: int) -> None:
    batch = made()
    parts = batch.minibatches(count)
    assert [part.key.tolist() for part in parts] == [list(range(first, 6, count)) for first in range(count)]
    assert all(list(part) == list(batch) for part in parts)
    parts[-1].obs.state[-1] = 7.0
    assert batch.obs.state[-1] == 7.0


def test_minibatches_of_a_sorted_batch_hold_all_of_it(device: str) -> None:
    """A stratified batch is sorted by age: each part has a row of each part of the buffer."""
    buffer = ReplayBuffer(256, {"x": Field((), torch.int64)}, sampler=Proportional(), device=device)
    buffer.add(x=torch.arange(256))
    for part in buffer.sample(64).minibatches(4):
        assert (part.x // 16).tolist() == list(range(16))
        buffer.update_priorities(part.key, part.weight)


@pytest.mark.parametrize(
    "count, error", [(0, ValueError), (4, ValueError), (12, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_minibatches_that_would_differ_in_size_are_refused(count: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"minibatches.*(divides|an int)"):
        made().minibatches(count)


@pytest.mark.parametrize("index", [3, (1, 2), torch.tensor([0.0])], ids=str)
def test_what_names_no_rows_is_refused(index: Any) -> None:
    with pytest.raises(TypeError):
        made()[index]
    with pytest.raises(ValueError):
        made()[torch.zeros(2, 2, dtype=torch.int64)]
    for other in (torch.tensor([True]), torch.tensor([6])):
        with pytest.raises(IndexError):
            made()[other]


def test_what_has_no_such_name_says_so() -> None:
    batch = made()
    assert batch.key is batch["key"]
    with pytest.raises(KeyError, match=r"nothing.*obs"):
        batch["nothing"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = batch.nothing


def test_cat_puts_rows_after_rows() -> None:
    parts = [made(2), made(0), made(3, first=2)]
    same(Batch.cat(parts), made(5))
    same(Batch.cat(iter(parts[:1])), made(2))
    with pytest.raises(ValueError, match="at least one"):
        Batch.cat([])
    with pytest.raises(KeyError, match="number 1 differs in obs.state"):
        Batch.cat([made(), Batch({name: value for name, value in made().items() if name != "obs.state"})])


def test_a_dictionary_is_a_copy_with_dotted_names() -> None:
    batch = made()
    found = batch.to_dict()
    assert type(found) is dict
    assert list(found) == ["obs.image", "obs.state", "key"]
    assert found["key"] is batch.key
    del found["key"]
    assert "key" in batch


@pytest.mark.parametrize("wrong", [torch.float32, None, True], ids=str)
def test_a_batch_moves_to_devices_only(wrong: Any) -> None:
    assert made().to("meta").key.device.type == made().to(torch.device("meta")).obs.state.device.type == "meta"
    with pytest.raises(TypeError, match="device"):
        made().to(wrong)


def test_torch_maps_over_a_batch() -> None:
    batch = made()
    doubled = _pytree.tree_map(lambda tensor: tensor * 2, {"batch": batch, "other": [torch.ones(1)]})["batch"]
    assert isinstance(doubled, Batch)
    assert doubled.obs.state.tolist() == batch.key.tolist()
    # as `vmap` sees it
    assert torch.vmap(lambda rows: rows.key + rows.obs.state)(batch).tolist() == [key * 1.5 for key in range(6)]


def test_copies_are_independent_pinned_by_torch_and_names_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made()
    deep, shallow = copy.deepcopy(batch), copy.copy(batch)
    same(deep, batch)
    assert shallow.key is batch.key
    deep.key.zero_()
    assert batch.key[5] == 5
    # pinned memory exists beside a GPU only
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self + 1)
    assert batch.pin_memory().key.tolist() == [1, 2, 3, 4, 5, 6]
    assert {"obs", "key", "to_dict"} <= set(dir(batch))
    assert ({"image", "state"} <= set(dir(batch.obs)), "obs.image" in dir(batch)) == (True, False)


def test_a_tensordict_nests_dotted_names_and_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    tensordict, batch = pytest.importorskip("tensordict"), made()
    found = batch.to_tensordict()
    assert isinstance(found, tensordict.TensorDict)
    assert found.batch_size == torch.Size([6])
    assert found["obs", "image"] is batch["obs.image"]
    assert set(found.keys(True, True)) == {("obs", "image"), ("obs", "state"), "key"}
    with pytest.raises(ValueError, match="'obs.image' beside 'obs'"):
        Batch({"obs.image": torch.ones(1), "obs": torch.ones(1)}).to_tensordict()
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ImportError, match="pip install tensordict"):
        batch.to_tensordict()


# what a buffer gives, and says of itself


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
    assert list(buffer.batches(1)) == []
    for keys in (buffer.keys(), []):
        found = buffer[keys]
        assert (len(found), found.obs.shape, found.action.dtype) == (0, (0, 2, 3), torch.int64)
    fields = {"obs": Field((3,), torch.uint8, scale=0.5), "action": Field((), torch.int64)}
    stacks = TrajectoryReplayBuffer(4, 1, fields, stack=2, autoreset="next_step", device=device)
    assert stacks[[]].next_obs.shape == (0, 2, 3)


def test_without_a_device_the_buffer_is_on_the_gpu_where_there_is_one(tmp_path: Path) -> None:
    buffer = make(4, device=None)
    buffer.save(tmp_path / "saved")
    for each in (buffer, ReplayBuffer.load(tmp_path / "saved")):
        assert each.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


FORMS = {"array": lambda keys: np.array(keys, np.int32), "list": list, "int": min}
FORMS["unsigned"] = lambda keys: torch.tensor(keys).to(torch.uint16)


@pytest.mark.parametrize("form", [*FORMS, "device tensor"])
def test_keys_come_in_every_form(form: str, device: str) -> None:
    buffer, wanted = wrapped(device), [12] if form == "int" else [12, 5, 10, 10]
    keys = FORMS[form](wanted) if form in FORMS else torch.tensor(wanted, device=device)
    batch = buffer[keys]
    assert (batch.key.tolist(), batch.key.dtype) == (wanted, torch.int64)
    assert all(tensor.device.type == device for tensor in batch.values())
    check_rows(batch)
    buffer.update_priorities(keys, [2.0] * len(wanted))
    found = buffer.priorities(keys)
    assert (found.tolist(), found.dtype, found.device.type) == ([2.0] * len(wanted), torch.float64, device)
    assert buffer.total_mass() == (8 + len(set(wanted))) * 2**20
    buffer.exclude(keys)
    assert set(buffer.keys(eligible=True).tolist()) == {*range(5, 13)} - {*wanted}


def test_stats_are_plain_numbers(device: str) -> None:
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
