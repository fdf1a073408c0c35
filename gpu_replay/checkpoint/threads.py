"""Threads in addition to the one that calls, whose locks are all taken in C.

`threading.Thread` and `concurrent.futures` take some of theirs in Python code: a signal handler that raises there, such
as that of Ctrl-C, leaves them held for ever, and whoever needs one then never returns.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any


class Threads:
    """Starts threads, and waits until all have ended; one thread at a time calls this.

    news: what the threads put here, and None when one has ended; while any are `running`, something will come.
    """

    def __init__(self) -> None:
        self.news: SimpleQueue[Any] = SimpleQueue()
        self._started: list[int] = []
        self._ended: list[None] = []

    def start(self, run: Callable[[], object], count: int = 1) -> None:
        """Call `run` in so many threads. Raises RuntimeError where the system or an ending interpreter starts none."""

        def call() -> None:
            try:
                run()
            finally:
                self._ended.append(None)
                self.news.put(None)

        if sys.is_finalizing():
            raise RuntimeError("the interpreter is ending")
        # one call, in which no signal is handled: what was started is known
        self._started.extend(map(_thread.start_new_thread, [call] * count, [()] * count))

    @property
    def running(self) -> bool:
        """Whether a thread has not ended."""
        return len(self._ended) < len(self._started)

    def wait(self, seconds: float | None = None) -> bool:
        """Drop news until all threads have ended, or for so many seconds; whether they have."""
        with suppress(Empty):
            while self.running:
                self.news.get(timeout=seconds)
        return not self.running
