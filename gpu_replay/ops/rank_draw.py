"""Ranks on the device: a sort that puts all slots in order.

The order codes of all slots are arranged by the age of their keys and sorted, the largest first. The sort is stable, so
that equal codes keep the smaller key first; slots that cannot be drawn have code 0 and come last. Nothing here waits
for the device, and a CUDA graph can capture all of it. During a sort it needs up to 40 bytes a slot of extra memory:
the arranged codes, the sorted codes, and as much again for PyTorch's radix sort.

Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu_replay.ops.counters import Counter
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.prefix_sum import inclusive_prefix_sum
from gpu_replay.ops.ranks import rank_masses


class RankList(NamedTuple):
    """All eligible slots in rank order.

    ages:   (capacity,) int64 ages of the keys in order of their ranks, 0 for the oldest slot of the ring.
    listed: (1,) int64, how many of them can be drawn: the first.
    """

    ages: Tensor
    listed: Tensor


class DeviceRanks:
    """The masses of ranks and the list of a buffer, and whether the next `sample` must sort it anew.

    counters: of the buffer.
    sums:     the masses of the ranks up to each, (slots,) int64 on the device, where somebody has made them already.
    """

    def __init__(self, slots: int, alpha: float, counters: Tensor, sums: Tensor | None = None) -> None:
        if sums is None:
            sums = inclusive_prefix_sum(torch.from_numpy(rank_masses(slots, alpha)).to(counters.device))
        self.sums = sums
        self._counters = counters
        ages = torch.zeros(sums.numel(), dtype=torch.int64, device=counters.device)
        self._list = RankList(ages, torch.zeros(1, dtype=torch.int64, device=counters.device))
        # whether the list is that of this moment, as far as the host knows, and whether a graph may have changed that
        self._current = self._unsure = False

    @property
    def nbytes(self) -> int:
        """Bytes of table and list."""
        return self.sums.nbytes + self._list.ages.nbytes + self._list.listed.nbytes

    def changed(self, capturing: bool) -> None:
        """Transitions were added, updated, cleared or restored."""
        self._unsure |= capturing
        self._current = False

    def current(self, tree: MassTree, capturing: bool) -> RankList:
        """The list to draw from now; sorted anew unless nothing has changed since it was made."""
        if capturing or self._unsure or not self._current:
            self._sort(tree)
            # one that is captured is made by the replays
            self._current |= not capturing
        return self._list

    def _sort(self, tree: MassTree) -> None:
        oldest, ages = self._counters[Counter.ADDED], torch.arange(tree.slots, device=self._counters.device)
        # by age, so that among equal codes the smaller key comes first
        codes = tree.masses[ages.add_(oldest).remainder_(tree.slots)]
        del ages
        # code 0 comes after all that can be drawn
        self._list.listed.copy_((codes > 0).sum())
        torch.sort(codes, descending=True, stable=True, out=(torch.empty_like(codes), self._list.ages))
