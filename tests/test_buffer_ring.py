"""The ring: keys go on for ever, slots come round, and what is overwritten or was never written does not come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from transitions import EXACT, NUMBER, SAMPLERS, STORED, check_rows, fill, make

from gpu_replay import Field, Proportional, ReplayBuffer, Uniform

pytestmark = pytest.mark.contract

AWKWARD = [1, 2, 7, 97, 128, 1000]


def check_live(buffer: ReplayBuffer) -> None:
    """Fail unless every live key gives its own transition, and its neighbours are gone."""
    live = list(range(buffer.added - len(buffer), buffer.added))
    batch = buffer[live]
    assert batch.key.tolist() == live
    check_rows(batch)
    for dead in (live[0] - 1, buffer.added):
        with pytest.raises(KeyError, match=rf"(?<!\d){dead}(?!\d)"):
            buffer[dead]


def test_keys_count_transitions_from_zero(device: str) -> None:
    buffer = make(7, device=device)
    found = [fill(buffer, count) for count in (1, 3, 2, 5, 1)]
    assert [keys.tolist() for keys in found] == [[0], [1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
    assert all(keys.dtype == torch.int64 and keys.device.type == device for keys in found)
    assert buffer.added == 12
    assert len(buffer) == 7


@pytest.mark.parametrize("capacity", AWKWARD)
def test_live_keys_hold_their_transition_through_many_wraps(capacity: int, device: str) -> None:
    buffer = make(capacity, device=device)
    for count in (1, 2, capacity - 1, capacity, 1, capacity + 1, 3):
        if count:
            fill(buffer, count)
            assert len(buffer) == min(buffer.added, capacity)
            check_live(buffer)


@pytest.mark.parametrize("start", range(7))
def test_every_length_of_add_at_every_place_of_the_ring(start: int, device: str) -> None:
    for count in range(1, scale(23, 10)):
        buffer = make(7, device=device)
        if start:
            fill(buffer, start)
        keys = fill(buffer, count)
        assert keys.tolist() == list(range(start, start + count))
        assert (buffer.added, len(buffer)) == (start + count, min(start + count, 7))
        check_live(buffer)


@pytest.mark.parametrize("count", [6, 7, 8, 14, 15, 70, 701])
def test_add_longer_than_the_capacity_keeps_the_last(count: int, device: str) -> None:
    buffer = make(7, device=device)
    keys = fill(buffer, count)
    assert keys.tolist() == list(range(count))
    check_live(buffer)
    assert set(buffer.sample(min(7, count)).key.tolist()) == set(range(max(0, count - 7), count))


def test_key_lives_in_the_slot_of_its_remainder(device: str) -> None:
    buffer = make(5, EXACT, device=device)
    fill(buffer, 3, priority=[1, 2, 3])
    assert buffer.masses().tolist() == [1 << 20, 2 << 20, 3 << 20, 0, 0]
    fill(buffer, 4, priority=[4, 5, 6, 7])
    assert buffer.masses().tolist() == [6 << 20, 7 << 20, 3 << 20, 4 << 20, 5 << 20]
    fill(buffer, 12, priority=range(8, 20))
    # keys 14 to 18 are left, with priorities 15 to 19
    assert buffer.masses().tolist() == [16 << 20, 17 << 20, 18 << 20, 19 << 20, 15 << 20]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("stored", [1, 2, 5, 64])
def test_unwritten_slots_are_never_drawn(name: str, stored: int, device: str) -> None:
    buffer = make(1000, SAMPLERS[name], device=device)
    fill(buffer, stored)
    for count in sorted({1, stored} - ({1} if name == "combined-proportional" else set())):
        if name == "combined-proportional" and count < 2:
            continue
        for _ in range(scale(20, 1)):
            batch = buffer.sample(count)
            assert all(0 <= key < stored for key in batch.key.tolist())
            check_rows(batch)


@pytest.mark.parametrize("name", SAMPLERS)
def test_overwritten_transitions_are_never_drawn(name: str, device: str) -> None:
    buffer = make(67, SAMPLERS[name], device=device)
    for count in scale((67, 1, 5, 66, 67, 68, 2), (67, 5, 68)):
        fill(buffer, count)
        for size in (2, 67):
            batch = buffer.sample(size)
            assert all(buffer.added - 67 <= key < buffer.added for key in batch.key.tolist())
            check_rows(batch)


@pytest.mark.parametrize("kind", ["tensor", "numpy int64", "numpy int32", "list", "int", "device tensor"])
def test_stored_transitions_come_back_by_key(kind: str, device: str) -> None:
    buffer = make(10, device=device)
    fill(buffer, 25)
    wanted = [24, 15, 20, 20]
    forms: dict[str, Any] = {
        "tensor": torch.tensor(wanted),
        "numpy int64": np.array(wanted),
        "numpy int32": np.array(wanted, dtype=np.int32),
        "list": wanted,
        "int": 24,
        "device tensor": torch.tensor(wanted, device=device),
    }
    batch = buffer[forms[kind]]
    assert batch.key.tolist() == ([24] if kind == "int" else wanted)
    assert batch.key.dtype == torch.int64
    assert all(tensor.device.type == device for tensor in batch.values())
    check_rows(batch)


@pytest.mark.parametrize("keys, named", [([20, 14, 9], 14), ([25], 25), ([-1, 20], -1), ([24, 2**62, 3], 2**62)])
def test_key_error_names_the_first_key_that_is_not_live(keys: list[int], named: int, device: str) -> None:
    buffer = make(10, device=device)
    fill(buffer, 25)
    with pytest.raises(KeyError, match=rf"(?<![\d-]){named}(?!\d)"):
        buffer[torch.tensor(keys)]


def test_clear_forgets_transitions_and_keys_go_on(device: str) -> None:
    buffer = make(5, EXACT, device=device)
    fill(buffer, 8, priority=range(1, 9))
    buffer.clear()
    assert (len(buffer), buffer.added, buffer.total_mass()) == (0, 8, 0)
    with pytest.raises(RuntimeError, match=r"(?i)empty|no transitions|holds nothing|add"):
        buffer.sample(1)
    with pytest.raises(KeyError, match="7"):
        buffer[7]
    assert fill(buffer, 2, priority=[1, 2]).tolist() == [8, 9]
    assert (len(buffer), buffer.added) == (2, 10)
    assert buffer.masses().tolist() == [0, 0, 0, 1 << 20, 2 << 20]
    check_live(buffer)
    for _ in range(scale(20, 4)):
        assert set(buffer.sample(4).key.tolist()) <= {8, 9}


@pytest.mark.parametrize("name", SAMPLERS)
def test_nothing_from_before_a_clear_is_drawn(name: str, device: str) -> None:
    buffer = make(9, SAMPLERS[name], device=device)
    fill(buffer, 13)
    buffer.clear()
    fill(buffer, 3)
    for _ in range(scale(20, 1)):
        batch = buffer.sample(3)
        assert set(batch.key.tolist()) <= {13, 14, 15}
        check_rows(batch)
    fill(buffer, 20)
    assert len(buffer) == 9
    check_live(buffer)


def test_clear_of_an_empty_buffer_changes_nothing(device: str) -> None:
    buffer = make(4, device=device)
    buffer.clear()
    buffer.clear()
    assert fill(buffer, 1).tolist() == [0]
    assert buffer.sample(1).key.tolist() == [0]


def test_late_update_after_clear_is_ignored(device: str) -> None:
    buffer = make(4, EXACT, device=device)
    fill(buffer, 4)
    buffer.clear()
    buffer.update_priorities(torch.tensor([0, 3]), torch.tensor([5.0, 5.0]))
    assert buffer.total_mass() == 0
    assert buffer.stats().stale_updates == 2


def test_batch_is_a_snapshot(device: str) -> None:
    buffer = make(6, Proportional(), device=device)
    fill(buffer, 6)
    batch, stored = buffer.sample(4), buffer[[0, 1, 2]]
    weight = batch.weight.tolist()
    fill(buffer, 6)
    buffer.update_priorities(torch.arange(6, 12, device=device), torch.full((6,), 9.0, device=device))
    buffer.sample(4)
    check_rows(batch)
    check_rows(stored)
    assert batch.weight.tolist() == weight
    assert stored.key.tolist() == [0, 1, 2]


def test_buffer_keeps_a_copy_of_what_is_added(device: str) -> None:
    buffer = make(4, device=device, number=NUMBER["number"])
    given = torch.tensor([1, 2], device=device)
    buffer.add(number=given)
    given.fill_(99)
    assert buffer[[0, 1]].number.tolist() == [1, 2]


def test_sampled_batch_is_the_callers_to_change(device: str) -> None:
    buffer = make(4, Uniform(), device=device)
    fill(buffer, 4)
    batch = buffer.sample(4)
    batch.obs.fill_(-1)
    buffer[[0, 1, 2, 3]].obs.fill_(-1)
    check_live(buffer)


def test_attributes_say_what_was_asked(device: str) -> None:
    buffer = make(11, device=device)
    assert buffer.capacity == 11
    assert buffer.device == torch.empty(0, device=device).device
    assert dict(buffer.fields) == STORED
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


@pytest.mark.parametrize("name", SAMPLERS)
def test_batch_has_the_promised_shapes_and_dtypes(name: str, device: str) -> None:
    buffer = make(9, SAMPLERS[name], device=device)
    fill(buffer, 9)
    batch = buffer.sample(5)
    for field, setting in STORED.items():
        assert (batch[field].shape, batch[field].dtype) == ((5, *setting.shape), setting.dtype)
    for extra, dtype in (("key", torch.int64), ("probability", torch.float32), ("weight", torch.float32)):
        assert (batch[extra].shape, batch[extra].dtype) == ((5,), dtype)
    assert all(tensor.device.type == device for tensor in batch.values())
    assert batch.weight.max().item() == 1.0
    check_rows(batch)


def test_dotted_fields_are_reached_as_a_group(device: str) -> None:
    fields = {"obs.camera": Field((2,), torch.uint8), "obs.speed": Field((), torch.float32)}
    buffer = ReplayBuffer(3, fields, device=device)
    buffer.add(**{"obs.camera": torch.tensor([[1, 2], [3, 4]]), "obs.speed": torch.tensor([0.5, 1.5])})
    batch = buffer[[1, 0]]
    assert batch["obs.camera"].tolist() == [[3, 4], [1, 2]]
    assert batch.obs.speed.tolist() == [1.5, 0.5]
    assert batch["obs"]["camera"].tolist() == [[3, 4], [1, 2]]


@pytest.mark.parametrize("name", SAMPLERS)
def test_capacity_of_one(name: str, device: str) -> None:
    if name == "combined-proportional":
        pytest.skip("it wants the two newest, and there is only one")
    buffer = make(1, SAMPLERS[name], device=device)
    for key in range(4):
        fill(buffer, 1)
        batch = buffer.sample(1)
        assert batch.key.tolist() == [key]
        assert (batch.probability.tolist(), batch.weight.tolist()) == ([1.0], [1.0])
        check_rows(batch)
