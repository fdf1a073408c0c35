"""Markdown tables of records, and their places in documents: the only way a figure gets into a page.

A document marks the place of a table with `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`. One command replaces the
text between the markers, so a table cannot differ from what was measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gpu_replay.console.errors import UserError
from gpu_replay.console.markdown import number, table

from . import runs
from .baselines import ALONE
from .cases import OPERATIONS, OURS, short
from .checkpoint import checkpoint_table
from .kernels import KERNELS
from .lower_bound import NAME as LOWER_BOUND
from .peers_suite import PEERS
from .records import Record
from .storage import storage_table
from .targets import targets_table

Records = Sequence[Record]

# without priorities they do less work: shown beside the others, never a baseline
UNIFORM = frozenset(name for name, peer in PEERS.items() if peer.uniform)
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


def frames_table(records: Records, peers: Records = ()) -> str:
    """Cases of Atari frames, each with a plain copy of the same bytes if one was measured."""
    copies = {record.case: record.median for record in records if record.implementation == "take"}
    rows = []
    for record in records:
        if record.implementation != "take":
            copy = copies.get(record.case)
            beside = ["", ""] if copy is None else [number(copy), f"{copy / record.median:.2f}x"]
            rows.append([record.case, number(record.median), *beside, _share(record)])
    return table(["Atari frames", "µs", "NumPy take, µs", "speedup", "% of copy bandwidth"], rows)


def memory_table(records: Records, peers: Records = ()) -> str:
    """Resident bytes a transition beside the bytes of its fields."""
    rows = []
    for record in records:
        counted = "" if record.counted is None else f"{record.counted:.1f}"
        above = f"{record.median / record.bytes - 1:+.1%}"
        rows.append([record.case, f"{record.bytes:,}", counted, f"{record.median:.1f}", above])
    return table(["bytes a transition", "of fields", "buffer.nbytes", "resident", "above fields"], rows)


def kernels_table(records: Records, peers: Records = ()) -> str:
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


def peers_table(records: Records, peers: Records = ()) -> str:
    """Microseconds of all libraries; the last column is the best prioritized one's time over this package's."""
    # a renewed case stands last in its file
    names = sorted(dict.fromkeys(record.implementation for record in records), key=lambda name: name != OURS)
    found = {(record.case, record.implementation): record for record in records}
    order = {operation: place for place, operation in enumerate(OPERATIONS)}
    cases = sorted(
        {record.case: record for record in records}.values(),
        key=lambda r: (order[r.operation], r.capacity, r.batch),
    )
    rows = []
    for each in cases:
        size = f"{'' if 'add' in each.operation else 'B = '}{each.batch:,}"
        label = f"{OPERATIONS[each.operation].label}, N = {short(each.capacity)}, {size}"
        here = [found.get((each.case, name)) for name in names]
        ours = found.get((each.case, OURS))
        speedup = _beside(ours, best_baseline(ours, records))[1] if ours else ""
        rows.append([label, *[number(record.median) if record else "" for record in here], speedup])
    heads = [f"{name} (uniform)" if name in UNIFORM else name for name in names]
    return table(["µs", *heads, "speedup"], rows)


def ratios_table(records: Records, peers: Records = ()) -> str:
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


def scale_table(records: Records, peers: Records = ()) -> str:
    """Microseconds of every implementation, and the time of this package over that of the C program."""
    names = list(dict.fromkeys(record.implementation for record in records))
    found = {(record.case, record.implementation): record for record in records}
    order = sorted({r.case: (r.operation, r.capacity, r.batch) for r in records}.items(), key=lambda item: item[1])
    rows = []
    for case, (operation, capacity, batch) in order:
        here = [found.get((case, name)) for name in names]
        ours, bound = found.get((case, OURS)), found.get((case, LOWER_BOUND))
        ratio = f"{ours.median / bound.median:.1f}x" if ours and bound else ""
        times = [number(record.median) if record else "" for record in here]
        rows.append([operation, short(capacity), f"{batch:,}", *times, ratio])
    heads = [f"{name}, µs" for name in names]
    return table(["call", "N", "B", *heads, f"{OURS} / C"], rows)


def conditions(records: Records) -> str:
    """One sentence that says where and with what these records were made: of what differs, all that there is."""
    environments = [record.environment for record in records]
    newest = max(environments, key=lambda environment: environment.date)
    threads = f"{newest.threads} thread{'s' if newest.threads > 1 else ''}"
    parts = [newest.device] * (newest.device != "cpu") + [f"{newest.cpu} ({newest.cores} cores, {threads})"]
    # implementations that were compared add their own versions
    versions: dict[str, dict[str, None]] = {}
    for name, version in (item for each in environments for item in each.versions.items() if item[1]):
        versions.setdefault(name, {})[str(version)] = None
    parts += [f"{name} {' and '.join(found)}" for name, found in versions.items()]
    commits = dict.fromkeys(each.commit for each in environments if each.commit)
    parts += [f"commit {', '.join(commits)}"] if commits else []
    parts.append(_span(sorted(each.date[:10] for each in environments)))
    copies = sorted(record.copy_bandwidth for record in records)
    parts.append(f"plain copy {_span([f'{each / 1e9:.1f}' for each in copies])} GB/s read and written")
    parts += ["QUICK RUN, not to be quoted"] if any(record.quick for record in records) else []
    failed = dict.fromkeys(name for record in records for name in record.failed_tests)
    parts += [f"TESTS FAILED: {', '.join(failed)}"] if failed else []
    return ", ".join(parts) + "."


def _span(values: Sequence[str]) -> str:
    """The first and the last of what is in order, or the only one."""
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


class Section(NamedTuple):
    """One marked table.

    command: the command that makes its records, without `gpu-replay bench`; its first word is their suite.
    table:   makes the table from these records and the peers' on the same machine.
    needs:   which of the suite's records it shows.

    bench/RESULTS.md explains the columns.
    """

    command: str
    table: Callable[[Records, Records], str]
    needs: Callable[[Record], bool] = lambda record: True

    def holds(self, record: Record) -> bool:
        """Whether the table shows the record."""
        return record.suite == self.command.split()[0] and self.needs(record)


_ON_CPU = "kernels --device cpu"
# the rows of the table in README.md
_IN_SHORT = ("cycle/N=100k/B=256", *(f"cycle/N=1M/B={batch}" for batch in (32, 256, 4096)))
_IN_SHORT += (*(f"frame-cycle/N=20k/B={batch}" for batch in (32, 256, 4096)), "step-add/N=100k/B=1")

SECTIONS: dict[str, Section] = {
    "cpu": Section("cpu", cells_table, lambda record: record.unit == "us"),
    "gpu": Section("gpu", cells_table),
    "kernels": Section("kernels", kernels_table, lambda r: r.environment.device != "cpu"),
    "kernels-cpu": Section(_ON_CPU, kernels_table, lambda r: r.environment.device == "cpu"),
    "peers": Section("peers", peers_table, lambda r: not r.operation.startswith("ratio-")),
    "ratios": Section("peers", ratios_table, lambda r: r.operation.startswith("ratio-")),
    "frames": Section("frames", frames_table),
    "checkpoint": Section("checkpoint", checkpoint_table),
    "scale": Section("scale", scale_table),
    "storage": Section("storage", storage_table),
    "memory": Section("cpu", memory_table, lambda record: record.operation == "memory"),
}


def section(name: str, records: Records) -> str:
    """The text of one marked place, with the command that reproduces it; one table per machine.

    Raises UserError for a name that no table has.
    """
    if name == "targets":
        return f"{targets_table(records)}\n\nReproduce: `bench/on_gpu.py records`."
    if name == "peers-in-short":
        return section("peers", [record for record in records if record.case in _IN_SHORT])
    if name == "pong":
        return runs.section(runs.run_folders())
    if name not in SECTIONS:
        raise UserError(
            f"no table is called {name!r}; there are {', '.join([*SECTIONS, 'targets', 'peers-in-short', 'pong'])}."
        )
    each = SECTIONS[name]
    machines: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if each.holds(record):
            machines.setdefault((record.environment.device, record.environment.cpu), []).append(record)
    if not machines:
        return f"Not measured yet: `gpu-replay bench {each.command}`."
    peers = [record for record in records if record.suite == "peers"]
    texts = []
    for mine in machines.values():
        texts.append(f"{each.table(mine, peers)}\n\n{conditions(mine)}")
    return "\n\n".join(texts) + f" Reproduce: `gpu-replay bench {each.command}`."


def measured(records: Records, peers: Records) -> list[str]:
    """The texts of all tables that these records fill, compared with earlier records of peers."""
    names = [name for name, each in SECTIONS.items() if any(each.holds(record) for record in records)]
    return [section(name, [*records, *peers]) for name in names]


def updated(document: str, records: Records) -> str:
    """The document with the text between all its markers made anew.

    Raises UserError for a marker that is not closed, and for one that names no table.
    """
    for name in re.findall(r"<!-- bench:([\w-]+) -->", document):
        mark, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        before, _, rest = document.partition(mark)
        _, closed, after = rest.partition(end)
        if not closed:
            raise UserError(f"{mark} is not closed; put {end} where its table ends.")
        document = f"{before}{mark}\n{section(name, records)}\n{end}{after}"
    return document
