"""What users are told: warnings at their own line, and commands that install what is missing."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from gpu_replay.loops.compiling import lacks_compiler

_told_of_python = False


def warn_caller(message: str) -> None:
    """Issue a UserWarning at the line outside of the package that led here."""
    level, frame = 1, sys._getframe()
    while (back := frame.f_back) is not None and frame.f_globals.get("__name__", "").startswith("gpu_replay."):
        level, frame = level + 1, back
    warnings.warn(message, stacklevel=level)


def warn_of_python() -> None:
    """Warn, once in a process, where the host's loops run as Python for want of a compiler."""
    global _told_of_python
    if _told_of_python or not lacks_compiler():
        return
    _told_of_python = True
    warn_caller(
        "Numba is not installed, or not for this NumPy: the loops of buffers on a CPU run as Python, 20 to 300 times "
        f"slower. Run: {install('cpu')}. With NUMBA_DISABLE_JIT=1 they do so without this warning, which comes once."
    )


def install(extras: str) -> str:
    """The command that installs the package with these extras, such as "training,ray": from the clone that it runs
    from, or else from the index.
    """
    in_clone = (Path(__file__).resolve().parents[2] / "pyproject.toml").is_file()
    return f'pip install -e ".[{extras}]" in the clone' if in_clone else f'pip install "gpu-replay[{extras}]"'
