"""The progress of programs on standard error, so that standard output holds results only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gpu_replay.checkpoint.files import progress_bar
from gpu_replay.loops import compiling

__all__ = ["Progress", "progress_bar", "telling_of_compiling"]


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
