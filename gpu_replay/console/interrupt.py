"""Ctrl-C and SIGTERM as a request to finish, so that a run ends with everything written."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

# the exit code that a shell reports for a process ended by such a signal
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}

# seconds within which a signal is the one before: `timeout` sends each to a process and again to its process group
_AGAIN = 1.0


class Stopped(Exception):
    """Ends long work after a request to finish; `reason` is the name of the signal."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StopRequest:
    """A context in which the first SIGINT or SIGTERM is recorded; one that comes a second later has its usual effect.

    Calling it returns the name of the signal, or None. Only the main thread of a program receives signals; in other
    threads nothing is recorded.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __call__(self) -> str | None:
        """The name of the recorded signal, or None."""
        return self._reason

    def check(self) -> None:
        """Raise Stopped if a signal was recorded."""
        if self._reason is not None:
            raise Stopped(self._reason)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self._reason is None:
            self._reason, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since > _AGAIN:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
