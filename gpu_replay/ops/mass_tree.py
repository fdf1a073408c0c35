"""The masses of all slots and the sums above them, which proportional draws search and priority updates change.

Level 0 holds one mass per slot, padded with zeros to whole blocks; every further level holds the sum of each block of
`fanout` nodes below it, up to a root of at most `root_limit` nodes. All are int64 and exact, so a total is `==` the sum
of its leaves after any number of updates.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.loops import tree as loops
from gpu_replay.loops.constants import ROOT_LIMIT
from gpu_replay.ops._backend import Backend
from gpu_replay.ops.counters import NO_MASS


def fanout_for(backend: Backend) -> int:
    """Children of one node: few where every array operation costs, many where every level is a trip to memory."""
    return 16 if backend == "host" else 32


def root_limit_for(backend: Backend) -> int:
    """Nodes of the root at most: the host's loops scan thousands at once, a kernel one block."""
    return ROOT_LIMIT if backend == "host" else fanout_for(backend)


def level_sizes(slots: int, backend: Backend, summed: bool) -> list[int]:
    """Nodes of each level, leaves first, each padded to whole blocks; without sums leaves alone."""
    fanout = fanout_for(backend)
    sizes = [-(-slots // fanout) * fanout]
    while summed and sizes[-1] > root_limit_for(backend):
        sizes.append(-(-(sizes[-1] // fanout) // fanout) * fanout)
    return sizes


class TreeArrays(NamedTuple):
    """Host: a tree as `loops/tree.py` takes it."""

    flat: np.ndarray
    starts: np.ndarray
    changed_slots: np.ndarray


class MassTree:
    """int64 masses of `slots` slots, all 0 at first, and their sums.

    levels: leaves first; `levels[0][:slots]` are the masses. With `summed=False` there are leaves alone,
            which hold order codes (see `OrderRule`), since sums of codes mean nothing.
    """

    def __init__(self, slots: int, device: torch.device, backend: Backend, *, summed: bool = True) -> None:
        self.slots = slots
        self.backend = backend
        self.fanout = fanout_for(backend)
        sizes = level_sizes(slots, backend, summed)
        if backend == "host" and device.type != "meta":
            # all levels in one piece, for the compiled loops
            starts = np.cumsum([0, *sizes])
            flat = np.zeros(starts[-1], dtype=np.int64)
            self.levels = torch.from_numpy(flat).split(sizes)
            # no order of ranks is kept yet
            self.host = TreeArrays(flat, starts, np.zeros(0, dtype=np.int64))
        else:
            self.levels = tuple(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes)

    @property
    def masses(self) -> Tensor:
        """(slots,) int64 masses in slot order, the tree's own memory."""
        return self.levels[0][: self.slots]

    @property
    def nbytes(self) -> int:
        """Bytes of all levels."""
        return sum(level.nbytes for level in self.levels)

    def total(self) -> int:
        """The exact total mass; on CUDA this waits for the device."""
        return loops.total.compiled()(*self.host[:2]) if self.backend == "host" else int(self.levels[-1].sum())

    def build(self) -> None:
        """Recompute all sums from the leaves."""
        if self.backend == "host":
            self._mark_all_changed()
        for below, above in pairwise(self.levels):
            sums = below.view(-1, self.fanout).sum(1)
            above[: sums.numel()] = sums

    def clear(self) -> None:
        """No slot has mass."""
        if self.backend == "host":
            self._mark_all_changed()
        for level in self.levels:
            level.zero_()

    def _mark_all_changed(self) -> None:
        """Host: tell the order of ranks, where one is kept, that more slots have changed than can be recorded."""
        if self.host.changed_slots.size:
            self.host.changed_slots[0] = self.host.changed_slots.size

    def lowest(self) -> Tensor:
        """The smallest mass that is not 0 as int64 without dimensions, or NO_MASS when there is none."""
        # in parts, which need little memory
        parts = [torch.where(part > 0, part, NO_MASS).min() for part in self.masses.split(2**24)]
        return torch.stack(parts).min()
