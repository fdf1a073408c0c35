"""What it costs to store transitions and to read batches back, for each way of keeping them in `layouts.py`.

Each layout takes 2,000,000 transitions one at a time, as many in blocks, and then gives 10,000 batches of 50. Before
that its rows are checked. What goes in is made beforehand, chunk by chunk, and is not part of the measured time.
"""

from __future__ import annotations

import fnmatch
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from gpu_replay.console.markdown import table
from gpu_replay.console.progress import Progress

from .cases import KEY, short
from .layouts import LAYOUTS, Layout
from .record import Record
from .rows import ROW_BYTES, described, make_rows, mismatches
from .runner import Refused, Run
from .timing import quantiles

BLOCK = 64


@dataclass(frozen=True)
class Work:
    """How much each layout does.

    chunk: rows made beforehand and timed together, a multiple of the block; batches timed together are a hundredth.
    """

    capacity: int = 1_000_000
    insertions: int = 2_000_000
    chunk: int = 64_000
    batches: int = 10_000
    batch: int = 50


QUICK = Work(capacity=20_000, insertions=64_000, chunk=6_400, batches=200)


def check(name: str, make: Callable[[int], Layout]) -> None:
    """Look whether a small layout that was filled past its end gives whole rows, and only the last ones.

    Raises Refused, naming what is wrong.
    """
    layout, rows = make(100), make_rows(330, np.random.default_rng(0))
    for row in range(10):
        layout.append(layout.single(rows, row))
    for begin in range(10, 330, BLOCK):
        layout.extend(layout.block({field: values[begin : begin + BLOCK] for field, values in rows.items()}))
    found = layout.batch(100)
    wrong = mismatches(found)
    stored = np.sort(found["obs"].numpy()[:, 0])
    if not np.array_equal(stored, np.sort(rows["obs"][-100:, 0])):
        wrong.append("which rows are kept")
    if wrong:
        raise Refused(f"{name} is not measured: wrong in {', '.join(wrong)}.")


def chosen(pattern: str | None) -> list[str]:
    """Names of the layouts that a pattern, a part of the name or a glob, leaves; all without one.

    Raises ValueError when it leaves none.
    """
    kept = [name for name in LAYOUTS if pattern is None or pattern in name or fnmatch.fnmatch(name, pattern)]
    if not kept:
        raise ValueError(f"no layout is called {pattern!r}; there are {', '.join(LAYOUTS)}.")
    return kept


def records(run: Run, work: Work, layouts: list[str], progress: Progress) -> Iterator[Record]:
    """Three records for each layout: one at a time, in blocks, and batches."""
    for name in layouts:
        make = LAYOUTS[name]
        check(name, make)
        parts: tuple[tuple[str, Callable[[Layout, Work], Iterator[tuple[int, int]]], int], ...] = (
            ("one", _one_at_a_time, 1),
            ("blocks", _in_blocks, BLOCK),
            ("batches", _batches, work.batch),
        )
        layout = make(work.capacity)
        for part, timed, rows in parts:
            progress.show(f"{name}, {part}")
            yield _record(run, work, name, part, rows, list(timed(layout, work)))
            progress.advance()
        del layout
        gc.collect()


def _one_at_a_time(layout: Layout, work: Work) -> Iterator[tuple[int, int]]:
    for begin, size in _chunks(work.insertions, work.chunk):
        rows = make_rows(size, np.random.default_rng(begin))
        singles = [layout.single(rows, row) for row in range(size)]
        append = layout.append
        start = time.perf_counter_ns()
        for single in singles:
            append(single)
        yield time.perf_counter_ns() - start, size


def _in_blocks(layout: Layout, work: Work) -> Iterator[tuple[int, int]]:
    for begin, size in _chunks(work.insertions, work.chunk):
        rows = make_rows(size, np.random.default_rng(begin))
        blocks = [
            layout.block({name: values[at : at + BLOCK] for name, values in rows.items()})
            for at in range(0, size, BLOCK)
        ]
        extend = layout.extend
        start = time.perf_counter_ns()
        for block in blocks:
            extend(block)
        yield time.perf_counter_ns() - start, len(blocks)


def _batches(layout: Layout, work: Work) -> Iterator[tuple[int, int]]:
    for _, size in _chunks(work.batches, -(-work.batches // 100)):
        start = time.perf_counter_ns()
        for _ in range(size):
            layout.batch(work.batch)
        yield time.perf_counter_ns() - start, size


def _chunks(total: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Begin and size of each part."""
    for begin in range(0, total, chunk):
        yield begin, min(chunk, total - begin)


def _record(run: Run, work: Work, name: str, part: str, rows: int, timed: list[tuple[int, int]]) -> Record:
    """One call's quantiles over the chunks, and the seconds of all calls together."""
    elapsed = np.array(timed, dtype=np.float64)
    spread = quantiles(elapsed[:, 0] / elapsed[:, 1] / 1000)
    moved = rows * (2 * ROW_BYTES + (0 if part == "batches" else KEY))
    return Record(
        suite=run.suite,
        case=f"storage-{part}/N={short(work.capacity)}/B={rows}",
        operation=f"storage-{part}",
        implementation=name,
        capacity=work.capacity,
        batch=rows,
        added=0 if part == "batches" else rows,
        fields=described(),
        unit="us",
        quantiles={quantile: round(value, 4) for quantile, value in spread.items()},
        repetitions=int(elapsed[:, 1].sum()),
        warmup=0,
        bytes=moved,
        copy_bandwidth=round(run.copy_bandwidth),
        copy_share=round(moved / (spread["p50"] / 1e6) / run.copy_bandwidth, 5),
        quick=run.quick,
        environment=run.environment,
        seconds=round(float(elapsed[:, 0].sum()) / 1e9, 6),
        timing="host",
        tests=run.tests,
    )


def storage_table(found: list[Record]) -> str:
    """Layouts down, the three parts across: seconds of all calls, and microseconds of a transition or a batch."""
    parts = {
        operation: [r for r in found if r.operation == operation]
        for operation in dict.fromkeys(r.operation for r in found)
    }
    header = ["layout"]
    for operation, measured in parts.items():
        first = measured[0]
        count = f"{first.repetitions * first.added or first.repetitions:,}"
        label = {
            "storage-one": f"{count} one at a time, s",
            "storage-blocks": f"{count} in blocks of {first.batch}, s",
            "storage-batches": f"{count} batches of {first.batch}, s",
        }[operation]
        header += [label, "µs each" if operation == "storage-batches" else "µs a transition"]
    lines = []
    for name in dict.fromkeys(record.implementation for record in found):
        line = [name]
        for measured in parts.values():
            own = [record for record in measured if record.implementation == name]
            if own:
                each = own[0].median / max(own[0].added, 1)
                line += [f"{own[0].seconds:,.2f}", f"{each:,.3f}" if each < 10 else f"{each:,.0f}"]
            else:
                line += ["", ""]
        lines.append(line)
    return table(header, lines)
