"""The table that compares libraries: cases down, implementations across."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_replay.console.markdown import number, table

from .cases import short
from .record import Record
from .subjects import PEERS

# without priorities they do less work: shown beside the others, never the baseline
UNIFORM = frozenset(name for name, peer in PEERS.items() if peer.uniform)

# operation to where its rows stand and what they are called
_ROWS = {
    "cycle": "cycle",
    "frame-cycle": "cycle, Atari",
    "add": "add",
    "frame-add": "add, Atari",
    "index": "index alone",
    "update": "update",
}
NOTE = (
    "A cycle adds 8 transitions, samples B and gives these B new priorities; an Atari transition has stacks of four "
    "84x84 frames before and after. All fields and weights are sampled as torch tensors. Speedup: the best other "
    "prioritized buffer's time over that of gpu_replay. Columns marked uniform have no priorities, do less work and "
    "are left out of the speedup. Implementations are interleaved."
)


def peers_table(records: Sequence[Record]) -> str:
    """Microseconds of all implementations; the last column is the best prioritized peer's time over this package's."""
    names = list(dict.fromkeys(record.implementation for record in records))
    # a renewed case stands last in its file
    names.sort(key=lambda name: name != "gpu_replay")
    found = {(record.case, record.implementation): record.median for record in records}
    rows = []
    for record in sorted({record.case: record for record in records}.values(), key=_place):
        times = [found.get((record.case, name)) for name in names]
        others = [
            time for name, time in zip(names[1:], times[1:], strict=True) if time is not None and name not in UNIFORM
        ]
        speedup = f"{min(others) / times[0]:.2f}x" if times[0] and others else ""
        rows.append([_label(record), *["" if time is None else number(time) for time in times], speedup])
    heads = [f"{name} (uniform)" if name in UNIFORM else name for name in names]
    return table(["µs", *heads, "speedup"], rows)


def _place(record: Record) -> tuple[int, int, int]:
    operations = list(_ROWS)
    known = record.operation in operations
    return operations.index(record.operation) if known else len(operations), record.capacity, record.batch


def _label(record: Record) -> str:
    name = _ROWS.get(record.operation, record.operation)
    return f"{name}, N = {short(record.capacity)}, {'' if 'add' in record.operation else 'B = '}{record.batch:,}"


def best_peer(case: str, records: Iterable[Record], cpu: str) -> Record | None:
    """The fastest prioritized library that was measured in a case on this CPU model; None where there is none."""
    found = [
        record
        for record in records
        if (record.suite, record.case) == ("peers", case)
        and record.implementation not in {"gpu_replay", *UNIFORM}
        and (record.environment.cpu, record.environment.device) == (cpu, "cpu")
        and not record.quick
    ]
    return min(found, key=lambda record: record.median, default=None)
