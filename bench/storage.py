"""The cost of storing transitions and of reading batches back: the containers that tutorials use, and this package.

Every layout holds the last `capacity` rows of `rows.py` and returns uniformly sampled batches as torch tensors. It
takes single transitions and blocks in the form that suits it best; making that form is not measured. Calls are timed
in chunks, since the fastest take less than reading the clock, and one layout after the other, since millions of Python
objects would slow down the others.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpu_replay import Uniform
from gpu_replay.console.markdown import table
from gpu_replay.console.progress import Progress

from .measure import Plan, Run, bind
from .operations import Case, short
from .records import Record
from .subjects import DTYPES, POOL, Rows, Sampled, Subject, make_rows, replay_buffer, tensors, wrong_vectors

BLOCK, BATCH = 64, 50
# rows that are added, and batches that are read, between two readings of the clock
CHUNK, BATCHES = 1600, 8
# slots, and readings of the clock: 2,000,000 transitions stored and 10,000 batches read
SIZES, QUICK = (1_000_000, 1250), (20_000, 40)


def _tuples(rows: Rows) -> Any:
    """Each row as a tuple with arrays of its own, as an environment makes them."""
    columns = zip(*(rows[name] for name in DTYPES), strict=True)
    return [(obs.copy(), int(act), float(gain), after.copy(), bool(end)) for obs, act, gain, after, end in columns]


def layout(
    append: Callable[[Any], object],
    extend: Callable[[Any], object],
    batch: Callable[[int], Any],
    single: Callable[[Rows], Any] = lambda rows: _tuples(rows)[0],
    block: Callable[[Rows], Any] = _tuples,
) -> Subject:
    """A ring of transitions.

    append, extend: store one transition, and a block, in the forms that `single` and `block` make of rows.
    batch:          so many transitions, sampled uniformly, as tensors.
    """

    def stream(count: int, pool: int = POOL) -> Iterator[Any]:
        made, form = np.random.default_rng(1), single if count == 1 else block
        while True:
            rows = make_rows(CHUNK, made)
            parts = range(0, CHUNK, count)
            yield [form({name: values[at : at + count] for name, values in rows.items()}) for at in parts]

    def add(chunk: list[Any]) -> None:
        store = append if isinstance(chunk[0], tuple) else extend
        for each in chunk:
            store(each)

    def sample(size: int) -> Sampled:
        for _ in range(BATCHES):
            found = batch(size)
        return None, found

    return Subject(add, sample, lambda *_: None, stream, wrong_vectors, add_size=CHUNK)


def _drawn_from(held: Any) -> Callable[[int], Any]:
    draws = random.Random(0)

    def batch(size: int) -> Any:
        columns = zip(*draws.sample(held, size), strict=True)
        kinds = DTYPES.items()
        return tensors({name: np.array(column, kind) for (name, (_, kind)), column in zip(kinds, columns, strict=True)})

    return batch


def list_ring(capacity: int) -> Subject:
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

    return layout(append, extend, _drawn_from(held))


def deque_of_tuples(capacity: int) -> Subject:
    """`collections.deque` of tuples: access to its middle walks from an end."""
    held: Any = deque(maxlen=capacity)
    return layout(held.append, held.extend, _drawn_from(held))


def arrays(capacity: int, records: bool = False) -> Subject:
    """One preallocated array for each field, or one array of records: all fields of a transition lie side by side."""
    kind = np.dtype([(name, dtype, shape) for name, (shape, dtype) in DTYPES.items()])
    whole = np.zeros(capacity if records else 0, kind)
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
        packed = np.empty(len(slots) if records else 0, kind)
        for name, values in block.items():
            if records:
                packed[name] = values
            else:
                columns[name][slots] = values
        if records:
            whole[slots] = packed

    def batch(size: int) -> Any:
        # distinct with few draws from many, as a tutorial would draw
        slots = draws.choice(min(added, capacity), size, replace=False, shuffle=False)
        if records:
            drawn = whole[slots]
            # torch takes no array whose rows have gaps of odd size
            return {name: torch.from_numpy(np.ascontiguousarray(drawn[name])) for name in DTYPES}
        return tensors({name: array[slots] for name, array in columns.items()})

    return layout(append, extend, batch, block=lambda rows: rows)


def replay(capacity: int) -> Subject:
    """This package's buffer on the CPU, with uniform draws."""
    buffer = replay_buffer(capacity, sampler=Uniform())

    def add(rows: Rows) -> object:
        return buffer.add(**rows)

    return layout(add, add, buffer.sample, lambda rows: {n: v.copy() for n, v in rows.items()}, lambda rows: rows)


LAYOUTS: dict[str, Callable[[int], Subject]] = {
    "gpu_replay": replay,
    "deque": deque_of_tuples,
    "list ring": list_ring,
    "NumPy array per field": arrays,
    "NumPy array of records": lambda capacity: arrays(capacity, records=True),
}


def cases(quick: bool) -> list[Case]:
    """One at a time, in blocks, and batches."""
    slots = QUICK[0] if quick else SIZES[0]
    inserted = Case("storage-one", slots, 1, 1), Case("storage-blocks", slots, BLOCK, BLOCK)
    return [*inserted, Case("storage-batches", slots, BATCH)]


def records(run: Run, cases: Sequence[Case], progress: Progress) -> Iterator[Record]:
    """A record for each case and layout; quantiles are over chunks, seconds are of all calls."""
    number = QUICK[1] if run.quick else SIZES[1]
    run = replace(run, plan=Plan(0, 0, fewest=number, most=number))

    def measured(case: Case) -> Iterator[Record]:
        calls = CHUNK // case.added if case.added else BATCHES
        for name, make in LAYOUTS.items():
            (subject,) = run.subjects(case.capacity, {name: make}, progress).values()
            bound = bind(case.kind.call, subject, case.batch, case.added, run.device)
            yield from run.timed(case, {name: bound}, progress, calls=calls)
            del subject, bound
            gc.collect()

    return run.each(cases, progress, measured)


def storage_table(found: Sequence[Record], peers: Sequence[Record] = ()) -> str:
    """Layouts down, the three parts across: seconds of all calls, and microseconds of a transition or a batch."""
    header = [f"layout, N = {short(found[0].capacity)}"]
    operations = {record.operation: record for record in found}
    for operation, record in operations.items():
        count = f"{record.repetitions * record.added or record.repetitions:,}"
        how = {"storage-one": "one at a time", "storage-blocks": "in blocks of {}", "storage-batches": "batches of {}"}
        header += [f"{count} {how[operation].format(record.batch)}, s", "µs each"]
    rows: dict[str, list[str]] = {}
    for record in found:
        each = record.median / max(record.added, 1)
        cells = [f"{record.seconds:,.2f}", f"{each:,.3f}" if each < 10 else f"{each:,.0f}"]
        rows.setdefault(record.implementation, [record.implementation]).extend(cells)
    return table(header, rows.values())
