"""Random sequences of calls to buffers that draw by rank, against lists that sort everything anew: the same keys.

The host code keeps its order in small blocks here, so that all of it runs: blocks that overflow, that are put together,
and that are made anew.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from rank_oracle import RankLists, RankOracle, by_rank, drawn_ranks, passed_on, rank_masses
from test_random_sequences import Pair, play
from tolerances import close
from trajectory_pair import Pair as StreamPair
from trajectory_pair import columns, final_of, numbered

from gpu_replay import Batch, Combined, Field, LinearSchedule, Proportional, RankBased, TrajectoryReplayBuffer
from gpu_replay.ops import _backend, numpy_loops, rank_order

SETTINGS = {
    "exact": RankBased(),
    "independent": RankBased(alpha=1.0, beta=1.0, stratified=False),
    "annealed": RankBased(alpha=2.0, beta=LinearSchedule(0.0, 1.0, 25), normalize="buffer", initial="stored"),
    "numbered": RankBased(alpha=0.0, initial=0.5),
    "outdated": RankBased(resort_every=3),
    "outdated for long": RankBased(resort_every=40, stratified=False, normalize="buffer", initial="stored"),
}
FEW = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
# whole numbers of mass units, so that a buffer that draws by mass holds them exactly; many are equal
PRIORITIES = (0.0, 0.25, 0.5, 0.5, 1.0, 1.0, 1.0, -2.0, 7.25, 300.0)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_order, "width_for", lambda slots: (2, 4, 8)[slots % 3])
    # sorted anew only when nearly everything has changed
    monkeypatch.setattr(rank_order, "_CHANGED", 1)
    if _backend.inner_loops() is not numpy_loops:
        from gpu_replay.ops import numba_rank_order

        monkeypatch.setattr(numba_rank_order, "fan_for", lambda slots: (2, 4, 8)[slots % 3])


class PairByRank(Pair):
    """The buffer and its oracle; of masses there are none."""

    oracle_class = RankOracle

    def check(self) -> None:
        live = [self.oracle.priorities[key % self.oracle.capacity] for key in self.oracle.live_keys()]
        stats = self.buffer.stats()
        assert (self.buffer.added, stats.size, stats.eligible) == (self.oracle.added, len(live), len(live))
        if live:
            assert (stats.min_priority, stats.max_priority) == (min(live), max(live))
            assert close(stats.mean_priority, sum(live) / len(live), "statistic")

    def priorities(self, generator: random.Random, count: int) -> list[float]:
        return generator.choices(PRIORITIES, k=count)


@pytest.mark.parametrize("name", SETTINGS)
def test_transitions_at_every_small_capacity(name: str, device: str) -> None:
    # every size with one of the settings
    for capacity in range(1 + list(SETTINGS).index(name), 41, scale(len(SETTINGS), 13)):
        pair = PairByRank(capacity, SETTINGS[name], capacity, device)
        play(pair, random.Random(f"{name} {capacity}"), scale(60, 12), 2 * capacity)


@pytest.mark.parametrize("name", ["exact", "annealed", "outdated"])
def test_transitions_in_larger_buffers(name: str, device: str) -> None:
    play(PairByRank(1009, SETTINGS[name], 5, device), random.Random(name), scale(150, 10), 33)


class Streams:
    """A trajectory buffer that draws by rank, and one by mass beside it: what has mass there can be drawn, by its mass.

    capacity: slots. The draws are those of a plain model that sorts anew.
    """

    def __init__(self, capacity: int, num_envs: int, settings: Any, device: str, **more: Any) -> None:
        self.newest = settings.newest if isinstance(settings, Combined) else 0
        self.settings: RankBased = settings.base if isinstance(settings, Combined) else settings
        by_mass = Proportional(alpha=1.0, eps=0.0, initial=self.settings.initial)
        self.pair = StreamPair(capacity, num_envs, sampler=by_mass, fields=FEW, device=device, **more)
        self.capacity = self.pair.history.capacity
        self.buffer = TrajectoryReplayBuffer(capacity, num_envs, FEW, sampler=settings, device=device, seed=3, **more)
        self.masses = rank_masses(self.capacity, self.settings.alpha)
        self.lists = RankLists(self.settings)
        self.samples = 0
        self.random = np.random.Philox(key=np.array([3, 0], dtype=np.uint64))

    def add(self, steps: list[Any]) -> None:
        """One step of all environments."""
        self.buffer.add(**columns(steps, FEW))
        self.pair.add(steps)

    @property
    def history(self) -> Any:
        return self.pair.history

    def clear(self) -> None:
        self.pair.clear()
        self.buffer.clear()
        self.lists.forget()

    def update(self, keys: list[int], priorities: list[float]) -> None:
        self.pair.update(keys, priorities)
        self.buffer.update_priorities(torch.tensor(keys, dtype=torch.int64), torch.tensor(priorities))

    def priorities(self) -> dict[int, int]:
        """The eligible keys and their masses, smallest key first."""
        masses = self.pair.buffer.masses().tolist()
        return {key: masses[key % self.capacity] for key in sorted(self.history.view().eligible())}

    def sample(self, count: int, beta: float | None) -> list[int]:
        held = self.priorities()
        if len(held) < max(self.newest, 1):
            with pytest.raises((RuntimeError, ValueError), match="eligible"):
                self.buffer.sample(max(count, self.newest), beta=beta)
            return []
        batch = self.buffer.sample(count + self.newest, beta=beta)

        def order() -> list[int]:
            return [key % self.capacity for key in by_rank(held.items())]

        keys = {key % self.capacity: key for key in held}
        if count:
            listed = self.lists.current(order, self.samples)
            oldest = next(iter(held)) % self.capacity
            chosen = self._check(batch, listed, count, beta)
            drawn = [keys[passed_on(listed, rank, keys.__contains__, oldest)] for rank in chosen]
        else:
            drawn = []
        self.samples += 1
        newest = list(held)[len(held) - self.newest :]
        assert batch.key.tolist() == drawn + newest
        self.pair.check_rows(batch, self.history.view())
        return drawn

    def sample_sequences(self, count: int, length: int) -> None:
        """Ranks of this moment among the starts within reach, whatever the list says."""
        starts = set(self.history.view().sequence_starts(length))
        held = {key: mass for key, mass in self.priorities().items() if key in starts}
        if self.newest or not held:
            return
        batch, listed = self.buffer.sample_sequences(count, length), by_rank(held.items())
        assert batch.key.tolist() == [listed[rank] for rank in self._check(batch, listed, count, None)]
        self.samples += 1

    def _check(self, batch: Batch, listed: list[int], count: int, beta: float | None) -> list[int]:
        """The ranks that the next `count` draws fall on, having compared probabilities and weights."""
        words = [int(word) for word in self.random.random_raw(-(-count // 4) * 4)[:count]]
        ranks, drawn = drawn_ranks(self.settings, self.masses[: len(listed)], words, count, self.samples, beta)
        assert close(batch.probability, [*drawn.probability, *[1.0] * self.newest], "probability")
        assert close(batch.weight, [*drawn.weight, *[1.0] * self.newest], "weight")
        return ranks


def live(streams: Streams, generator: random.Random, calls: int) -> None:
    """So many random calls."""
    held: list[int] = []
    for _ in range(calls):
        call = generator.random()
        if call < 0.5:
            steps, own = [], generator.random() < 0.3
            for env in range(streams.history.num_envs):
                ended, truncated = generator.random() < 0.2, generator.random() < 0.5
                step = numbered(streams.history.count, env, FEW)
                step |= {"terminated": ended and not truncated, "truncated": ended and truncated}
                step["final"] = final_of(step, step["truncated"])
                steps.append(step | ({"priority": generator.choice(PRIORITIES)} if own else {}))
            streams.add(steps)
        elif call < 0.7:
            held = streams.sample(generator.randint(0 if streams.newest else 1, 9), generator.choice((None, 0.5)))
        elif call < 0.8:
            streams.sample_sequences(generator.randint(1, 5), generator.randint(1, 3))
        elif call < 0.98:
            keys = held or generator.choices(range(-2, streams.history.added + 2), k=generator.randint(1, 6))
            streams.update(keys, generator.choices(PRIORITIES, k=len(keys)))
            held = []
        else:
            streams.clear()


STREAMS = SETTINGS | {
    "combined": Combined(RankBased(normalize="buffer"), newest=2),
    "combined outdated": Combined(RankBased(resort_every=4)),
}


@pytest.mark.parametrize("autoreset", scale(["next_step", "same_step"], ["same_step"]))
@pytest.mark.parametrize("name", STREAMS)
def test_streams(name: str, autoreset: Any, device: str) -> None:
    for turn, (capacity, num_envs) in enumerate(scale([(1, 1), (9, 1), (20, 2), (64, 8)], [(20, 2)])):
        more = [{"stack": 1}, {"n_step": 3}, {"stack": 3, "n_step": 2}][turn % 3]
        streams = Streams(capacity, num_envs, STREAMS[name], device, autoreset=autoreset, **more)
        live(streams, random.Random(f"{name} {turn}"), scale(100, 30))


def test_a_list_of_which_nothing_can_be_drawn_any_more_leaves_the_oldest_start(device: str) -> None:
    streams = Streams(20, 1, RankBased(resort_every=1000), device)
    for number in range(21):
        streams.add([numbered(number, 0, FEW) | {"terminated": number == 19}])
        if number == 1:
            # only key 0 can be drawn, and only its slot is listed
            assert streams.sample(3, None) == [0, 0, 0]
    # the step after the ending took the slot, and is no start
    assert streams.sample(5, None) == [1] * 5
