"""Draws by rank: the masses of ranks, and the order of a buffer's slots, exact at every draw.

The masses are integers that fall as 1 / rank ** alpha, made once, so that host and device draw from the same.

The host sorts once and then brings its order up to date with what has changed, as `loops/ranks.py` says. A device sorts
at every draw: the order codes of all slots are arranged by the age of their keys and sorted, the largest first. The
sort is stable, so that equal codes keep the smaller key first; slots that cannot be drawn have code 0 and come last.
Nothing here waits for the device, and a CUDA graph can capture all of it. During a sort it needs up to 40 bytes a slot
of extra memory: the arranged codes, the sorted codes, and as much again for PyTorch's radix sort.

Prefix sums of all masses take two launches on a device, whatever the length: one sums up parts of the numbers, the
other scans each part from the sum of those before it. This moves 24 bytes a number where one launch could do with 16,
but whose programs would have to wait for each other's sums.

Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.loops import ranks as loops
from gpu_replay.ops._backend import choose
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.masses import MassTree

# the total of all ranks stays below 2**62, and a mass is a whole float64
_TOTAL_BITS = 61
_MASS_BITS = 52
# when a larger share of all slots has changed, sorting anew takes less
_CHANGED = 8
# parts of a prefix sum at most, which the multiprocessors of a large GPU hold all at once, and the numbers of a block
_PARTS, _BLOCK = 1024, 1024


def cumulative_masses(slots: int, alpha: float) -> np.ndarray:
    """(slots,) int64: entry `r` is the sum of the masses of the ranks from 1 to r + 1.

    With `n` ranked transitions their total is entry n - 1, and rank `r + 1` is drawn where the first entry above a
    target in [0, total) is entry `r`.
    """
    return np.cumsum(rank_masses(slots, alpha))


def rank_masses(slots: int, alpha: float) -> np.ndarray:
    """(slots,) int64 masses of the ranks from 1 on, at least 1 each."""
    share = np.arange(1, slots + 1, dtype=np.float64)
    np.log2(share, out=share)
    share *= -alpha
    np.exp2(share, out=share)
    bits = min(_MASS_BITS, int(np.floor(_TOTAL_BITS - np.log2(share.sum()))))
    share *= float(2**bits)
    share += 0.5
    # the cast truncates, which is the floor of a positive number
    masses = share.astype(np.int64)
    np.maximum(masses, 1, out=masses)
    return masses


class RankedRows(NamedTuple):
    """`B` draws by rank.

    slots:  (B,) int64. masses: (B,) int64, of the ranks that were drawn.
    total:  mass of all ranks; `last` that of the lowest rank.
    """

    slots: np.ndarray
    masses: np.ndarray
    total: int
    last: int


def most_changes(slots: int) -> int:
    """Changes that are recorded between two draws, at most."""
    return slots // _CHANGED + 64


def _block_shape(slots: int) -> tuple[int, int]:
    """Blocks, twice as many as must be, and the slots of one at most.

    A draw sums up the sizes of all blocks and sorts one for each of its rows: 128 slots of a million.
    """
    width = max(8, 1 << max(0, (slots.bit_length() + 1) // 2 - 3))
    return 2 * slots // width + 2, width


def _arrays(slots: int, full: Callable[[Any, int, Any], np.ndarray] = np.full) -> tuple[np.ndarray, ...]:
    """Where changes are recorded, and then what `loops/ranks.py` takes of the order of so many slots.

    full: makes an array of a shape, a number and a dtype.
    """
    blocks, width = _block_shape(slots)
    # unlike zeros, these may be in large pages of memory
    return (
        full(most_changes(slots) + 1, 0, np.int64),
        full((blocks, width), 0, np.int64),
        full((blocks, width), 0, np.int32),
        full(slots, -1, np.int32),
        # fences, their keys, the order of blocks and their sizes
        *(full(blocks, 0, np.int64) for _ in range(4)),
        full(loops.COUNT, -1, np.int64),
    )


def host_ranks_bytes(slots: int) -> int:
    """Bytes of the `HostRanks` of a buffer: of table, order and recorded changes."""
    # one number seen in every place has the size of an array and takes no memory
    arrays = _arrays(slots, lambda shape, number, dtype: np.broadcast_to(dtype(number), shape))
    return slots * np.int64().nbytes + sum(array.nbytes for array in arrays)


class HostRanks:
    """The rank order of one buffer on the host, and draws from it.

    leaves: (slots,) int64 order codes, 0 for slots that cannot be drawn. counters: of the buffer.
    changed_slots: where `loops/masses.py` records which codes and keys have changed.
    """

    def __init__(self, leaves: np.ndarray, counters: np.ndarray, alpha: float) -> None:
        slots = leaves.size
        self._leaves, self._counters = leaves, counters
        self._sums = cumulative_masses(slots, alpha)
        self.changed_slots, *self._order = _arrays(slots)
        self._counts = self._order[-1]

    def draw_ranks(self, doubles: np.ndarray, *, stratified: bool) -> RankedRows:
        """Draw one row for each of (B,) float64 in [0, 1). Raises RuntimeError where no slot can be drawn.

        stratified: from each of B equal parts of the mass.
        """
        added, counts = self._counters.item(Counter.ADDED), self._counts
        changed = self._changes()
        # marked invalid until the update is done: after an interrupt the next draw sorts anew
        counts[loops.ADDED] = -1
        self._renew(changed, added)
        count = counts.item(loops.RANKED)
        if not count:
            raise RuntimeError("no stored row has a priority to sample by; a state that was loaded may have lost them.")
        ranks, masses = np.empty((2, doubles.size), dtype=np.int64)
        loops.draw.compiled()(self._sums, count, doubles, stratified, ranks, masses)
        slots = self._located(ranks, added)
        self.changed_slots[0], counts[loops.ADDED] = 0, added
        total, before = self._sums.item(count - 1), self._sums.item(count - 2) if count > 1 else 0
        return RankedRows(slots, masses, total, total - before)

    def _changes(self) -> np.ndarray | None:
        """The slots whose code or key changed since the last call; None if all may have changed."""
        count = self.changed_slots.item(0)
        if self._counts.item(loops.ADDED) < 0 or count >= self.changed_slots.size:
            return None
        return self.changed_slots[1 : count + 1]

    def _renew(self, changed: np.ndarray | None, added: int) -> None:
        """Bring the order up to date."""
        if changed is None:
            # by age, so that among equal codes the smaller key comes first
            slots = np.arange(added, added + self._leaves.size) % self._leaves.size
            codes = self._leaves[slots]
            self._fill(slots[np.argsort(-codes, kind="stable")[: np.count_nonzero(codes)]], added)
        elif changed.size:
            loops.remove.compiled()(changed, *self._order)
            insert, done = loops.insert.compiled(), 0
            while (done := insert(changed, done, added, self._leaves, *self._order)) < changed.size:
                # all that have a rank
                listed = np.arange(self._counts.item(loops.RANKED))
                self._fill(self._located(listed, added), added)

    def _located(self, ranks: np.ndarray, added: int) -> np.ndarray:
        """The (B,) slots that have these ranks, counted from 0."""
        slots = np.empty(ranks.size, dtype=np.int64)
        loops.locate.compiled()(ranks, added, slots, *self._order)
        return slots

    def _fill(self, listed: np.ndarray, added: int) -> None:
        """Make all blocks anew of (n,) slots in order, each five eighths full."""
        codes, slots, block_of, fences, fence_keys, order, sizes, counts = self._order
        width, count = codes.shape[1], listed.size
        each = width * 5 // 8
        blocks = max(1, -(-count // each))
        block = np.arange(count) // each
        places = block * (width - each) + np.arange(count)
        firsts = listed[::each]
        codes.reshape(-1)[places], slots.reshape(-1)[places] = self._leaves[listed], listed
        block_of.fill(-1)
        block_of[listed] = block
        order[:blocks], sizes[:blocks] = np.arange(blocks), each
        sizes[blocks - 1] = count - (blocks - 1) * each
        fences[: firsts.size] = self._leaves[firsts]
        fence_keys[: firsts.size] = added - 1 - (added - 1 - firsts) % self._leaves.size
        counts[loops.RANKED], counts[loops.BLOCKS] = count, blocks


def inclusive_prefix_sum(values: Tensor) -> Tensor:
    """(N,) int64 sums of the first 1, 2, ..., N of (N,) int64 values; N may be 0. Overflow wraps."""
    if choose(values.device) == "host":
        return torch.from_numpy(values.numpy().cumsum())
    from gpu_replay.kernels.prefix_sum import scan_parts_kernel, sum_parts_kernel

    values, length = values.contiguous(), values.numel()
    out = torch.empty_like(values)
    if length:
        # blocks of each part, and parts
        blocks = -(-length // (_PARTS * _BLOCK))
        parts = -(-length // (blocks * _BLOCK))
        sums = torch.empty(parts, dtype=torch.int64, device=values.device)
        with torch.cuda.device_of(values):
            sum_parts_kernel[(parts,)](values, sums, length, blocks, BLOCK=_BLOCK)
            scan_parts_kernel[(parts,)](values, sums, out, length, blocks, PARTS=_PARTS, BLOCK=_BLOCK)
    return out


def device_ranks_bytes(slots: int) -> int:
    """Bytes of the `DeviceRanks` of a buffer: of table and list."""
    return (2 * slots + 1) * np.int64().nbytes


class DeviceRanks:
    """The masses of ranks and the list of a buffer, and whether the next `sample` must sort it anew.

    sums:   (slots,) int64, the masses of the ranks up to each.
    ages:   (slots,) int64 ages of the keys in order of their ranks, 0 for the oldest slot of the ring.
    listed: (1,) int64, how many of them can be drawn: the first.
    """

    def __init__(self, slots: int, alpha: float, counters: Tensor) -> None:
        self.sums = inclusive_prefix_sum(torch.from_numpy(rank_masses(slots, alpha)).to(counters.device))
        self._counters = counters
        self.ages = torch.zeros_like(self.sums)
        self.listed = counters.new_zeros(1)
        # whether the list is that of this moment, as far as the host knows, and whether a graph may have changed that
        self._current = self._unsure = False

    def changed(self, capturing: bool) -> None:
        """Transitions were added, updated, cleared or restored."""
        self._unsure |= capturing
        self._current = False

    def current(self, tree: MassTree, capturing: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Sums, ages and their number, to draw from now; sorted anew unless nothing has changed since it was made."""
        if capturing or self._unsure or not self._current:
            self._sort(tree)
            # one that is captured is made by the replays
            self._current |= not capturing
        return self.sums, self.ages, self.listed

    def _sort(self, tree: MassTree) -> None:
        oldest, ages = self._counters[Counter.ADDED], torch.arange(tree.slots, device=self._counters.device)
        # by age, so that among equal codes the smaller key comes first
        codes = tree.masses[ages.add_(oldest).remainder_(tree.slots)]
        del ages
        # code 0 comes after all that can be drawn
        self.listed.copy_((codes > 0).sum())
        torch.sort(codes, descending=True, stable=True, out=(torch.empty_like(codes), self.ages))
