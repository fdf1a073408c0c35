"""`gpu-replay bench`: measure, record, and make tables of the records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from . import frames, memory, report, storage
from .cases import BATCHES, CAPACITIES, Case, chosen, cycle_cases, index_cases, step_cases
from .environment import current_environment
from .index_subject import IndexSubject
from .progress import Progress
from .record import Record
from .results import default_file, read, recorded_files, write
from .runner import Maker, Refused, Run
from .subjects import PEERS, MissingPeer, ReplaySubject, make_peer, peer_version
from .timing import Plan, copy_bandwidth

CPU = torch.device("cpu")
OURS = "gpu_replay"
QUICK = Plan(warmup=0.01, seconds=0.02, fewest=20, most=200)
QUICK_CAPACITIES = (10_000,)
QUICK_BATCHES = (32, 256)


class _Parser(argparse.ArgumentParser):
    """Errors in one line; usage is a matter for --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(argv: Sequence[str]) -> int:
    """Run one command of `gpu-replay bench`; returns the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted.

    A run that cannot be made says why in one line on standard error. What was measured before an interruption is
    recorded.
    """
    options = _parser().parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        status: int = options.run(options)
        return status
    except KeyboardInterrupt:
        print("gpu-replay bench: interrupted", file=sys.stderr)
        return 130
    except (ValueError, KeyError) as error:
        # str() of a KeyError is the repr of its message
        print(f"gpu-replay bench: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError, MemoryError, MissingPeer, Refused) as error:
        print(f"gpu-replay bench: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(threads)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gpu-replay bench", description="Measures buffers and records the result.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    suites = {
        "cpu": (_cpu, "add, sample, update, full cycles, the index alone and memory, on the CPU with one thread"),
        "gpu": (_gpu, "add, sample, update and full cycles on the GPU, timed by CUDA events"),
        "frames": (_frames, "stacks of Atari frames stored once, beside a bare copy of the same bytes"),
        "peers": (_peers, "the full cycle of this package and of other libraries, side by side"),
        "storage": (_storage, "storing transitions and reading batches, for deque, list, NumPy rings and this buffer"),
    }
    for name, (run, about) in suites.items():
        command = commands.add_parser(name, help=about, description=f"Measures {about}.")
        command.add_argument(
            "--output",
            type=Path,
            metavar="FILE",
            help=f"JSON lines; its cases are renewed (default: {default_file(name)})",
        )
        command.add_argument("--quick", action="store_true", help="few sizes and repetitions: a trial, no measurement")
        command.add_argument(
            "--only", metavar="PATTERN", help='cases to run: a part of the name or a glob, "N=1M", "cycle/*"'
        )
        command.set_defaults(run=run, suite=name)
        if name == "peers":
            command.add_argument("--peer", action="append", choices=sorted(PEERS), help="only this one; repeatable")
    about = "Markdown tables made from records"
    command = commands.add_parser("report", help=about, description=f"{about}.")
    command.add_argument("files", nargs="*", type=Path, metavar="FILE", help="JSON lines (default: all recorded)")
    command.add_argument(
        "--update",
        action="append",
        type=Path,
        metavar="DOCUMENT",
        help="renew the text between its <!-- bench:NAME --> and <!-- /bench:NAME --> instead of printing; repeatable",
    )
    command.set_defaults(run=_report)
    return parser


def _cpu(options: argparse.Namespace) -> int:
    sizes = (QUICK_CAPACITIES, QUICK_BATCHES) if options.quick else (CAPACITIES, BATCHES)
    steps = step_cases(*sizes)
    index = index_cases(*sizes) if options.quick else index_cases()
    kept = chosen(steps + index, options.only)
    with_memory = options.only is None
    run = _prepared("cpu", CPU, options.quick)
    with _session(options, len(kept) + with_memory) as (records, progress):
        parts: tuple[tuple[Maker, list[Case]], ...] = (
            (partial(ReplaySubject, device=CPU), steps),
            (IndexSubject, index),
        )
        for make, cases in parts:
            for record in run.records([case for case in cases if case in kept], {OURS: make}, progress):
                records.append(record)
        if with_memory:
            capacity = 100_000 if options.quick else 1_000_000
            progress.show(f"memory of {capacity:,} transitions")
            records.append(memory.record(run, capacity, repetitions=1 if options.quick else 3))
            progress.advance()
    _print(records)
    return 0


def _gpu(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise RuntimeError("bench gpu needs a CUDA or ROCm device and torch finds none; `bench cpu` needs none.")
    device = torch.device("cuda")
    sizes = (QUICK_CAPACITIES, QUICK_BATCHES) if options.quick else ((*CAPACITIES, 10_000_000), (*BATCHES, 65_536))
    kept = chosen(step_cases(*sizes), options.only)
    run = _prepared("gpu", device, options.quick)
    with _session(options, len(kept)) as (records, progress):
        for record in run.records(kept, {OURS: partial(ReplaySubject, device=device)}, progress):
            records.append(record)
    _print(records)
    return 0


def _frames(options: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    capacity = 1_000_000 if device.type == "cuda" else frames.CAPACITY
    sizes = (2_000, (32,)) if options.quick else (capacity, frames.BATCHES)
    gathered, others = frames.gather_cases(*sizes), frames.stream_cases(*sizes)
    kept = chosen(gathered + others, options.only)
    run = replace(_prepared("frames", device, options.quick), rounds=1 if options.quick else 5)
    ours: dict[str, Maker] = {OURS: partial(frames.FrameSubject, device=device)}
    both: dict[str, Maker] = {**ours, "take": partial(frames.TakeSubject, device=device)}
    with _session(options, len(kept)) as (records, progress):
        for cases, makers in ((gathered, both), (others, ours)):
            for record in run.records([case for case in cases if case in kept], makers, progress):
                records.append(record)
    print(report.frames_table(records), report.conditions(records), sep="\n\n")
    return 0


def _peers(options: argparse.Namespace) -> int:
    cases = cycle_cases(QUICK_CAPACITIES, QUICK_BATCHES) if options.quick else cycle_cases()
    kept = chosen(cases, options.only)
    names = options.peer or list(PEERS)
    versions = {name: peer_version(name) for name in names}
    run = replace(_prepared("peers", CPU, options.quick), versions=versions, rounds=1 if options.quick else 5)
    makers: dict[str, Maker] = {OURS: partial(ReplaySubject, device=CPU)}
    makers |= {name: partial(make_peer, name) for name in names}
    with _session(options, len(kept)) as (records, progress):
        for record in run.records(kept, makers, progress):
            records.append(record)
    print(report.peers_table(records), report.conditions(records), sep="\n\n")
    return 0


def _storage(options: argparse.Namespace) -> int:
    run = _prepared("storage", CPU, options.quick)
    work = storage.QUICK if options.quick else storage.Work()
    layouts = storage.chosen(options.only)
    with _session(options, 3 * len(layouts)) as (records, progress):
        for record in storage.records(run, work, layouts, progress):
            records.append(record)
    print(storage.storage_table(records), report.conditions(records), sep="\n\n")
    return 0


def _report(options: argparse.Namespace) -> int:
    files = options.files or recorded_files()
    records = [record for file in files for record in read(file)]
    for document in options.update or []:
        text = document.read_text()
        renewed = report.updated(text, records)
        if renewed != text:
            document.write_text(renewed)
        print(f"{document}: {'renewed' if renewed != text else 'already as recorded'}")
    if not options.update:
        for name in report.SECTIONS:
            print(f"## {name}\n\n{report.section(name, records)}\n")
    return 0


def _prepared(suite: str, device: torch.device, quick: bool) -> Run:
    bandwidth = copy_bandwidth(device, nbytes=2**25, repetitions=3) if quick else copy_bandwidth(device)
    return Run(suite, device, QUICK if quick else Plan(), current_environment(device), bandwidth, quick, versions={})


@contextmanager
def _session(options: argparse.Namespace, total: int) -> Iterator[tuple[list[Record], Progress]]:
    """Records to fill and a progress bar; the records are written at the end, however it comes."""
    output = options.output or default_file(f"{options.suite}-quick" if options.quick else options.suite)
    records: list[Record] = []
    try:
        with Progress(total, f"bench {options.suite}") as progress:
            yield records, progress
    finally:
        if records:
            write(output, records)
            print(f"{len(records)} records written to {output}", file=sys.stderr)


def _print(records: list[Record]) -> None:
    """All tables that these records fill, beside the peers recorded earlier."""
    earlier = default_file("peers")
    peers = read(earlier) if earlier.is_file() else []
    parts = [report.cells_table(records, peers)]
    if any(record.operation == "cycle" for record in records):
        parts.append(report.cycle_table(records, peers))
    if any(record.operation == "memory" for record in records):
        parts.append(report.memory_table(records))
    print(*parts, report.conditions(records), sep="\n\n")
