"""Markdown tables from records: the only way in which a figure gets into the documentation.

A document marks the place of a table with `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; what stands between is
replaced, so a table is renewed by one command and cannot differ from what was measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from gpu_replay.console.markdown import number, table

from . import cost_model, frames, kernel_tables, runs, storage
from .cases import OPERATIONS, short
from .kernel_tables import kernels_table
from .peers_table import NOTE, best_peer, peers_table
from .record import Environment, Record

Records = Sequence[Record]


def conditions(records: Records) -> str:
    """One sentence that says where and with what these records were made."""
    newest = max((record.environment for record in records), key=lambda environment: environment.date)
    parts = [_machine(newest)]
    # implementations that were compared add their own versions
    versions = {name: version for record in records for name, version in record.environment.versions.items()}
    parts += [f"{name} {version}" for name, version in versions.items() if version]
    commits = list(dict.fromkeys(record.environment.commit for record in records if record.environment.commit))
    if commits:
        parts.append("commit " + ", ".join(commits))
    parts.append(newest.date[:10])
    bandwidth = max(record.copy_bandwidth for record in records)
    parts.append(f"plain copy {bandwidth / 1e9:.1f} GB/s read and written")
    if any(record.quick for record in records):
        parts.append("QUICK RUN, not to be quoted")
    return ", ".join(parts) + "."


def _machine(environment: Environment) -> str:
    threads = f"{environment.threads} thread{'s' if environment.threads > 1 else ''}"
    cpu = f"{environment.cpu} ({environment.cores} cores, {threads})"
    return cpu if environment.device == "cpu" else f"{environment.device}, {cpu}"


def cells_table(records: Records, peers: Records = ()) -> str:
    """Every timed case with its quantiles, its share of the copy bandwidth and the best peer of these records."""
    rows = []
    for record in records:
        if record.unit != "us":
            continue
        peer = best_peer(record.case, peers, record.environment.cpu)
        share = "" if record.copy_share is None else f"{record.copy_share:.1%}"
        rows.append(
            [
                record.case + (", replayed" if record.clock == "graph" else ""),
                *[number(record.quantiles[name]) for name in ("p10", "p50", "p90")],
                share,
                f"{number(peer.median)} ({peer.implementation})" if peer else "",
                f"{peer.median / record.median:.2f}x" if peer else "",
            ]
        )
    return table(["case", "p10 µs", "p50 µs", "p90 µs", "% of copy bandwidth", "best baseline, µs", "speedup"], rows)


def cycle_table(records: Records, peers: Records = ()) -> str:
    """The full cycle, capacities down and batch sizes across; in parentheses the speedup over the best peer."""
    cycles = [record for record in records if record.operation == "cycle"]
    batches = sorted({record.batch for record in cycles})
    rows = []
    for capacity in sorted({record.capacity for record in cycles}):
        cells = {record.batch: record for record in cycles if record.capacity == capacity}
        rows.append([f"N = {short(capacity)}", *[_cycle_cell(cells.get(batch), peers) for batch in batches]])
    return table(["full cycle, µs", *[f"B = {batch:,}" for batch in batches]], rows)


def _cycle_cell(record: Record | None, peers: Records) -> str:
    if record is None:
        return ""
    peer = best_peer(record.case, peers, record.environment.cpu)
    return number(record.median) + (f" ({peer.median / record.median:.2f}x)" if peer else "")


def frames_table(records: Records) -> str:
    """Cases of Atari frames, each beside a plain copy of the same bytes where there is one."""
    copies = {record.case: record.median for record in records if record.implementation == "take"}
    rows = []
    for record in records:
        if record.implementation == "take":
            continue
        copy = copies.get(record.case)
        beside = ["", ""] if copy is None else [number(copy), f"{copy / record.median:.2f}x"]
        rows.append([record.case, number(record.median), *beside, f"{record.copy_share or 0:.1%}"])
    return table(["Atari frames", "µs", "NumPy take, µs", "speedup", "% of copy bandwidth"], rows)


def memory_table(records: Records) -> str:
    """Resident bytes a transition beside the bytes of its fields."""
    rows = []
    for record in records:
        if record.unit == "bytes":
            payload = record.bytes
            above = f"{record.median / payload - 1:+.1%}"
            counted = "" if record.counted is None else f"{record.counted:.1f}"
            rows.append([record.case, f"{payload:,}", counted, f"{record.median:.1f}", above])
    return table(["bytes a transition", "of fields", "buffer.nbytes", "resident", "above fields"], rows)


def _cpu_section(records: Records) -> str:
    mine = [record for record in records if record.suite == "cpu"]
    peers = [record for record in records if record.suite == "peers"]
    note = f"One cycle: {OPERATIONS['cycle'].about}. In parentheses the speedup over the best peer on the same machine."
    return f"{cycle_table(mine, peers)}\n\n{note} Medians. {conditions(mine)}"


def _cells_section(records: Records) -> str:
    mine = [record for record in records if record.suite == "cpu" and record.unit == "us"]
    peers = [record for record in records if record.suite == "peers"]
    return f"{cells_table(mine, peers)}\n\n{conditions(mine)}"


def _gpu_section(records: Records) -> str:
    mine = [record for record in records if record.suite == "gpu"]
    return f"{cells_table(mine)}\n\n{conditions(mine)}"


def _peers_section(records: Records) -> str:
    mine = [record for record in records if record.suite == "peers"]
    return f"{peers_table(mine)}\n\n{NOTE} Medians. {conditions(mine)}"


def _kernels_of(record: Record) -> str | None:
    """The kind of device of a kernel microbenchmark, None for another record."""
    if record.suite != "kernels":
        return None
    return "cpu" if record.environment.device == "cpu" else "gpu"


def _kernels_section(records: Records) -> str:
    mine = [record for record in records if record.suite == "kernels"]
    return f"{kernels_table(mine)}\n\n{kernel_tables.NOTE} Medians. {conditions(mine)}"


def _memory_section(records: Records) -> str:
    mine = [record for record in records if record.operation == "memory"]
    return f"{memory_table(mine)}\n\n{conditions(mine)}"


def _frames_section(records: Records) -> str:
    mine = [record for record in records if record.suite == "frames"]
    # what is measured has its place among the operations once the cases are imported
    (about,) = {OPERATIONS[case.operation].about for case in frames.gather_cases()}
    return f"{frames_table(mine)}\n\n{about}. Medians. {conditions(mine)}"


def _storage_section(records: Records) -> str:
    mine = [record for record in records if record.suite == "storage"]
    capacity = mine[0].capacity
    note = (
        f"Rings of {capacity:,} transitions. Of single calls the medians over parts of the run. Tuples of a deque or a "
        "list only take a reference, and pay when a batch is put together."
    )
    return f"{storage.storage_table(mine)}\n\n{note} {conditions(mine)}"


# marker name: how its table is made, which records it needs, and the command that makes these
SECTIONS: dict[str, tuple[Callable[[Records], str], Callable[[Record], bool], str]] = {
    "cpu": (_cpu_section, lambda record: record.suite == "cpu" and record.operation == "cycle", "gpu-replay bench cpu"),
    "cpu-cells": (_cells_section, lambda record: record.suite == "cpu" and record.unit == "us", "gpu-replay bench cpu"),
    "gpu": (_gpu_section, lambda record: record.suite == "gpu", "gpu-replay bench gpu"),
    "kernels": (_kernels_section, lambda record: _kernels_of(record) == "gpu", "gpu-replay bench kernels"),
    "kernels-cpu": (
        _kernels_section,
        lambda record: _kernels_of(record) == "cpu",
        "gpu-replay bench kernels --device cpu",
    ),
    "peers": (_peers_section, lambda record: record.suite == "peers", "gpu-replay bench peers"),
    "frames": (_frames_section, lambda record: record.suite == "frames", "gpu-replay bench frames"),
    "storage": (_storage_section, lambda record: record.suite == "storage", "gpu-replay bench storage"),
    "memory": (_memory_section, lambda record: record.operation == "memory", "gpu-replay bench cpu"),
}


def section(name: str, records: Records) -> str:
    """The text of one marked place, the command that reproduces it included; one table per machine.

    Raises KeyError for a name that no table has.
    """
    if name not in SECTIONS:
        raise KeyError(f"no table is called {name!r}; there are {', '.join(SECTIONS)}.")
    make, needed, command = SECTIONS[name]
    machines = dict.fromkeys(
        (record.environment.device, record.environment.cpu) for record in records if needed(record)
    )
    if not machines:
        return f"Not measured yet: `{command}`."
    texts = []
    for device, cpu in machines:
        # tables of a GPU show peers measured on the CPU beside it, but peers have a table for each device
        also = "peers" if name != "peers" else None
        here = [r for r in records if r.environment.cpu == cpu and (r.environment.device == device or r.suite == also)]
        texts.append(make(here))
    return "\n\n".join(texts) + f" Reproduce: `{command}`."


def updated(document: str, records: Records) -> str:
    """The document with the text between all its markers made anew.

    Raises ValueError for a marker that is not closed and KeyError for one that names no table.
    """
    opened = re.findall(r"<!-- bench:([\w-]+) -->", document)
    for name in opened:
        mark, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        before, _, rest = document.partition(mark)
        _, closed, after = rest.partition(end)
        if not closed:
            raise ValueError(f"{mark} is not closed; put {end} where its table ends.")
        if name == "pong":
            text = runs.section(runs.run_folders())
        else:
            text = cost_model.section(records) if name == "cost-model" else section(name, records)
        document = f"{before}{mark}\n{text}\n{end}{after}"
    return document
