"""The table that compares libraries: cases down, implementations across."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_replay.console.markdown import number, table

from .cases import short
from .record import Record
from .reference import UNIFORM

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
    "A cycle adds 8 transitions, samples B and gives these B new priorities; in the Atari rows a transition has stacks "
    "of four 84x84 frames before and after. All sampled fields and weights come as torch tensors. Columns marked "
    "uniform have no priorities and do less: they are not compared. Ahead: the best of the others over the first."
)


def peers_table(records: Sequence[Record]) -> str:
    """Microseconds of all implementations; the last column is the best prioritized one's over that of the first."""
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
        ahead = f"{min(others) / times[0]:.2f}x" if times[0] and others else ""
        rows.append([_label(record), *["" if time is None else number(time) for time in times], ahead])
    heads = [f"{name} (uniform)" if name in UNIFORM else name for name in names]
    return table(["µs", *heads, "ahead"], rows)


def _place(record: Record) -> tuple[int, int, int]:
    operations = list(_ROWS)
    known = record.operation in operations
    return operations.index(record.operation) if known else len(operations), record.capacity, record.batch


def _label(record: Record) -> str:
    name = _ROWS.get(record.operation, record.operation)
    return f"{name}, N = {short(record.capacity)}, {'' if 'add' in record.operation else 'B = '}{record.batch:,}"
