"""Draws by rank on the device: who has which rank, found by a sort or by a merge, and the launches of the draws.

A list that must be of this moment at every sample is kept and brought up to date by what has changed (see
`rank_merge.py`); it is sorted where the host knows that much has. One that serves several samples, or a single call, is
always sorted.

The order codes of all slots are arranged by the age of their keys and sorted, the largest first. The sort is stable, so
that equal codes keep the smaller key first, and codes of 0, of slots that cannot be drawn, come last. Nothing of it
waits for the device, and all of it can be captured in a CUDA graph. While a sort is under way it takes up to 48 bytes a
slot beside what is kept: the codes, sorted codes and ages, and what PyTorch's radix sort needs as much again for.

Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_replay.ops.counters import Counter
from gpu_replay.ops.draws import DeviceDraws, new_draws, per_program, reciprocal
from gpu_replay.ops.launch import Launch
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.prefix_sum import inclusive_prefix_sum
from gpu_replay.ops.rank_merge import BASE, MergedList, digits_for, merged_bytes, plan_merge
from gpu_replay.ops.rank_table import rank_masses

# places of the list that one step of the search for a slot that can still be drawn reads
_WIDTH = 32
# when a larger share of all slots has changed, sorting anew is cheaper
_CHANGED = 16


class RankList(NamedTuple):
    """Slots in order of their ranks.

    slots:  (capacity,) int32, of which the first `listed[0]` can be drawn. listed: (1,) int64.
    merged: the two are of a `MergedList`, (2 * capacity,) and (6,): the list begins at `listed[1]`.
    """

    slots: Tensor
    listed: Tensor
    merged: bool = False


class DeviceRanks:
    """The masses of ranks and the list of a buffer, and whether the next `sample` must make the list anew.

    every:    samples that a list serves. One that serves a single sample is kept all the same while the host knows that
              nothing has changed; with more, `counters` say how long it is and when it was made.
    counters: of the buffer.
    sums:     the masses of the ranks up to each, (slots,) int64 on the device, where somebody has made them already.
    """

    def __init__(self, slots: int, alpha: float, every: int, counters: Tensor, sums: Tensor | None = None) -> None:
        device = counters.device
        if sums is None:
            sums = inclusive_prefix_sum(torch.from_numpy(rank_masses(slots, alpha)).to(device))
        self.sums = sums
        self.every = every
        self._counters = counters
        # one that serves a single sample is brought up to date by the next
        self._merged = MergedList(slots, device) if every == 1 else None
        self._merge: Callable[[], None] | None = None
        if self._merged is not None:
            self.list = RankList(self._merged.slots, self._merged.state, merged=True)
        else:
            count = counters[Counter.RANKED : Counter.RANKED + 1]
            self.list = RankList(torch.zeros(slots, dtype=torch.int32, device=device), count)
        # where the device says whether the list is out of date
        self._due = torch.zeros_like(counters[:1]) if every > 1 else None
        # samples that the list can still serve, as far as the host knows
        self._left = 0
        # slots that have changed since the list was made, as far as the host knows
        self._changes = 0
        # whether a graph may have changed what the host thinks it knows
        self._unsure = False
        # samples left when the sample in progress began, and whether it made the list anew
        self._before, self._made = 0, False

    @property
    def nbytes(self) -> int:
        """Bytes of table and list."""
        return self.sums.nbytes + (self.list.slots.nbytes if self._merged is None else self._merged.nbytes)

    def changed(self, rows: int, capturing: bool) -> None:
        """So many rows were added or updated."""
        self._unsure |= capturing
        if self.every == 1:
            self._left = 0
            self._changes += rows

    def on_clear(self, capturing: bool) -> None:
        """Reset host state after `clear`."""
        self._unsure |= capturing
        self._left, self._changes = 0, self.sums.numel()

    def rebuild(self) -> None:
        """Take over a restored state. Waits for the device."""
        self._left, self._changes = 0, self.sums.numel()
        if self.every > 1:
            counts = self._counters.tolist()
            if counts[Counter.RANKED]:
                self._left = max(0, self.every - (counts[Counter.STEP] - counts[Counter.SORTED]))

    def mark(self) -> None:
        """A sample begins, which `take_back` may take back."""
        self._before, self._made = self._left, False

    def take_back(self) -> None:
        """Let the next sample find the list out of date if the one in progress found it so."""
        if self._made and self._due is not None:
            self._counters[Counter.RANKED : Counter.RANKED + 1].mul_(1 - self._due)
        self._left = 0 if self._made else self._before

    def skip_sample(self, capturing: bool) -> None:
        """Count a sample that does not make the list anew."""
        if self.every > 1:
            self._unsure |= capturing
            self._left = max(0, self._left - 1)

    def exact(self, tree: MassTree, skipped: int, capturing: bool) -> RankList:
        """A list of its own for one call, without the newest `skipped` slots; 2 launches and a sort."""
        self.skip_sample(capturing)
        made = RankList(self.list.slots.new_empty(tree.slots), self._counters.new_empty(1))
        _make_list(tree, self._counters, made, skipped=skipped)
        return made

    def current(self, tree: MassTree, capturing: bool) -> RankList:
        """The list to draw from now; 2 launches and a sort where it is made anew, 4 to 8 where changes are merged."""
        known = not (capturing or self._unsure)
        if known and self._left:
            self.skip_sample(capturing)
            return self.list
        self._made = True
        # a graph does the same each time; else a sort is right even where more has changed than the host knows
        self._make(tree, merge=capturing or self._changes * _CHANGED <= tree.slots)
        if not capturing:
            self._changes = 0
        if known:
            # one that serves a single sample does so until something changes
            self._left = max(1, self.every - 1)
        else:
            # only the device knows whether it is time
            self._unsure |= self.every > 1
            self._left = 0
        return self.list

    def _make(self, tree: MassTree, *, merge: bool) -> None:
        """Bring the list up to date, or one that serves several samples if it is time."""
        if self._merged is None:
            _make_list(tree, self._counters, self.list, due=self._due, every=self.every)
        elif merge:
            if self._merge is None:
                self._merge = plan_merge(self._merged, tree, self._counters)
            self._merge()
        else:
            _make_list(tree, self._counters, self.list, known=self._merged.known)


def ranks_bytes(slots: int, every: int) -> int:
    """Bytes of the table and the list of `DeviceRanks`."""
    return slots * torch.int64.itemsize + (merged_bytes(slots) if every == 1 else slots * torch.int32.itemsize)


def _make_list(
    tree: MassTree,
    counters: Tensor,
    made: RankList,
    *,
    skipped: int = 0,
    known: Tensor | None = None,
    due: Tensor | None = None,
    every: int = 1,
) -> None:
    """Device: sort the slots by their codes, without the newest `skipped`; two launches beside the sort.

    known: codes of slots in a `MergedList`, of which `made` is a part: what it is merged with next.
    due, every: (1,) int64, of a list that serves so many samples: it stays as it is unless it is out of date by now.
    """
    from gpu_replay.kernels.rank_draw import arrange_kernel, list_kernel

    slots = per_program(1024, tree.slots, counters.device.type == "cpu", most=2**16)
    grid = (-(-tree.slots // slots),)
    codes = torch.empty(tree.slots, dtype=torch.int64, device=counters.device)
    # the device decides alone, so that a captured call is the same code as any other
    said = counters if due is None else due
    sizes = {"KEPT": due is not None, "SLOTS": slots}
    arrange_kernel[grid](tree.masses, codes, said, counters, tree.slots, skipped, every, **sizes)
    codes, ages = torch.sort(codes, descending=True, stable=True)
    noted = () if known is None else (known,)
    list_kernel[grid](codes, ages, made.slots, made.listed, noted, said, counters, tree.slots, **sizes)


def plan_rank_draw(
    sums: Tensor,
    tree: MassTree,
    eligible_tree: MassTree | None,
    counters: Tensor,
    times_sampled: Tensor,
    drawn: int,
    batch: int,
    *,
    skipped: int = 0,
    shifted: bool = False,
    merged: bool = False,
    outdated: bool = False,
    stratified: bool,
    lowest_of_all: bool,
) -> Callable[[RankList], DeviceDraws]:
    """Device: `drawn` draws from a list by rank and the newest for the rest of the batch; one launch a call, all of the
    same list or each of one of its own.

    sums:     of the masses of the ranks up to each.
    tree:     of the codes.
    eligible_tree: of ones where the newest rows can be drawn, or None where all stored ones can.
    skipped:  slots of the newest keys that newest rows leave out; the list must have been made without them.
    shifted:  whether random words are taken after the draw's own.
    merged:   whether lists are those of a `MergedList`.
    outdated: whether the list may hold slots that can no longer be drawn.
    """
    from gpu_replay.kernels.rank_draw import rank_draw_kernel

    device = counters.device
    # two draws for each of four warps
    draws = per_program(8, batch, device.type == "cpu")
    newest = () if eligible_tree is None or drawn == batch else eligible_tree.levels
    launch = Launch(
        rank_draw_kernel,
        -(-batch // draws),
        DIGITS=digits_for(tree.slots),
        BASE=BASE,
        FANOUT=tree.fanout,
        DRAWS=draws,
        WIDTH=_WIDTH,
        STRATIFIED=stratified,
        SKIPS=skipped > 0,
        MERGED=merged,
        OUTDATED=outdated,
        LOWEST_OF_ALL=lowest_of_all,
    )
    masses = tree.masses
    numbers = (drawn, batch, tree.slots, skipped, reciprocal(drawn), reciprocal(tree.slots))

    def draw(ranked: RankList) -> DeviceDraws:
        found = new_draws(batch, device, by_priority=True, shifted=shifted)
        ranks = (sums, ranked.slots, ranked.listed)
        launch(ranks, masses, newest, counters, found.outputs(times_sampled), found.word_outputs, *numbers)
        return found

    return draw
