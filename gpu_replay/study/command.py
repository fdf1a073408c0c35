"""`gpu-replay study`: from flags to a folder with every figure, the pictures and the report."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_replay.console.arguments import positive
from gpu_replay.console.errors import UserError, require
from gpu_replay.console.interrupt import EXIT_CODES, StopRequest
from gpu_replay.study.settings import ENVIRONMENTS, StudySettings

# `methods.METHODS` imports the buffers, and --help should not
METHODS = ("none", "uniform", "proportional", "rank", "combined", "hindsight")
SEEDS = 5
QUICK_SEEDS, QUICK_EPISODES = 2, 20

DESCRIPTION = """\
Compare kinds of replay: no memory, uniform, proportional, rank-based, combined and hindsight, with one agent on
CartPole-v1, Acrobot-v1 and MountainCar-v0, several seeds each. ENV names some of them; without it all are taken.

The agent is the tutorial's by default: a hidden layer of 128, discount 0.8, Adam 1e-3, memory 10,000, batch 64, epsilon
1 to 0.05 over 1,000 steps, target network copied at each episode's end, 300 episodes. The report says where that is
known to be poor; --tuned takes settings with which all three environments can be solved.

--output receives episodes.csv (a line per episode: duration, return, TD errors, correlated pairs and Q values of the
sampled batches), settings.json, pictures and report.md. Each run is one process with one thread. Ctrl-C ends the study;
the same command again goes on with the runs that are not finished, and gives what it would have given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("env", metavar="ENV", nargs="*", help=f"of {', '.join(ENVIRONMENTS)} (default: all)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the study")
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", help=f"of {', '.join(METHODS)} (default: all); commas do as well"
    )
    parser.add_argument("--seeds", type=positive, metavar="N", help=f"runs of each method (default: {SEEDS})")
    parser.add_argument(
        "--episodes", type=positive, metavar="N", help="episodes of a run (default: 300; with --tuned up to 800)"
    )
    parser.add_argument("--tuned", action="store_true", help="settings that solve all three, instead of the tutorial's")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a smoke run of minutes: {QUICK_SEEDS} seeds, {QUICK_EPISODES} episodes; its figures mean nothing",
    )
    parser.add_argument("--jobs", type=positive, metavar="N", help="processes at a time (default: all cores)")


def run(options: argparse.Namespace) -> int:
    """Make the study as the flags say; returns the exit code. Raises UserError for what cannot be done."""
    require("gymnasium", "tqdm", "matplotlib", purpose="gpu-replay study")
    from gpu_replay.study.progress import Forecast, clock, expected_seconds
    from gpu_replay.study.records import StudyFolder
    from gpu_replay.study.report import write_report
    from gpu_replay.study.run import RunId
    from gpu_replay.study.workers import WorkerFailed, work

    began = time.perf_counter()
    settings = _settings(options)
    jobs = options.jobs or _cores()
    folder = StudyFolder(options.output)
    described = {**settings.described(), **_surroundings(jobs)}
    before = folder.claim(described)
    runs = [
        (RunId(environment, method, seed), agent)
        for environment, agent in settings.agents.items()
        for method in settings.methods
        for seed in settings.seeds
    ]
    finished = folder.finished(run for run, _ in runs)
    if finished:
        print(f"{len(finished)} of {len(runs)} runs are there already.")
    tasks = [(run, agent) for run, agent in runs if run not in finished]
    # the longest first, so that the last ones do not keep one core busy while the others wait
    tasks.sort(key=lambda task: -expected_seconds(*task) * task[1].episodes)
    forecast = Forecast(runs, finished)
    try:
        with StopRequest() as stop, _bar(forecast, jobs) as counted:
            whole = work(tasks, jobs, counted, folder.keep, stop)
    except WorkerFailed as error:
        print(f"gpu-replay study: {error} The same command goes on with the runs that are left.", file=sys.stderr)
        return 1
    finally:
        folder.note({**described, "wall_seconds": round(before + time.perf_counter() - began, 1)})
    if not whole:
        kept = len(folder.finished(run for run, _ in runs))
        print(
            f"gpu-replay study: interrupted with {kept} of {len(runs)} runs finished; the same command goes on from "
            "there.",
            file=sys.stderr,
        )
        return EXIT_CODES[stop() or "SIGINT"]
    table = folder.join(run for run, _ in runs)
    written = write_report(folder.path)
    print(f"{len(runs)} runs in {clock(before + time.perf_counter() - began)}: {table}")
    print("\n".join(str(path) for path in written))
    return 0


def _settings(options: argparse.Namespace) -> StudySettings:
    environments = _chosen("ENV", options.env, ENVIRONMENTS)
    methods = _chosen("--methods", options.methods, METHODS)
    seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    episodes = options.episodes or (QUICK_EPISODES if options.quick else None)
    return StudySettings.of(environments, methods, seeds, episodes=episodes, tuned=options.tuned, quick=options.quick)


def _chosen(flag: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The named ones, each once and in the order of the tables; all where none is named."""
    names = [name for text in given or () for name in text.split(",") if name]
    short = {name.lower().partition("-v")[0]: name for name in known}
    found = {name if name in known else short.get(name.lower(), name) for name in names}
    unknown = sorted(found - set(known))
    if unknown:
        raise UserError(f"{flag}: {', '.join(map(repr, unknown))} is not part of the study; use {', '.join(known)}.")
    return [name for name in known if name in found or not names]


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _surroundings(jobs: int) -> dict[str, Any]:
    from gpu_replay.console.versions import cpu_model, versions

    return {"versions": versions(), "cpu": cpu_model(), "jobs": jobs}


@contextmanager
def _bar(forecast: Any, jobs: int) -> Iterator[Any]:
    """The progress bar, which counts the work and not the runs; yields what `work` tells the episodes to."""
    from tqdm import tqdm

    from gpu_replay.study.progress import clock

    form = "{percentage:3.0f}%|{bar}| {elapsed}{postfix}"
    # a log file needs no more than a line now and then
    every = 0.2 if sys.stderr.isatty() else 30.0
    with tqdm(total=1.0, initial=forecast.share(), bar_format=form, mininterval=every, dynamic_ncols=True) as bar:
        bar.set_postfix_str("starting")

        def counted(run: Any, episodes: int, seconds: float) -> None:
            forecast.count(run, episodes, seconds)
            # a bar that goes back when a guess was low would be right and look wrong
            bar.n = max(bar.n, min(forecast.share(), 1.0))
            left = clock(forecast.seconds_left(jobs))
            bar.set_postfix_str(f"about {left} left, {_runs(forecast.open)} to go", refresh=False)
            bar.update(0)

        yield counted


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
