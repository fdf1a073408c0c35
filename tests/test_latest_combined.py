"""`Latest` and `Combined`: the newest transitions, newest last, always in the batch."""

from __future__ import annotations

from collections import Counter

import pytest
from devices import device_fixture as device_fixture
from devices import statistical
from distribution import check_counts
from oracle import UNIT, OracleBuffer
from tolerances import close
from transitions import EXACT, check_rows, fill, make

from gpu_replay import Combined, Latest, LinearSchedule, Proportional, Uniform

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("capacity", [1, 2, 7, 97])
def test_latest_is_the_newest_in_order_at_every_place_of_the_ring(capacity: int, device: str) -> None:
    buffer = make(capacity, Latest(), device=device)
    for add in (1, 1, 2, capacity, capacity + 3):
        fill(buffer, add)
        for count in {1, (len(buffer) + 1) // 2, len(buffer)}:
            batch = buffer.sample(count)
            assert batch.key.tolist() == list(range(buffer.added - count, buffer.added))
            assert batch.weight.tolist() == [1.0] * count
            assert batch.probability.tolist() == [1.0] * count
            check_rows(batch)


def test_latest_gives_the_same_batch_until_something_is_added(device: str) -> None:
    buffer = make(9, Latest(), device=device)
    fill(buffer, 5)
    assert [buffer.sample(2).key.tolist() for _ in range(3)] == [[3, 4]] * 3
    fill(buffer, 1)
    assert buffer.sample(2).key.tolist() == [4, 5]


def test_latest_of_more_than_is_stored_is_refused(device: str) -> None:
    buffer = make(9, Latest(), device=device)
    fill(buffer, 4)
    with pytest.raises(ValueError, match=r"(?s)5.*4|4.*5"):
        buffer.sample(5)
    buffer.clear()
    fill(buffer, 2)
    with pytest.raises(ValueError, match=r"(?s)3.*2|2.*3"):
        buffer.sample(3)


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


def test_combined_rows_of_a_proportional_base_are_its_own_draws(device: str) -> None:
    buffer = make(31, Combined(EXACT, newest=3), device=device, seed=8)
    oracle = OracleBuffer(31, EXACT, seed=8)
    priorities = [float(1 + key % 5) for key in range(40)]
    fill(buffer, 40, priority=priorities)
    oracle.add(40, priorities)
    for count in (4, 7, 20, 3):
        batch = buffer.sample(count)
        base = oracle.sample(count - 3) if count > 3 else None
        assert batch.key.tolist() == (base.keys if base else []) + [37, 38, 39]
        assert close(batch.weight, (base.weight if base else []) + [1.0] * 3, "weight")
        assert close(batch.probability, (base.probability if base else []) + [1.0] * 3, "probability")


@statistical
def test_combined_rows_of_a_uniform_base_are_distinct_and_uniform(device: str) -> None:
    buffer = make(7, Combined(Uniform(), newest=1), device=device, seed=2)
    fill(buffer, 9)
    counts: Counter[int] = Counter()
    for _ in range(2000):
        keys = buffer.sample(4).key.tolist()
        assert len(set(keys[:3])) == 3
        counts.update(keys[:1])
    # the newest is in the base as likely as any other
    check_counts(counts, dict.fromkeys(range(2, 9), 1.0))


def test_more_newest_than_the_batch_is_refused(device: str) -> None:
    buffer = make(9, Combined(Uniform(), newest=3), device=device)
    fill(buffer, 9)
    with pytest.raises(ValueError, match=r"(?s)3.*2|2.*3"):
        buffer.sample(2)
    assert buffer.sample(3).key.tolist() == [6, 7, 8]


def test_more_newest_than_is_stored_is_refused(device: str) -> None:
    buffer = make(9, Combined(Proportional(), newest=3), device=device)
    fill(buffer, 2)
    with pytest.raises(ValueError, match=r"(?s)3.*2|2.*3"):
        buffer.sample(6)


def test_base_without_replacement_needs_as_many_as_it_draws(device: str) -> None:
    buffer = make(9, Combined(Uniform(), newest=2), device=device)
    fill(buffer, 4)
    assert sorted(buffer.sample(6).key.tolist()[:4]) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"(?s)5.*4|4.*5|7.*4|4.*7"):
        buffer.sample(7)


def test_combined_advances_the_schedule_of_its_base(device: str) -> None:
    base = Proportional(alpha=1.0, eps=0.0, beta=LinearSchedule(0.0, 1.0, steps=2))
    buffer = make(2, Combined(base, newest=1), device=device)
    fill(buffer, 2, priority=[1, 3])
    assert buffer.sample(9).weight.min().item() == 1.0
    assert close(buffer.sample(9).weight.min(), (1 / 3) ** 0.5, "weight")
    assert close(buffer.sample(9).weight.min(), 1 / 3, "weight")


def test_sample_of_the_newest_alone_advances_the_schedule_too(device: str) -> None:
    base = Proportional(alpha=1.0, eps=0.0, beta=LinearSchedule(0.0, 1.0, steps=2))
    buffer = make(2, Combined(base, newest=1), device=device)
    fill(buffer, 2, priority=[1, 3])
    assert buffer.sample(1).key.tolist() == [1]
    assert close(buffer.sample(9).weight.min(), (1 / 3) ** 0.5, "weight")
    assert buffer.total_mass() == 4 * UNIT
