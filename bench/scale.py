"""How the cost of each call grows with the slots and with the batch, beside the fastest peer and the C program."""

from __future__ import annotations

from . import lower_bound, subjects
from .cases import OURS, Case
from .measure import Maker
from .peers_suite import Task, make_peer

SLOTS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 50_000_000)
ROWS = (1, 8, 64, 256, 1024, 4096, 16_384, 65_536)
# what stays as it is while the other grows
SLOT, ROW = 1_000_000, 256
PEER = "cpprb"


def cases(slots: tuple[int, ...] = SLOTS, rows: tuple[int, ...] = ROWS, slot: int = SLOT) -> list[Case]:
    """All calls over the slots, at B = 256, and over the batch, at N = 1M; those of one capacity together."""
    sizes = sorted({*((each, ROW) for each in slots), *((slot, each) for each in rows)})
    found = []
    for capacity, batch in sizes:
        found += [Case("add", capacity, batch, batch), Case("sample", capacity, batch), Case("update", capacity, batch)]
    return found


def makers() -> dict[str, Maker]:
    """This package, the peer with the fastest trees, and the lower bound."""
    return {
        OURS: subjects.replay,
        PEER: lambda slots: make_peer(PEER, Task(slots, ROW)),
        lower_bound.NAME: lower_bound.make,
    }
