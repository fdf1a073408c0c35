"""The command `gpu-replay study cliffwalk`: the paper's own experiment, from arguments to report."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from gpu_replay.console.arguments import positive
from gpu_replay.console.errors import UserError, require
from gpu_replay.console.versions import device_name, versions
from gpu_replay.study.cliffwalk_agents import AGENTS, Outcome, solve

DESCRIPTION = (
    "The Blind Cliffwalk of Schaul et al. 2016 (Figure 1 and section 3): updates that tabular Q-learning needs until "
    "its values are right, over the number of states, for uniform, oracle, greedy, proportional and rank-based "
    "replay. Writes cliffwalk.csv, cliffwalk.png and cliffwalk.md."
)
FEWEST_STATES, MOST_STATES = 2, 20
Task = tuple[str, int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for what is written")
    parser.add_argument(
        "--states-max",
        type=positive,
        default=13,
        metavar="N",
        help=f"largest number of states, {FEWEST_STATES} to {MOST_STATES}; each one doubles the time (default: 13)",
    )
    parser.add_argument("--seeds", type=positive, default=10, metavar="K", help="runs of each (default: 10)")
    parser.add_argument(
        "--max-updates",
        type=positive,
        default=10_000_000,
        metavar="N",
        help="a run that has not converged by then is given up and marked as such (default: 10,000,000)",
    )
    parser.add_argument("--jobs", type=positive, metavar="N", help="processes (default: all cores)")


def run(options: argparse.Namespace) -> int:
    """Run everything, write the files, print the verdict. Raises UserError for options that make no sense."""
    require("matplotlib", "tqdm", purpose="the study")
    if not FEWEST_STATES <= options.states_max <= MOST_STATES:
        raise UserError(f"--states-max must be {FEWEST_STATES} to {MOST_STATES}; found {options.states_max}.")
    folder: Path = options.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "no permission to write there")
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error.strerror or error}.") from None
    from gpu_replay.study.cliffwalk_report import write_cliffwalk
    from gpu_replay.study.cliffwalk_summary import gap_words, order_words, summarise

    tasks = [
        (a, n, s) for a in AGENTS for n in range(FEWEST_STATES, options.states_max + 1) for s in range(options.seeds)
    ]
    # the longest first, so that no core idles at the end
    tasks.sort(key=expected_seconds, reverse=True)
    jobs = min(options.jobs or _cores(), len(tasks))
    start = time.perf_counter()
    outcomes = list(_with_progress(tasks, jobs, options.max_updates))
    facts = {
        "seeds": f"{options.seeds}, at most {options.max_updates:,} updates each",
        "time": f"{time.perf_counter() - start:,.0f} s, {jobs} at a time, on {device_name(torch.device('cpu'))}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    written = write_cliffwalk(folder, outcomes, facts)
    cells = summarise(outcomes)
    print(order_words(cells))
    print(gap_words(cells))
    print("written:", *written)
    return 0


def expected_seconds(task: Task) -> float:
    """About how long a run takes, for the order of the runs and the time that is left."""
    agent, states, _ = task
    memory = 2.0 ** (states + 1)
    return {
        "oracle": 5e-6 * states**3 + 1e-6 * memory,
        "greedy": 5e-6 * memory,
        "proportional": 3.5e-4 * memory,
        "rank": 7e-4 * memory,
        "uniform": 2e-5 * memory,
    }[agent]


def _with_progress(tasks: Sequence[Task], jobs: int, most_updates: int) -> Iterator[Outcome]:
    from tqdm import tqdm

    bar_format = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}"
    with tqdm(total=sum(map(expected_seconds, tasks)), desc="cliffwalk", bar_format=bar_format, file=sys.stderr) as bar:
        for task, outcome in _outcomes(tasks, jobs, most_updates):
            bar.set_postfix_str(f"{outcome.agent}, {outcome.states} states", refresh=False)
            bar.update(expected_seconds(task))
            yield outcome


def _outcomes(tasks: Sequence[Task], jobs: int, most_updates: int) -> Iterator[tuple[Task, Outcome]]:
    """Every task with what came of it, in the order in which they end."""
    if jobs == 1:
        _one_thread()
        for task in tasks:
            yield task, solve(*task, most_updates)
        return
    before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_one_thread) as pool:
        futures = {pool.submit(solve, *task, most_updates): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise MemoryError("a process of the study was killed, for memory perhaps; try fewer --jobs") from None
        except BaseException:
            # runs under way would go on for a while otherwise
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - before:
                child.terminate()
            raise


def _one_thread() -> None:
    """Tensors of one row are no work for several threads, and the other cores are busy."""
    torch.set_num_threads(1)


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
