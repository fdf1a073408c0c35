"""Draws by rank on the host: the masses of ranks, the order of a buffer, and the rows that targets fall on.

With one sort for several samples there is a plain list instead of an order that is updated with every change. Between
sorts a slot keeps its rank whatever it holds; one that cannot be drawn any more passes its draw on to the next rank
that can.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops import _backend
from gpu_replay.ops.counters import NO_MASS, Counter
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.rank_order import RankOrder, sorted_ages
from gpu_replay.ops.rank_table import cumulative_masses
from gpu_replay.ops.ring import commit
from gpu_replay.ops.stratified_draw import stratified_targets
from gpu_replay.ops.uniform_draw import independent_ranks

# sums of masses that a search looks at together
_ROW = 64


class RankedRows(NamedTuple):
    """`B` draws by rank.

    slots:  (B,) int64. masses: (B,) int64, of the ranks that were drawn.
    total:  mass of all ranks; `last` that of the lowest rank.
    """

    slots: np.ndarray
    masses: np.ndarray
    total: int
    last: int


def host_ranks_bytes(slots: int, every: int) -> int:
    """Bytes of the `HostRanks` of a buffer."""
    return (-(-slots // _ROW) * (_ROW + 1)) * 8 + (
        _backend.inner_loops().order_bytes(slots) if every == 1 else slots * 4
    )


class HostRanks:
    """Who has which rank in one buffer, and the draws from it.

    tree:     of the order codes. counters: of the buffer.
    every:    samples that one sort serves; with 1 ranks are those of the moment at every sample.
    """

    def __init__(self, tree: MassTree, counters: np.ndarray, alpha: float, every: int) -> None:
        self._slots = tree.slots
        self._leaves = tree.arrays[0][: tree.slots]
        self._counters = counters
        self._every = every
        # in rows, so that a search touches few of them; past the end no target comes
        self._rows = np.full((-(-tree.slots // _ROW), _ROW), NO_MASS, dtype=np.int64)
        self._sums = self._rows.reshape(-1)
        self._sums[: tree.slots] = cumulative_masses(tree.slots, alpha)
        self._last = self._rows[:, -1].copy()
        self._order: RankOrder | None = None
        # the whole draw as one loop, where there is one
        self._compiled: Any = None
        self.list: Tensor | None = None
        # a list just made, until its draw is counted
        self._made: np.ndarray | None = None
        if every == 1:
            order: Any = tree.loops.RankOrder(self._leaves, tree.slots)
            self._order = tree.order = order
            self._compiled = getattr(order, "draw", None)
            if self._compiled is not None:
                order.draw_by(self._sums, self._last)
        else:
            self.list = torch.zeros(tree.slots, dtype=torch.int32, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of table and order."""
        return host_ranks_bytes(self._slots, self._every)

    def among(self, tree: MassTree) -> HostRanks:
        """The same for one exact draw from other codes."""
        found = copy.copy(self)
        found._leaves, found._order = tree.arrays[0][: tree.slots], None
        return found

    def draw(self, doubles: np.ndarray, *, stratified: bool, skipped: int = 0, exact: bool = False) -> RankedRows:
        """Draw one row for each of (B,) float64 in [0, 1); something can be drawn.

        skipped: slots with the newest keys that are left out; needs `exact`.
        exact:   ranks are those of this moment in any case.
        """
        if self._order is not None:
            self._order.sort_changes(self._counters.item(Counter.ADDED))
            if skipped:
                self._order.hide(self.newest(skipped))
            count = self._order.count
            if self._compiled is not None:
                slots, masses, total = self._compiled(doubles, stratified)
                return RankedRows(slots, masses, total, total - (self._sums.item(count - 2) if count > 1 else 0))
        elif exact:
            listed = self._sorted(skipped)
            count = listed.size
        else:
            listed = self._listed()
            count = listed.size
        total = self._sums.item(count - 1)
        targets = (stratified_targets if stratified else independent_ranks)(total, doubles)
        ranks = self._ranks_at(targets)
        masses = self._sums.take(ranks)
        # nothing comes before the first rank
        before = self._sums.take(ranks - 1, mode="clip")
        before *= ranks > 0
        masses -= before
        last = total - (self._sums.item(count - 2) if count > 1 else 0)
        if self._order is not None:
            slots = self._order.at(ranks)
        else:
            slots = listed.take(ranks) if exact else self._passed_on(listed, ranks)
        return RankedRows(slots, masses, total, last)

    def _ranks_at(self, targets: np.ndarray) -> np.ndarray:
        """The first ranks whose sum of masses exceeds these (B,) targets, two steps instead of one through all."""
        row = self._last.searchsorted(targets, "right")
        ranks = (self._rows.take(row, axis=0) > targets[:, None]).argmax(axis=1)
        row *= _ROW
        ranks += row
        return ranks

    def newest(self, count: int) -> np.ndarray:
        """The slots of so many newest keys."""
        head = self._counters.item(Counter.ADDED)
        return np.arange(head - count, head) % self._slots

    def _sorted(self, skipped: int) -> np.ndarray:
        """All slots that can be drawn in order, without the newest `skipped`."""
        head = self._counters.item(Counter.ADDED) % self._slots
        leaves = np.concatenate((self._leaves[head:], self._leaves[:head]))
        if skipped:
            leaves[-skipped:] = 0
        slots = sorted_ages(leaves)
        slots += head
        slots -= (slots >= self._slots) * self._slots
        return slots

    def _listed(self) -> np.ndarray:
        """The list that serves several samples, made anew when it is time."""
        if self.list is None:
            raise RuntimeError("a buffer that ranks at every sample keeps no list.")
        counters, kept = self._counters, self.list.numpy()
        step = counters.item(Counter.STEP)
        if not counters.item(Counter.RANKED) or step - counters.item(Counter.SORTED) >= self._every:
            self._made = self._sorted(0)
            return self._made
        return kept[: counters.item(Counter.RANKED)]

    def keep_list(self) -> None:
        """Keep the list if the draw in progress has made one."""
        made, self._made = self._made, None
        if made is not None and self.list is not None:
            said = slice(Counter.RANKED, Counter.SORTED + 1)
            counts = made.size, self._counters.item(Counter.STEP)
            commit([(self.list.numpy(), slice(0, made.size), made), (self._counters, said, counts)], None)

    def take_back(self) -> None:
        """After a draw that raised, and whose counters were taken back: make list or order anew."""
        self._made = None
        if self._order is not None:
            self._order.invalidate()

    def _passed_on(self, listed: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """The slots at the first ranks from the given ones on that can be drawn; the first rank comes after the last.

        Where none in the list can be drawn any more, the oldest slot that can.
        """
        slots = listed.take(ranks).astype(np.int64)
        lost = np.flatnonzero(self._leaves.take(slots) == 0)
        if lost.size:
            drawable = np.flatnonzero(self._leaves.take(listed))
            if drawable.size:
                found = drawable.searchsorted(ranks[lost])
                slots[lost] = listed.take(drawable.take(found, mode="wrap"))
            else:
                head = self._counters.item(Counter.ADDED) % self._slots
                ages = np.concatenate((self._leaves[head:], self._leaves[:head]))
                slots[lost] = (head + int((ages > 0).argmax())) % self._slots
        return slots
