"""An opened checkpoint of a buffer: its settings, its counters, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

from gpu_replay.checkpoint.config import arguments_of
from gpu_replay.checkpoint.format import read_checkpoint
from gpu_replay.checkpoint.manifest import check_version
from gpu_replay.checkpoint.state import VERSION, BufferState, checked_counters
from gpu_replay.errors import CheckpointError
from gpu_replay.validation import check_int

# a class of earlier versions
OF_RANKS = "ShardedReplayBuffer"
NO_SETTINGS = "its settings are not those of a buffer"


class BufferCheckpoint:
    """An opened checkpoint of a buffer.

    kind: the class whose checkpoint is taken; None takes them all.

    Raises CheckpointError for a damaged one, or one of another kind.
    """

    def __init__(self, path: str | PathLike[str], kind: str | None = None) -> None:
        self.path = path
        self.checkpoint = read_checkpoint(path)
        manifest = self.checkpoint.manifest
        with self.refusing("the manifest is not of a replay buffer"):
            version, self.config = manifest["version"], dict(manifest["settings"])
            self.seed, found = check_int("seed", manifest["seed"]), self.config["kind"]
        check_version(f"{path} has state version", version, VERSION)
        if found == OF_RANKS:
            raise CheckpointError(
                f"{path} was written by {OF_RANKS}; gpu_replay 0.3 is the last version that reads it. There "
                "ReplayBuffer.load makes one buffer of it, whose own checkpoint this version loads."
            )
        if kind not in (None, found):
            raise CheckpointError(f"{path} holds a {found}; load it with {found}.load.")
        with self.refusing("the manifest is not of a replay buffer"):
            self.counters = checked_counters(manifest["counters"])

    @contextmanager
    def refusing(self, what: str) -> Iterator[None]:
        """Within it, an error caused by the contents of the file becomes CheckpointError."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: {what}: {error}") from error

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments."""
        with self.refusing(NO_SETTINGS):
            return arguments_of(self.config)

    def restore(self, buffer: BufferState) -> None:
        """Stream all of it into a buffer."""
        views = buffer.views(self.counters["ADDED"])
        self.checkpoint.fill(views)
        with self.refusing("what it holds is no state of a buffer"):
            buffer.check(self.counters, views)
        buffer.take_over(self.counters, self.seed)
