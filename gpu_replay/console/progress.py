"""The progress of programs on standard error, so that standard output holds results only."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gpu_replay.loops import compiling

# bytes from which saving and loading show a bar
SHOWN_FROM = 10**9


def progress_bar(total: float, **options: Any) -> Any:
    """tqdm with `options`, refreshed rarely where standard error is a log file. Raises ImportError without tqdm."""
    from tqdm import tqdm

    class Bar(tqdm):
        # without the thread that draws bars which nobody advances
        monitor_interval = 0

    # of its own: a signal handler that raises can leave the lock that all bars share held for ever
    Bar.set_lock(threading.RLock())
    # in a log file every refresh is a line of its own
    interval = 0.2 if sys.stderr.isatty() else 30.0
    return Bar(total=total, file=sys.stderr, dynamic_ncols=True, mininterval=interval, miniters=1, **options)


@contextmanager
def bytes_bar(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """A callback for the bytes moved since its last call; large totals show a bar if tqdm is installed."""
    try:
        bar = progress_bar(total, desc=title, unit="B", unit_scale=True, leave=False) if total > SHOWN_FROM else None
    except ImportError:
        bar = None
    if bar is None:
        yield lambda nbytes: None
        return
    with bar:
        yield bar.update


@contextmanager
def telling_of_compiling(say: Callable[[str], object]) -> Iterator[None]:
    """Within it users are told by `say` that the loops of buffers are compiled, where they are."""
    before, compiling.tell = compiling.tell, say
    try:
        yield
    finally:
        compiling.tell = before


class Progress:
    """Shows the cases of a benchmark: a progress bar, or one plain line per case if tqdm is not installed."""

    def __init__(self, total: int, title: str) -> None:
        self._total = total
        self._title = title
        self._done = 0
        self._bar: Any = None
        with suppress(ImportError):
            self._bar = progress_bar(total, desc=title, unit="case")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, what: str) -> None:
        """Name the current case."""
        if self._bar is not None:
            self._bar.set_postfix_str(what)
        else:
            print(f"{self._title} [{self._done + 1}/{self._total}] {what}", file=sys.stderr, flush=True)

    def advance(self, steps: int = 1) -> None:
        """Count finished cases."""
        self._done += steps
        if self._bar is not None:
            self._bar.update(steps)

    def say(self, line: str) -> None:
        """Print a line that stays, above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)
