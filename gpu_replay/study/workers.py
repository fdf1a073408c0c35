"""Runs in a pool of processes, one thread each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from gpu_replay.console.progress import progress_bar

Name = TypeVar("Name")
Result = TypeVar("Result")


def run_all(
    function: Callable[..., Result],
    tasks: Mapping[Name, tuple[Any, ...]],
    jobs: int,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[tuple[Name, Result]]:
    """Call `function` with the arguments of every task and yield each name and result as it arrives, under a bar.

    tasks: name to arguments, in the order in which they start.
    jobs:  number of processes.
    stop:  called twice a second; once it returns true, running tasks are killed and the rest is not started.

    Raises RuntimeError from the exception of a task, with its traceback, and ChildProcessError if a process dies.
    """
    others = set(multiprocessing.active_children())
    # fresh interpreters: forked ones would inherit threads and locks in an undefined state
    pool = ProcessPoolExecutor(max(1, min(jobs, len(tasks))), multiprocessing.get_context("spawn"), _initialize)
    # processes started here ignore Ctrl-C, which reaches every process of a terminal: the parent decides
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        waiting = {pool.submit(function, *arguments): name for name, arguments in tasks.items()}
    finally:
        signal.signal(signal.SIGINT, previous)
    try:
        with progress_bar(len(tasks), unit="run") as bar:
            while waiting and not stop():
                # what has finished is kept before what failed raises
                done = wait(waiting, 0.5, FIRST_COMPLETED).done
                for future in sorted(done, key=lambda each: each.exception() is not None):
                    name, error = waiting.pop(future), future.exception()
                    if isinstance(error, BrokenProcessPool):
                        # a signal to all processes ends the workers first
                        if stop():
                            return
                        raise ChildProcessError("a worker process was killed. Is there enough memory?")
                    if error is not None:
                        raise RuntimeError(f"the run {name} failed") from error
                    yield name, future.result()
                    bar.update()
    finally:
        if waiting:
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
        pool.shutdown(cancel_futures=True)


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
