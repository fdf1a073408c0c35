"""Draws by rank as plain Python: all priorities sorted anew for every sample, and one linear scan for every draw.

The integer masses of ranks are the package's own, held against their formula in test_rank_order.py; everything that
follows from them is compared with `==`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from oracle import Drawn, OracleBuffer, draw, place, stratum

from gpu_replay import LinearSchedule, RankBased
from gpu_replay.ops.ranks import cumulative_masses


def rank_masses(slots: int, alpha: float) -> list[int]:
    """The mass of each rank, the first rank first."""
    sums = [0, *cumulative_masses(slots, alpha).tolist()]
    return [after - before for before, after in pairwise(sums)]


def by_rank(priorities: Iterable[tuple[int, float]]) -> list[int]:
    """The keys of (key, priority) pairs: the largest priority first, the smaller key first among equal ones."""
    return [key for key, _ in sorted(priorities, key=lambda pair: (-pair[1], pair[0]))]


def drawn_ranks(
    settings: RankBased, masses: Sequence[int], words: Sequence[int], count: int, samples: int, beta: float | None
) -> tuple[list[int], Drawn]:
    """The 0-based ranks of `count` draws from ranks with these masses, and what `sample` returns without the keys."""
    total = sum(masses)
    if settings.stratified:
        parts = [stratum(row, count, total) for row in range(count)]
        targets = [low + place(word, high - low) for (low, high), word in zip(parts, words, strict=True)]
    else:
        targets = [place(word, total) for word in words]
    ranks = [draw(masses, target) for target in targets]
    mine = [masses[rank] for rank in ranks]
    lowest = min(mine) if settings.normalize == "batch" else masses[-1]
    if beta is None:
        beta = settings.beta(samples) if isinstance(settings.beta, LinearSchedule) else settings.beta
    weight = [(lowest / mass) ** beta for mass in mine]
    return ranks, Drawn([], [mass / total for mass in mine], weight)


class RankOracle(OracleBuffer):
    """`ReplayBuffer` with a `RankBased` sampler."""

    settings: RankBased  # type: ignore[assignment]

    def __init__(self, capacity: int, settings: RankBased, seed: int = 0) -> None:
        super().__init__(capacity, settings, seed)  # type: ignore[arg-type]
        self.rank_masses = rank_masses(capacity, settings.alpha)

    def order(self) -> list[int]:
        """Live keys by rank."""
        return by_rank((key, self.priorities[key % self.capacity]) for key in self.live_keys())

    def sample(self, count: int, beta: float | None = None) -> Drawn:
        words = [int(word) for word in self.random.random_raw(-(-count // 4) * 4)[:count]]
        order = self.order()
        ranks, drawn = drawn_ranks(self.settings, self.rank_masses[: len(order)], words, count, self.samples, beta)
        self.samples += 1
        drawn.keys = [order[rank] for rank in ranks]
        return drawn

    def _store(self, slot: int, priority: float) -> None:
        self.priorities[slot] = abs(priority)
