"""The masses of all slots and the sums above them: what proportional draws descend and priority updates change.

Level 0 holds one mass per slot, padded with zeros to whole blocks; every further level holds the sum of each block of
`fanout` nodes below it, up to a root of at most `root_limit` nodes. All are int64 and exact, so a total is `==` the sum
of its leaves after any number of updates. Optionally the smallest (`low`) and largest (`high`) mass of every block of
leaves is kept; updates only write `DIRTY` there, and the next query finds those again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops import _backend
from gpu_replay.ops._backend import Backend
from gpu_replay.ops.counters import NO_MASS
from gpu_replay.ops.mass import Rule
from gpu_replay.ops.prefix_sum import block_sums
from gpu_replay.ops.rank_order import RankOrder

# in the place of an extreme that must be found again
DIRTY = -1


def fanout_for(backend: Backend) -> int:
    """Children of one node: few where every array operation costs, many where every level is a trip to memory."""
    return 16 if backend == "host" else 128


def root_limit_for(backend: Backend) -> int:
    """Nodes of the root at most: the host's loops scan thousands at once, a kernel one block."""
    limit: int = _backend.inner_loops().ROOT_LIMIT if backend == "host" else fanout_for(backend)
    return limit


def level_sizes(slots: int, fanout: int, root_limit: int) -> list[int]:
    """Nodes of each level, leaves first, each padded to whole blocks."""
    sizes = [-(-slots // fanout) * fanout]
    while sizes[-1] > root_limit:
        sizes.append(-(-(sizes[-1] // fanout) // fanout) * fanout)
    return sizes


def tree_bytes(slots: int, backend: Backend, low: bool = False, high: bool = False, summed: bool = True) -> int:
    """Bytes that a tree over so many slots takes."""
    fanout = fanout_for(backend)
    sizes = level_sizes(slots, fanout, root_limit_for(backend))[: None if summed else 1]
    return 8 * (sum(sizes) + (low + high) * (sizes[0] // fanout))


class MassTree:
    """int64 masses of `slots` slots, all 0 at first, and their sums.

    levels: leaves first; `levels[0][:slots]` are the masses. With `summed=False` the leaves are all there is: what is
            kept are order codes (see `OrderRule`), whose sums mean nothing.
    low, high: (blocks,) extremes of each block of leaves, or None.
    """

    def __init__(
        self,
        slots: int,
        device: torch.device,
        backend: Backend,
        *,
        low: bool = False,
        high: bool = False,
        summed: bool = True,
    ) -> None:
        self.slots = slots
        self.backend = backend
        self.fanout = fanout_for(backend)
        self.shift = self.fanout.bit_length() - 1
        sizes = level_sizes(slots, self.fanout, root_limit_for(backend))[: None if summed else 1]
        host = backend == "host"
        if host:
            # all levels in one piece, for the compiled loops
            starts = np.cumsum([0, *sizes])
            flat = np.zeros(starts[-1], dtype=np.int64)
            self.levels = torch.from_numpy(flat).split(sizes)
        else:
            self.levels = tuple(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes)
        blocks = sizes[0] // self.fanout
        self.low = torch.full((blocks,), NO_MASS, dtype=torch.int64, device=device) if low else None
        self.high = torch.zeros(blocks, dtype=torch.int64, device=device) if high else None
        # host: the order of the leaves, told of every change
        self.order: RankOrder | None = None
        if host:
            # what the inner loops work on: views of the same memory
            self.loops: Any = _backend.inner_loops()
            self.arrays = tuple(level.numpy() for level in self.levels)
            self.rows = tuple(array.reshape(-1, self.fanout) for array in self.arrays)
            self.extremes = tuple(each.numpy() for each in (self.low, self.high) if each is not None)
            # the levels below the root, the upper ones first; children and sums of each; operands of operations on
            # arrays, and what draws keep
            self.down = self.rows[-2::-1]
            self.sums = tuple(zip(self.rows, self.arrays[1:], strict=False))
            self.ones, self.count = np.ones(self.fanout, dtype=np.int64), np.array(slots)
            self.up, self.top = np.array(self.shift), np.array(self.shift * (len(sizes) - 1))
            self.kept: Any = None
            nothing = np.zeros(0, dtype=np.int64)
            low_high = (nothing if each is None else each.numpy() for each in (self.low, self.high))
            self.compiled = (flat, starts, self.shift, *low_high)

    @property
    def masses(self) -> Tensor:
        """(slots,) int64 masses in slot order, the tree's own memory."""
        return self.levels[0][: self.slots]

    @property
    def nbytes(self) -> int:
        """Bytes of all levels and extremes."""
        extremes = [edge for edge in (self.low, self.high) if edge is not None]
        return sum(tensor.nbytes for tensor in (*self.levels, *extremes))

    def total(self) -> int:
        """The exact total mass; on CUDA this waits for the device."""
        return int(self.levels[-1].sum())

    def build(self) -> None:
        """Make all sums anew from the leaves."""
        if self.order is not None:
            self.order.invalidate()
        if self.backend == "host":
            self.loops.sum_range(self, 0, self.slots)
            return
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            block_sums(below, self.fanout, above)
        for extreme in (self.low, self.high):
            if extreme is not None:
                extreme.fill_(DIRTY)

    def clear(self) -> None:
        """No slot has mass."""
        for level in self.levels:
            level.zero_()
        if self.low is not None:
            self.low.fill_(NO_MASS)
        if self.high is not None:
            self.high.zero_()
        if self.order is not None:
            self.order.invalidate()

    def set_masses(self, start: int, stop: int, mass: int | np.ndarray) -> None:
        """Host: give the slots `start` to `stop` a mass each, and their ancestors the new sums."""
        self.arrays[0][start:stop] = mass
        self.sum_range(start, stop)

    def sum_range(self, start: int, stop: int, loops: Any = None) -> None:
        """Host: give the ancestors of the slots `start` to `stop` their sums, after masses were written there.

        loops: the module whose `sum_range` does it, if not the one that was chosen.
        """
        if self.order is not None:
            self.order.note(start, stop)
        (loops or self.loops).sum_range(self, start, stop)

    def update(
        self,
        keys: np.ndarray,
        priorities: np.ndarray,
        rule: Rule,
        first: int,
        added: int,
        counters: np.ndarray,
        *,
        sparse: bool = False,
    ) -> None:
        """Host: give live keys, those from `first` to `added`, the masses of their priorities, and the sums above them.

        The last of a repeated key wins. Counts the largest mass given, keys that were not live, and masses that were
        cut to the limit. An exception, whatever it is and wherever it comes from, leaves all as it was.

        keys, priorities: (B,) int64 and finite float64. sparse: whether slots without mass keep none.
        """
        self.loops.update(self, keys, priorities, rule, first, added, counters, sparse)

    def lowest(self) -> int:
        """Host: the smallest mass that is not 0, or NO_MASS when there is none."""
        low = self._kept(self.low)
        dirty = np.flatnonzero(low == DIRTY)
        if dirty.size:
            rows = self.rows[0].take(dirty, axis=0)
            low[dirty] = np.where(rows == 0, NO_MASS, rows).min(axis=1)
        return int(low.min())

    def highest(self) -> int:
        """Host: the largest mass, 0 when there is none."""
        high = self._kept(self.high)
        dirty = np.flatnonzero(high == DIRTY)
        if dirty.size:
            high[dirty] = self.rows[0].take(dirty, axis=0).max(axis=1)
        return int(high.max())

    @staticmethod
    def _kept(extreme: Tensor | None) -> np.ndarray:
        if extreme is None:
            raise RuntimeError("this tree was made without the extremes that are asked for.")
        return extreme.numpy()
