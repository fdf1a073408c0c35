"""The cost of storing transitions and of reading batches back: the containers that tutorials use, and this package.

Every layout holds the last `capacity` rows of `rows.py` and returns uniformly sampled batches as torch tensors. It
takes single transitions and blocks in the form that suits it best; making that form is not measured. Three cases store
2,000,000 transitions one at a time, store as many in blocks, and read 10,000 batches of 50. A layout's rows are checked
first. Inputs are made beforehand, chunk by chunk, outside the measured time.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu_replay import ReplayBuffer, Uniform
from gpu_replay.console.markdown import table
from gpu_replay.console.progress import Progress

from .cases import Case, short
from .measure import Run, quantiles
from .records import CannotMeasure, Record
from .rows import DTYPES, Rows, buffer_fields, make_rows, mismatches
from .subjects import tensors


def _single(rows: Rows, row: int) -> Any:
    """One row as a tuple with arrays of its own, as an environment makes them."""
    obs, action, reward, after, ended = (rows[name][row] for name in DTYPES)
    return obs.copy(), int(action), float(reward), after.copy(), bool(ended)


def _singles(rows: Rows) -> Any:
    return [_single(rows, row) for row in range(len(rows["obs"]))]


class Layout(NamedTuple):
    """A ring of transitions.

    append, extend: store one transition, and a block, in the forms that `single` and `block` make.
    batch:          so many transitions, drawn uniformly, as tensors.
    """

    append: Callable[[Any], object]
    extend: Callable[[Any], object]
    batch: Callable[[int], Any]
    single: Callable[[Rows, int], Any] = _single
    block: Callable[[Rows], Any] = lambda rows: rows


def _drawn_from(held: Any) -> Callable[[int], Any]:
    draws = random.Random(0)

    def batch(size: int) -> Any:
        columns = zip(*draws.sample(held, size), strict=True)
        kinds = DTYPES.items()
        return tensors({name: np.array(column, kind) for (name, (_, kind)), column in zip(kinds, columns, strict=True)})

    return batch


def list_ring(capacity: int) -> Layout:
    """A list of tuples with the position of the next one: constant-time access."""
    held: list[Any] = []
    at = 0

    def append(single: Any) -> None:
        nonlocal at
        if len(held) < capacity:
            held.append(single)
        else:
            held[at] = single
        at = (at + 1) % capacity

    def extend(block: list[Any]) -> None:
        nonlocal at
        end = at + len(block)
        if end > capacity:
            for single in block:
                append(single)
            return
        # past the end of a list that still grows, assigning to a slice appends
        held[at:end] = block
        at = end % capacity

    return Layout(append, extend, _drawn_from(held), block=_singles)


def deque_of_tuples(capacity: int) -> Layout:
    """`collections.deque` of tuples: access to its middle walks from an end."""
    held: Any = deque(maxlen=capacity)
    return Layout(held.append, held.extend, _drawn_from(held), block=_singles)


def arrays(capacity: int, records: bool = False) -> Layout:
    """One preallocated array for each field, or one array of records: all fields of a transition lie side by side."""
    kind = np.dtype([(name, dtype, shape) for name, (shape, dtype) in DTYPES.items()])
    whole = np.zeros(capacity, kind)
    columns = {name: np.zeros((capacity, *shape), dtype) for name, (shape, dtype) in DTYPES.items()}
    draws, added = np.random.default_rng(0), 0

    def append(single: Any) -> None:
        nonlocal added
        slot = added % capacity
        added += 1
        if records:
            whole[slot] = single
            return
        for array, value in zip(columns.values(), single, strict=True):
            array[slot] = value

    def extend(block: Rows) -> None:
        nonlocal added
        slots = np.arange(added, added + len(block["obs"])) % capacity
        added += len(slots)
        if records:
            packed = np.empty(len(slots), kind)
            for name, values in block.items():
                packed[name] = values
            whole[slots] = packed
            return
        for name, array in columns.items():
            array[slots] = block[name]

    def batch(size: int) -> Any:
        # distinct with few draws from many, as a tutorial would draw
        slots = draws.choice(min(added, capacity), size, replace=False, shuffle=False)
        if records:
            drawn = whole[slots]
            # torch takes no array whose rows have gaps of odd size
            return {name: torch.from_numpy(np.ascontiguousarray(drawn[name])) for name in DTYPES}
        return tensors({name: array[slots] for name, array in columns.items()})

    return Layout(append, extend, batch)


def replay(capacity: int) -> Layout:
    """This package's buffer on the CPU, with uniform draws."""
    buffer = ReplayBuffer(capacity, buffer_fields(), sampler=Uniform(), device="cpu", seed=0)

    def add(rows: Rows) -> object:
        return buffer.add(**rows)

    def single(rows: Rows, row: int) -> Rows:
        return {name: values[row : row + 1].copy() for name, values in rows.items()}

    return Layout(add, add, buffer.sample, single)


LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "gpu_replay": replay,
    "deque": deque_of_tuples,
    "list ring": list_ring,
    "NumPy array per field": arrays,
    "NumPy array of records": lambda capacity: arrays(capacity, records=True),
}


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


def cases(sizes: Sizes) -> list[Case]:
    """One at a time, in blocks, and batches."""
    inserted = Case("storage-one", sizes.capacity, 1, 1), Case("storage-blocks", sizes.capacity, BLOCK, BLOCK)
    return [*inserted, Case("storage-batches", sizes.capacity, sizes.batch)]


def check(name: str, make: Callable[[int], Layout]) -> None:
    """Check that a small layout filled past its end keeps whole rows, and only the last ones; raises CannotMeasure."""
    layout, rows = make(100), make_rows(330, np.random.default_rng(0))
    for row in range(10):
        layout.append(layout.single(rows, row))
    for block in _blocks(layout, {field: values[10:] for field, values in rows.items()}):
        layout.extend(block)
    found = layout.batch(100)
    wrong = mismatches(found)
    if not np.array_equal(np.sort(found["obs"].numpy()[:, 0]), np.sort(rows["obs"][-100:, 0])):
        wrong.append("which rows are kept")
    if wrong:
        raise CannotMeasure(f"{name} is not measured: wrong in {', '.join(wrong)}.")


def records(sizes: Sizes, run: Run, cases: Sequence[Case], progress: Progress) -> Iterator[Record]:
    """A record for each case and layout; quantiles are over chunks, seconds are of all calls."""

    def measured(case: Case) -> Iterator[Record]:
        for name, make in LAYOUTS.items():
            check(name, make)
            layout = make(sizes.capacity)
            parts = [(_nanoseconds(call, inputs), len(inputs)) for call, inputs in _calls(case, layout, sizes)]
            found = np.array(parts, dtype=np.float64)
            spread, seconds = quantiles(found[:, 0] / found[:, 1] / 1000), round(found[:, 0].sum() / 1e9, 6)
            yield run.record(case, name, spread, int(found[:, 1].sum()), seconds=seconds, timing="host")
            del layout
            gc.collect()

    return run.each(cases, progress, measured)


def _calls(case: Case, layout: Layout, sizes: Sizes) -> Iterator[tuple[Callable[[Any], object], Sequence[Any]]]:
    """What is called, and the inputs of the calls that are timed together."""
    for begin in range(0, sizes.insertions, sizes.chunk):
        rows = make_rows(min(sizes.chunk, sizes.insertions - begin), np.random.default_rng(begin))
        if case.operation == "storage-one":
            yield layout.append, [layout.single(rows, row) for row in range(len(rows["obs"]))]
        elif case.operation == "storage-blocks":
            yield layout.extend, _blocks(layout, rows)
        else:
            for block in _blocks(layout, rows):
                layout.extend(block)
    if case.operation == "storage-batches":
        batches = [sizes.batch] * -(-sizes.batches // 100)
        yield from [(layout.batch, batches)] * (sizes.batches // len(batches))


def _nanoseconds(call: Callable[[Any], object], inputs: Sequence[Any]) -> int:
    start = time.perf_counter_ns()
    for each in inputs:
        call(each)
    return time.perf_counter_ns() - start


def _blocks(layout: Layout, rows: Rows) -> list[Any]:
    begins = range(0, len(rows["obs"]), BLOCK)
    return [layout.block({name: values[at : at + BLOCK] for name, values in rows.items()}) for at in begins]


def storage_table(found: Sequence[Record], peers: Sequence[Record] = ()) -> str:
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
