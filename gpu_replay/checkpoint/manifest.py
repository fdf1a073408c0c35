"""`manifest.json`: lists the tensors and files of a checkpoint with checksums; all that is read from it is checked."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_replay.checkpoint.fsync import replace_file, sync_file, sync_folder
from gpu_replay.checkpoint.shards import DTYPE_NAMES, DTYPES, SHARD_NAME, Part, Shard
from gpu_replay.errors import CheckpointError

FORMAT = "gpu_replay checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
# names the checkpoints of several ranks, in a folder of these
RANKS = "ranks.json"
UNFINISHED_MANIFEST = ".manifest.json.saving"

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.

    given:  what the caller of `write_checkpoint` gave.
    shapes: dtype and shape of each tensor by name.
    shards: hold each row of each tensor once.
    sha256: of all of it.
    """

    given: dict[str, Any]
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    shards: tuple[Shard, ...]
    sha256: str


def write_manifest(folder: Path, given: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Put a new manifest in force: from the rename on, these shards are the checkpoint."""
    body = {"manifest": given, **described(shards)}
    outer = {"format": FORMAT, "version": VERSION, "sha256": _body_sha256(body), "body": body}

    def write(path: Path) -> None:
        # never through a link: "x" is O_EXCL
        with open(path, "x", encoding="utf-8") as out:
            json.dump(outer, out, indent=1)
            sync_file(out)

    replace_file(folder / MANIFEST, write, partial=folder / UNFINISHED_MANIFEST)
    sync_folder(folder)


def described(shards: Sequence[Shard]) -> dict[str, Any]:
    """Shards, and the dtypes and shapes of their tensors, as JSON values."""
    parts = [part for shard in shards for part in shard.parts]
    return {
        "tensors": {part.name: {"dtype": DTYPE_NAMES[part.dtype], "shape": part.shape} for part in parts},
        "pieces": [
            {
                "file": shard.file,
                "bytes": shard.nbytes,
                "modified_ns": shard.modified,
                "sha256": shard.sha256,
                "holds": {part.name: [part.start, part.stop] for part in shard.parts},
            }
            for shard in shards
        ],
    }


def read_manifest(folder: Path) -> Manifest:
    """The verified manifest. Raises CheckpointError naming what is missing, damaged, foreign or of another version."""
    if not folder.exists():
        raise CheckpointError(f"there is no checkpoint {folder}.")
    file = folder / MANIFEST
    if not file.is_file():
        if (folder / RANKS).is_file():
            raise CheckpointError(
                f"{folder} holds those of several ranks: use ShardedReplay.load, or load that of one."
            )
        raise CheckpointError(f"{folder} is not a checkpoint: {MANIFEST} is missing.")
    try:
        outer = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} is not valid JSON ({error}).") from error
    if not isinstance(outer, dict) or outer.get("format") != FORMAT:
        raise CheckpointError(f"{folder} is not a checkpoint of gpu_replay: {MANIFEST} does not name the format.")
    check_version(f"{file} has schema version", outer.get("version"), VERSION)
    body = outer.get("body")
    if not isinstance(body, dict) or _body_sha256(body) != outer.get("sha256"):
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} was changed after it was written.")
    try:
        if not isinstance(body["manifest"], dict):
            raise ValueError("'manifest' is not an object")
        shapes = {name: _shape(each) for name, each in body["tensors"].items()}
        shards = tuple(_shard(each, shapes) for each in body["pieces"])
        _check_rows(shapes, shards)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} does not list its tensors and pieces: {error!r}.") from error
    return Manifest(body["manifest"], shapes, shards, outer["sha256"])


def check_version(what: str, version: object, supported: int) -> None:
    """Raise CheckpointError unless the version is the known one; `what` begins the message."""
    if type(version) is int and version == supported:
        return
    advice = "Load it with the gpu_replay that wrote it."
    if type(version) is int and version > supported:
        advice = "A newer gpu_replay wrote it: update this one."
    raise CheckpointError(f"{what} {version!r}; this gpu_replay reads version {supported}. {advice}")


def is_ours(folder: Path) -> bool:
    """Whether a folder has a manifest of this format, whatever else it says."""
    try:
        # anything but a file, such as a pipe, might never end
        return (folder / MANIFEST).is_file() and json.loads((folder / MANIFEST).read_bytes())["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError, OSError):
        return False


def files_in_force(folder: Path) -> set[str]:
    """The shard files that the manifest names; all there are, if it is too damaged to tell."""
    if not (folder / MANIFEST).exists():
        return set()
    try:
        return {shard["file"] for shard in json.loads((folder / MANIFEST).read_bytes())["body"]["pieces"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {file.name for file in folder.iterdir() if SHARD_NAME.fullmatch(file.name)}


def _body_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


def _shape(described: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    return DTYPES[described["dtype"]], tuple(_count(side) for side in described["shape"])


def _shard(described: Any, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Shard:
    file, sha256, modified = described["file"], described["sha256"], described.get("modified_ns")
    if not SHARD_NAME.fullmatch(file) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"{file!r} with checksum {sha256!r} is no piece of a checkpoint")
    parts = tuple(
        Part(name, *shapes[name], _count(start), _count(stop)) for name, (start, stop) in described["holds"].items()
    )
    return Shard(file, parts, sha256, modified)


def _check_rows(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], shards: Sequence[Shard]) -> None:
    """Raise ValueError unless the shards hold each row of each tensor once, and each file is one shard."""
    if len({shard.file for shard in shards}) < len(shards):
        raise ValueError("a file is listed twice")
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in shapes}
    for part in (part for shard in shards for part in shard.parts):
        ranges[part.name].append((part.start, part.stop))
    for name, (_, shape) in shapes.items():
        rows, slices = shape[0] if shape else 1, sorted(ranges[name])
        starts, stops = [start for start, _ in slices], [stop for _, stop in slices]
        # an empty slice is only right where the tensor is empty
        empty = any(start == stop for start, stop in slices) and (rows or len(slices) > 1)
        if starts != [0, *stops[:-1]] or stops[-1:] != [rows] or empty:
            raise ValueError(f"the pieces do not hold each row of {name!r} once")
