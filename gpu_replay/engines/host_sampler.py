"""Draws and priority updates on CPU tensors: loops over views of the tensors' own memory.

`device_sampler.py` does the same with kernels; both leave the same integers behind.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.draw_state import DrawState
from gpu_replay.engines.storage import Storage
from gpu_replay.loops import ring as ring_loops
from gpu_replay.loops import tree as tree_loops
from gpu_replay.ops.counters import Counter, HostWords, blocks_for
from gpu_replay.ops.draw import (
    ALL,
    PERMUTATION_WORDS,
    DrawRange,
    draw_by_mass,
    draw_range,
    importance_weights,
    independent_ranks,
    permuted_ranks,
    slots_in,
    slots_of,
    weights_of,
)
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.ranks import HostRanks
from gpu_replay.ops.ring import plain
from gpu_replay.samplers import LinearSchedule

_NONE = np.zeros(0, dtype=np.int64)
_DAMAGED = (
    "fewer transitions can be drawn than were counted. The buffer was changed past its lock, or its memory is "
    "damaged; load it from a checkpoint."
)


class HostDraw(NamedTuple):
    """(B,) int64 slots, float32 probabilities and importance weights, and the blocks of random words that they took."""

    slots: np.ndarray
    probability: np.ndarray
    weight: np.ndarray
    blocks: int


class HostSampler:
    """Trees, ranks, random words and counters of one buffer on the host: draws from them, and updates of priorities.

    The buffer has checked all arguments and holds the lock. A draw changes nothing until `finish` counts it.

    arrays: counters, times sampled, and the tree of masses as `loops/tree.py` takes it, or nothing.
    """

    def __init__(self, state: DrawState, storage: Storage, seed: int) -> None:
        self.state = state
        self.counters = state.counters.numpy()
        self.times_sampled = storage.times_sampled.numpy()
        self._plan, self._tree, self._capacity = state.plan, state.tree, state.slots
        self._ranks: HostRanks | None = None
        if self._plan.kind == "rank":
            codes = state.masses
            self._ranks = HostRanks(codes.arrays[0][: codes.slots], self.counters, self._plan.alpha)
            codes.host = codes.host._replace(noted=self._ranks.noted)
        tree = (_NONE,) * 5 if state.tree is None else state.tree.host
        self.arrays = self.counters, self.times_sampled, *tree
        self._finish = ring_loops.finish.ready()
        self.reseed(seed)
        # slots that the last draw counted
        self._counted = _NONE
        self._mark: bytes | None = None

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside those of the state."""
        return 0 if self._ranks is None else self._ranks.nbytes

    def reseed(self, seed: int) -> None:
        """Draw from the stream of this seed, from the counter's position on."""
        self._random = HostWords(seed)

    def span(self) -> tuple[int, int]:
        """The smallest live key and the next key."""
        added = self.counters.item(Counter.ADDED)
        return max(self.counters.item(Counter.FIRST), added - self._capacity), added

    def count_at_least(self, needed: int, skipped: int) -> int:
        """Count the rows that can be drawn without the newest `skipped` slots; a buffer of transitions skips none.

        Of eligible starts exact where they are counted; else, for samplers that need no more than one, at most 1.
        """
        if not self.state.tracks_eligibility:
            first, added = self.span()
            return added - first
        if not skipped:
            return self.counters.item(Counter.ELIGIBLE)
        if self._ranks is not None:
            # order codes have no sums
            added = self.counters.item(Counter.ADDED)
            newest = self.state.masses.arrays[0][np.arange(added - skipped, added) % self._capacity]
            return self.counters.item(Counter.ELIGIBLE) - np.count_nonzero(newest)
        mass = self._range(self.state.eligible, skipped).mass
        return mass if self.state.eligible_tree is not None else min(mass, 1)

    def restricted_to(self, allowed: Tensor) -> tuple[HostSampler, int]:
        """A sampler for one call over the allowed slots alone, (slots,) bool, and the number of eligible ones."""
        sampler = copy.copy(self)
        sampler.state = self.state.narrowed(allowed)
        sampler._tree = sampler.state.tree
        if self._ranks is not None:
            sampler._ranks = self._ranks.restricted_to(sampler.state.masses.arrays[0][: self._capacity])
        return sampler, int(np.count_nonzero(sampler.state.eligible.arrays[0]))

    # random words

    def words(self, count: int, after: int) -> np.ndarray:
        """(count,) uint64 words of the stream, from `after` blocks past the counter on."""
        return self._random.words(self.counters.item(Counter.RANDOM) + after, count)

    def doubles(self, count: int, after: int = 0) -> np.ndarray:
        """(count,) float64 in [0, 1) from the words that `words` returns for these arguments."""
        return self._random.doubles(self.counters.item(Counter.RANDOM) + after, count)

    # draws

    def draw(self, batch: int, beta: float | None, skipped: int = 0) -> HostDraw:
        """Draw `batch` slots, none of them among the newest `skipped`."""
        newest = self._plan.newest_of(batch)
        if not newest:
            return self._draw_by_chance(batch, beta, skipped)
        slots, sure = self._newest(newest, skipped), np.ones(newest, dtype=np.float32)
        if newest == batch:
            return HostDraw(slots, sure, sure.copy(), 0)
        drawn = self._draw_by_chance(batch - newest, beta, skipped)
        return HostDraw(
            np.concatenate((drawn.slots, slots)),
            np.concatenate((drawn.probability, sure)),
            np.concatenate((drawn.weight, sure)),
            drawn.blocks,
        )

    def finish(self, tensors: dict[str, Tensor], draw: HostDraw, more: int = 0) -> dict[str, Tensor]:
        """Count a draw, and `more` blocks of random words that the sample took; returns the tensors of the sample with
        its keys, probabilities and weights.
        """
        slots, tensor = draw.slots, torch.from_numpy
        keys = np.empty(slots.size, dtype=np.int64)
        tensors["key"] = tensor(keys)
        tensors["probability"] = tensor(draw.probability)
        tensors["weight"] = tensor(draw.weight)
        self._counted = slots
        # no signal is handled within this one call, so an exception comes before or after all of it
        self._finish(slots, draw.blocks + more, self.counters, self.times_sampled, keys)
        return tensors

    def mark(self) -> Any:
        """The position of the draws, for `take_back` of a sample that begins here and raises after it was counted."""
        self._mark = self.counters.tobytes()
        return self._mark

    def take_back(self, mark: Any) -> None:
        """Let the draws stand where they stood at this mark, unless other draws came after it."""
        if self._mark is None or mark is not self._mark:
            return
        counts = np.frombuffer(self._mark, dtype=np.int64)
        if counts[Counter.STEP] != self.counters[Counter.STEP]:
            # rows added meanwhile have not been sampled
            ages = (self._counted - counts[Counter.ADDED]) % self._capacity
            unchanged = ages >= self.counters[Counter.ADDED] - counts[Counter.ADDED]
            np.subtract.at(self.times_sampled, self._counted[unchanged], 1)
        moved = [Counter.RANDOM, Counter.STEP]
        self.counters[moved] = counts[moved]

    def _draw_by_chance(self, drawn: int, beta: float | None, skipped: int) -> HostDraw:
        """Draw the rows of a batch other than the newest ones."""
        plan, tree, counters = self._plan, self._tree, self.counters
        if tree is None:
            return self._draw_uniformly(drawn, skipped)
        if beta is None:
            beta = plan.beta(counters.item(Counter.STEP)) if isinstance(plan.beta, LinearSchedule) else plan.beta
        doubles, blocks = self._random.doubles(counters.item(Counter.RANDOM), drawn), blocks_for(drawn)
        if self._ranks is not None:
            rows = self._ranks.draw(doubles, stratified=plan.stratified, skipped=skipped)
            lowest = rows.last if plan.lowest_of_all else int(rows.masses.min())
            probability = (rows.masses / rows.total).astype(np.float32)
            return HostDraw(rows.slots, probability, importance_weights(rows.masses, lowest, beta), blocks)
        draws = draw_by_mass(
            tree,
            doubles,
            stratified=plan.stratified,
            of_all=plan.lowest_of_all,
            within=self._range(tree, skipped) if skipped else ALL,
        )
        if not draws.mass:
            raise RuntimeError(_DAMAGED)
        return HostDraw(draws.slots, draws.probability, weights_of(draws.ratio, beta), blocks)

    def _draw_uniformly(self, drawn: int, skipped: int) -> HostDraw:
        (first, added), capacity = self.span(), self._capacity
        tree = self.state.eligible if self.state.tracks_eligibility else None
        eligible = None if tree is None else self._range(tree, skipped)
        count, ring = (added - first, (first % capacity, capacity)) if eligible is None else (eligible.mass, (0, 2**62))
        if count < (1 if self._plan.replacement else drawn):
            raise RuntimeError(_DAMAGED)
        if self._plan.replacement:
            slots, words = independent_ranks(count, self.doubles(drawn)), drawn
            slots = slots_of(slots, first, capacity) if eligible is None else slots
        else:
            slots, words = permuted_ranks(count, drawn, self.words(PERMUTATION_WORDS, 0), *ring), PERMUTATION_WORDS
        if tree is not None and eligible is not None:
            slots = slots_in(tree, eligible, slots)
        probability, sure = np.empty(drawn, np.float32), np.empty(drawn, np.float32)
        probability.fill(1 / count)
        sure.fill(1)
        return HostDraw(slots, probability, sure, blocks_for(words))

    def _newest(self, count: int, skipped: int) -> np.ndarray:
        """The slots of the `count` newest keys that can be drawn."""
        if not self.state.tracks_eligibility:
            added = self.counters.item(Counter.ADDED)
            return np.arange(added - count, added) % self._capacity
        eligible = self._range(self.state.eligible, skipped, by_key=True)
        return slots_in(self.state.eligible, eligible, np.arange(eligible.mass - count, eligible.mass))

    def _range(self, tree: MassTree, skipped: int, *, by_key: bool = False) -> DrawRange:
        return draw_range(tree, self.counters.item(Counter.ADDED) % self._capacity, skipped, by_key=by_key)

    # update

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Give live keys the masses of their priorities; the last of a repeated key wins, others are counted."""
        if not keys.size:
            return
        # the last line of each branch changes all that changes: an exception comes before it or after
        if self._tree is None:
            first, added = self.span()
            self.counters[Counter.STALE] += np.count_nonzero((keys < first) | (keys >= added))
        else:
            rule, contiguous = self.state.rule, plain(keys)
            settings = rule.limit, self._capacity, self.state.tracks_eligibility
            masses = rule.uncut(priorities)
            tree_loops.update.ready()(contiguous, masses, *settings, self.counters, *self._tree.host)
