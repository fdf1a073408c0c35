"""`Latest` and `Combined`: the newest transitions, newest last, always in the batch."""

from __future__ import annotations

from collections import Counter

import pytest
from devices import device_fixture as device_fixture
from devices import statistical
from distribution import check_counts
from tolerances import close
from transitions import check_rows, fill, make

from gpu_replay import Combined, Latest, LinearSchedule, Proportional, Uniform

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("capacity", [1, 2, 7, 97])
def test_latest_is_the_newest_in_order_at_every_place_of_the_ring(capacity: int, device: str) -> None:
    buffer = make(capacity, Latest(), device=device)
    for add in (1, 1, 2, capacity, capacity + 3):
        fill(buffer, add)
        # the same batch until something is added
        for count in [1, (len(buffer) + 1) // 2, len(buffer)] * 2:
            batch = buffer.sample(count)
            assert batch.key.tolist() == list(range(buffer.added - count, buffer.added))
            assert batch.weight.tolist() == batch.probability.tolist() == [1.0] * count
            check_rows(batch)


@pytest.mark.parametrize("newest", [1, 2, 5, 8])
@pytest.mark.parametrize("base", [Uniform(), Uniform(replacement=True), Proportional()], ids=repr)
def test_combined_ends_with_the_newest(base: Uniform | Proportional, newest: int, device: str) -> None:
    buffer = make(71, Combined(base, newest=newest), device=device)
    for add in (66, 1, 5, 71, 190):
        fill(buffer, add)
        batch = buffer.sample(8)
        assert batch.key.tolist()[8 - newest :] == list(range(buffer.added - newest, buffer.added))
        assert batch.weight.tolist()[8 - newest :] == [1.0] * newest
        assert batch.probability.tolist()[8 - newest :] == [1.0] * newest
        assert set(batch.key.tolist()) <= set(range(buffer.added - len(buffer), buffer.added))
        check_rows(batch)


@statistical
def test_combined_rows_of_a_uniform_base_are_distinct_and_uniform(device: str) -> None:
    buffer = make(7, Combined(Uniform(), newest=1), device=device, seed=2)
    fill(buffer, 9)
    rows = [buffer.sample(4).key.tolist() for _ in range(2000)]
    assert all(len(set(keys[:3])) == 3 for keys in rows)
    # the newest is in the base as likely as any other
    check_counts(Counter(keys[0] for keys in rows), dict.fromkeys(range(2, 9), 1.0))


# what is stored, a batch that cannot be drawn of it, and one that can
@pytest.mark.parametrize("first", [1, 9], ids=["newest alone", "with its base"])
def test_combined_advances_the_schedule_of_its_base(first: int, device: str) -> None:
    base = Proportional(alpha=1.0, eps=0.0, beta=LinearSchedule(0.0, 1.0, steps=2))
    buffer = make(2, Combined(base, newest=1), device=device)
    fill(buffer, 2, priority=[1, 3])
    assert buffer.sample(first).weight.min().item() == 1.0
    assert close(buffer.sample(9).weight.min(), (1 / 3) ** 0.5, "weight")
    assert close(buffer.sample(9).weight.min(), 1 / 3, "weight")
