"""Ctrl-C and SIGTERM as a request to finish, so that a run ends with everything written."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# what a shell reports for a process that such a signal ended
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


class Stopped(Exception):
    """Raised where long work looks for a request to finish; `reason` is the name of the signal."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StopRequest:
    """While it is entered, the first SIGINT or SIGTERM is noted; a second one acts as it usually does.

    Calling it gives the name of the signal, or None. Signals reach only the main thread of a program; elsewhere
    nothing is noted.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __call__(self) -> str | None:
        """The signal that came, or None."""
        return self._reason

    def check(self) -> None:
        """Raise Stopped if a signal came."""
        if self._reason is not None:
            raise Stopped(self._reason)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._reason = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
