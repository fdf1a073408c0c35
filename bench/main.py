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

from gpu_replay.console.progress import Progress

from . import frames, gpu_page, kernel_runner, memory, peers_suite, plots, report, storage
from .cases import BATCHES, CAPACITIES, Case, chosen, index_cases, step_cases
from .environment import current_environment
from .index_subject import IndexSubject
from .kernel_cases import KernelCase, kernel_cases
from .kernel_tables import kernels_table
from .peers_table import peers_table
from .record import Record
from .results import default_file, device_name, read, recorded_files, write
from .runner import Maker, Refused, Run
from .subjects import PEERS, MissingPeer, ReplaySubject, peer_version
from .test_gate import TestsFailed, proven
from .timing import How, Plan, copy_bandwidth

CPU = torch.device("cpu")
OURS = "gpu_replay"
QUICK = Plan(warmup=0.01, seconds=0.02, fewest=20, most=200)
QUICK_CAPACITIES = (10_000,)
QUICK_BATCHES = (32, 256)
# a kernel that takes a second is called a few times, one that takes a microsecond thousands of times
KERNELS = Plan(warmup=0.03, seconds=0.2, fewest=6, most=5000)
# a step of Atari agents: so many environments, so many transitions learned from
ATARI_ENVS, ATARI_STEPS, ATARI_BATCH = 128, 8_000, 512


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
    except (OSError, RuntimeError, MemoryError, MissingPeer, TestsFailed, Refused) as error:
        print(f"gpu-replay bench: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(threads)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gpu-replay bench", description="Measures buffers and records the result.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    suites = {
        "cpu": (_cpu, "add, sample, update, full cycles, the index alone and memory, on the CPU with one thread"),
        "gpu": (_gpu, "add, sample, update and full cycles on the GPU, vectors and Atari frames, called and replayed"),
        "kernels": (_kernels, "single operations of this package beside the torch operations that do the same"),
        "frames": (_frames, "stacks of Atari frames stored once, beside a bare copy of the same bytes"),
        "peers": (_peers, "full cycles, adds and the index alone, beside other libraries in turns"),
        "storage": (_storage, "storing transitions and reading batches, for deque, list, NumPy rings and this buffer"),
    }
    files = {"kernels": "kernels-DEVICE"}
    for name, (run, about) in suites.items():
        command = commands.add_parser(name, help=about, description=f"Measures {about}.")
        command.add_argument(
            "--output",
            type=Path,
            metavar="FILE",
            help=f"JSON lines; its cases are renewed (default: {default_file(files.get(name, name))})",
        )
        command.add_argument("--quick", action="store_true", help="few sizes and repetitions: a trial, no measurement")
        command.add_argument(
            "--only", metavar="PATTERN", help='cases to run: a part of the name or a glob, "N=1M", "cycle/*"'
        )
        command.set_defaults(run=run, suite=name)
        if name == "peers":
            command.add_argument("--peer", action="append", choices=sorted(PEERS), help="only this one; repeatable")
            command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where rows are stored")
        if name == "kernels":
            command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
            command.add_argument("--n-max", type=_count, metavar="N", help="no cases with more slots: 1000000, 1e7")
            command.add_argument("--plot", action="store_true", help="PNGs from the records, beside them")
        if name in ("gpu", "kernels"):
            command.add_argument(
                "--timing",
                choices=("events", "graph"),
                help="on a GPU, events around each call or around a replayed CUDA graph of calls "
                f"(default: {'both' if name == 'gpu' else 'graph'})",
            )
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
    about = "PNGs of kernel microbenchmarks made from records"
    command = commands.add_parser("plot", help=about, description=f"{about}, one folder for each file.")
    command.add_argument("files", nargs="*", type=Path, metavar="FILE", help="JSON lines (default: all recorded)")
    command.set_defaults(run=_plot)
    about = "the page of one GPU, from all that bench/on_gpu.sh left in a folder"
    command = commands.add_parser("page", help=about, description=f"Writes {about}.")
    command.add_argument("--results", type=Path, required=True, metavar="DIR", help="the folder of the records")
    command.add_argument("--output", type=Path, metavar="FILE", help="Markdown (default: DIR.md, beside the folder)")
    command.set_defaults(run=_page)
    return parser


def _count(text: str) -> int:
    """A positive whole number, in digits or as 1e7."""
    number = float(text)
    if not 1 <= number < float("inf") or number % 1:
        raise ValueError(f"{text!r} is not a positive whole number")
    return int(number)


def _cpu(options: argparse.Namespace) -> int:
    sizes = (QUICK_CAPACITIES, QUICK_BATCHES) if options.quick else (CAPACITIES, BATCHES)
    steps = step_cases(*sizes)
    index = index_cases(*sizes) if options.quick else index_cases()
    kept = chosen(steps + index, options.only)
    with_memory = options.only is None
    run = _prepared(options, CPU, _operations(kept) + ["memory"] * with_memory)
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
    vectors, atari = step_cases(*sizes), _atari_cases(options.quick)
    kept = chosen(vectors + atari, options.only)
    ways: tuple[How, ...] = (options.timing,) if options.timing else ("events", "graph")
    run = replace(_prepared(options, device, _operations(kept)), ways=ways)
    parts: tuple[tuple[Maker, list[Case]], ...] = (
        (partial(ReplaySubject, device=device), vectors),
        (partial(frames.FrameSubject, device=device, envs=ATARI_ENVS), atari),
    )
    with _session(options, len(kept)) as (records, progress):
        for make, cases in parts:
            for record in run.records([case for case in cases if case in kept], {OURS: make}, progress):
                records.append(record)
    _print(records)
    return 0


def _atari_cases(quick: bool) -> list[Case]:
    """The parts of a step of Atari agents, and the whole of it."""
    capacity = ATARI_ENVS * (100 if quick else ATARI_STEPS)
    return [
        Case("frame-add", capacity, ATARI_ENVS, ATARI_ENVS),
        Case("frames", capacity, ATARI_BATCH, 0),
        Case("frame-cycle", capacity, ATARI_BATCH, ATARI_ENVS),
    ]


def _kernels(options: argparse.Namespace) -> int:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("bench kernels --device cuda needs a CUDA or ROCm device and torch finds none.")
    if device.type == "cpu" and options.timing:
        raise ValueError(f"--timing {options.timing} needs a GPU; on a CPU the host's clock is all there is.")
    if options.plot:
        plots.require()
    most = options.n_max
    cases = kernel_cases(device.type, most=most)
    if options.quick:
        cases = kernel_cases(device.type, QUICK_CAPACITIES, QUICK_BATCHES, rows=10_000, frames=2_000, most=most)
    kept = chosen(cases, options.only)
    name = f"kernels-{device_name(device)}"
    options.output = options.output or default_file(f"{name}-quick" if options.quick else name)
    ways: tuple[How, ...] = ("host",) if device.type == "cpu" else (options.timing or "graph",)
    run = _prepared(options, device, _operations(kept))
    # others may be busy on the same CPU, while a GPU is its user's own
    rounds = 1 if options.quick or device.type == "cuda" else 3
    run = replace(run, ways=ways, plan=run.plan if options.quick else KERNELS, rounds=rounds)
    with _session(options, len(kept)) as (records, progress):
        for record in kernel_runner.records(run, kept, progress):
            records.append(record)
    if records:
        print(kernels_table(records), report.conditions(records), sep="\n\n")
    if options.plot and options.output.is_file():
        _draw(options.output)
    return 0


def _plot(options: argparse.Namespace) -> int:
    plots.require()
    for file in options.files or recorded_files():
        _draw(file)
    return 0


def _draw(file: Path) -> None:
    """Plots of a file's kernel records, in a folder of its name."""
    for image in plots.draw([record for record in read(file) if record.suite == "kernels"], file.with_suffix("")):
        print(f"{image}: drawn from {file}", file=sys.stderr)


def _frames(options: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    capacity = 1_000_000 if device.type == "cuda" else frames.CAPACITY
    sizes = (2_000, (32,)) if options.quick else (capacity, frames.BATCHES)
    gathered, others = frames.gather_cases(*sizes), frames.stream_cases(*sizes)
    kept = chosen(gathered + others, options.only)
    run = replace(_prepared(options, device, _operations(kept)), rounds=1 if options.quick else 5)
    ours: dict[str, Maker] = {OURS: partial(frames.FrameSubject, device=device)}
    both: dict[str, Maker] = {**ours, "take": partial(frames.TakeSubject, device=device)}
    with _session(options, len(kept)) as (records, progress):
        for cases, makers in ((gathered, both), (others, ours)):
            for record in run.records([case for case in cases if case in kept], makers, progress):
                records.append(record)
    print(report.frames_table(records), report.conditions(records), sep="\n\n")
    return 0


def _peers(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("bench peers --device cuda needs a CUDA or ROCm device and torch finds none.")
    parts = peers_suite.parts(peers_suite.QUICK if options.quick else peers_suite.Sizes(), device)
    kept = chosen([case for part in parts for case in part.cases], options.only)
    parts = [replace(part, cases=[case for case in part.cases if case in kept]) for part in parts]
    names = options.peer or list(PEERS)
    versions = {name: peer_version(name) for name in names}
    run = _prepared(options, device, _operations(kept))
    run = replace(run, versions=versions, rounds=1 if options.quick else 5)
    with _session(options, len(kept)) as (records, progress):
        for record in peers_suite.records(run, parts, names, progress, device):
            records.append(record)
    print(peers_table(records), report.conditions(records), sep="\n\n")
    return 0


def _storage(options: argparse.Namespace) -> int:
    run = _prepared(options, CPU, ["storage-one", "storage-blocks", "storage-batches"])
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


def _page(options: argparse.Namespace) -> int:
    folder: Path = options.results
    if not folder.is_dir():
        raise ValueError(f"--results {folder} is not a folder; `bench/on_gpu.sh` makes one.")
    output: Path = options.output or folder.resolve().with_name(f"{folder.resolve().name}.md")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(gpu_page.page(folder, output))
    print(f"{output} is written")
    return 0


def _operations(cases: Sequence[Case | KernelCase]) -> list[str]:
    return list(dict.fromkeys(case.operation for case in cases))


def _prepared(options: argparse.Namespace, device: torch.device, operations: list[str]) -> Run:
    """What all records of the run share; raises TestsFailed while tests of these operations are, except for a trial."""
    quick = options.quick
    tests = None if quick else proven(operations, device)
    bandwidth = copy_bandwidth(device, nbytes=2**25, repetitions=3) if quick else copy_bandwidth(device)
    return Run(
        options.suite,
        device,
        QUICK if quick else Plan(),
        current_environment(device),
        bandwidth,
        quick,
        versions={},
        ways=("host",) if device.type == "cpu" else ("events",),
        tests=tests,
    )


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
