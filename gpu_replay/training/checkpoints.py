"""A run's checkpoints: everything that is needed to go on, so that a crash at any moment leaves one that fits together.

    checkpoint/000000120064/replay/   the replay buffer, as its own `save` writes it
    checkpoint/000000120064/state/    all else, in the same format; its appearance makes the checkpoint complete

The two parts belong to one moment, so neither may be replaced without the other: each save goes to a new folder, named
by the step, whose `state` is written last and appears in one atomic rename; only then the checkpoint before it goes.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gpu_replay.checkpoint.format import MANIFEST, Checkpoint, read_checkpoint, write_checkpoint
from gpu_replay.checkpoint.fsync import sync_folder
from gpu_replay.errors import CheckpointError
from gpu_replay.training.state_tree import join, split

VERSION = 1
REPLAY = "replay"
STATE = "state"
_NAME = re.compile(r"\d{12,}")
# saving takes at most one part in so many of the time between two checkpoints
COST = 40


class Saveable(Protocol):
    """What writes itself to a folder, as the replay buffers do."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint folder."""


class SavedRun:
    """A complete checkpoint, opened. Raises CheckpointError for what is damaged or of another version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checkpoint: Checkpoint = read_checkpoint(path / STATE)
        version = self._checkpoint.manifest.get("version")
        if version != VERSION:
            raise CheckpointError(f"{path / STATE} has version {version!r}; this gpu_replay reads version {VERSION}.")

    @property
    def values(self) -> dict[str, Any]:
        """The state without its tensors."""
        found = self._checkpoint.manifest.get("values")
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path / STATE} is not the state of a run.")
        return found

    @property
    def replay(self) -> Path | None:
        """The folder of the replay buffer, or None where it was not saved."""
        folder = self.path / REPLAY
        return folder if folder.is_dir() else None

    def state(self) -> dict[str, Any]:
        """The whole state as it was saved, with tensors in host memory."""
        names = self._checkpoint.tensor_names
        return join(self.values, {name: self._checkpoint.read(name) for name in names})


def latest(folder: Path) -> SavedRun | None:
    """The newest complete checkpoint in `folder`, or None. Raises CheckpointError if it is damaged."""
    complete = [path for path in _saved(folder) if (path / STATE / MANIFEST).is_file()]
    return SavedRun(max(complete, key=lambda path: int(path.name))) if complete else None


def save_run(folder: Path, step: int, state: Mapping[str, Any], buffer: Saveable | None) -> None:
    """Write a checkpoint of this step, then remove the others; one that is complete already is left as it is.

    Until the new checkpoint is complete the old one stands beside it and takes its space.
    Raises OSError if the disk is full or fails; the checkpoint before is then as it was.
    """
    target = folder / f"{step:012d}"
    if not (target / STATE / MANIFEST).is_file():
        # what a crash left of this very step
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        sync_folder(folder)
        values, tensors = split(state)
        try:
            if buffer is not None:
                buffer.save(target / REPLAY)
            write_checkpoint(target / STATE, {"version": VERSION, "values": values}, tensors)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
    for path in _saved(folder):
        if path != target:
            shutil.rmtree(path, ignore_errors=True)


def _saved(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


class CheckpointManager:
    """Saves a run now and then, and at its end.

    folder:  of the checkpoints.
    every:   seconds between two of them; more if saving takes long, so that it stays below a fortieth of the time.
    collect: gives the step, the state, and the replay buffer or None to leave it out.
    seconds: spent here, which is not part of the learning loop's.

    A save that fails is reported in one line and the run goes on: the last good checkpoint is still there.
    """

    def __init__(
        self,
        folder: Path,
        every: float,
        collect: Callable[[], tuple[int, Mapping[str, Any], Saveable | None]],
    ) -> None:
        self.seconds = 0.0
        self._folder = folder
        self._every = every
        self._collect = collect
        self._next = time.perf_counter() + every

    def due(self) -> bool:
        """Whether it is time."""
        return time.perf_counter() >= self._next

    def save(self) -> None:
        """Write a checkpoint of this moment."""
        began = time.perf_counter()
        try:
            save_run(self._folder, *self._collect())
        except (OSError, CheckpointError) as error:
            print(f"gpu-replay train: no checkpoint was written: {error}", file=sys.stderr)
        now = time.perf_counter()
        self.seconds += now - began
        self._next = now + max(self._every, COST * (now - began))
