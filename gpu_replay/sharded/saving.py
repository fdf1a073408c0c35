"""The checkpoints of all ranks' buffers as one set, so that a crash at any moment leaves the old set or the new one.

    ranks.json          names the folder in force and the checksum of each rank's manifest; replaced in one atomic rename
    save-3/rank0/       the checkpoint of rank 0's buffer, as its own `save` writes it, and so on

Each save goes to a new folder, in which the files of the one before are linked first (where the file system has hard
links), so that shards whose rows have not changed are neither written again nor stored twice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path

from gpu_replay.base.buffer import Buffer
from gpu_replay.checkpoint.fsync import replace, save_lock, sync_file, sync_folder
from gpu_replay.checkpoint.manifest import check_version, read_manifest
from gpu_replay.errors import CheckpointError
from gpu_replay.sharded.group import Contribution, Group
from gpu_replay.validation import check_path

MANIFEST = "ranks.json"
VERSION = 1
_FOLDER = re.compile(r"save-(\d+)")


def read_set(path: str | PathLike[str]) -> tuple[Path, list[str]]:
    """The folder in force and the SHA-256 of each rank's manifest. Raises CheckpointError for anything else."""
    target = Path(os.path.realpath(check_path("path", path)))
    try:
        said = json.loads((target / MANIFEST).read_bytes())
        check_version(f"{target / MANIFEST} has version", said["version"], VERSION)
        if not _FOLDER.fullmatch(said["folder"]) or not said["parts"]:
            raise ValueError("it names no folder or no parts")
        return target / said["folder"], [str(each) for each in said["parts"]]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint of ranks: {MANIFEST} is missing.") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{target / MANIFEST} is damaged: {error}.") from error


def part_of(folder: Path, rank: int) -> Path:
    """The folder of a rank's own checkpoint."""
    return folder / f"rank{rank}"


@contextmanager
def _room(target: Path) -> Iterator[Path]:
    """A new folder in `target` for a set; on leaving only the set in force stays. Excludes other saves."""
    made = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    with save_lock(target, target):
        if other := [name for name in os.listdir(target) if name != MANIFEST and not _FOLDER.fullmatch(name)]:
            raise CheckpointError(f"{target} is not a checkpoint of ranks: it holds {other[0]}. Nothing was written.")
        number = _clean(target)
        try:
            (folder := target / f"save-{number + 1}").mkdir()
            yield folder
        finally:
            if _clean(target) < 0 and made:
                with suppress(OSError):
                    target.rmdir()


def _clean(target: Path) -> int:
    """Remove all folders but that in force, whose number is returned; -1 without one."""
    kept = read_set(target)[0].name if (target / MANIFEST).exists() else "save--1"
    for name in os.listdir(target):
        if _FOLDER.fullmatch(name) and name != kept:
            shutil.rmtree(target / name, ignore_errors=True)
    return int(kept.removeprefix("save-"))


def _write_part(target: Path, folder: Path, rank: int, buffer: Buffer) -> str:
    """Save the buffer of a rank, and return the checksum of its manifest."""
    part = part_of(folder, rank)
    part.mkdir()
    with suppress(CheckpointError, OSError):
        for file in sorted(part_of(read_set(target)[0], rank).iterdir()):
            os.link(file, part / file.name)
    buffer.save(part)
    return read_manifest(part).sha256


def _write_manifest(target: Path, folder: Path, parts: list[str]) -> None:
    """Put a set in force whose parts all ranks have written."""
    for rank, sha256 in enumerate(parts):
        part = part_of(folder, rank)
        if not part.is_dir() or read_manifest(part).sha256 != sha256:
            raise CheckpointError(f"all ranks need the same file system; rank 0 does not see {part}.")
    sync_folder(folder)

    def write(path: Path) -> None:
        with open(path, "x", encoding="utf-8") as out:
            json.dump({"version": VERSION, "folder": folder.name, "parts": parts}, out, indent=1)
            sync_file(out)

    replace(target / MANIFEST, write, partial=folder / MANIFEST)
    sync_folder(target)


def save(group: Group, buffer: Buffer, path: str | PathLike[str]) -> None:
    """Rank 0 makes the folder, each rank writes its checkpoint, rank 0 puts the set in force."""
    with ExitStack() as stack:
        folder = Path()

        def room() -> Contribution:
            nonlocal folder
            checked = check_path("path", path)
            if group.rank == 0:
                folder = stack.enter_context(_room(Path(os.path.realpath(checked))))
            return {"path": str(checked)}, None

        group.agree("save", room)
        place = Path(group.all_gather_text(str(folder))[0])
        written = group.run_on_all(lambda: _write_part(place.parent, place, group.rank, buffer), "save")
        parts = group.all_gather_text(written)

        def finish() -> Contribution:
            if group.rank == 0:
                _write_manifest(place.parent, place, parts)
                stack.close()
            return {}, None

        group.agree("save", finish)
