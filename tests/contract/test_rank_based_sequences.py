"""Random sequences of calls to buffers that draw by rank, against lists that sort everything anew: the same keys."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from rank_oracle import RankOracle, by_rank, drawn_ranks, rank_masses
from test_random_sequences import Pair, play
from tolerances import close
from trajectory_pair import Pair as StreamPair
from trajectory_pair import final_of, numbered, taken_by

from gpu_replay import Batch, Combined, Field, LinearSchedule, Proportional, RankBased, TrajectoryReplayBuffer
from gpu_replay.ops import ranks

SETTINGS = {
    "exact": RankBased(),
    "independent": RankBased(alpha=1.0, beta=1.0, stratified=False),
    "annealed": RankBased(alpha=2.0, beta=LinearSchedule(0.0, 1.0, 25), normalize="buffer", initial="stored"),
    "numbered": RankBased(alpha=0.0, initial=0.5),
    "stored": RankBased(stratified=False, normalize="buffer", initial="stored"),
}
FEW = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
# whole numbers of mass units, so that a buffer that draws by mass holds them exactly; many are equal
PRIORITIES = (0.0, 0.25, 0.5, 0.5, 1.0, 1.0, 1.0, -2.0, 7.25, 300.0)


@pytest.fixture(autouse=True)
def _few_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    # the host sorts anew only when nearly everything has changed
    monkeypatch.setattr(ranks, "_CHANGED", 1)


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


@pytest.mark.parametrize("name", ["exact", "annealed", "stored"])
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
        self.samples = 0
        self.random = np.random.Philox(key=np.array([3, 0], dtype=np.uint64))

    def add(self, steps: list[Any]) -> None:
        """One step of all environments."""
        self.buffer.add(**taken_by(self.buffer, steps, FEW))
        self.pair.add(steps)

    @property
    def history(self) -> Any:
        return self.pair.history

    def clear(self) -> None:
        self.pair.clear()
        self.buffer.clear()

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

        order = by_rank(held.items())
        drawn = [order[rank] for rank in self._check(batch, len(order), count, beta)] if count else []
        self.samples += 1
        newest = list(held)[len(held) - self.newest :]
        assert batch.key.tolist() == drawn + newest
        self.pair.check_rows(batch, self.history.view())
        return drawn

    def sample_sequences(self, count: int, length: int) -> None:
        """Ranks among the starts within reach."""
        starts = set(self.history.view().sequence_starts(length))
        held = {key: mass for key, mass in self.priorities().items() if key in starts}
        if self.newest or not held:
            return
        batch, order = self.buffer.sample_sequences(count, length), by_rank(held.items())
        assert batch.key.tolist() == [order[rank] for rank in self._check(batch, len(order), count, None)]
        self.samples += 1

    def _check(self, batch: Batch, ranked: int, count: int, beta: float | None) -> list[int]:
        """The ranks of so many on which the next `count` draws fall, having compared probabilities and weights."""
        words = [int(word) for word in self.random.random_raw(-(-count // 4) * 4)[:count]]
        ranks, drawn = drawn_ranks(self.settings, self.masses[:ranked], words, count, self.samples, beta)
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


STREAMS = SETTINGS | {"combined": Combined(RankBased(normalize="buffer"), newest=2)}


@pytest.mark.parametrize("autoreset", scale(["next_step", "same_step"], ["same_step"]))
@pytest.mark.parametrize("name", STREAMS)
def test_streams(name: str, autoreset: Any, device: str) -> None:
    for turn, (capacity, num_envs) in enumerate(scale([(1, 1), (9, 1), (20, 2), (64, 8)], [(20, 2)])):
        more = [{"stack": 1}, {"n_step": 3}, {"stack": 3, "n_step": 2}][turn % 3]
        streams = Streams(capacity, num_envs, STREAMS[name], device, autoreset=autoreset, **more)
        live(streams, random.Random(f"{name} {turn}"), scale(100, 30))
