"""`gpu-replay bench`: measure, record, and make tables of the records."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from gpu_replay.console.arguments import Parser, positive
from gpu_replay.console.errors import UserError, require
from gpu_replay.console.progress import Progress

from . import checkpoint, gpu_page, kernels, memory, peers_suite, plots, report, scale, storage, subjects
from .cases import (
    BATCHES,
    CAPACITIES,
    FRAME_BATCHES,
    FRAME_ENVS,
    FRAME_SLOTS,
    OURS,
    chosen,
    gather_cases,
    step_cases,
    stream_cases,
)
from .measure import How, Maker, Part, Plan, Run, compared, copy_bandwidth
from .peers_suite import PEERS, peer_version
from .records import (
    ERRORS,
    CannotMeasure,
    DeviceLost,
    Record,
    current_environment,
    default_file,
    device_slug,
    read,
    recorded_files,
    write,
)
from .records import QUICK as TRIAL
from .subjects import CPU
from .targets import targets_first
from .test_gate import failed_tests

QUICK = Plan(warmup=0.01, seconds=0.02, fewest=20, most=200)
QUICK_CAPACITIES = (10_000,)
QUICK_BATCHES = (32, 256)
QUICK_FRAMES, QUICK_STEPS = (2_000, (32,)), 100
# a kernel that takes a second is called a few times, one that takes a microsecond thousands of times
KERNELS = Plan(warmup=0.03, seconds=0.2, fewest=6, most=5000)
# a step of Atari agents: environments, steps of each in the ring, transitions learned from
ATARI_ENVS, ATARI_STEPS, ATARI_BATCH = 128, 8_000, 512


def main(argv: Sequence[str]) -> int:
    """Run one command of `gpu-replay bench`; returns the exit code.

    0 done, 1 something failed, 2 bad input, 3 the device is lost (another process may continue with `--missing`), 130
    interrupted.

    If a run is not possible, one line on standard error says why. Everything measured before an interruption is
    recorded. Any other exception is a bug in this program, and keeps its traceback.
    """
    options = _parser().parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return options.run(options) or 0
    except KeyboardInterrupt:
        print("gpu-replay bench: interrupted", file=sys.stderr)
        return 130
    except (UserError, OSError, MemoryError, CannotMeasure) as error:
        print(f"gpu-replay bench: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else LOST if isinstance(error, DeviceLost) else 1
    finally:
        torch.set_num_threads(threads)


# the exit code for a device that is lost
LOST = 3


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gpu-replay bench", description="Measures buffers and records the result.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, about: str, run: Callable[[argparse.Namespace], int | None]) -> Any:
        added = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        added.set_defaults(run=run, suite=name)
        return added

    for name, (run, about) in SUITES.items():
        suite = command(name, f"measure {about}", run)
        file = default_file("kernels-DEVICE" if name == "kernels" else name)
        suite.add_argument("--output", type=Path, metavar="FILE", help=f"JSON lines to merge into (default: {file})")
        suite.add_argument("--quick", action="store_true", help="few sizes and repetitions: a trial, no measurement")
        only = 'cases to run: a part of the name or a glob, "N=1M", "cycle/*"'
        suite.add_argument("--only", metavar="PATTERN", help=only)
        skip = "cases to leave out; repeatable"
        suite.add_argument("--skip", action="append", default=[], metavar="PATTERN", help=skip)
        suite.add_argument("--missing", action="store_true", help="only cases that --output does not hold yet")
        if name == "peers":
            suite.add_argument("--peer", action="append", choices=sorted(PEERS), help="only this one; repeatable")
            suite.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where rows are stored")
        if name == "kernels":
            suite.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
            suite.add_argument("--n-max", type=positive, metavar="N", help="no cases with more slots: 1000000, 1e7")
        if name in ("gpu", "kernels"):
            default = "both" if name == "gpu" else "graph"
            timing = f"on a GPU, events around each call or around a replayed graph of calls (default: {default})"
            suite.add_argument("--timing", choices=("events", "graph"), help=timing)
    contact = command("contact", "try each feature that a GPU may break, in a process of its own", _contact)
    contact.add_argument("--output", type=Path, metavar="FILE", help="JSON lines, replaced")
    contact.add_argument("--seconds", type=positive, default=180, metavar="N", help="for all of them (default: 180)")
    tables = command("report", "Markdown tables made from records", _report)
    renew = "renew the text between its <!-- bench:NAME --> and <!-- /bench:NAME --> instead of printing; repeatable"
    tables.add_argument("--update", action="append", type=Path, metavar="DOCUMENT", help=renew)
    images = command("plot", "PNGs of kernels and of cycles made from records, one folder for each file", _plot)
    for each in (tables, images):
        each.add_argument("files", nargs="*", type=Path, metavar="FILE", help="JSON lines (default: all recorded)")
    page = command("page", "write the page of one GPU from all that bench/on_gpu.py left in a folder", _page)
    page.add_argument("--results", type=Path, required=True, metavar="DIR", help="the folder of the records")
    page.add_argument("--output", type=Path, metavar="FILE", help="Markdown (default: DIR.md, beside the folder)")
    return parser


def _cpu(options: argparse.Namespace) -> None:
    sizes = (QUICK_CAPACITIES, QUICK_BATCHES) if options.quick else (CAPACITIES, BATCHES)
    vectors: dict[str, Maker] = {OURS: subjects.replay}
    resident = memory.cases(100_000 if options.quick else 1_000_000)
    _measure(
        options,
        CPU,
        [(step_cases(*sizes), compared(vectors)), (resident, memory.records)],
    )


def _gpu(options: argparse.Namespace) -> None:
    device = _device("gpu", "cuda")
    sizes = (QUICK_CAPACITIES, QUICK_BATCHES) if options.quick else ((*CAPACITIES, 10_000_000), (*BATCHES, 65_536))
    capacity = ATARI_ENVS * (QUICK_STEPS if options.quick else ATARI_STEPS)
    atari = gather_cases(capacity, (ATARI_BATCH,)) + stream_cases(capacity, (ATARI_BATCH,), ATARI_ENVS)
    # filled once for both ways
    vectors: dict[str, Maker] = {OURS: cache(partial(subjects.replay, device=device))}
    stacks: dict[str, Maker] = {OURS: cache(partial(subjects.frames, device=device, envs=ATARI_ENVS))}
    # all single calls before any capture, after which they would wait for the device
    ways: tuple[How, ...] = (options.timing,) if options.timing else ("events", "graph")
    parts = [(targets_first(atari), compared(stacks)), (step_cases(*sizes), compared(vectors))]
    _measure(options, device, parts, ways)


def _kernels(options: argparse.Namespace) -> None:
    device = _device("kernels --device cuda", options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and options.timing:
        raise UserError(f"--timing {options.timing} needs a GPU; on a CPU only the host's clock is available.")
    sizes: dict[str, Any] = {"capacities": QUICK_CAPACITIES, "batches": QUICK_BATCHES, "rows": 10_000, "frames": 2_000}
    cases = kernels.kernel_cases(device.type, most=options.n_max, **(sizes if options.quick else {}))
    name = f"kernels-{device_slug(device)}"
    options.output = options.output or default_file(name + TRIAL if options.quick else name)
    way: How = "host" if device.type == "cpu" else (options.timing or "graph")
    # other work may share a CPU, while a GPU is the benchmark's own
    rounds = 1 if options.quick or device.type == "cuda" else 3
    plan = QUICK if options.quick else KERNELS
    _measure(options, device, [(targets_first(cases), kernels.records)], (way,), plan=plan, rounds=rounds)


def _frames(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # a step of more environments fills a million slots in fewer calls
    capacity, envs = (1_000_000, ATARI_ENVS) if device.type == "cuda" else (FRAME_SLOTS, FRAME_ENVS)
    capacity, batches = QUICK_FRAMES if options.quick else (capacity, FRAME_BATCHES)
    ours: dict[str, Maker] = {OURS: cache(partial(subjects.frames, device=device, envs=envs))}
    both: dict[str, Maker] = {**ours, "take": partial(subjects.take, device=device)}
    gathers, streams = gather_cases(capacity, batches), stream_cases(capacity, batches, envs)
    parts = [(gathers, compared(both)), (streams, compared(ours))]
    _measure(options, device, parts, rounds=1 if options.quick else 5)


def _peers(options: argparse.Namespace) -> None:
    device = _device("peers --device cuda", options.device)
    names = peers_suite.available(options.peer or list(PEERS), device)
    parts = peers_suite.parts(peers_suite.QUICK if options.quick else peers_suite.Sizes(), names, device)
    versions = {name: peer_version(name) for name in names}
    _measure(options, device, parts, versions=versions, rounds=1 if options.quick else 5)


def _storage(options: argparse.Namespace) -> None:
    sizes = storage.QUICK if options.quick else storage.Sizes()
    _measure(options, CPU, [(storage.cases(sizes), partial(storage.records, sizes))])


def _checkpoint(options: argparse.Namespace) -> None:
    _measure(options, CPU, [(checkpoint.cases(options.quick), checkpoint.records)])


def _scale(options: argparse.Namespace) -> None:
    cases = scale.cases((10_000,), (32, 256), 10_000) if options.quick else scale.cases()
    versions = {scale.PEER: peer_version(scale.PEER)}
    parts = [(cases, compared(scale.makers()))]
    _measure(options, CPU, parts, versions=versions, rounds=1 if options.quick else 3)


SUITES = {
    "cpu": (_cpu, "add, sample, update, full cycles and memory, on the CPU with one thread"),
    "gpu": (_gpu, "add, sample, update and full cycles on the GPU, vectors and Atari frames, called and replayed"),
    "kernels": (_kernels, "single operations of this package beside the torch operations that do the same"),
    "frames": (_frames, "stacks of Atari frames stored once, beside a plain copy of the same bytes"),
    "peers": (_peers, "full cycles and adds, interleaved with other libraries"),
    "checkpoint": (_checkpoint, "saving and loading a buffer as large as fits, beside a plain write and read"),
    "scale": (_scale, "each call over slots and over batches, beside cpprb and a plain C program"),
    "storage": (_storage, "storing transitions and reading batches, for deque, list, NumPy rings and this buffer"),
}


def _contact(options: argparse.Namespace) -> int:
    # before the first fork nothing may touch the GPU
    from . import first_contact

    return first_contact.run(options.output, options.seconds)


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
    require("matplotlib", purpose="gpu-replay bench plot")
    for file in options.files or recorded_files():
        kept = [
            each
            for each in read(file)
            if each.suite in ("kernels", "scale") or each.operation in ("cycle", "frame-cycle")
        ]
        for image in plots.draw(kept, file.with_suffix("")):
            print(f"{image}: drawn from {file}", file=sys.stderr)


def _page(options: argparse.Namespace) -> None:
    folder: Path = options.results
    if not folder.is_dir():
        raise UserError(f"--results {folder} is not a folder; `bench/on_gpu.py` makes one.")
    output: Path = options.output or folder.resolve().with_name(f"{folder.resolve().name}.md")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(gpu_page.page(folder, output))
    print(f"{output} is written")


def _device(command: str, kind: str) -> torch.device:
    if kind == "cuda" and not torch.cuda.is_available():
        raise CannotMeasure(f"bench {command} needs a CUDA or ROCm device and torch finds none.")
    return torch.device(kind)


def _measure(
    options: argparse.Namespace, device: torch.device, parts: Sequence[Part], ways: Sequence[How] = (), **changes: Any
) -> None:
    """Run the tests, measure the chosen cases with a progress bar, and print tables; each record is written at once.

    ways:    how each part is timed; by default the host's clock, or events on a GPU.
    changes: changed fields of `Run`.

    Failing tests are named in the records; a trial runs no tests. A case that fails leaves a line in a separate file,
    and the others are measured; CannotMeasure reports it at the end.
    """
    kept = chosen([case for cases, _ in parts for case in cases], options.only)
    kept = [case for case in kept if not any(fnmatch(case.name, pattern) for pattern in options.skip)]
    output = options.output or default_file(options.suite + TRIAL if options.quick else options.suite)
    errors = output.with_suffix(ERRORS)
    done = _done(output, errors) if options.missing else set()
    if not options.missing:
        errors.unlink(missing_ok=True)
    failed = None if options.quick else failed_tests(dict.fromkeys(case.operation for case in kept), device)
    if failed:
        print(f"tests fail, which the records will say: {', '.join(failed)}", file=sys.stderr)
    bandwidth = copy_bandwidth(device, nbytes=2**25, repetitions=3) if options.quick else copy_bandwidth(device)
    plan, environment = QUICK if options.quick else Plan(), current_environment(device)
    run = Run(
        options.suite, device, plan, environment, bandwidth, options.quick, {}, failed_tests=failed, errors=errors
    )
    ways = ways or ("host" if device.type == "cpu" else "events",)
    found: list[Record] = []
    try:
        with Progress(len(ways) * len(kept), f"bench {options.suite}") as progress:
            for way, (cases, records) in ((way, part) for way in ways for part in parts):
                here = [case for case in cases if case in kept and (case.name, way) not in done]
                for record in records(replace(run, way=way, **changes), here, progress) if here else ():
                    found.append(record)
                    write(output, [record])
    finally:
        if found:
            print(f"{len(found)} records written to {output}", file=sys.stderr)
    earlier = default_file("peers")
    peers = read(earlier) if earlier.is_file() and options.suite != "peers" else []
    print(*report.measured(found, peers), sep="\n\n")
    if errors.is_file():
        raise CannotMeasure(f"some cases failed, as {errors} tells.")


def _done(output: Path, errors: Path) -> set[tuple[str, str]]:
    """Cases that were recorded or failed before, and how they were timed."""
    lines = errors.read_text().splitlines() if errors.is_file() else []
    recorded = {(record.case, record.clock) for record in read(output)} if output.is_file() else set()
    return recorded | {(each["case"], each["timing"]) for each in map(json.loads, lines)}
