"""The masses of all slots and the sums above them, which proportional draws search and priority updates change.

Level 0 holds one mass per slot, padded with zeros to whole blocks; every further level holds the sum of each block of
`fanout` nodes below it, up to a root of at most `root_limit` nodes. All are int64 and exact, so a total is `==` the sum
of its leaves after any number of updates. Optionally the smallest (`low`) and largest (`high`) mass of every block of
leaves is kept; updates only write `DIRTY` there, and the next query finds those again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.loops import tree as loops
from gpu_replay.loops.constants import DIRTY as DIRTY
from gpu_replay.loops.constants import ROOT_LIMIT
from gpu_replay.ops._backend import Backend
from gpu_replay.ops.counters import NO_MASS
from gpu_replay.ops.launch import Launch, per_program

# nodes of the upper of two levels that a program of a build makes: 16 KB of the level below them
_TOPS = 2


def fanout_for(backend: Backend) -> int:
    """Children of one node: few where every array operation costs, many where every level is a trip to memory."""
    return 16 if backend == "host" else 32


def extremes_block_for(backend: Backend) -> int:
    """Leaves of one block whose extremes are kept."""
    return fanout_for(backend) if backend == "host" else 128


def root_limit_for(backend: Backend) -> int:
    """Nodes of the root at most: the host's loops scan thousands at once, a kernel one block."""
    return ROOT_LIMIT if backend == "host" else fanout_for(backend)


def level_sizes(slots: int, fanout: int, root_limit: int, extremes_block: int) -> list[int]:
    """Nodes of each level, leaves first, each padded to whole blocks; leaves also to blocks of `extremes_block`."""
    sizes = [-(-slots // extremes_block) * extremes_block]
    while sizes[-1] > root_limit:
        sizes.append(-(-(sizes[-1] // fanout) // fanout) * fanout)
    return sizes


def tree_bytes(slots: int, backend: Backend, low: bool = False, high: bool = False, summed: bool = True) -> int:
    """Bytes that a tree over this many slots takes."""
    fanout = fanout_for(backend)
    sizes = level_sizes(slots, fanout, root_limit_for(backend), extremes_block_for(backend))[: None if summed else 1]
    return 8 * (sum(sizes) + (low + high) * (sizes[0] // extremes_block_for(backend)))


class TreeArrays(NamedTuple):
    """Host: a tree as `loops/tree.py` takes it."""

    flat: np.ndarray
    starts: np.ndarray
    low: np.ndarray
    high: np.ndarray
    changed_slots: np.ndarray


class MassTree:
    """int64 masses of `slots` slots, all 0 at first, and their sums.

    levels: leaves first; `levels[0][:slots]` are the masses. With `summed=False` there are leaves alone,
            which hold order codes (see `OrderRule`), since sums of codes mean nothing.
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
        self.extremes_block = extremes_block_for(backend)
        sizes = level_sizes(slots, self.fanout, root_limit_for(backend), self.extremes_block)[: None if summed else 1]
        host = backend == "host"
        if host:
            # all levels in one piece, for the compiled loops
            starts = np.cumsum([0, *sizes])
            flat = np.zeros(starts[-1], dtype=np.int64)
            self.levels = torch.from_numpy(flat).split(sizes)
        else:
            self.levels = tuple(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes)
        blocks = sizes[0] // self.extremes_block
        self.low = torch.full((blocks,), NO_MASS, dtype=torch.int64, device=device) if low else None
        self.high = torch.zeros(blocks, dtype=torch.int64, device=device) if high else None
        if host:
            # views of the same memory
            self.arrays = tuple(level.numpy() for level in self.levels)
            nothing = np.zeros(0, dtype=np.int64)
            low_high = [nothing if each is None else each.numpy() for each in (self.low, self.high)]
            # no order of ranks is kept yet
            self.host = TreeArrays(flat, starts, low_high[0], low_high[1], nothing)

    @property
    def masses(self) -> Tensor:
        """(slots,) int64 masses in slot order, the tree's own memory."""
        return self.levels[0][: self.slots]

    @property
    def nbytes(self) -> int:
        """Bytes of all levels and extremes."""
        extremes = [each for each in (self.low, self.high) if each is not None]
        return sum(tensor.nbytes for tensor in (*self.levels, *extremes))

    def total(self) -> int:
        """The exact total mass; on CUDA this waits for the device."""
        return loops.total.compiled()(*self.host[:2]) if self.backend == "host" else int(self.levels[-1].sum())

    def build(self) -> None:
        """Recompute all sums from the leaves; on a device one launch for every two levels above them."""
        if self.backend == "host":
            self._mark_all_changed()
            loops.build.compiled()(*self.host[:4])
            return
        from gpu_replay.kernels.mass_tree import block_sums_kernel

        for place in range(0, len(self.levels) - 1, 2):
            below, above = self.levels[place], self.levels[place + 1 : place + 3]
            with torch.cuda.device_of(below):
                programs = -(-below.numel() // (_TOPS * self.fanout**2))
                block_sums_kernel[(programs,)](below, above, below.numel(), TOPS=_TOPS)
        for extreme in (self.low, self.high):
            if extreme is not None:
                extreme.fill_(DIRTY)

    def clear(self) -> None:
        """No slot has mass."""
        if self.backend == "host":
            self._mark_all_changed()
        for level in self.levels:
            level.zero_()
        if self.low is not None:
            self.low.fill_(NO_MASS)
        if self.high is not None:
            self.high.zero_()

    def _mark_all_changed(self) -> None:
        """Host: tell the order of ranks, where one is kept, that more slots have changed than can be recorded."""
        if self.host.changed_slots.size:
            self.host.changed_slots[0] = self.host.changed_slots.size

    def lowest(self) -> int:
        """Host: the smallest mass that is not 0, or NO_MASS when there is none."""
        return int(loops.lowest.compiled()(self.host.flat, self.host.low))


def make_extreme(tree: MassTree, counters: Tensor, *, low: bool) -> Callable[[], None]:
    """Device: bring the largest mass of a tree into counters[HIGHEST], or the smallest that is not 0 into
    counters[LOWEST]; one launch a call, which changes nothing else that lasts.
    """
    from gpu_replay.kernels.mass_tree import find_extreme_kernel

    extremes = tree.low if low else tree.high
    if extremes is None:
        raise RuntimeError(f"this tree was made without its {'smallest' if low else 'largest'} masses.")
    blocks = extremes.numel()
    each = per_program(32, blocks, counters.device.type == "cpu", most=256)
    return Launch(
        find_extreme_kernel,
        -(-blocks // each),
        extremes_ptr=extremes,
        leaves_ptr=tree.levels[0],
        counters_ptr=counters,
        blocks=blocks,
        LOW=low,
        BLOCKS=each,
    )
