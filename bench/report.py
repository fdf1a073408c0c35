"""Puts tables of records into documents: the only way in which a figure gets into the documentation.

A document marks the place of a table with `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; what stands between is
replaced, so a table is renewed by one command and cannot differ from what was measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from . import cost_model, runs, tables
from .cases import OPERATIONS
from .checkpoint import checkpoint_table
from .kernels import KERNELS
from .record import Environment, Record
from .storage import storage_table
from .tables import Records


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
    failed = dict.fromkeys(name for record in records for name in record.failed_tests)
    if failed:
        parts.append(f"TESTS FAILED: {', '.join(failed)}")
    return ", ".join(parts) + "."


def _machine(environment: Environment) -> str:
    threads = f"{environment.threads} thread{'s' if environment.threads > 1 else ''}"
    cpu = f"{environment.cpu} ({environment.cores} cores, {threads})"
    return cpu if environment.device == "cpu" else f"{environment.device}, {cpu}"


@dataclass(frozen=True)
class Section:
    """One marked table.

    suite:   of its records, and the command that makes them.
    needs:   which of the suite's records it shows.
    table:   made of these records and of the peers' on the same machine.
    note:    one or more sentences below it.
    options: of the command.
    """

    suite: str
    table: Callable[[Records, Records], str]
    needs: Callable[[Record], bool] = lambda record: True
    note: str = ""
    options: str = ""

    @property
    def command(self) -> str:
        """The command that makes the records."""
        return f"gpu-replay bench {self.suite}{self.options}"

    def holds(self, record: Record) -> bool:
        """Whether the table shows the record."""
        return record.suite == self.suite and self.needs(record)


def _on_cpu(record: Record) -> bool:
    return record.environment.device == "cpu"


def _of_settings(record: Record) -> bool:
    return record.operation.startswith("ratio-")


def _beside_peers(record: Record) -> bool:
    return not _of_settings(record)


_KERNELS_NOTE = (
    "Best baseline: the fastest torch operations that do the whole work; speedup: their time over ours. % of copy "
    "bandwidth: the bytes that must move over the time, relative to a plain copy in the same run. Caches are flushed "
    f"before each call of {', '.join(name for name, kernel in KERNELS.items() if kernel.cold)}. Medians."
)
_PEERS_NOTE = (
    "A cycle adds 8 transitions, samples B and gives these B new priorities; an Atari transition has stacks of four "
    "84x84 frames before and after. All fields and weights are sampled as torch tensors. Speedup: the best other "
    "prioritized buffer's time over that of gpu_replay. Columns marked uniform have no priorities, do less work and "
    "are left out of the speedup, except where a loop without priorities is measured. With one environment, a step is "
    "added, with a float64 reward and a Python bool. Implementations are interleaved. Medians."
)
_RATIOS_NOTE = (
    "Settings of this package, interleaved: the time of the second over that of the first. A case of rank or loops "
    "adds 8, samples B and updates B; hindsight, replacement and threads sample. Medians."
)
_CYCLE_NOTE = (
    f"One cycle: {OPERATIONS['cycle'].about}. In parentheses the speedup over the best peer on this machine. Medians."
)
_STORAGE_NOTE = (
    "Single calls: medians over parts of the run. Deques and lists of tuples only take a reference on insertion and "
    "pay when a batch is put together."
)
_CHECKPOINT_NOTE = (
    "Frames of random bytes in one buffer. Writes end with fsync; files are dropped from the page cache before they "
    "are read. Medians of three rounds, in each of which all are done in turn."
)
_FRAMES_NOTE = (
    "A batch has B transitions with stacks of 4 frames of 84x84 before and after; take copies as many frames from "
    "given places. Implementations are interleaved. Medians."
)

SECTIONS: dict[str, Section] = {
    "cpu": Section("cpu", tables.cycle_table, lambda record: record.operation == "cycle", _CYCLE_NOTE),
    "cpu-cells": Section("cpu", tables.cells_table, lambda record: record.unit == "us"),
    "gpu": Section("gpu", tables.cells_table),
    "kernels": Section("kernels", lambda mine, _: tables.kernels_table(mine), lambda r: not _on_cpu(r), _KERNELS_NOTE),
    "kernels-cpu": Section(
        "kernels", lambda mine, _: tables.kernels_table(mine), _on_cpu, _KERNELS_NOTE, " --device cpu"
    ),
    "peers": Section("peers", lambda mine, _: tables.peers_table(mine), _beside_peers, _PEERS_NOTE),
    "ratios": Section("peers", lambda mine, _: tables.ratios_table(mine), _of_settings, _RATIOS_NOTE),
    "frames": Section("frames", lambda mine, _: tables.frames_table(mine), note=_FRAMES_NOTE),
    "checkpoint": Section("checkpoint", lambda mine, _: checkpoint_table(mine), note=_CHECKPOINT_NOTE),
    "storage": Section("storage", lambda mine, _: storage_table(mine), note=_STORAGE_NOTE),
    "memory": Section("cpu", lambda mine, _: tables.memory_table(mine), lambda record: record.operation == "memory"),
}


def section(name: str, records: Records) -> str:
    """The text of one marked place, with the command that reproduces it; one table per machine.

    Raises KeyError for a name that no table has.
    """
    if name == "cost-model":
        return cost_model.section(records)
    if name == "pong":
        return runs.section(runs.run_folders())
    if name not in SECTIONS:
        raise KeyError(f"no table is called {name!r}; there are {', '.join([*SECTIONS, 'cost-model', 'pong'])}.")
    each = SECTIONS[name]
    machines: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if each.holds(record):
            machines.setdefault((record.environment.device, record.environment.cpu), []).append(record)
    if not machines:
        return f"Not measured yet: `{each.command}`."
    peers = [record for record in records if record.suite == "peers"]
    texts = []
    for mine in machines.values():
        notes = [each.note] * bool(each.note)
        texts.append(f"{each.table(mine, peers)}\n\n{' '.join([*notes, conditions(mine)])}")
    return "\n\n".join(texts) + f" Reproduce: `{each.command}`."


def measured(records: Records, peers: Records) -> list[str]:
    """The texts of all tables that these records fill, compared with earlier records of peers."""
    names = [name for name, each in SECTIONS.items() if any(each.holds(record) for record in records)]
    return [section(name, [*records, *peers]) for name in names]


def updated(document: str, records: Records) -> str:
    """The document with the text between all its markers made anew.

    Raises ValueError for a marker that is not closed and KeyError for one that names no table.
    """
    for name in re.findall(r"<!-- bench:([\w-]+) -->", document):
        mark, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        before, _, rest = document.partition(mark)
        _, closed, after = rest.partition(end)
        if not closed:
            raise ValueError(f"{mark} is not closed; put {end} where its table ends.")
        document = f"{before}{mark}\n{section(name, records)}\n{end}{after}"
    return document
