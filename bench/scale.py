"""How the cost of each call grows with the slots and with the batch, beside the fastest peer and the C program.

And how many bytes a transition takes, over the bytes of its fields, beside all libraries that are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch

from gpu_replay.engines.memory import free_bytes

from . import lower_bound, memory, subjects
from .measure import Maker, Part, Run
from .operations import OURS, Case
from .peers import PEERS, make_peer
from .subjects import Task

SLOTS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 50_000_000, 100_000_000)
ROWS = (1, 8, 64, 256, 1024, 4096, 16_384, 65_536)
# what stays as it is while the other grows
SLOT, ROW = 1_000_000, 256
PEER = "cpprb"
# bytes a slot of all implementations together, and the share of free memory that they may take
SLOT_BYTES, _SHARE = 190, 0.9
# numbers of an observation, and slots of a few hundred megabytes
WIDTHS = {4: 4_000_000, 32: 1_000_000, 256: 100_000, 2048: 20_000}


def cases(slots: Sequence[int] = SLOTS, rows: Sequence[int] = ROWS, slot: int = SLOT) -> list[Case]:
    """All calls over the slots, at B = 256, and over the batch, at N = 1M; those of one capacity together."""
    sizes = sorted({*((each, ROW) for each in slots), *((slot, each) for each in rows)})
    found = []
    for capacity, batch in sizes:
        found += [Case("add", capacity, batch, batch), Case("sample", capacity, batch), Case("update", capacity, batch)]
    return found


def fitting(slots: Sequence[int] = SLOTS) -> list[int]:
    """The numbers of slots that fit free memory; the others are reported."""
    free = free_bytes(torch.device("cpu"))
    found = [each for each in slots if free is None or each * SLOT_BYTES <= _SHARE * free]
    for each in slots[len(found) :]:
        print(f"N = {each:,} is skipped: it takes {each * SLOT_BYTES / 1e9:.0f} GB in all.", file=sys.stderr)
    return found


def parts(quick: bool, names: Sequence[str]) -> list[Part]:
    """Times of this package, the peer with the fastest trees and the lower bound; bytes of all that have `names`."""
    makers: dict[str, Maker] = {
        OURS: subjects.replay,
        PEER: lambda slots: make_peer(PEER, Task(slots, ROW)),
        lower_bound.NAME: lower_bound.make,
    }
    timed = cases((10_000,), (32, 256), 10_000) if quick else cases(fitting())
    widths = {4: 20_000, 256: 5_000} if quick else WIDTHS
    held = [Case("bytes", capacity, 0, width=width) for width, capacity in widths.items()]
    # a tree in Python keeps references to rows
    kept = [name for name in names if PEERS[name].distribution]
    of: dict[str, memory.Maker] = {OURS: subjects.replay, **{name: partial(memory.of_peer, name) for name in kept}}
    return [(timed, partial(Run.records, makers=makers)), (held, partial(memory.records, makers=of))]
