"""Markdown tables of records; `report.py` puts them into documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_replay.console.markdown import number, table

from .baselines import ALONE
from .cases import OURS, short
from .kernels import KERNELS
from .record import Record
from .subjects import PEERS

Records = Sequence[Record]

# without priorities they do less work: shown beside the others, never a baseline
UNIFORM = frozenset(name for name, peer in PEERS.items() if peer.uniform)
# operation to where its rows of the peers' table stand and what they are called
_PEER_ROWS = {
    "cycle": "cycle",
    "frame-cycle": "cycle, Atari",
    "add": "add",
    "frame-add": "add, Atari",
    "index": "index alone",
    "update": "update",
    "step-add": "one environment: add",
    "step-exact": "one environment: add, exact dtypes",
    "step-cycle": "one environment: add, sample, update",
    "step-uniform": "one environment: add, sample, no priorities",
}
# what is measured against libraries without priorities
_WITHOUT_PRIORITIES = frozenset({"step-uniform"})


def best_baseline(record: Record, others: Iterable[Record]) -> Record | None:
    """The fastest other implementation that did all of the record's case on the same machine, timed in the same way."""
    found = [
        other
        for other in others
        if (other.case, *other.identity[3:]) == (record.case, *record.identity[3:])
        and other.implementation != OURS
        and (other.implementation not in UNIFORM or other.operation in _WITHOUT_PRIORITIES)
        and not other.implementation.endswith(ALONE)
        and other.quick <= record.quick
    ]
    return min(found, key=lambda other: other.median, default=None)


def _beside(record: Record, best: Record | None) -> list[str]:
    """The best baseline and the speedup over it; empty cells without one."""
    if best is None:
        return ["", ""]
    return [f"{number(best.median)} ({best.implementation})", f"{best.median / record.median:.2f}x"]


def _share(record: Record) -> str:
    return "" if record.copy_share is None or not record.bytes else f"{record.copy_share:.1%}"


def cells_table(records: Records, peers: Records = ()) -> str:
    """Every timed case with its quantiles, its share of the copy bandwidth and the best peer."""
    rows = []
    for record in records:
        case = record.case + (", replayed" if record.clock == "graph" else "")
        spread = [number(record.quantiles[name]) for name in ("p10", "p50", "p90")]
        rows.append([case, *spread, _share(record), *_beside(record, best_baseline(record, peers))])
    return table(["case", "p10 µs", "p50 µs", "p90 µs", "% of copy bandwidth", "best baseline, µs", "speedup"], rows)


def cycle_table(records: Records, peers: Records = ()) -> str:
    """The full cycle, capacities down and batch sizes across; in parentheses the speedup over the best peer."""
    cells = {}
    for record in records:
        best = best_baseline(record, peers)
        speedup = f" ({best.median / record.median:.2f}x)" if best else ""
        cells[record.capacity, record.batch] = number(record.median) + speedup
    capacities, batches = (sorted({key[i] for key in cells}) for i in (0, 1))
    rows = [[f"N = {short(n)}", *[cells.get((n, batch), "") for batch in batches]] for n in capacities]
    return table(["full cycle, µs", *[f"B = {batch:,}" for batch in batches]], rows)


def frames_table(records: Records) -> str:
    """Cases of Atari frames, each beside a plain copy of the same bytes where there is one."""
    copies = {record.case: record.median for record in records if record.implementation == "take"}
    rows = []
    for record in records:
        if record.implementation != "take":
            copy = copies.get(record.case)
            beside = ["", ""] if copy is None else [number(copy), f"{copy / record.median:.2f}x"]
            rows.append([record.case, number(record.median), *beside, _share(record)])
    return table(["Atari frames", "µs", "NumPy take, µs", "speedup", "% of copy bandwidth"], rows)


def memory_table(records: Records) -> str:
    """Resident bytes a transition beside the bytes of its fields."""
    rows = []
    for record in records:
        counted = "" if record.counted is None else f"{record.counted:.1f}"
        above = f"{record.median / record.bytes - 1:+.1%}"
        rows.append([record.case, f"{record.bytes:,}", counted, f"{record.median:.1f}", above])
    return table(["bytes a transition", "of fields", "buffer.nbytes", "resident", "above fields"], rows)


def kernels_table(records: Records) -> str:
    """Every measured kernel of this package beside the best torch operations, in the order of the registry."""
    order = {name: place for place, name in enumerate(KERNELS)}
    ours = [record for record in records if record.implementation == OURS]
    ours.sort(key=lambda r: (order.get(r.operation, len(order)), r.operation, r.capacity, r.batch, r.clock))
    rows = []
    for record in ours:
        name = record.operation + (", events" if record.clock == "events" else "")
        sizes = [short(record.capacity) if record.capacity else "", f"{record.batch:,}" if record.batch else ""]
        beside = _beside(record, best_baseline(record, records))
        rows.append([name, *sizes, number(record.median), *beside, _share(record)])
    return table(["operation", "N", "B", "µs", "best baseline, µs", "speedup", "% of copy bandwidth"], rows)


def peers_table(records: Records) -> str:
    """Microseconds of all libraries; the last column is the best prioritized one's time over this package's."""
    # a renewed case stands last in its file
    names = sorted(dict.fromkeys(record.implementation for record in records), key=lambda name: name != OURS)
    found = {(record.case, record.implementation): record for record in records}
    order = {operation: place for place, operation in enumerate(_PEER_ROWS)}
    cases = sorted(
        {record.case: record for record in records}.values(),
        key=lambda r: (order.get(r.operation, len(order)), r.capacity, r.batch),
    )
    rows = []
    for each in cases:
        size = f"{'' if 'add' in each.operation else 'B = '}{each.batch:,}"
        label = f"{_PEER_ROWS.get(each.operation, each.operation)}, N = {short(each.capacity)}, {size}"
        here = [found.get((each.case, name)) for name in names]
        ours = found.get((each.case, OURS))
        speedup = _beside(ours, best_baseline(ours, records))[1] if ours else ""
        rows.append([label, *[number(record.median) if record else "" for record in here], speedup])
    heads = [f"{name} (uniform)" if name in UNIFORM else name for name in names]
    return table(["µs", *heads, "speedup"], rows)


def ratios_table(records: Records) -> str:
    """Settings of this package beside each other: the time of each over that of the first of its case."""
    first: dict[str, Record] = {}
    rows = []
    for record in records:
        base = first.setdefault(record.case, record)
        if record is not base:
            times = [number(each.median) for each in (base, record)]
            ratio = f"{record.median / base.median:.2f}x"
            rows.append([record.case, base.implementation, times[0], record.implementation, times[1], ratio])
    return table(["case", "setting", "µs", "compared with it", "µs", "ratio"], rows)
