"""The processes in which runs are made: one thread each, and every run in one of them from its start to its end."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from gpu_replay.study.run import Episode, RunId, episodes
from gpu_replay.study.settings import AgentSettings

# seconds between two reports of a worker, and for which the parent waits for one before it looks around
_REPORT_EVERY = 0.5
_LOOK_EVERY = 0.5
# seconds that a worker has to end its episode when all are to stop
_PATIENCE = 5.0

Task = tuple[RunId, AgentSettings]


class WorkerFailed(RuntimeError):
    """A run could not be made; the message names it and says why."""


def work(
    tasks: Sequence[Task],
    jobs: int,
    counted: Callable[[RunId, int, float], None],
    keep: Callable[[RunId, list[Episode]], None],
    stop: Callable[[], object],
) -> bool:
    """Make all runs, the first ones first; returns whether all were made.

    jobs:    processes.
    counted: told how many episodes of a run ended and the seconds that they took, now and then.
    keep:    given the episodes of each run that has ended.
    stop:    true when no more is wanted; nothing is kept of runs that have not ended.

    Raises WorkerFailed when a run raises or its process dies.
    """
    if not tasks:
        return True
    # fresh interpreters: forked ones would inherit threads and locks in a state that nobody knows
    context = multiprocessing.get_context("spawn")
    todo, reports, ending = context.SimpleQueue(), context.Queue(), context.Event()
    workers = [
        context.Process(target=_worker, args=(todo, reports, ending), daemon=True) for _ in range(min(jobs, len(tasks)))
    ]
    _start(workers)
    try:
        return _follow(tasks, workers, todo, reports, counted, keep, stop)
    finally:
        ending.set()
        for _ in workers:
            todo.put(None)
        _part_from(workers, reports)


def _start(workers: Sequence[SpawnProcess]) -> None:
    """Start processes that Ctrl-C, which reaches every process of a terminal, does not touch: the parent decides."""
    # what is ignored stays so in a process that is started, from its first moment on; only main threads may ask for it
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        for worker in workers:
            worker.start()
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


def _follow(
    tasks: Sequence[Task],
    workers: Sequence[SpawnProcess],
    todo: Any,
    reports: Any,
    counted: Callable[[RunId, int, float], None],
    keep: Callable[[RunId, list[Episode]], None],
    stop: Callable[[], object],
) -> bool:
    # a worker asks for its next run, so that a pipe never fills
    waiting, left = list(reversed(tasks)), len(tasks)
    for _ in workers:
        todo.put(waiting.pop())
    while left:
        if stop():
            return False
        try:
            kind, run, *rest = reports.get(timeout=_LOOK_EVERY)
        except queue.Empty:
            if not stop():
                _look_after(workers)
            continue
        if kind == "failed":
            raise WorkerFailed(f"the run {run.name} failed: {rest[0]}.")
        if kind == "episodes":
            counted(run, *rest)
        else:
            keep(run, rest[0])
            left -= 1
            todo.put(waiting.pop() if waiting else None)
    return True


def _look_after(workers: Sequence[SpawnProcess]) -> None:
    """Raise WorkerFailed for a process that died without a word, such as one that the system killed for its memory."""
    for worker in workers:
        if worker.exitcode not in (None, 0):
            raise WorkerFailed(f"a worker process ended with exit code {worker.exitcode}. Is there enough memory?")


def _part_from(workers: Sequence[SpawnProcess], reports: Any) -> None:
    """Wait a little for the processes to end by themselves, then end them."""
    deadline = time.monotonic() + _PATIENCE
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        # a process does not end before what it has put into the queue is taken out
        try:
            reports.get(timeout=0.05)
        except queue.Empty:
            continue
    for worker in workers:
        if worker.is_alive():
            worker.kill()
        worker.join()
    reports.close()


def _worker(todo: Any, reports: Any, ending: Any) -> None:
    """The life of a process: runs until there are none, until all are to stop, or until the parent is gone.

    A process that were ended while it writes into the queue would leave the parent waiting for the rest.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    # averages of gradients that stay zero would shrink to numbers with which processors are slow
    torch.set_flush_denormal(True)

    def unwanted() -> bool:
        parent = multiprocessing.parent_process()
        return ending.is_set() or (parent is not None and not parent.is_alive())

    while not unwanted() and (task := todo.get()) is not None:
        run, agent = task
        try:
            found = _made(run, agent, reports, unwanted)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
            reports.put(("failed", run, " ".join(text.split())))
            return
        if found is None:
            return
        reports.put(("over", run, found))


def _made(run: RunId, agent: AgentSettings, reports: Any, unwanted: Callable[[], bool]) -> list[Episode] | None:
    """The episodes of a run, or None when nobody wants them any more."""
    found: list[Episode] = []
    told, last = 0, time.perf_counter()
    for episode in episodes(run, agent):
        found.append(episode)
        now = time.perf_counter()
        if now - last > _REPORT_EVERY or len(found) == agent.episodes:
            if unwanted():
                return None
            reports.put(("episodes", run, len(found) - told, now - last))
            told, last = len(found), now
    return found
