"""What it costs to store transitions and to read batches back, for each way of keeping them in `layouts.py`.

Each layout takes 2,000,000 transitions one at a time, as many in blocks, and then gives 10,000 batches of 50. Before
that its rows are checked. Inputs are made beforehand, chunk by chunk, outside the measured time.
"""

from __future__ import annotations

import fnmatch
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpu_replay.console.markdown import table
from gpu_replay.console.progress import Progress

from .cases import Case, short
from .layouts import LAYOUTS, Layout
from .record import Record
from .rows import Rows, make_rows, mismatches
from .runner import Refused, Run
from .timing import quantiles

BLOCK = 64


@dataclass(frozen=True)
class Sizes:
    """How much each layout does.

    chunk: rows made beforehand and timed together, a multiple of the block; batches timed together are a hundredth.
    """

    capacity: int = 1_000_000
    insertions: int = 2_000_000
    chunk: int = 64_000
    batches: int = 10_000
    batch: int = 50


QUICK = Sizes(capacity=20_000, insertions=64_000, chunk=6_400, batches=200)


def check(name: str, make: Callable[[int], Layout]) -> None:
    """Check that a small layout filled past its end keeps whole rows, and only the last ones; raises Refused."""
    layout, rows = make(100), make_rows(330, np.random.default_rng(0))
    for row in range(10):
        layout.append(layout.single(rows, row))
    for block in _blocks(layout, {field: values[10:] for field, values in rows.items()}):
        layout.extend(block)
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


def records(run: Run, sizes: Sizes, layouts: list[str], progress: Progress) -> Iterator[Record]:
    """Three records for each layout: one at a time, in blocks, and batches."""
    parts: tuple[tuple[Case, Callable[[Layout, Sizes], Iterator[tuple[int, int]]]], ...] = (
        (Case("storage-one", sizes.capacity, 1, 1), _one_at_a_time),
        (Case("storage-blocks", sizes.capacity, BLOCK, BLOCK), _in_blocks),
        (Case("storage-batches", sizes.capacity, sizes.batch), _batches),
    )
    for name in layouts:
        check(name, LAYOUTS[name])
        layout = LAYOUTS[name](sizes.capacity)
        for case, timed in parts:
            progress.show(f"{name}, {case.operation}")
            # nanoseconds and calls of each chunk: quantiles are over chunks, seconds are of all calls
            found = np.array(list(timed(layout, sizes)), dtype=np.float64)
            spread, seconds = quantiles(found[:, 0] / found[:, 1] / 1000), round(found[:, 0].sum() / 1e9, 6)
            yield run.record(case, name, spread, int(found[:, 1].sum()), seconds=seconds, timing="host")
            progress.advance()
        del layout
        gc.collect()


def _one_at_a_time(layout: Layout, sizes: Sizes) -> Iterator[tuple[int, int]]:
    for rows in _chunks(sizes):
        singles = [layout.single(rows, row) for row in range(len(rows["obs"]))]
        yield _timed(layout.append, singles), len(singles)


def _in_blocks(layout: Layout, sizes: Sizes) -> Iterator[tuple[int, int]]:
    for rows in _chunks(sizes):
        blocks = _blocks(layout, rows)
        yield _timed(layout.extend, blocks), len(blocks)


def _batches(layout: Layout, sizes: Sizes) -> Iterator[tuple[int, int]]:
    batches = [sizes.batch] * -(-sizes.batches // 100)
    for _ in range(sizes.batches // len(batches)):
        yield _timed(layout.batch, batches), len(batches)


def _timed(call: Callable[[object], object] | Callable[[int], object], inputs: Sequence[object]) -> int:
    start = time.perf_counter_ns()
    for each in inputs:
        call(each)  # type: ignore[arg-type]
    return time.perf_counter_ns() - start


def _blocks(layout: Layout, rows: Rows) -> list[object]:
    begins = range(0, len(rows["obs"]), BLOCK)
    return [layout.block({name: values[at : at + BLOCK] for name, values in rows.items()}) for at in begins]


def _chunks(sizes: Sizes) -> Iterator[Rows]:
    for begin in range(0, sizes.insertions, sizes.chunk):
        yield make_rows(min(sizes.chunk, sizes.insertions - begin), np.random.default_rng(begin))


def storage_table(found: Sequence[Record]) -> str:
    """Layouts down, the three parts across: seconds of all calls, and microseconds of a transition or a batch."""
    operations = {record.operation: record for record in found}
    header = [f"layout, N = {short(found[0].capacity)}"]
    for operation, record in operations.items():
        count = f"{record.repetitions * record.added or record.repetitions:,}"
        header += {
            "storage-one": [f"{count} one at a time, s", "µs a transition"],
            "storage-blocks": [f"{count} in blocks of {record.batch}, s", "µs a transition"],
            "storage-batches": [f"{count} batches of {record.batch}, s", "µs each"],
        }[operation]
    cells = {(record.implementation, record.operation): _cells(record) for record in found}
    names = dict.fromkeys(record.implementation for record in found)
    rows = [[name, *[cell for each in operations for cell in cells.get((name, each), ["", ""])]] for name in names]
    return table(header, rows)


def _cells(record: Record) -> list[str]:
    each = record.median / max(record.added, 1)
    return [f"{record.seconds:,.2f}", f"{each:,.3f}" if each < 10 else f"{each:,.0f}"]
