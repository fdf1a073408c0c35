"""Runs in a pool of processes, one thread each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gpu_replay.console.progress import progress_bar

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
Result = TypeVar("Result")
# seconds between two looks at `stop`
_POLL = 0.5


class WorkerFailed(RuntimeError):
    """A run could not be made; the message names it and the reason."""


def run_all(
    function: Callable[..., Result],
    tasks: Mapping[str, Arguments],
    jobs: int,
    cost: Callable[[Arguments], float],
    stop: Callable[[], object] = lambda: None,
) -> Iterator[tuple[Arguments, Result]]:
    """Call `function` with the arguments of every task and yield each result as it arrives, under a progress bar.

    tasks: name to arguments.
    jobs:  processes.
    cost:  expected seconds of a task, up to a common factor: the longest go first, and the bar advances by it.
    stop:  true when no more is wanted; runs under way are then killed.

    Raises WorkerFailed when a task raises or its process dies.
    """
    names = sorted(tasks, key=lambda name: cost(tasks[name]), reverse=True)
    others = set(multiprocessing.active_children())
    # fresh interpreters: forked ones would inherit threads and locks in an undefined state
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max(1, min(jobs, len(tasks))), context, _initialize)
    form = "{percentage:3.0f}%|{bar}| {elapsed}, about {remaining} left{postfix}"
    bar = progress_bar(sum(map(cost, tasks.values())), bar_format=form)
    waiting = {}
    try:
        with _sigint_ignored():
            waiting = {pool.submit(_call, function, name, tasks[name]): name for name in names}
        while waiting and not stop():
            for future in wait(waiting, _POLL, FIRST_COMPLETED).done:
                arguments = tasks[waiting.pop(future)]
                yield arguments, future.result()
                bar.set_postfix_str(f"{len(waiting)} runs to go", refresh=False)
                bar.update(cost(arguments))
    except BrokenProcessPool:
        if not stop():
            raise WorkerFailed("a worker process was killed. Is there enough memory?") from None
    finally:
        bar.close()
        if waiting:
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _sigint_ignored() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which reaches every process of a terminal: the parent decides."""
    main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, previous)


def _initialize() -> None:
    import torch

    torch.set_num_threads(1)
    # moving averages of gradients that stay zero decay into denormal numbers, which are slow
    torch.set_flush_denormal(True)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _call(function: Callable[..., Result], name: str, arguments: tuple[Any, ...]) -> Result:
    try:
        return function(*arguments)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise WorkerFailed(
            f"the run {name} failed: {text} ({Path(place.filename).name}, line {place.lineno})."
        ) from None
