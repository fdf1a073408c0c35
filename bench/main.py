"""`gpu-replay bench`: measure, record, and make tables of the records."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_replay import Uniform
from gpu_replay.console.arguments import Parser, pathname, positive
from gpu_replay.console.errors import UserError, install, require
from gpu_replay.console.progress import Progress

from . import (
    checkpoint,
    field,
    host_time,
    kernels,
    operations,
    peers_suite,
    plots,
    records,
    report,
    scale,
    storage,
    subjects,
)
from .measure import How, Part, Plan, Run, copy_bandwidth
from .operations import OURS, Case, chosen
from .peers import PEERS, available, names_on, peer_versions
from .records import CannotMeasure, DeviceLost, Record, default_file, installed_version, read, recorded_files, write
from .sharded import parts as sharded_parts
from .subjects import CPU

QUICK = Plan(warmup=0.01, seconds=0.02, fewest=20, most=200)
QUICK_CAPACITIES = (10_000,)
QUICK_BATCHES = (32, 256)
QUICK_STEPS = 100
# a kernel that takes a second is called a few times, one that takes a microsecond thousands of times
KERNELS = Plan(warmup=0.03, seconds=0.2, fewest=6, most=5000)
# libraries on the host take seconds for the largest batches of frames
PEERS_ON_GPU = Plan(warmup=0.02, seconds=0.2, fewest=3, most=2000)
# a step of Atari agents: environments, steps of each in the ring, transitions learned from
ATARI_ENVS, ATARI_STEPS, ATARI_BATCH = 128, 8_000, 512
# the exit code for a device that is lost
LOST = 3


class Work(NamedTuple):
    """What a suite measures, on which device, in which ways (default: one that the device has), with changes of Run."""

    parts: Sequence[Part]
    device: torch.device = CPU
    ways: tuple[How, ...] = ()
    changes: Mapping[str, Any] = {}


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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gpu-replay bench", description="Measures buffers and records the result.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, about: str, run: Callable[[argparse.Namespace], int | None]) -> Any:
        added = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        added.set_defaults(run=run, suite=name)
        return added.add_argument

    for name, (_, about) in SUITES.items():
        add = command(name, f"measure {about}", _measure)
        add("--output", type=pathname, metavar="FILE", help=f"JSON lines to merge into (default: {default_file(name)})")
        add("--quick", action="store_true", help="few sizes and repetitions: a trial, no measurement")
        only = 'cases to run: a part of the name or a glob, "N=1M", "cycle/*"'
        add("--only", metavar="PATTERN", help=only)
        add("--skip", action="append", default=[], metavar="PATTERN", help="cases to leave out, likewise; repeatable")
        add("--missing", action="store_true", help="only cases that --output does not hold yet")
        if name == "peers":
            add("--peer", action="append", choices=sorted(PEERS), help="only this one; repeatable")
            add("--device", choices=("cpu", "cuda"), default="cpu", help="where batches are wanted")
        if name in ("kernels", "host"):
            add("--device", choices=("cpu", "cuda"), help="default: cuda if available")
        if name in ("gpu", "kernels"):
            default = "both" if name == "gpu" else "graph"
            timing = f"on a GPU, events around each call or around a replayed graph of calls (default: {default})"
            add("--timing", choices=("events", "graph"), help=timing)
    add = command("contact", "try each feature that a GPU may break, in a process of its own", _contact)
    add("--output", type=pathname, metavar="FILE", help="JSON lines, replaced")
    add("--seconds", type=positive, default=180, metavar="N", help="for all of them (default: 180)")
    files: dict[str, Any] = {"nargs": "*", "type": pathname, "metavar": "FILE"}
    files["help"] = "JSON lines (default: all recorded)"
    add = command("report", "Markdown tables made from records", _report)
    add("files", **files)
    renew = "renew the text between its <!-- bench:NAME --> and <!-- /bench:NAME --> instead of printing; repeatable"
    add("--update", action="append", type=pathname, metavar="DOCUMENT", help=renew)
    command("plot", "PNGs made from records, one folder for each file", _plot)("files", **files)
    return parser


def _cpu(options: argparse.Namespace) -> Work:
    sizes = (QUICK_CAPACITIES, QUICK_BATCHES) if options.quick else ()
    return Work([(operations.step_cases(*sizes), partial(Run.records, makers={OURS: subjects.replay}))])


def _gpu(options: argparse.Namespace) -> Work:
    device = _device("gpu", "cuda")
    slots = QUICK_CAPACITIES if options.quick else (*operations.CAPACITIES, 10_000_000)
    rows = QUICK_BATCHES if options.quick else (*operations.BATCHES, 65_536)
    capacity = ATARI_ENVS * (QUICK_STEPS if options.quick else ATARI_STEPS)
    atari = [
        ("frame-cycle", ATARI_BATCH, ATARI_ENVS),
        ("frames", ATARI_BATCH, 0),
        ("frame-add", ATARI_ENVS, ATARI_ENVS),
    ]
    wide = (slots[-1], rows[-1]) if options.quick else (200_000, 32_768)
    # filled once for both ways
    vectors = {OURS: cache(partial(subjects.replay, device=device))}
    stacks = {OURS: cache(partial(subjects.frames, device=device, envs=ATARI_ENVS))}
    uniform: Any = {"sampler": Uniform(replacement=True), "width": subjects.WIDE}
    plain = {OURS: cache(partial(subjects.replay, device=device, **uniform))}
    parts: list[Part] = [
        ([Case(name, capacity, batch, added) for name, batch, added in atari], partial(Run.records, makers=stacks)),
        (operations.step_cases(slots, rows), partial(Run.records, makers=vectors)),
        field.loop_part(options.quick, device),
        ([Case("wide-sample", *wide)], partial(Run.records, makers=plain)),
    ]
    # all single calls before any capture, after which they would wait for the device
    return Work(parts, device, (options.timing,) if options.timing else ("events", "graph"))


def _kernels(options: argparse.Namespace) -> Work:
    device = _device("kernels --device cuda", options.device or _default())
    if device.type == "cpu" and options.timing:
        raise UserError(f"--timing {options.timing} needs a GPU; on a CPU only the host's clock is available.")
    sizes: dict[str, Any] = {"capacities": QUICK_CAPACITIES, "batches": QUICK_BATCHES, "rows": 10_000, "frames": 2_000}
    cases = kernels.kernel_cases(device.type, **(sizes if options.quick else {}))
    way: How = "host" if device.type == "cpu" else (options.timing or "graph")
    # other work may share a CPU, while a GPU is the benchmark's own
    changes = {"plan": QUICK if options.quick else KERNELS, "rounds": 3 if device.type == "cpu" else 1}
    return Work([(cases, kernels.records)], device, (way,), changes)


def _peers(options: argparse.Namespace) -> Work:
    device = _device("peers --device cuda", options.device)
    asked = options.peer or names_on(device.type)
    needed = sorted({PEERS[name].distribution or "" for name in asked})
    # what needs no library counts where it was asked for, and on a GPU, where it is what learners write
    alone = "" in needed and (options.peer or device.type == "cuda")
    if not (alone or any(map(installed_version, filter(None, needed))) or (options.only or "").startswith("field")):
        raise CannotMeasure(
            f"nothing to compare with is installed ({', '.join(filter(None, needed))}); install some of these, or all: "
            f"{install('peers')}."
        )
    names = available(asked, device)
    versions = {**peer_versions(names), "skrl": installed_version("skrl")}
    many = field.parts(options.quick, device) if options.peer is None else []
    if device.type == "cpu":
        sizes = peers_suite.QUICK if options.quick else peers_suite.Sizes()
        return Work([*peers_suite.parts(sizes, names), *many], changes={"rounds": 5, "versions": versions})
    sizes = peers_suite.QUICK if options.quick else peers_suite.ON_GPU
    changes = {"plan": QUICK if options.quick else PEERS_ON_GPU, "versions": versions}
    return Work([*peers_suite.gpu_parts(sizes, names, device), *many], device, ("events", "graph"), changes)


def _host(options: argparse.Namespace) -> Work:
    device = _device("host --device cuda", options.device or _default())
    return Work([(host_time.cases(options.quick), host_time.records)], device, ("host",))


def _scale(options: argparse.Namespace) -> Work:
    names = available(names_on("cpu"), CPU)
    return Work(scale.parts(options.quick, names), changes={"rounds": 3, "versions": peer_versions(names)})


# what each command measures, and a description
SUITES: dict[str, tuple[Callable[[argparse.Namespace], Work], str]] = {
    "cpu": (_cpu, "add, sample, update and full cycles, on the CPU with one thread"),
    "gpu": (_gpu, "add, sample, update and full cycles on the GPU, vectors and Atari frames, called and replayed"),
    "kernels": (_kernels, "single operations, compared with torch operations that do the same"),
    "host": (_host, "what calls of the buffers cost the host, whatever the device does"),
    "peers": (_peers, "full cycles and adds, interleaved with other libraries"),
    "checkpoint": (
        lambda options: Work([(checkpoint.cases(options.quick), checkpoint.records)]),
        "saving and loading a buffer as large as fits, compared with a plain write and read",
    ),
    "scale": (_scale, "each call over slots and over batches, and bytes over fields, compared with peers and plain C"),
    "sharded": (
        lambda options: Work(sharded_parts(options.quick)),
        "bytes that the ranks of one memory send each other, on gloo over the loopback device",
    ),
    "storage": (
        lambda options: Work([(storage.cases(options.quick), storage.records)]),
        "storing transitions and reading batches, for deque, list, NumPy rings and this buffer",
    ),
}


def _contact(options: argparse.Namespace) -> int:
    # before the first fork nothing may touch the GPU
    from . import first_contact

    return first_contact.run(options.output, options.seconds)


def _report(options: argparse.Namespace) -> None:
    found = [record for file in options.files or recorded_files() for record in read(file)]
    for document in options.update or []:
        text = document.read_text()
        renewed = report.updated(text, found)
        if renewed != text:
            document.write_text(renewed)
        print(f"{document}: {'renewed' if renewed != text else 'already as recorded'}")
    if not options.update:
        for name in report.SECTIONS:
            print(f"## {name}\n\n{report.section(name, found)}\n")


def _plot(options: argparse.Namespace) -> None:
    require("matplotlib", purpose="gpu-replay bench plot")
    for file in options.files or recorded_files():
        for image in plots.draw(read(file), file.with_suffix("")):
            print(f"{image}: plotted from {file}", file=sys.stderr)


def _default() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device(command: str, kind: str) -> torch.device:
    if kind == "cuda" and not torch.cuda.is_available():
        raise CannotMeasure(f"bench {command} needs a CUDA or ROCm device and torch finds none.")
    return torch.device(kind)


def _measure(options: argparse.Namespace) -> None:
    """Measure the chosen cases with a progress bar, and print tables; each record is written at once.

    A case that fails leaves a line in a separate file, and the others are measured; CannotMeasure reports it at the
    end.
    """
    work, quick = SUITES[options.suite][0](options), options.quick
    kept = chosen([case for cases, _ in work.parts for case in cases], options.only, options.skip)
    output = options.output or default_file(options.suite + records.QUICK * quick)
    errors = output.with_suffix(records.ERRORS)
    done = _done(output, errors) if options.missing else set()
    if not options.missing:
        errors.unlink(missing_ok=True)
    sizes = {"nbytes": 2**25, "repetitions": 3} if quick else {}
    ways = work.ways or ("host" if work.device.type == "cpu" else "events",)
    given: dict[str, Any] = {"plan": QUICK if quick else Plan(), **work.changes, **({"rounds": 1} if quick else {})}
    found: list[Record] = []
    try:
        with Progress(len(ways) * len(kept), f"bench {options.suite}") as progress:
            run = Run(
                suite=options.suite,
                device=work.device,
                environment=records.current_environment(work.device),
                copy_bandwidth=copy_bandwidth(work.device, **sizes),
                quick=quick,
                errors=errors,
                **given,
            )
            for way, (cases, measured) in ((way, part) for way in ways for part in work.parts):
                here = [case for case in cases if case in kept and not (done and (case.name, way) in done)]
                for record in measured(replace(run, way=way), here, progress) if here else ():
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
    recorded = {(record.case, record.timing) for record in read(output)} if output.is_file() else set()
    return recorded | {(each["case"], each["timing"]) for each in map(json.loads, lines)}
