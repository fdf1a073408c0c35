"""Draws and priority updates on CPU tensors: NumPy over whole batches, on views of the tensors' own memory.

At these sizes the count of array operations is the cost, so one call makes as few as it can and none per transition.
`device_sampler.py` does the same with kernels; both leave the same integers behind.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.draw_state import DrawState
from gpu_replay.engines.storage import Storage
from gpu_replay.ops import _backend
from gpu_replay.ops.counters import Counter, HostWords, blocks_for
from gpu_replay.ops.eligible_draw import DrawRange, draw_range
from gpu_replay.ops.mass import MassRule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.rank_draw_host import HostRanks
from gpu_replay.ops.ring import Write, commit
from gpu_replay.ops.stratified_draw import importance_weights, smallest, stratified_targets, weights_of
from gpu_replay.ops.uniform_draw import PERMUTATION_WORDS, independent_ranks, permuted_ranks, slots_of
from gpu_replay.schedule import LinearSchedule

_INT64 = np.dtype(np.int64)
_REAL = (np.dtype(np.float32), np.dtype(np.float64))


class HostDraw(NamedTuple):
    """(B,) int64 slots, float32 probabilities and float32 importance weights."""

    slots: np.ndarray
    probability: np.ndarray
    weight: np.ndarray


class HostSampler:
    """Trees, ranks, random words and counters of one buffer on the host: draws from them, and updates of priorities.

    The buffer has checked all arguments and holds the lock.
    """

    def __init__(self, state: DrawState, storage: Storage, seed: int) -> None:
        self.state = state
        self.counters = state.counters.numpy()
        self.times_sampled = storage.times_sampled.numpy()
        self._plan, self._tree, self._rule, self._sparse = state.plan, state.tree, state.rule, state.sparse
        self._capacity = state.slots
        self._loops: Any = _backend.inner_loops()
        self._whole: Any = _backend.whole_calls()
        self._ranks: HostRanks | None = None
        # where compiled updates note what changes in an order
        self._noted: Any = ()
        if self._plan.kind == "rank":
            self._ranks = HostRanks(state.masses, self.counters, self._plan.alpha, self._plan.resort_every)
            self._noted = () if self._whole is None else self._whole.noted_by(state.masses)
        # the mass of new transitions where the plan names one, or before any priority was given
        self._initial = self._plan.initial
        self.first_mass = state.rule.mass(1.0 if isinstance(self._initial, str) else float(self._initial))
        self.reseed(seed)
        # slots that the last draw counted, or was about to
        self._counted: np.ndarray | None = None
        self._mark: bytes | None = None

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside those of the state."""
        return 0 if self._ranks is None else self._ranks.nbytes

    @property
    def ranked(self) -> Tensor | None:
        """(capacity,) int32 slots in order of their ranks, where the order must outlive a call."""
        return None if self._ranks is None else self._ranks.list

    def reseed(self, seed: int) -> None:
        """Draw from the stream of this seed, from the counter's position on."""
        self._random = HostWords(seed)
        # of the same stream
        self.key = np.array([seed & (2**64 - 1), 0], dtype=np.uint64)

    def span(self) -> tuple[int, int]:
        """The smallest live key and the next key."""
        added = self.counters.item(Counter.ADDED)
        return max(self.counters.item(Counter.FIRST), added - self._capacity), added

    def count_at_least(self, wanted: int, skipped: int) -> int:
        """What can be drawn without the newest `skipped` slots, of which there are none in a buffer of transitions.

        Of eligible starts exact where they are counted; else, for samplers that need no more than one, at most 1.
        """
        if not self._sparse:
            first, added = self.span()
            return added - first
        if not skipped:
            return self.counters.item(Counter.ELIGIBLE)
        if self._ranks is not None:
            # order codes have no sums
            newest = self.state.masses.arrays[0].take(self._ranks.newest(skipped))
            return self.counters.item(Counter.ELIGIBLE) - np.count_nonzero(newest)
        found = self._within(self.state.eligible, skipped).mass
        return found if self.state.eligible_tree is not None else min(found, 1)

    def among(self, allowed: Tensor) -> tuple[HostSampler, int]:
        """What draws, for one call, no other slots than the allowed, (slots,) bool, and how many of them it can."""
        found = copy.copy(self)
        found.state = self.state.narrowed(allowed)
        found._tree = found.state.tree
        if self._ranks is not None:
            found._ranks = self._ranks.among(found.state.masses)
        return found, int(np.count_nonzero(found.state.eligible.arrays[0]))

    # masses of new transitions

    def initial_mass(self) -> int:
        """The mass of new transitions without a priority of their own; 0 where none has any."""
        if self._tree is None:
            return 0
        if self._initial == "running":
            return self.counters.item(Counter.MAX_MASS) or self.first_mass
        if self._initial == "stored":
            return self._tree.highest() or self.first_mass
        return self.first_mass

    @property
    def initial_runs(self) -> bool:
        """Whether the initial mass is the largest ever given."""
        return self._initial == "running"

    @property
    def initial_is_stored(self) -> bool:
        """Whether the initial mass is the largest of those stored."""
        return self._initial == "stored"

    def given(self, largest: int, saturated: int) -> list[Write]:
        """What counts masses that were given, as writes: the largest, and how many were cut to the limit."""
        counters = self.counters
        writes: list[Write] = []
        if largest > counters.item(Counter.MAX_MASS):
            writes.append((counters, Counter.MAX_MASS, largest))
        if saturated:
            writes.append((counters, Counter.SATURATED, counters.item(Counter.SATURATED) + saturated))
        return writes

    # what a draw that raises takes back

    def mark(self) -> Any:
        """Where the draws stand, for `take_back` of the draw that begins here."""
        self._counted = None
        self._mark = self.counters.tobytes()
        return self._mark

    def take_back(self, mark: Any) -> None:
        """Let the draws stand where they stood at this mark, unless other draws came after it."""
        if self._mark is None or mark is not self._mark:
            return
        counts = np.frombuffer(self._mark, dtype=np.int64)
        if self._counted is not None and counts[Counter.STEP] != self.counters[Counter.STEP]:
            # what was added meanwhile has not been sampled
            ages = (self._counted - counts[Counter.ADDED]) % self._capacity
            held = ages >= self.counters[Counter.ADDED] - counts[Counter.ADDED]
            np.subtract.at(self.times_sampled, self._counted[held], 1)
        moved = [Counter.RANDOM, Counter.STEP, Counter.RANKED, Counter.SORTED]
        self.counters[moved] = counts[moved]
        if self._ranks is not None:
            self._ranks.take_back()

    def counting(self, slots: np.ndarray) -> None:
        """These drawn slots and the sample are about to be counted, in one."""
        self._counted = slots
        if self._ranks is not None:
            self._ranks.keep_list()

    # random words

    def words(self, count: int) -> np.ndarray:
        """The next (count,) uint64 words of the stream."""
        return self._random.words(self._take_blocks(count), count)

    def doubles(self, count: int) -> np.ndarray:
        """The next (count,) float64 in [0, 1)."""
        return self._random.doubles(self._take_blocks(count), count)

    def _take_blocks(self, words: int) -> int:
        block = self.counters.item(Counter.RANDOM)
        self.counters[Counter.RANDOM] = block + blocks_for(words)
        return block

    # draws

    def draw(self, batch: int, beta: float | None, skipped: int = 0, *, exact: bool = False) -> HostDraw:
        """Draw `batch` slots, none of them among the newest `skipped`.

        exact: ranks are those of this moment in any case.
        """
        newest = batch if self._plan.kind == "newest" else self._plan.newest
        if not newest:
            return self._draw_by_chance(batch, beta, skipped, exact)
        slots = self._newest(newest, skipped)
        sure = np.ones(newest, dtype=np.float32)
        if newest == batch:
            return HostDraw(slots, sure, sure.copy())
        drawn = self._draw_by_chance(batch - newest, beta, skipped, exact)
        return HostDraw(
            np.concatenate((drawn.slots, slots)),
            np.concatenate((drawn.probability, sure)),
            np.concatenate((drawn.weight, sure)),
        )

    def named(self, draw: HostDraw) -> dict[str, Tensor]:
        """Count the draw; returns its keys, probabilities and weights."""
        return self.named_in({}, *draw)

    def named_in(
        self, tensors: dict[str, Tensor], slots: np.ndarray, probability: np.ndarray, weight: np.ndarray
    ) -> dict[str, Tensor]:
        """Count a draw; returns the tensors with its keys, probabilities and weights."""
        counters, tensor = self.counters, torch.from_numpy
        keys, count = self._loops.count_draws(slots, counters.item(Counter.ADDED), self._capacity, self.times_sampled)
        tensors["key"] = tensor(keys)
        tensors["probability"] = tensor(probability)
        tensors["weight"] = tensor(weight)
        self.counting(slots)
        return commit([(counters, Counter.STEP, counters.item(Counter.STEP) + 1)], tensors, count)

    def _draw_by_chance(self, drawn: int, beta: float | None, skipped: int, exact: bool) -> HostDraw:
        """Draw what is not drawn for being the newest."""
        plan, tree = self._plan, self._tree
        if tree is None:
            return self._draw_uniformly(drawn, skipped)
        if not skipped and self._ranks is None:
            return HostDraw(*self.draw_by_mass(tree, drawn, beta))
        doubles = self.doubles(drawn)
        if beta is None:
            beta = plan.beta(self.counters.item(Counter.STEP)) if isinstance(plan.beta, LinearSchedule) else plan.beta
        if self._ranks is not None:
            rows = self._ranks.draw(doubles, stratified=plan.stratified, skipped=skipped, exact=exact)
            slots, masses, total, lowest = rows
        else:
            found = self._within(tree, skipped)
            total = found.mass
            slots = found.slots((stratified_targets if plan.stratified else independent_ranks)(total, doubles))
            masses, lowest = tree.arrays[0].take(slots), tree.lowest() if plan.lowest_of_all else 0
        weight = importance_weights(masses, lowest if plan.lowest_of_all else smallest(masses), beta)
        return HostDraw(slots, (masses / total).astype(np.float32), weight)

    def draw_by_mass(self, tree: MassTree, drawn: int, beta: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw by mass from all slots of the tree, what a HostDraw holds."""
        plan, counters = self._plan, self.counters
        block = counters.item(Counter.RANDOM)
        counters[Counter.RANDOM] = block + blocks_for(drawn)
        if beta is None:
            beta = plan.beta(counters.item(Counter.STEP)) if isinstance(plan.beta, LinearSchedule) else plan.beta
        lowest = tree.lowest() if plan.lowest_of_all else 0
        doubles = self._random.doubles(block, drawn)
        slots, _, probability, ratio, _ = self._loops.draw(tree, doubles, plan.stratified, lowest)
        return slots, probability, weights_of(ratio, beta)

    def _draw_uniformly(self, drawn: int, skipped: int) -> HostDraw:
        found = self._within(self.state.eligible, skipped) if self.state.sparse else None
        first, added = self.span()
        count = added - first if found is None else found.mass
        if self._plan.replacement:
            ranks = independent_ranks(count, self.doubles(drawn))
        else:
            ranks = permuted_ranks(count, drawn, self.words(PERMUTATION_WORDS))
        slots = slots_of(ranks, first, self._capacity) if found is None else found.slots(ranks)
        return HostDraw(slots, np.full(drawn, 1 / count, np.float32), np.ones(drawn, np.float32))

    def _newest(self, count: int, skipped: int) -> np.ndarray:
        """The slots of so many newest keys that can be drawn."""
        if not self.state.sparse:
            added = self.counters.item(Counter.ADDED)
            return np.arange(added - count, added) % self._capacity
        found = self._within(self.state.eligible, skipped, by_key=True)
        return found.slots(np.arange(found.mass - count, found.mass))

    def _within(self, tree: MassTree, skipped: int, *, by_key: bool = False) -> DrawRange:
        return draw_range(tree, self.counters.item(Counter.ADDED) % self._capacity, skipped, by_key=by_key)

    # update

    def update_tensors(self, keys: Any, priorities: Any) -> bool:
        """Update as `update` does if these are plain tensors and the priorities are finite; else false, and no change.

        Both have not been looked at. Where loops are compiled, one checks the priorities and another stores them.
        """
        if type(keys) is not Tensor or type(priorities) is not Tensor or priorities.requires_grad:
            return False
        try:
            key, given = keys.numpy(), priorities.numpy()
        except (RuntimeError, TypeError):
            # they are not in memory as they are
            return False
        if key.dtype != _INT64 or given.dtype not in _REAL or key.ndim != 1 or key.shape != given.shape:
            return False
        if not key.size:
            return False
        rule, tree = self._rule, self._tree
        if self._whole is None or tree is None:
            # nothing compares with what is not a number, and the first of these is the largest
            if not (given.item(given.argmax()) < math.inf and given.item(given.argmin()) > -math.inf):
                return False
            if tree is None:
                self.update(key, given)
            else:
                numbers = given.astype(_REAL[1], copy=False)
                self._loops.update(tree, key, numbers, rule, *self.span(), self.counters, self._sparse)
            return True
        if not (key.flags.c_contiguous and given.flags.c_contiguous):
            return False
        numbers = np.empty(key.size)
        if not self._whole.shifted(given, rule.eps, rule.clip, rule.least, numbers):
            return False
        counts = self.counters, self._sparse, *tree.compiled
        if isinstance(rule, MassRule):
            masses = rule.raised(numbers), rule.limit
            return self._whole.update(key, *masses, *self.span(), tree.slots, *counts) is None
        return self._whole.update_codes(key, numbers.view(np.int64), *self.span(), *counts, *self._noted) is None

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Give live keys the masses of their priorities; the last of a repeated key wins, others are counted."""
        if not keys.size:
            return
        first, added = self.span()
        if self._tree is None:
            self.counters[Counter.STALE] += np.count_nonzero((keys < first) | (keys >= added))
        else:
            self._tree.update(keys, priorities, self._rule, first, added, self.counters, sparse=self._sparse)
