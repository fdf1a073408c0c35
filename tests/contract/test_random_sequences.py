"""Long random sequences of calls, played to the buffer and to the plain-Python oracle: everything integer is equal.

Whatever runs behind the buffer (host code, interpreted kernels, a GPU) is compared with the same oracle, so all of them
draw the same keys, bit for bit.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from oracle import UNIT, OracleBuffer, place, stratum
from tolerances import close
from transitions import FIELDS, NUMBER, check_rows, fill, make

from gpu_replay import LinearSchedule, Proportional, ReplayBuffer

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

pytestmark = pytest.mark.contract

SETTINGS = {
    "exact": Proportional(alpha=1.0, beta=0.5, eps=0.0),
    "independent": Proportional(alpha=1.0, beta=1.0, eps=0.0, stratified=False),
    "annealed": Proportional(alpha=1.0, beta=LinearSchedule(0.0, 1.0, 25), eps=0.25, clip=512.0, normalize="buffer"),
    "numbered": Proportional(alpha=1.0, beta=0.0, eps=0.0, initial=0.0078125),
}


class Pair:
    """The buffer and its oracle; every call goes to both and is compared at once."""

    oracle_class: Any = OracleBuffer

    def __init__(self, capacity: int, sampler: Any, seed: int, device: str) -> None:
        self.buffer = make(capacity, sampler, device=device, seed=seed, action=FIELDS["action"])
        self.oracle = self.oracle_class(capacity, sampler, seed)

    def add(self, count: int, priority: list[float] | None = None) -> None:
        assert fill(self.buffer, count, priority).tolist() == list(self.oracle.add(count, priority))

    def update(self, keys: list[int], priorities: list[float]) -> None:
        device = self.buffer.device
        self.buffer.update_priorities(
            torch.tensor(keys, dtype=torch.int64, device=device),
            torch.tensor(priorities, dtype=torch.float64, device=device),
        )
        self.oracle.update(keys, priorities)

    def sample(self, count: int, beta: float | None = None) -> list[int]:
        if not self.oracle.live_keys():
            with pytest.raises(RuntimeError, match="no transitions"):
                self.buffer.sample(count, beta=beta)
            return []
        batch, drawn = self.buffer.sample(count, beta=beta), self.oracle.sample(count, beta)
        assert batch.key.tolist() == drawn.keys
        assert close(batch.probability, drawn.probability, "probability")
        assert close(batch.weight, drawn.weight, "weight")
        check_rows(batch)
        return drawn.keys

    def clear(self) -> None:
        self.buffer.clear()
        self.oracle.clear()

    def check(self) -> None:
        assert (self.buffer.added, len(self.buffer)) == (self.oracle.added, len(self.oracle.live_keys()))
        assert self.buffer.masses().tolist() == self.oracle.masses
        assert self.buffer.total_mass() == sum(self.oracle.masses)

    def priorities(self, generator: random.Random, count: int) -> list[float]:
        """Priorities over ten orders of magnitude, each a whole number of mass units, some negative."""
        sizes = (round(10 ** generator.uniform(-5, 5) * UNIT) for _ in range(count))
        return [generator.choice((1, 1, -1)) * max(1, size) / UNIT for size in sizes]

    def finish(self) -> None:
        """What is too dear to compare after each call."""
        self.check()
        assert self.buffer.stats().stale_updates == self.oracle.stale
        if self.oracle.live_keys():
            check_rows(self.buffer[list(self.oracle.live_keys())])


def any_keys(generator: random.Random, pair: Pair, count: int) -> list[int]:
    """Live keys, some repeated, and a few that are gone, never were, or are not yet."""
    added, capacity = pair.oracle.added, pair.oracle.capacity
    keys = [generator.randrange(max(0, added - capacity), added) for _ in range(count)] if added else []
    strange = {generator.randrange(-3, added + 4) for _ in range(3)} | {added - capacity - 1, added, -1}
    keys += sorted(strange - set(pair.oracle.live_keys()))
    generator.shuffle(keys)
    return keys


def play(pair: Pair, generator: random.Random, steps: int, largest_batch: int) -> None:
    """So many random calls; the batch of a sample is what the next updates are about, as in training."""
    capacity = pair.oracle.capacity
    held: list[int] = []
    for _ in range(steps):
        call = generator.random()
        if call < 0.35:
            most = generator.choice((1, 3, capacity // 2 + 1, capacity, 2 * capacity + 3))
            count, given_too = generator.randint(1, most), generator.random() < 0.3
            pair.add(count, pair.priorities(generator, count) if given_too else None)
        elif call < 0.65:
            beta = generator.choice((None, None, 0.0, 1.0, 0.3))
            held = pair.sample(generator.randint(1, largest_batch), beta)
        elif call < 0.8 and held:
            pair.update(held, pair.priorities(generator, len(held)))
        elif call < 0.98:
            keys = any_keys(generator, pair, generator.randint(0, largest_batch))
            pair.update(keys, pair.priorities(generator, len(keys)))
        else:
            pair.clear()
        pair.check()
    pair.finish()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("capacity", [1, 2, 7, 97, 1000])
def test_long_random_sequences_agree_with_the_oracle(capacity: int, name: str, device: str) -> None:
    pair = Pair(capacity, SETTINGS[name], seed=capacity, device=device)
    play(pair, random.Random(f"{capacity} {name}"), scale(250, 35), largest_batch=33)


@pytest.mark.parametrize("seed", [0, 1, -7, 2**64 - 1])
def test_sequences_with_large_batches_agree_with_the_oracle(seed: int, device: str) -> None:
    pair = Pair(129, SETTINGS["exact"], seed=seed, device=device)
    play(pair, random.Random(seed), scale(40, 10), largest_batch=700)


@pytest.mark.parametrize("capacity", [4099, 20_011])
def test_sequences_in_large_buffers_agree_with_the_oracle(capacity: int, device: str) -> None:
    pair = Pair(capacity, SETTINGS["exact"], seed=capacity, device=device)
    play(pair, random.Random(capacity), scale(40, 8), largest_batch=20)


def test_capacity_of_3_000_001(device: str) -> None:
    capacity, sampler = 3_000_001, SETTINGS["exact"]
    buffer = ReplayBuffer(capacity, NUMBER, sampler=sampler, device=device, seed=3)
    generator = np.random.default_rng(3)
    given_masses = (10 ** generator.uniform(-5, 5, capacity) * UNIT).round().clip(1)
    buffer.add(number=torch.arange(capacity, device=device), priority=torch.from_numpy(given_masses / UNIT).to(device))
    masses, words = given_masses.astype(np.int64), np.random.Philox(key=[3, 0])

    def check(count: int) -> None:
        assert np.array_equal(buffer.masses().cpu().numpy(), masses)
        prefix = masses.cumsum()
        total = int(prefix[-1])
        assert buffer.total_mass() == total
        parts = [stratum(part, count, total) for part in range(count)]
        raw = words.random_raw(-(-count // 4) * 4)[:count].tolist()
        targets = [low + place(word, high - low) for (low, high), word in zip(parts, raw, strict=True)]
        slots, batch = prefix.searchsorted(targets, side="right"), buffer.sample(count)
        assert batch.key.tolist() == np.where(slots < buffer.added % capacity, slots + capacity, slots).tolist()
        assert torch.equal(batch.number, batch.key)

    check(scale(1000, 100))
    # the last slot, the first one and their neighbours, by far the heaviest
    ends = [0, 1, capacity - 2, capacity - 1]
    buffer.update_priorities(torch.tensor(ends), torch.full((4,), 2.0**18, dtype=torch.float64))
    masses[ends] = 2**38
    check(scale(4097, 300))
    # the ring wraps by two: two heavy slots are overwritten with the running maximum
    buffer.add(number=torch.tensor([capacity, capacity + 1], device=device))
    check(scale(1000, 100))
    buffer.update_priorities(torch.tensor([0, 1, capacity]), torch.tensor([5.0, 5.0, 0.5]))
    masses[0] = UNIT // 2
    check(5)
    assert buffer.stats().stale_updates == 2


PRIORITY = st.integers(1, 2**36).map(lambda mass: mass / UNIT)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20)),
        st.tuples(st.just("give"), st.lists(PRIORITY, min_size=1, max_size=12)),
        st.tuples(st.just("sample"), st.integers(1, 40)),
        st.tuples(st.just("update"), st.dictionaries(st.integers(-2, 80), PRIORITY, min_size=1, max_size=12)),
        st.tuples(st.just("repeat"), st.lists(PRIORITY, min_size=2, max_size=6)),
        st.tuples(st.just("clear"), st.none()),
    ),
    max_size=30,
)


@hypothesis.settings(
    max_examples=scale(30, 6),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(capacity=st.integers(1, 40), calls=CALLS)
def test_any_sequence_of_calls_agrees_with_the_oracle(device: str, capacity: int, calls: list[tuple[str, Any]]) -> None:
    pair = Pair(capacity, SETTINGS["annealed"], seed=capacity, device=device)
    for call, argument in calls:
        if call == "add":
            pair.add(argument)
        elif call == "give":
            pair.add(len(argument), argument)
        elif call == "sample":
            pair.sample(argument)
        elif call == "update":
            pair.update(list(argument), list(argument.values()))
        elif call == "repeat" and pair.oracle.live_keys():
            pair.update([pair.oracle.live_keys()[-1]] * len(argument), argument)
        elif call == "clear":
            pair.clear()
        pair.check()
    pair.finish()
