"""The masses of all slots and the sums above them: what proportional draws descend and priority updates change.

Level 0 holds one mass per slot, padded with zeros to whole blocks; every further level holds the sum of each block of
`fanout` nodes below it, up to a root of at most `root_limit` nodes. All are int64 and exact, so a total is `==` the sum
of its leaves after any number of updates. Optionally the smallest (`low`) and largest (`high`) mass of every block of
leaves is kept; updates only mark a block as `STALE_EDGE`, and the next query looks at it again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops import _backend, prefix_sum
from gpu_replay.ops._backend import Backend
from gpu_replay.ops.counters import NO_MASS
from gpu_replay.ops.rank_order import RankOrder

# the mark of a block whose extremes must be looked up again
STALE_EDGE = -1


def fanout_for(backend: Backend) -> int:
    """Children of one node: few where every array operation costs, many where every level is a trip to memory."""
    return 16 if backend == "host" else 128


def root_limit_for(backend: Backend) -> int:
    """Nodes of the root at most: NumPy scans thousands at once, a kernel one block."""
    return 4096 if backend == "host" else fanout_for(backend)


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
        # host: all levels in one piece, for the compiled loops
        self.starts = np.cumsum([0, *sizes])
        self.flat = np.zeros(self.starts[-1] if host else 0, dtype=np.int64)
        if host:
            self.levels = torch.from_numpy(self.flat).split(sizes)
        else:
            self.levels = tuple(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes)
        blocks = sizes[0] // self.fanout
        self.low = torch.full((blocks,), NO_MASS, dtype=torch.int64, device=device) if low else None
        self.high = torch.zeros(blocks, dtype=torch.int64, device=device) if high else None
        # host: the order of the leaves, told of every change
        self.order: RankOrder | None = None
        # what the host code works on: views of the same memory
        self.arrays = tuple(level.numpy() for level in self.levels) if host else ()
        self.rows = tuple(array.reshape(-1, self.fanout) for array in self.arrays)
        self._edges = tuple(edge.numpy() for edge in (self.low, self.high) if host and edge is not None)
        nothing = np.zeros(0, dtype=np.int64)
        self.low_array = nothing if self.low is None or not host else self.low.numpy()
        self.high_array = nothing if self.high is None or not host else self.high.numpy()
        self.loops = _backend.numba_loops() if host else None

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
        if self.loops is not None:
            self._sum_with(self.loops, 0, self.slots)
            if self.order is not None:
                self.order.forget()
            return
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            sums = prefix_sum.block_sums(below, self.fanout, self.backend)
            above.zero_()
            above[: sums.numel()].copy_(sums)
        for edge in (self.low, self.high):
            if edge is not None:
                edge.fill_(STALE_EDGE)
        if self.order is not None:
            self.order.forget()

    def clear(self) -> None:
        """No slot has mass."""
        for level in self.levels:
            level.zero_()
        if self.low is not None:
            self.low.fill_(NO_MASS)
        if self.high is not None:
            self.high.zero_()
        if self.order is not None:
            self.order.forget()

    def set_range(self, start: int, stop: int, mass: int | np.ndarray) -> None:
        """Host: give the slots `start` to `stop` a mass each, and their ancestors the new sums."""
        self.arrays[0][start:stop] = mass
        self.follow_range(start, stop)

    def follow_range(self, start: int, stop: int) -> None:
        """Host: give the ancestors of the slots `start` to `stop` their sums, after masses were written there."""
        if self.order is not None:
            self.order.note(start, stop)
        if self.loops is not None:
            self._sum_with(self.loops, start, stop)
            return
        low, high = start // self.fanout, -(-stop // self.fanout)
        for edge in self._edges:
            edge[low:high] = STALE_EDGE
        for below, above in zip(self.rows, self.arrays[1:], strict=False):
            np.add.reduce(below[low:high], axis=1, out=above[low:high])
            low, high = low // self.fanout, -(-high // self.fanout)

    def _sum_with(self, loops: Any, start: int, stop: int) -> None:
        loops.sum_range(self.flat, self.starts, self.fanout, start, stop, self.low_array, self.high_array)

    def set_slots(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """Host: give (B,) distinct slots their (B,) masses, and their ancestors the differences."""
        if self.loops is not None and self.order is None:
            every = (0, self.slots, self.slots, False)
            edges = self.low_array, self.high_array
            self.loops.set_masses(slots, masses, NO_MASS, *every, self.flat, self.starts, self.shift, *edges)
            return
        leaves = self.arrays[0]
        if self.order is not None:
            self.order.note_slots(slots)
        change = masses - leaves.take(slots) if len(self.arrays) > 1 else masses
        leaves[slots] = masses
        node = slots >> self.shift
        for edge in self._edges:
            edge[node] = STALE_EDGE
        for above in self.arrays[1:]:
            np.add.at(above, node, change)
            node = node >> self.shift

    def lowest(self) -> int:
        """Host: the smallest mass that is not 0, or NO_MASS when there is none."""
        low = self._looked_up(self.low)
        stale = np.flatnonzero(low == STALE_EDGE)
        if stale.size:
            rows = self.rows[0].take(stale, axis=0)
            low[stale] = np.where(rows == 0, NO_MASS, rows).min(axis=1)
        return int(low.min())

    def highest(self) -> int:
        """Host: the largest mass, 0 when there is none."""
        high = self._looked_up(self.high)
        stale = np.flatnonzero(high == STALE_EDGE)
        if stale.size:
            high[stale] = self.rows[0].take(stale, axis=0).max(axis=1)
        return int(high.max())

    @staticmethod
    def _looked_up(edge: Tensor | None) -> np.ndarray:
        if edge is None:
            raise RuntimeError("this tree was made without the extremes that are asked for.")
        return edge.numpy()
