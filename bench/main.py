"""`gpu-replay bench`: measure, record, and make tables of the records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from gpu_replay.console.arguments import Parser, positive
from gpu_replay.console.progress import Progress

from . import checkpoint, cost_model, frames, gpu_page, kernels, memory, peers_suite, plots, report, storage
from .cases import BATCHES, CAPACITIES, FRAME_ENVS, OURS, Case, chosen, index_cases, step_cases
from .environment import current_environment
from .record import Record
from .results import QUICK as TRIAL
from .results import default_file, device_slug, read, recorded_files, write
from .runner import Maker, Refused, Run
from .subjects import PEERS, IndexSubject, MissingPeer, ReplaySubject, peer_version
from .test_gate import CannotTest, failed_tests
from .timing import How, Plan, copy_bandwidth

CPU = torch.device("cpu")
QUICK = Plan(warmup=0.01, seconds=0.02, fewest=20, most=200)
QUICK_CAPACITIES = (10_000,)
QUICK_BATCHES = (32, 256)
QUICK_FRAMES, QUICK_STEPS = (2_000, (32,)), 100
# a kernel that takes a second is called a few times, one that takes a microsecond thousands of times
KERNELS = Plan(warmup=0.03, seconds=0.2, fewest=6, most=5000)
# a step of Atari agents: environments, steps of each in the ring, transitions learned from
ATARI_ENVS, ATARI_STEPS, ATARI_BATCH = 128, 8_000, 512

Measured = Callable[[Progress], Iterator[Record]]
Parts = Sequence[tuple[Mapping[str, Maker], Sequence[Case]]]


def main(argv: Sequence[str]) -> int:
    """Run one command of `gpu-replay bench`; returns the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted.

    A run that cannot be made says why in one line on standard error. What was measured before an interruption is
    recorded.
    """
    options = _parser().parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        options.run(options)
        return 0
    except KeyboardInterrupt:
        print("gpu-replay bench: interrupted", file=sys.stderr)
        return 130
    except (ValueError, KeyError) as error:
        # str() of a KeyError is the repr of its message
        print(f"gpu-replay bench: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError, MemoryError, MissingPeer, CannotTest, Refused) as error:
        print(f"gpu-replay bench: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(threads)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gpu-replay bench", description="Measures buffers and records the result.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, about: str, run: Callable[[argparse.Namespace], None]) -> Any:
        added = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        added.set_defaults(run=run, suite=name)
        return added

    suites = {
        "cpu": (_cpu, "add, sample, update, full cycles, the index alone and memory, on the CPU with one thread"),
        "gpu": (_gpu, "add, sample, update and full cycles on the GPU, vectors and Atari frames, called and replayed"),
        "kernels": (_kernels, "single operations of this package beside the torch operations that do the same"),
        "frames": (_frames, "stacks of Atari frames stored once, beside a plain copy of the same bytes"),
        "peers": (_peers, "full cycles, adds and the index alone, interleaved with other libraries"),
        "checkpoint": (_checkpoint, "saving and loading a buffer as large as fits, beside a plain write and read"),
        "storage": (_storage, "storing transitions and reading batches, for deque, list, NumPy rings and this buffer"),
    }
    for name, (run, about) in suites.items():
        suite = command(name, f"measure {about}", run)
        file = default_file("kernels-DEVICE" if name == "kernels" else name)
        suite.add_argument("--output", type=Path, metavar="FILE", help=f"JSON lines to merge into (default: {file})")
        suite.add_argument("--quick", action="store_true", help="few sizes and repetitions: a trial, no measurement")
        suite.add_argument(
            "--only", metavar="PATTERN", help='cases to run: a part of the name or a glob, "N=1M", "cycle/*"'
        )
        if name == "peers":
            suite.add_argument("--peer", action="append", choices=sorted(PEERS), help="only this one; repeatable")
            suite.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where rows are stored")
        if name == "kernels":
            suite.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
            suite.add_argument("--n-max", type=positive, metavar="N", help="no cases with more slots: 1000000, 1e7")
            suite.add_argument("--plot", action="store_true", help="PNGs from the records, beside them")
        if name in ("gpu", "kernels"):
            suite.add_argument(
                "--timing",
                choices=("events", "graph"),
                help="on a GPU, events around each call or around a replayed CUDA graph of calls "
                f"(default: {'both' if name == 'gpu' else 'graph'})",
            )
    tables = command("report", "Markdown tables made from records", _report)
    tables.add_argument(
        "--update",
        action="append",
        type=Path,
        metavar="DOCUMENT",
        help="renew the text between its <!-- bench:NAME --> and <!-- /bench:NAME --> instead of printing; repeatable",
    )
    images = command("plot", "PNGs of kernel microbenchmarks made from records, one folder for each file", _plot)
    for each in (tables, images):
        each.add_argument("files", nargs="*", type=Path, metavar="FILE", help="JSON lines (default: all recorded)")
    page = command("page", "write the page of one GPU from all that bench/on_gpu.sh left in a folder", _page)
    page.add_argument("--results", type=Path, required=True, metavar="DIR", help="the folder of the records")
    page.add_argument("--output", type=Path, metavar="FILE", help="Markdown (default: DIR.md, beside the folder)")
    return parser


def _cpu(options: argparse.Namespace) -> None:
    sizes = (QUICK_CAPACITIES, QUICK_BATCHES) if options.quick else (CAPACITIES, BATCHES)
    index = index_cases(*sizes) if options.quick else index_cases()
    vectors: dict[str, Maker] = {OURS: partial(ReplaySubject, device=CPU)}
    parts = _kept(options, (vectors, step_cases(*sizes)), ({OURS: IndexSubject}, index))
    with_memory = options.only is None
    run = _prepared(options, CPU, parts, ["memory"] * with_memory)

    def measured(progress: Progress) -> Iterator[Record]:
        yield from _records(run, parts, progress)
        if with_memory:
            capacity = 100_000 if options.quick else 1_000_000
            progress.show(f"memory of {capacity:,} transitions")
            yield memory.record(run, capacity, repetitions=1 if options.quick else 3)
            progress.advance()

    _session(options, _count(parts) + with_memory, measured)


def _gpu(options: argparse.Namespace) -> None:
    device = _device("gpu", "cuda")
    sizes = (QUICK_CAPACITIES, QUICK_BATCHES) if options.quick else ((*CAPACITIES, 10_000_000), (*BATCHES, 65_536))
    capacity = ATARI_ENVS * (QUICK_STEPS if options.quick else ATARI_STEPS)
    atari = frames.gather_cases(capacity, (ATARI_BATCH,)) + frames.stream_cases(capacity, (ATARI_BATCH,), ATARI_ENVS)
    # filled once for both ways
    vectors: dict[str, Maker] = {OURS: cache(partial(ReplaySubject, device=device))}
    stacks: dict[str, Maker] = {OURS: cache(partial(frames.FrameSubject, device=device, envs=ATARI_ENVS))}
    parts = _kept(options, (stacks, cost_model.targets_first(atari)), (vectors, step_cases(*sizes)))
    run = _prepared(options, device, parts)
    # all single calls before any capture, after which they would wait for the device
    ways: tuple[How, ...] = (options.timing,) if options.timing else ("events", "graph")

    def measured(progress: Progress) -> Iterator[Record]:
        for way in ways:
            yield from _records(replace(run, way=way), parts, progress)

    _session(options, len(ways) * _count(parts), measured)


def _kernels(options: argparse.Namespace) -> None:
    device = _device("kernels --device cuda", options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and options.timing:
        raise ValueError(f"--timing {options.timing} needs a GPU; on a CPU only the host's clock is available.")
    if options.plot:
        plots.require()
    sizes: dict[str, Any] = {"capacities": QUICK_CAPACITIES, "batches": QUICK_BATCHES, "rows": 10_000, "frames": 2_000}
    cases = kernels.kernel_cases(device.type, most=options.n_max, **(sizes if options.quick else {}))
    kept = cost_model.targets_first(chosen(cases, options.only))
    name = f"kernels-{device_slug(device)}"
    options.output = options.output or default_file(name + TRIAL if options.quick else name)
    run = _prepared(options, device, [({}, kept)])
    # other work may share a CPU, while a GPU is the benchmark's own
    rounds = 1 if options.quick or device.type == "cuda" else 3
    way: How = "host" if device.type == "cpu" else (options.timing or "graph")
    run = replace(run, way=way, plan=run.plan if options.quick else KERNELS, rounds=rounds)
    _session(options, len(kept), partial(kernels.records, run, kept))
    if options.plot and options.output.is_file():
        _draw(options.output)


def _frames(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # a step of more environments fills a million slots in fewer calls
    capacity, envs = (1_000_000, ATARI_ENVS) if device.type == "cuda" else (frames.CAPACITY, FRAME_ENVS)
    capacity, batches = QUICK_FRAMES if options.quick else (capacity, frames.BATCHES)
    gathers, streams = frames.gather_cases(capacity, batches), frames.stream_cases(capacity, batches, envs)
    ours: dict[str, Maker] = {OURS: cache(partial(frames.FrameSubject, device=device, envs=envs))}
    both: dict[str, Maker] = {**ours, "take": partial(frames.TakeSubject, device=device)}
    parts = _kept(options, (both, gathers), (ours, streams))
    run = replace(_prepared(options, device, parts), rounds=1 if options.quick else 5)
    _session(options, _count(parts), partial(_records, run, parts))


def _peers(options: argparse.Namespace) -> None:
    device = _device("peers --device cuda", options.device)
    parts = peers_suite.parts(peers_suite.QUICK if options.quick else peers_suite.Sizes(), device)
    everything: Parts = [({}, part.cases) for part in parts]
    kept = _kept(options, *everything)
    parts = [replace(part, cases=cases) for part, (_, cases) in zip(parts, kept, strict=True)]
    names = options.peer or list(PEERS)
    run = _prepared(options, device, kept)
    run = replace(run, versions={name: peer_version(name) for name in names}, rounds=1 if options.quick else 5)
    _session(options, _count(kept), lambda progress: peers_suite.records(run, parts, names, progress))


def _storage(options: argparse.Namespace) -> None:
    sizes = storage.QUICK if options.quick else storage.Sizes()
    layouts = storage.chosen(options.only)
    run = _prepared(options, CPU, [], ["storage-one", "storage-blocks", "storage-batches"])
    _session(options, 3 * len(layouts), lambda progress: storage.records(run, sizes, layouts, progress))


def _checkpoint(options: argparse.Namespace) -> None:
    run = _prepared(options, CPU, [], checkpoint.OPERATIONS)
    _session(options, 1 if options.quick else 3, partial(checkpoint.records, run))


def _report(options: argparse.Namespace) -> None:
    records = [record for file in options.files or recorded_files() for record in read(file)]
    for document in options.update or []:
        text = document.read_text()
        renewed = report.updated(text, records)
        if renewed != text:
            document.write_text(renewed)
        print(f"{document}: {'renewed' if renewed != text else 'already as recorded'}")
    if not options.update:
        for name in report.SECTIONS:
            print(f"## {name}\n\n{report.section(name, records)}\n")


def _plot(options: argparse.Namespace) -> None:
    plots.require()
    for file in options.files or recorded_files():
        _draw(file)


def _draw(file: Path) -> None:
    """Plots of a file's kernel records, in a folder of its name."""
    for image in plots.draw([record for record in read(file) if record.suite == "kernels"], file.with_suffix("")):
        print(f"{image}: drawn from {file}", file=sys.stderr)


def _page(options: argparse.Namespace) -> None:
    folder: Path = options.results
    if not folder.is_dir():
        raise ValueError(f"--results {folder} is not a folder; `bench/on_gpu.sh` makes one.")
    output: Path = options.output or folder.resolve().with_name(f"{folder.resolve().name}.md")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(gpu_page.page(folder, output))
    print(f"{output} is written")


def _device(command: str, kind: str) -> torch.device:
    if kind == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"bench {command} needs a CUDA or ROCm device and torch finds none.")
    return torch.device(kind)


def _kept(options: argparse.Namespace, *parts: tuple[Mapping[str, Maker], Sequence[Case]]) -> Parts:
    """The parts with those of their cases that `--only` leaves."""
    kept = chosen([case for _, cases in parts for case in cases], options.only)
    return [(makers, [case for case in cases if case in kept]) for makers, cases in parts]


def _count(parts: Parts) -> int:
    return sum(len(cases) for _, cases in parts)


def _records(run: Run, parts: Parts, progress: Progress) -> Iterator[Record]:
    for makers, cases in parts:
        yield from run.records(cases, makers, progress)


def _prepared(options: argparse.Namespace, device: torch.device, parts: Parts, more: Sequence[str] = ()) -> Run:
    """What all records of the run share; runs the tests of the operations first, except for a trial.

    Raises CannotTest where pytest is missing or finds no tests; failing tests are named in the records instead.
    """
    quick = options.quick
    operations = list(dict.fromkeys([*(case.operation for _, cases in parts for case in cases), *more]))
    failed = None if quick else failed_tests(operations, device)
    if failed:
        print(f"tests fail, which the records will say: {', '.join(failed)}", file=sys.stderr)
    return Run(
        options.suite,
        device,
        QUICK if quick else Plan(),
        current_environment(device),
        copy_bandwidth(device, nbytes=2**25, repetitions=3) if quick else copy_bandwidth(device),
        quick,
        versions={},
        way="host" if device.type == "cpu" else "events",
        failed_tests=failed,
    )


def _session(options: argparse.Namespace, total: int, measured: Measured) -> None:
    """Measure with a progress bar, then print tables; each record is written as soon as it is there."""
    output = options.output or default_file(options.suite + TRIAL if options.quick else options.suite)
    records: list[Record] = []
    try:
        with Progress(total, f"bench {options.suite}") as progress:
            for record in measured(progress):
                records.append(record)
                write(output, [record])
    finally:
        if records:
            print(f"{len(records)} records written to {output}", file=sys.stderr)
    earlier = default_file("peers")
    peers = read(earlier) if earlier.is_file() and options.suite != "peers" else []
    print(*report.measured(records, peers), sep="\n\n")
