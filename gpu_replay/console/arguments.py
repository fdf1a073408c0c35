"""Command lines: errors in one line, and numbers checked while they are parsed."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Reports a bad command line in one line on standard error and exits with 2; usage is shown by --help only.

    Flags are written out: a prefix such as --step for --steps is refused.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, *args: Any, **given: Any) -> Any:
        """Refuse unknown flags here already: a sub-command names itself, where argparse would name the program."""
        found, unknown = super().parse_known_args(*args, **given)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1)
            hint = f". Did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def whole(text: str) -> int:
    """An int, also written 1e6 or 1_000_000."""
    try:
        return int(text)
    except ValueError:
        number = _number(text, "a whole number, such as 1000 or 1e6")
        if not number.is_integer():
            raise argparse.ArgumentTypeError(f"must be a whole number, such as 1000 or 1e6; found {text!r}") from None
        return int(number)


def natural(text: str) -> int:
    """An int of at least 0."""
    return _at_least(whole(text), 0, text)


def positive(text: str) -> int:
    """An int from 1 to 2^31 - 1."""
    number = _at_least(whole(text), 1, text)
    if number >= 2**31:
        raise argparse.ArgumentTypeError(f"must be less than 2^31; found {text}")
    return number


def positive_float(text: str) -> float:
    """A number above 0."""
    number = _number(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0; found {text}")
    return number


def share(text: str) -> float:
    """A number from 0 to 1."""
    number = _number(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1; found {text}")
    return number


def widths(text: str) -> tuple[int, ...]:
    """`128,128` as (128, 128)."""
    return tuple(whole(part) for part in text.split(","))


def pathname(text: str) -> Path:
    """A path that is not empty, with the home folder for `~`."""
    # imports torch, which takes seconds
    from gpu_replay.validation import check_path

    return check_path("the path", text)


def _number(text: str, wanted: str = "a number") -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {wanted}; found {text!r}") from None


def _at_least(number: int, least: int, text: str) -> int:
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}; found {text}")
    return number
