"""What users are told: warnings at their own line, and commands that install what is missing."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path


def warn_caller(message: str) -> None:
    """Issue a UserWarning at the line outside of the package that led here."""
    level, frame = 1, sys._getframe()
    while (back := frame.f_back) is not None and frame.f_globals["__name__"].startswith("gpu_replay."):
        level, frame = level + 1, back
    warnings.warn(message, stacklevel=level)


def install(extras: str) -> str:
    """The command that installs the package with these extras, such as "training,ray": from the clone that it runs
    from, or else from the index.
    """
    in_clone = (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file()
    return f'pip install -e ".[{extras}]" in the clone' if in_clone else f'pip install "gpu-replay[{extras}]"'


def lacking(module: str, extra: str, error: ImportError) -> ImportError:
    """The error of a module of the package whose library cannot be imported."""
    return ImportError(f"{module} cannot be imported: {error}. Run: {install(extra)}", name=error.name)
