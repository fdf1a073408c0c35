"""What a user of the programs can get wrong, told in one line instead of a traceback."""

from __future__ import annotations

import importlib.util

EXTRA = 'pip install "gpu-replay[training]"'


class UserError(Exception):
    """A mistake in what was asked for; the command line prints its message alone and exits with 2."""


def require(*modules: str, purpose: str) -> None:
    """Check that optional packages are there before any work is done.

    purpose: what they are needed for, to end the sentence "... is needed for".

    Raises UserError that names the missing package and the extra that brings it.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{', '.join(missing)} {verb} needed for {purpose} but not installed. Run: {EXTRA}")
