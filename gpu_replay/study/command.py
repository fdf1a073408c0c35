"""`gpu-replay study`: from flags to a folder with all figures, plots and the report."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

from gpu_replay.console.arguments import pathname, positive
from gpu_replay.console.errors import UserError, require
from gpu_replay.console.interrupt import EXIT_CODES, StopRequest
from gpu_replay.study.settings import ENVIRONMENTS, METHODS, agents, described
from gpu_replay.study.workers import run_all

SEEDS = 5
QUICK_SEEDS, QUICK_EPISODES = 2, 20

DESCRIPTION = """\
Compare kinds of replay: no memory, uniform, proportional, rank-based, combined and hindsight, with one agent on
CartPole-v1, Acrobot-v1 and MountainCar-v0, several seeds each. ENV names some of them; without it all are taken.
The agent is a well-known tutorial's by default, and the report says where its settings are poor; --tuned takes settings
with which all three environments can be solved.

--output receives episodes.csv (a line per episode), settings.json, pictures and report.md. Each run is one process with
one thread. Ctrl-C ends the study; the same command again continues with the runs that are not finished, and gives what
it would have given. On a finished study it writes the pictures and the report again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    number: Any = {"type": positive, "metavar": "N"}
    smoke = f"a smoke run of minutes: {QUICK_SEEDS} seeds, {QUICK_EPISODES} episodes; its figures mean nothing"
    methods = f"of {', '.join(METHODS)} (default: all); commas do as well"
    parser.add_argument("env", metavar="ENV", nargs="*", help=f"of {', '.join(ENVIRONMENTS)} (default: all)")
    parser.add_argument("--output", type=pathname, required=True, metavar="DIR", help="folder of the study")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help=methods)
    parser.add_argument("--seeds", **number, help=f"runs of each method (default: {SEEDS})")
    parser.add_argument("--episodes", **number, help="episodes of a run (default: 300; with --tuned up to 800)")
    parser.add_argument("--tuned", action="store_true", help="settings that solve all three, instead of the tutorial's")
    parser.add_argument("--quick", action="store_true", help=smoke)
    parser.add_argument("--jobs", **number, help="processes at a time (default: all cores)")


def run(options: argparse.Namespace) -> int:
    """Run the study as the flags say; returns the exit code. Raises UserError for bad input."""
    require("gymnasium", "matplotlib", "pandas", "scipy", "tqdm", purpose="gpu-replay study")
    from gpu_replay.console.versions import cpu_cores, cpu_model, versions
    from gpu_replay.study.report import write_report
    from gpu_replay.study.results import StudyFolder
    from gpu_replay.study.run import RunId, make_run

    began = time.perf_counter()
    methods = _chosen("--methods", options.methods, list(METHODS))
    chosen = agents(
        _chosen("ENV", options.env, ENVIRONMENTS),
        tuned=options.tuned,
        episodes=options.episodes or (QUICK_EPISODES if options.quick else None),
    )
    seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    jobs = options.jobs or cpu_cores()
    settings = described(chosen, methods, seeds, tuned=options.tuned, quick=options.quick)
    settings |= {"versions": versions(), "cpu": cpu_model(), "jobs": jobs}
    folder = StudyFolder(options.output)
    before = folder.claim(settings)
    if not folder.complete:
        runs = list(itertools.starmap(RunId, itertools.product(chosen, methods, range(seeds))))
        finished = folder.finished(runs)
        if finished:
            print(f"{len(finished)} of {len(runs)} runs are there already.")
        tasks = {run: (run, chosen[run.environment]) for run in runs if run not in finished}
        try:
            with StopRequest() as stop:
                for done, episodes in run_all(make_run, tasks, jobs, stop):
                    folder.keep(done, episodes)
        finally:
            folder.note({**settings, "wall_seconds": round(before + time.perf_counter() - began, 3)})
        if (kept := len(folder.finished(runs))) < len(runs):
            told = f"interrupted with {kept} of {len(runs)} runs finished; the same command continues from there."
            print(f"gpu-replay study: {told}", file=sys.stderr)
            return EXIT_CODES[stop() or "SIGINT"]
        print(folder.join(runs))
    print(*write_report(folder.path), sep="\n")
    return 0


def _chosen(flag: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The given names, each once and in the order of the tables; all known ones if none is given."""
    names = [name for text in given or () for name in text.split(",") if name]
    short = {name.lower().partition("-v")[0]: name for name in known}
    found = {name if name in known else short.get(name.lower(), name) for name in names}
    unknown = sorted(found - set(known))
    if unknown:
        raise UserError(f"{flag}: {', '.join(map(repr, unknown))} is not part of the study; use {', '.join(known)}.")
    return [name for name in known if name in found or not names]
