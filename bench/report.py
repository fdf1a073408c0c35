"""Markdown tables of records, and their places in documents: the only way a figure gets into a page.

A document marks the place of a table with `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`. One command replaces the
text between the markers, so a table cannot differ from what was measured.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_replay.console.errors import UserError
from gpu_replay.console.markdown import number, table

from .baselines import ALONE
from .checkpoint import checkpoint_table
from .host_time import host_table
from .lower_bound import NAME as LOWER_BOUND
from .operations import KERNELS, OPERATIONS, OURS, short
from .peers import PEERS
from .records import Record, recorded_folder
from .sharded import sharded_table
from .storage import storage_table

Records = Sequence[Record]

# without priorities they do less work: shown beside the others, never a baseline
UNIFORM = frozenset(name for name, peer in PEERS.items() if peer.uniform)


def best_baseline(record: Record, others: Iterable[Record]) -> Record | None:
    """The fastest other implementation that did all of the record's case on the same machine, timed in the same way.

    Those without priorities count where nothing with priorities is asked for.
    """

    def measured(each: Record) -> tuple[str, ...]:
        return each.case, each.environment.device, each.environment.cpu, each.timing

    found = [
        other
        for other in others
        if measured(other) == measured(record)
        and other.implementation != OURS
        and (other.implementation not in UNIFORM or "uniform" in other.operation)
        and not other.implementation.endswith(ALONE)
        and other.quick <= record.quick
    ]
    return min(found, key=lambda other: other.median, default=None)


def _beside(record: Record | None, others: Iterable[Record]) -> list[str]:
    """The best baseline and the speedup over it; empty cells without one."""
    best = best_baseline(record, others) if record else None
    if record is None or best is None:
        return ["", ""]
    return [f"{number(best.median)} ({best.implementation})", f"{best.median / record.median:.2f}x"]


def _share(record: Record) -> str:
    return "" if record.copy_share is None or not record.bytes else f"{record.copy_share:.1%}"


def _tells_floor(record: Record) -> bool:
    """Whether it is of the simplest gather of frames, replayed."""
    return (record.operation, record.implementation, record.timing) == ("frame-gather", "index_select", "graph")


def cold_floor(records: Records) -> float | None:
    """Microseconds that a replayed call with cold caches takes before it moves anything, whatever it does.

    It is where the line through the two smallest gathers of frames by `index_select` begins; None without those.
    """
    gathers = sorted(filter(_tells_floor, records), key=lambda record: record.bytes)
    if len(gathers) < 2:
        return None
    small, large = gathers[:2]
    return small.median - small.bytes * (large.median - small.median) / (large.bytes - small.bytes)


def _share_or_floor(record: Record, floor: float | None) -> str:
    """The share; of a cold call that is too small to reach two thirds of the bandwidth, the floor."""
    if floor is None or not record.flush or record.timing != "graph":
        return _share(record)
    small = record.bytes < 2e-6 * floor * record.copy_bandwidth
    return f"floor {floor:.1f} µs" if small else _share(record)


def cells_table(records: Records, peers: Records = ()) -> str:
    """Every timed case with its quantiles, its share of the copy bandwidth and the best peer."""
    rows = []
    for record in records:
        case = record.case + (", replayed" if record.timing == "graph" else "")
        spread = [number(record.quantiles[name]) for name in ("p10", "p50", "p90")]
        rows.append([case, *spread, _share(record), *_beside(record, peers)])
    return table(["case", "p10 µs", "p50 µs", "p90 µs", "% of copy bandwidth", "best baseline, µs", "speedup"], rows)


def kernels_table(records: Records, peers: Records = ()) -> str:
    """Every measured kernel of this package beside the best torch operations, in the order of the registry."""
    order = {name: place for place, name in enumerate(KERNELS)}
    ours = [record for record in records if record.implementation == OURS]
    ours.sort(key=lambda r: (order.get(r.operation, len(order)), r.operation, r.capacity, r.batch, r.timing))
    floor, rows = cold_floor(records), []
    for record in ours:
        name = record.operation + (", events" if record.timing == "events" else "")
        sizes = [short(record.capacity) if record.capacity else "", f"{record.batch:,}" if record.batch else ""]
        rows.append([name, *sizes, number(record.median), *_beside(record, records), _share_or_floor(record, floor)])
    return table(["operation", "N", "B", "µs", "best baseline, µs", "speedup", "% of copy bandwidth"], rows)


def _compared(
    records: Records,
    heads: Sequence[str],
    first: Callable[[Record], list[str]],
    last: Callable[[Mapping[str, Record]], list[str]] = lambda here: [],
    shown: Callable[[Record], float] = lambda record: record.median,
) -> str:
    """Cases down, implementations across, this package first: medians.

    heads: of the `first` cells, of an implementation's column ("{}" is its name), and of the `last` one, if any.
    shown: the number of a record.
    """

    def column(record: Record) -> str:
        # replayed calls have one of their own
        return record.implementation + (", captured" if record.timing == "graph" else "")

    # a renewed case stands last in its file
    names = sorted(dict.fromkeys(map(column, records)), key=lambda name: not name.startswith(OURS))
    order = {operation: place for place, operation in enumerate(OPERATIONS)}
    cases: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        size = (record.bytes if record.unit == "bytes" else 0, record.capacity, record.batch)
        key = (order[record.operation], *size, record.case)
        cases.setdefault(key, {})[column(record)] = record
    rows = []
    for _, here in sorted(cases.items()):
        cells = [number(shown(here[name])) if name in here else "" for name in names]
        rows.append([*first(next(iter(here.values()))), *cells, *last(here)])
    place = next(place for place, head in enumerate(heads) if "{}" in head)
    columns = [heads[place].format(f"{name} (uniform)" if name in UNIFORM else name) for name in names]
    return table([*heads[:place], *columns, *heads[place + 1 :]], rows)


def peers_table(records: Records, peers: Records = ()) -> str:
    """Microseconds of all libraries; the last column is the best prioritized one's time over this package's."""

    def label(each: Record) -> list[str]:
        size = f"{'' if 'add' in each.operation else 'B = '}{each.batch:,}"
        return [f"{OPERATIONS[each.operation].about.format(each.added)}, N = {short(each.capacity)}, {size}"]

    return _compared(records, ["µs", "{}", "speedup"], label, lambda here: _beside(here.get(OURS), here.values())[1:])


def scale_table(records: Records, peers: Records = ()) -> str:
    """Microseconds of every implementation, and the time of this package over that of the C program."""

    def sizes(each: Record) -> list[str]:
        return [each.operation, short(each.capacity), f"{each.batch:,}"]

    def ratio(here: Mapping[str, Record]) -> list[str]:
        both = OURS in here and LOWER_BOUND in here
        return [f"{here[OURS].median / here[LOWER_BOUND].median:.1f}x" if both else ""]

    return _compared(records, ["call", "N", "B", "{}, µs", f"{OURS} / C"], sizes, ratio)


def bytes_table(records: Records, peers: Records = ()) -> str:
    """Resident bytes a transition of every implementation over the bytes of its fields."""

    def above(here: Mapping[str, Record]) -> list[str]:
        return [f"{here[OURS].median / here[OURS].bytes - 1:+.1%}" if OURS in here else ""]

    heads = ["bytes of fields", "N", "{}", f"{OURS} above fields"]
    return _compared(records, heads, lambda each: [f"{each.bytes:,}", short(each.capacity)], above)


def field_table(records: Records, peers: Records = ()) -> str:
    """Bytes of a transition, and milliseconds of every buffer of many environments."""

    def label(each: Record) -> list[str]:
        size = f", B = {each.batch:,}" if each.batch else ""
        return [f"{each.operation.removeprefix('field/')}{size}, {'ms' if each.unit == 'us' else 'a transition'}"]

    return _compared(records, ["", "{}"], label, shown=lambda each: each.median / (1000 if each.unit == "us" else 1))


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


# mean returns of Pong whose first time is shown
THRESHOLDS = (0.0, 15.0)
_ENDINGS = {"max_seconds": "time was up", "steps": "all steps done"}


def run_folders() -> list[Path]:
    """The recorded runs of Pong, in folders of the results whose names say so; none outside of a checkout."""
    folder = recorded_folder()
    return [] if folder is None else sorted({path.parent for path in folder.rglob("*pong*/**/summary.json")})


def runs_section(folders: Sequence[Path]) -> str:
    """One line a training run: minutes and steps to each threshold and to its end, last evaluation, speed."""
    if not folders:
        return "Not measured yet: `gpu-replay train pong`."
    rows, devices, commands = [], {}, {}
    for folder in folders:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        env, ending, mean = str(summary["env"]), str(summary["stopped_by"]), summary["eval_return_mean"]
        devices[str(summary["device_name"])] = commands[f"`gpu-replay train {env} --seed N`"] = True
        with (folder / "progress.csv").open(newline="") as file:
            progress = list(csv.DictReader(file))
        missed = "ended before" if ending == "solved" else "not reached"
        # NaN before the first episode ends, which exceeds nothing; the thresholds are those of Pong
        above = [[row for row in progress if float(row["return_mean"]) > each] for each in THRESHOLDS]
        reached = [_minutes(each[0]["seconds"], each[0]["step"]) if each else missed for each in above]
        rows.append(
            [
                f"{folder.parent.name}/{folder.name}",
                *(reached if "pong" in env else [""] * len(THRESHOLDS)),
                f"{_minutes(summary['wall_seconds'], summary['steps'])}, {_ENDINGS.get(ending, ending)}",
                "none" if mean is None else f"{mean:.1f} ± {summary['eval_return_std']:.1f}",
                *(f"{summary[name]:,.0f}" for name in ("steps_per_second", "updates_per_second")),
                f"{summary['replay_share']:.1%}",
            ]
        )
    window = json.loads((folders[0] / "settings.json").read_text())["return_window"]
    note = (
        f"Mean over the last {window} finished training episodes, exploration included; minutes of wall clock from the "
        "start of the run, evaluations included, and environment steps. The evaluation plays fresh games with the best "
        "network, and ends a run that it finds solved."
    )
    columns = [f"mean return > {threshold:.0f}" for threshold in THRESHOLDS]
    header = ["run", *columns, "ended", "evaluation", "steps/s", "updates/s", "replay"]
    return f"{table(header, rows)}\n\n{note} {', '.join(devices)}. Reproduce: {', '.join(commands)}."


def _minutes(seconds: float | str, steps: float | str) -> str:
    return f"{float(seconds) / 60:.1f} min, {float(steps) / 1e6:.2f}M"


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


def _in_short_of_gpu(record: Record) -> bool:
    """Rows of the table in README.md, and what tells the floor of its cold calls."""
    shown = record.case.endswith("M/B=256") or _tells_floor(record)
    return shown and record.environment.device != "cpu"


SECTIONS: dict[str, Section] = {
    "cpu": Section("cpu", cells_table),
    "gpu": Section("gpu", cells_table),
    "kernels": Section("kernels", kernels_table),
    "peers": Section("peers", peers_table, lambda r: not r.operation.startswith(("ratio-", "field/"))),
    "field": Section('peers --only "field/*"', field_table, lambda r: r.operation.startswith("field/")),
    "ratios": Section("peers", ratios_table, lambda r: r.operation.startswith("ratio-")),
    "checkpoint": Section("checkpoint", checkpoint_table),
    "scale": Section("scale", scale_table, lambda record: record.unit == "us"),
    "bytes": Section("scale", bytes_table, lambda record: record.unit == "bytes"),
    "sharded": Section("sharded", sharded_table),
    "storage": Section("storage", storage_table),
    "host": Section("host", host_table),
}
# texts that are not of one suite, made of all records
_OTHERS: dict[str, Callable[[Records], str]] = {
    "gpu-in-short": lambda records: section("kernels", [each for each in records if _in_short_of_gpu(each)]),
    "pong": lambda records: runs_section(run_folders()),
}


def section(name: str, records: Records) -> str:
    """The text of one marked place, with the command that reproduces it; one table per machine.

    Raises UserError for a name that no table has.
    """
    if name in _OTHERS:
        return _OTHERS[name](records)
    if name not in SECTIONS:
        raise UserError(f"no table is called {name!r}; there are {', '.join([*SECTIONS, *_OTHERS])}.")
    each = SECTIONS[name]
    machines: dict[tuple[str, str], list[Record]] = {}
    for record in filter(each.holds, records):
        machines.setdefault((record.environment.device, record.environment.cpu), []).append(record)
    if not machines:
        return f"Not measured yet: `gpu-replay bench {each.command}`."
    peers = [record for record in records if record.suite == "peers"]
    texts = [f"{each.table(mine, peers)}\n\n{conditions(mine)}" for mine in machines.values()]
    return "\n\n".join(texts) + f" Reproduce: `gpu-replay bench {each.command}`."


def measured(records: Records, peers: Records) -> list[str]:
    """The texts of all tables that these records fill, compared with earlier records of peers."""
    return [section(name, [*records, *peers]) for name, each in SECTIONS.items() if any(map(each.holds, records))]


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
