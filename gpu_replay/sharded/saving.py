"""The checkpoints of all ranks' buffers as one set, so that a crash at any moment leaves the old set or the new one.

    ranks.json      names the folder in force and the checksum of each rank's manifest; replaced in one atomic rename
    save-3/rank0/   the checkpoint of rank 0's buffer, as its own `save` writes it, and so on

Each save goes to a new folder, in which the files of the one before are linked first (where the file system has hard
links), so that shards whose rows have not changed are neither written again nor stored twice. The folders of all ranks
are there before one is written to: so a first set, whose ranks died before `ranks.json` was written, is known to be
whole if each of them holds a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import ExitStack, suppress
from os import PathLike
from pathlib import Path

from gpu_replay.base.buffer import Buffer
from gpu_replay.checkpoint import CheckpointError
from gpu_replay.checkpoint.files import replace_json, save_lock, sync_folder
from gpu_replay.checkpoint.format import MANIFEST, RANKS, check_version, read_manifest
from gpu_replay.checkpoint.state import BufferCheckpoint
from gpu_replay.sharded.group import CollectiveError, Contribution, Group
from gpu_replay.validation import check_path

VERSION = 1
_FOLDER = re.compile(r"save-(\d+)")


def read_set(path: str | PathLike[str]) -> tuple[Path, list[str]]:
    """The folder in force and the SHA-256 of each rank's manifest. Raises CheckpointError for anything else."""
    target = Path(os.path.realpath(check_path("path", path)))
    if not (target / RANKS).exists():
        return _first_set(target)
    try:
        said = json.loads((target / RANKS).read_bytes())
        check_version(f"{target / RANKS} has version", said["version"], VERSION)
        if not _FOLDER.fullmatch(said["folder"]) or not said["parts"]:
            raise ValueError("it names no folder or no parts")
        return target / said["folder"], [str(each) for each in said["parts"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{target / RANKS} is damaged: {error}.") from error


def _first_set(target: Path) -> tuple[Path, list[str]]:
    """The only set, if all ranks have written their parts of it, though a rank died before it was put in force."""
    if (target / MANIFEST).exists():
        kind = BufferCheckpoint(target).config["kind"]
        raise CheckpointError(f"{target} is the checkpoint of one {kind}; load it with {kind}.load.")
    folders = list(target.glob("save-*"))
    if len(folders) != 1:
        raise CheckpointError(f"{target} is no checkpoint of ranks: {RANKS} is missing.")
    count = max(1, len(list(folders[0].glob("rank[0-9]*"))))
    parts = [part_of(folders[0], rank) for rank in range(count)]
    if missing := [part for part in parts if not (part / MANIFEST).is_file()]:
        raise CheckpointError(
            f"{target} holds no set of all ranks: its first save did not end, and {missing[0]} is not complete."
        )
    return folders[0], [read_manifest(part).sha256 for part in parts]


def part_of(folder: Path, rank: int) -> Path:
    """The folder of a rank's own checkpoint."""
    return folder / f"rank{rank}"


def _new_set(target: Path, ranks: int) -> Path:
    """A folder for a set of so many ranks, with one for each of them; of others only that in force stays."""
    if other := [name for name in os.listdir(target) if name != RANKS and not _FOLDER.fullmatch(name)]:
        raise CheckpointError(f"{target} is not a checkpoint of ranks: it holds {other[0]}. Nothing was written.")
    if not (target / RANKS).exists():
        with suppress(CheckpointError):
            _put_in_force(target, *_first_set(target))
    folder = target / f"save-{_remove_others(target) + 1}"
    for rank in range(ranks):
        part_of(folder, rank).mkdir(parents=True)
    sync_folder(folder)
    return folder


def _remove_others(target: Path) -> int:
    """Remove all folders but that in force, whose number is returned; -1 without one."""
    kept = read_set(target)[0].name if (target / RANKS).exists() else "save--1"
    for name in os.listdir(target):
        if _FOLDER.fullmatch(name) and name != kept:
            shutil.rmtree(target / name, ignore_errors=True)
    return int(kept.removeprefix("save-"))


def _write_part(target: Path, folder: Path, rank: int, buffer: Buffer) -> None:
    """Save the buffer of a rank."""
    part = part_of(folder, rank)
    if not part.is_dir():
        raise CheckpointError(f"all ranks need the same file system; rank {rank} does not see {part}.")
    with suppress(CheckpointError, OSError):
        for file in sorted(part_of(read_set(target)[0], rank).iterdir()):
            os.link(file, part / file.name)
    buffer.save(part)


def _put_in_force(target: Path, folder: Path, parts: list[str]) -> None:
    """Let a set, whose parts have these checksums, be the one that is loaded."""
    sync_folder(folder)
    said = {"version": VERSION, "folder": folder.name, "parts": parts}
    replace_json(target / RANKS, said, partial=folder / RANKS)


def save(group: Group, buffer: Buffer, path: str | PathLike[str]) -> None:
    """Rank 0 makes the folders, each rank writes its checkpoint, rank 0 puts the set in force."""
    with ExitStack() as stack:
        target = folder = Path()
        made = False

        def room() -> Contribution:
            nonlocal target, folder, made
            checked = check_path("path", path)
            if group.rank == 0:
                target = Path(os.path.realpath(checked))
                made = not target.exists()
                target.mkdir(parents=True, exist_ok=True)
                stack.enter_context(save_lock(target, target))
                folder = _new_set(target, group.size)
            return {"path": str(checked)}, None

        def finish() -> Contribution:
            if group.rank == 0:
                parts = [read_manifest(part_of(folder, rank)).sha256 for rank in range(group.size)]
                _put_in_force(target, folder, parts)
                _remove_others(target)
            return {}, None

        try:
            group.agree("save", room)
            place = Path(group.all_gather_text(str(folder))[0])
            group.run_on_all(lambda: _write_part(place.parent, place, group.rank, buffer), "save")
            group.agree("save", finish)
        except CollectiveError:
            # all ranks raise it, so none is still writing, as one may be where another has died
            if folder != Path() and _remove_others(target) < 0 and made:
                with suppress(OSError):
                    target.rmdir()
            raise
