"""Work that a second thread does beside the first one, or that the first does itself where the second is behind.

Which thread does a piece of work changes no result: both compute the same with the same kernels. So a run is
deterministic while the work divides itself, whatever else wants the second core; emulators do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Task(Generic[T]):
    """A call that happens once, in the first thread that has time for it; `result` is what it returned.

    A task may need the results of tasks made before it. Raises what the call raised.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._claim = threading.Lock()
        self._done = threading.Event()
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, without gradients, unless a thread has begun it."""
        if not self._claim.acquire(blocking=False) or self._call is None:
            return
        try:
            with torch.no_grad():
                self._value.append(self._call())
        except BaseException as error:
            self._error = error
        # what the call holds is no longer needed
        self._call = None
        self._done.set()

    def result(self) -> T:
        """What the call returns, made here and now if no thread has begun it."""
        self.run()
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value[0]


class HelperThread:
    """A thread that runs tasks in the order in which they are given."""

    def __init__(self) -> None:
        # torch's own threads would compete with this one
        self._executor = ThreadPoolExecutor(1, "learner", initializer=torch.set_num_threads, initargs=(1,))

    def offer(self, task: Task[T]) -> Task[T]:
        """Let the thread run this task when it comes to it."""
        self._executor.submit(task.run)
        return task
