"""A progress bar on long work: tqdm where it is installed, one plain line per step elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """Counts steps on standard error, so that standard output holds results only."""

    def __init__(self, total: int, title: str) -> None:
        self._total = total
        self._title = title
        self._done = 0
        self._bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(total=total, desc=title, unit="case", file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, what: str) -> None:
        """Say what is being done now."""
        if self._bar is not None:
            self._bar.set_postfix_str(what)
        else:
            print(f"{self._title} [{self._done + 1}/{self._total}] {what}", file=sys.stderr, flush=True)

    def advance(self, steps: int = 1) -> None:
        """So many steps are done."""
        self._done += steps
        if self._bar is not None:
            self._bar.update(steps)

    def say(self, line: str) -> None:
        """One line that stays, above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)
