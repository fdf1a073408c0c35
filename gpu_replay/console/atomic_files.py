"""Files that appear whole: written beside their place and moved there."""

from __future__ import annotations

from pathlib import Path

from gpu_replay.checkpoint.fsync import replace

__all__ = ["replace", "write_text"]


def write_text(path: Path, text: str) -> Path:
    """A text file, whole or not at all."""
    return replace(path, lambda partial: partial.write_text(text, encoding="utf-8"))
