"""A run's checkpoints: everything that a resumed run needs, consistent after a crash at any moment.

    checkpoint/000000120064/replay/   the replay buffer, as its own `save` writes it
    checkpoint/000000120064/rank1/    of a run on several ranks: `replay/` and `state/` of rank 1, and so on
    checkpoint/000000120064/state/    everything else, in the same format; written last, it completes the checkpoint

All parts belong to one step, so none may be replaced without the others: each save goes to a new folder named by the
step, whose `state` appears in one atomic rename, after all ranks have written their parts. Only then is the checkpoint
before it removed.
"""

from __future__ import annotations

import copy
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from torch import Tensor

from gpu_replay import CheckpointError, TrajectoryReplayBuffer
from gpu_replay.checkpoint.files import sync_folder
from gpu_replay.checkpoint.format import MANIFEST, check_version, read_checkpoint, write_checkpoint
from gpu_replay.training.team import Team

VERSION = 4
REPLAY = "replay"
STATE = "state"
_NAME = re.compile(r"\d{12,}")
# saving takes at most this fraction, one part in so many, of the time between two checkpoints
COST = 40


# step, state, and the replay buffer if it is saved too
Content = tuple[int, Mapping[str, Any], TrajectoryReplayBuffer | None]


@dataclass(frozen=True)
class SavedRun:
    """A complete checkpoint.

    ranks:   how many ranks wrote it.
    state:   of rank 0, with tensors in host memory.
    replays: folders of the ranks' replay buffers, in the order of ranks; empty if the checkpoint has none.
    """

    folder: Path
    ranks: int
    state: dict[str, Any]
    replays: list[Path]

    def trainer(self, rank: int) -> dict[str, Any]:
        """The state of a rank's trainer. Raises CheckpointError if it is damaged."""
        state = _read(_part(self.folder, rank) / STATE) if rank else self.state
        return dict(state["trainer"])


def latest(folder: Path) -> SavedRun | None:
    """The newest complete checkpoint in `folder`, or None.

    Raises CheckpointError if it is damaged or of another version.
    """
    path = newest(folder)
    if path is None:
        return None
    state = _read(path / STATE)
    ranks = state.get("ranks", 1)
    replays = [_part(path, rank) / REPLAY for rank in range(ranks)]
    return SavedRun(path, ranks, state, replays if replays[0].is_dir() else [])


def newest(folder: Path) -> Path | None:
    """The folder of the newest complete checkpoint in `folder`, or None."""
    complete = [path for path in saved_steps(folder) if (path / STATE / MANIFEST).is_file()]
    return max(complete, key=lambda path: int(path.name), default=None)


def _read(path: Path) -> dict[str, Any]:
    saved = read_checkpoint(path)
    check_version(f"{path} has version", saved.manifest.get("version"), VERSION)
    values = saved.manifest.get("values")
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not the state of a run.")
    return unflatten(values, saved.read_all())


def save_run(
    folder: Path, step: int, state: Mapping[str, Any], buffer: TrajectoryReplayBuffer | None, team: Team
) -> None:
    """Write a checkpoint of this step, then remove the others. If this step has a complete one, nothing is written.

    Every rank calls this at the same step. The disk holds both checkpoints until the new one is complete.
    Raises OSError on all ranks if the disk of one is full or fails; the previous checkpoint is then unchanged.
    """
    target = folder / f"{step:012d}"
    if not (target / STATE / MANIFEST).is_file():
        part = _part(target, team.rank)
        # a crash while this same step was saved can leave a part of it
        shutil.rmtree(part / REPLAY, ignore_errors=True)
        values, tensors = flatten(state)
        content = {"version": VERSION, "values": values}
        try:
            with team.together():
                part.mkdir(parents=True, exist_ok=True)
                sync_folder(part.parent)
                if buffer is not None:
                    buffer.save(part / REPLAY)
                if team.rank > 0:
                    write_checkpoint(part / STATE, content, tensors)
            with team.together():
                if team.rank == 0:
                    write_checkpoint(target / STATE, content, tensors)
        except (OSError, CheckpointError):
            # all ranks know it, and none has the whole; where one died meanwhile, the checkpoint may be complete
            if not (target / STATE / MANIFEST).is_file():
                shutil.rmtree(part, ignore_errors=True)
            raise
    for path in saved_steps(folder) if team.rank == 0 else ():
        if path != target:
            shutil.rmtree(path, ignore_errors=True)


def _part(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"rank{rank}" if rank else checkpoint


def saved_steps(folder: Path) -> list[Path]:
    """The folders in `folder` that are named as checkpoints, complete or not."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


class CheckpointManager:
    """Saves a run at intervals, and at its end.

    folder:  holds the checkpoints.
    every:   seconds between two checkpoints; longer if saving is slow, so that it takes at most a fortieth of the time.
    collect: returns the step, the state, and the replay buffer or None to leave it out.
    due:     when the next checkpoint should be written, by `time.perf_counter`.

    If a save fails, one line reports it and the run continues; the last complete checkpoint is still there.
    """

    def __init__(self, folder: Path, every: float, collect: Callable[[], Content], team: Team) -> None:
        self._folder, self._every, self._collect, self._team = folder, every, collect, team
        self.due = time.perf_counter() + every

    def save(self) -> float:
        """Write a checkpoint now; returns the seconds that it took, which do not count as learning time."""
        began = time.perf_counter()
        try:
            save_run(self._folder, *self._collect(), self._team)
        except (OSError, CheckpointError) as error:
            print(f"gpu-replay train: no checkpoint was written: {error}", file=sys.stderr)
        now = time.perf_counter()
        self.due = now + max(self._every, COST * (now - began))
        return now - began


def flatten(tree: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split off the tensors by path: {"a": {"b": t, "c": 1}} becomes {"a": {"b": None, "c": 1}} and {"a/b": t}.

    Tensors are not copied.
    """
    values, tensors = dict(tree), {}
    for name, leaf in tree.items():
        if isinstance(leaf, Tensor):
            values[name], tensors[prefix + name] = None, leaf
        elif isinstance(leaf, Mapping):
            values[name], inside = flatten(leaf, f"{prefix}{name}/")
            tensors |= inside
    return values, tensors


def unflatten(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of `flatten`, also after `values` was written to JSON and read back."""
    tree = copy.deepcopy(dict(values))
    for path, tensor in tensors.items():
        *parents, leaf = path.split("/")
        reduce(dict.__getitem__, parents, tree)[leaf] = tensor
    return tree
