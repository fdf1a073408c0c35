"""User errors, reported in one line instead of a traceback."""

from __future__ import annotations

import importlib.util

from gpu_replay.ops.advice import install

__all__ = ["EXTRA", "UserError", "install", "require"]

EXTRA = install("training")


class UserError(Exception):
    """Bad input; the command line prints the message alone and exits with 2."""


def require(*modules: str, purpose: str, extra: str = EXTRA) -> None:
    """Check that optional packages are installed, before any work is done.

    purpose: completes the sentence "... is needed for".
    extra:   the command that installs them.

    Raises UserError with the missing packages and the command that installs them.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{', '.join(missing)} {verb} needed for {purpose} but not installed. Run: {extra}")
