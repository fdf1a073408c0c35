"""Files that appear whole: written beside their place and moved there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` make a file next to `path`, move it there, and return `path`; a reader never sees half of it."""
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_text(path: Path, text: str) -> Path:
    """A text file, whole or not at all."""
    return replace(path, lambda partial: partial.write_text(text, encoding="utf-8"))
