"""A list of ranks on the device that is kept, and brought up to date by what has changed since it was made.

What has changed is found by comparing the codes of all slots with those by which they are listed, and keys with the
keys of then: so nothing need be told what was added, updated, cleared or restored. The changes are put in order, and
one pass moves what stays and writes them in between. Per slot that moves 24 bytes, where a radix sort of codes and ages
moves some 300. All is decided on the device; nothing waits for it, and it can be captured in a CUDA graph.

Up to 40 bytes a slot are taken beside what is kept while it happens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_replay.ops.draws import per_program
from gpu_replay.ops.launch import Launch
from gpu_replay.ops.mass_tree import MassTree

# changes that are put in order by comparing each with each; then so many runs become one
_RUN = 1024
_FAN = 32
# parts that one step of a search divides what is left into
BASE = 32
# programs that share the changes, however many there are
_PROGRAMS = 1024
# how many changes, runs of them at first, one program looks at together
_CHUNK = 64


class MergedList:
    """Slots in order of their ranks, and by what they were ranked.

    slots: (2 * capacity,) int32: the list is in one half, which the next merge leaves for the other.
    state: (6,) int64: entries of the list, where its half begins, the next key when it was made; and the same as it was
           before the merge in progress.
    known: (capacity,) int64 codes by which slots are listed, 0 for those that are not.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = torch.zeros(2 * slots, dtype=torch.int32, device=device)
        self.state = torch.zeros(6, dtype=torch.int64, device=device)
        self.known = torch.zeros(slots, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of list, state and codes."""
        return self.slots.nbytes + self.state.nbytes + self.known.nbytes


def merged_bytes(slots: int) -> int:
    """Bytes of a `MergedList` of so many slots."""
    return slots * (2 * torch.int32.itemsize + torch.int64.itemsize) + 6 * torch.int64.itemsize


def joins_for(slots: int) -> int:
    """Launches that join runs of changes, when all slots may have changed."""
    joins, run = 0, _RUN
    while run < slots:
        joins, run = joins + 1, run * _FAN
    return joins


def digits_for(slots: int) -> int:
    """Steps of a search."""
    digits = 1
    while BASE**digits < slots:
        digits += 1
    return digits


def plan_merge(merged: MergedList, tree: MassTree, counters: Tensor) -> Callable[[], None]:
    """Device: each call brings the list up to date; 3 launches, those that join runs, and a fill of one number."""
    from gpu_replay.kernels.rank_merge import changes_kernel, join_kernel, merge_kernel, order_kernel

    capacity, device, joins = tree.slots, counters.device, joins_for(tree.slots)
    interpreted = device.type == "cpu"
    slots = per_program(1024, capacity, interpreted, most=2**16)
    find = Launch(changes_kernel, -(-capacity // slots), SLOTS=slots)
    searches = {"DIGITS": digits_for(capacity), "BASE": BASE}
    each = min(_RUN, per_program(8, capacity, interpreted, most=64))
    programs = 2 * min(_PROGRAMS, -(-capacity // each))
    order = Launch(order_kernel, programs, ENTRIES=each, RUN=_RUN, CHUNK=min(_RUN, _CHUNK), **searches)
    join = Launch(join_kernel, programs, ENTRIES=each, FAN=_FAN)
    runs = [_RUN * _FAN**number for number in range(joins)]
    slots = per_program(512, capacity, interpreted, most=2**16)
    merge = Launch(merge_kernel, -(-capacity // slots), SLOTS=slots, JOINS=joins, RUN=_RUN, FAN=_FAN, **searches)
    codes, known, listed, state = tree.masses, merged.known, merged.slots, merged.state

    def bring_up_to_date() -> None:
        changes = torch.empty((2, capacity), dtype=torch.int32, device=device)
        entries = torch.empty((1 + (joins > 0), 2, capacity), dtype=torch.int64, device=device)
        # anew for each call: one that was broken off leaves nothing to the next
        counts = torch.zeros(1, dtype=torch.int64, device=device)
        find(codes, known, changes, counts, state, counters, capacity)
        order(changes, counts, entries, listed, state, codes, known, counters, capacity)
        for number, run in enumerate(runs):
            given, joined = entries[number % 2], entries[1 - number % 2]
            join(given, joined, counts, state, codes, known, counters, capacity, run, run.bit_length())
        merge(entries, counts, listed, state, codes, known, counters, capacity)

    return bring_up_to_date
