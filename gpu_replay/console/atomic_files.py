"""Atomic file writes: a reader finds the old file or the new one."""

from __future__ import annotations

from pathlib import Path

from gpu_replay.checkpoint.files import replace_file

__all__ = ["replace_file", "write_text"]


def write_text(path: Path, text: str) -> Path:
    """Write a text file atomically; returns `path`."""
    return replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))
