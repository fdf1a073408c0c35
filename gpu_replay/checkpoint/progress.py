"""Progress bars on standard error, so that standard output holds results only."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SHOWN_FROM = 10**9
"""Bytes from which saving and loading show a bar."""


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
