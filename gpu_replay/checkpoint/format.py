"""Tensors and settings in a folder on disk, so that a crash at any moment leaves the old checkpoint or the new one.

The folder holds shards, `piece-TOKEN-00000.safetensors` and so on, and one `manifest.json` that names them. A save does
not touch what the manifest in force names: it writes shards under a new token, syncs them, and only then replaces the
manifest in one atomic rename; the shards that the new one does not name go last. Without a manifest a folder is no
checkpoint, so a first save does the same. A shard whose bytes would be those of one in force is not written: the new
manifest names the old file. What a crash leaves behind is recognised by its name and removed by the next save.
Replacing one small file is atomic on every file system; exchanging two folders (Linux, renameat2) is not to be had
everywhere, which is why the shards of two saves may stand side by side for a while.

The manifest lists the tensors and files of the checkpoint with checksums; all that is read from it is checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_replay.checkpoint import CheckpointError, files
from gpu_replay.checkpoint.files import replace_json, require_free, save_lock, sync_folder
from gpu_replay.checkpoint.shards import (
    DTYPE_NAMES,
    DTYPES,
    SHARD_NAME,
    Part,
    Shard,
    check_length,
    file_bytes,
    in_parallel,
    read_shard,
    sha256_of,
    split_into_shards,
    synchronize,
    write_shard,
)
from gpu_replay.validation import check_path

FORMAT = "gpu_replay checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
# names the checkpoints of several ranks, in a folder of these
RANKS = "ranks.json"
UNFINISHED_MANIFEST = ".manifest.json.saving"

# dtype and shape of a tensor
Kind = tuple[torch.dtype, tuple[int, ...]]
_SHA256 = re.compile(r"[0-9a-f]{64}")


def write_manifest(folder: Path, given: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Put a new manifest in force: from the rename on, these shards are the checkpoint."""
    parts = [part for shard in shards for part in shard.parts]
    pieces = [
        {
            "file": shard.file,
            "bytes": shard.nbytes,
            "modified_ns": shard.modified,
            "sha256": shard.sha256,
            "holds": {part.name: [part.start, part.stop] for part in shard.parts},
        }
        for shard in shards
    ]
    tensors = {part.name: {"dtype": DTYPE_NAMES[part.dtype], "shape": part.shape} for part in parts}
    body = {"manifest": given, "tensors": tensors, "pieces": pieces}
    outer = {"format": FORMAT, "version": VERSION, "sha256": _body_sha256(body), "body": body}
    replace_json(folder / MANIFEST, outer, partial=folder / UNFINISHED_MANIFEST)


def read_manifest(folder: Path) -> Checkpoint:
    """The checkpoint that a verified manifest describes, whose shards nobody has looked at.

    Raises CheckpointError naming what is missing, damaged, foreign or of another version.
    """
    if not folder.exists():
        raise CheckpointError(f"there is no checkpoint {folder}.")
    file = folder / MANIFEST
    if not file.is_file():
        if (folder / RANKS).is_file():
            raise CheckpointError(
                f"{folder} holds those of several ranks: use ShardedReplay.load, or load one rank's part, whose "
                f"folder {RANKS} names, such as save-0/rank0."
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
    return Checkpoint(folder, body["manifest"], shapes, shards, outer["sha256"])


def check_version(what: str, version: object, supported: int) -> None:
    """Raise CheckpointError unless the version is the known one; `what` begins the message."""
    number = version if type(version) is int else -1
    if number != supported:
        newer = "A newer gpu_replay wrote it: update this one."
        advice = newer if number > supported else "Load it with the gpu_replay that wrote it."
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
    with suppress(CheckpointError):
        return {shard.file for shard in read_manifest(folder).shards}
    return {file.name for file in folder.iterdir() if SHARD_NAME.fullmatch(file.name)}


def _body_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


def _shape(described: Any) -> Kind:
    return DTYPES[described["dtype"]], tuple(_count(side) for side in described["shape"])


def _shard(described: Any, shapes: Mapping[str, Kind]) -> Shard:
    file, sha256, modified = described["file"], described["sha256"], described.get("modified_ns")
    if not SHARD_NAME.fullmatch(file) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"{file!r} with checksum {sha256!r} is no piece of a checkpoint")
    parts = tuple(
        Part(name, *shapes[name], _count(start), _count(stop)) for name, (start, stop) in described["holds"].items()
    )
    return Shard(file, parts, sha256, modified)


def _check_rows(shapes: Mapping[str, Kind], shards: Sequence[Shard]) -> None:
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


SHARD_BYTES = 64 << 20
"""The most that one shard file holds."""


def write_checkpoint(
    path: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `manifest` and `tensors` as the checkpoint `path`, replacing the one that is there.

    path:        a folder; made with its parents if missing, refused if it holds something else than a checkpoint.
    manifest:    whatever JSON can say; comes back as `Checkpoint.manifest`.
    tensors:     by name, on any device; they are never copied whole.
    shard_bytes: the most that one shard file holds, except that a single row of a tensor is never split.

    Shards that hold what they held before are not written again. Until the new checkpoint is complete the old one
    stands next to it, and what differs takes its space twice.
    Raises TypeError or ValueError for what cannot be written, CheckpointError if `path` is not a checkpoint or another
    save to it is under way, and OSError if the disk is full or fails; in each case the old checkpoint is as it was.
    """
    json.dumps(manifest)
    contents = split_into_shards(tensors, shard_bytes)
    synchronize(tensors.values())
    folder = Path(os.path.realpath(check_path("path", path)))
    made = not folder.exists()
    # another save may make it at the same time, and then holds the lock
    if made:
        folder.mkdir(parents=True, exist_ok=True)
    with save_lock(folder, folder):
        _refuse_other_contents(folder)
        before = files_in_force(folder)
        _remove_shards(folder, keep=before)
        try:
            write_manifest(folder, manifest, write_shards(folder, contents, tensors))
        except BaseException as error:
            with suppress(OSError):
                _remove_shards(folder, keep=before | files_in_force(folder))
                if made:
                    folder.rmdir()
            if not isinstance(error, OSError):
                raise
            state = "The checkpoint that was there is unharmed." if before else "There was no checkpoint before."
            raise OSError(error.errno, f"saving to {folder} failed: {error.strerror}. {state}") from error
        _remove_shards(folder, keep=files_in_force(folder))
        if made:
            sync_folder(folder.parent)


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint `path`: its manifest is verified, its shards are present and of the right length.

    The contents of a shard are verified when they are read, so that opening takes no time.
    Raises CheckpointError naming what is missing, damaged, foreign or of another version.
    """
    found = read_manifest(Path(os.path.realpath(check_path("path", path))))
    with found.unless_replaced():
        for shard in found.shards:
            check_length(found.path, shard)
        _refuse_foreign_shards(found.path)
    return found


@dataclass(frozen=True)
class Checkpoint:
    """What a manifest says, and tensors that stream into memory one chunk at a time.

    manifest: what the caller of `write_checkpoint` gave.
    shapes:   dtype and shape of each tensor by name.
    shards:   hold each row of each tensor once.
    sha256:   of all that the manifest says.

    Nothing stays open between calls. Saving to the same path meanwhile removes shards; then CheckpointError says to
    open it again.
    """

    path: Path
    manifest: dict[str, Any]
    shapes: dict[str, Kind]
    shards: tuple[Shard, ...]
    sha256: str

    def read_all(self) -> dict[str, Tensor]:
        """New tensors with everything that is stored, by name, in host memory."""
        out = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (dtype, shape) in self.shapes.items()}
        self.fill(out)
        return out

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, of the stored shapes and dtypes and on any device, one chunk at a time.

        Raises CheckpointError if one does not fit or a shard is damaged; in the second case they may have been written
        to already.
        """
        check_fit(str(self.path), tensors, self.shape_of)
        synchronize(tensors.values())
        self.read_parts(lambda part: part.name in tensors, lambda part: part.of(tensors[part.name]))

    def read_parts(
        self,
        wanted: Callable[[Part], bool],
        target: Callable[[Part], Tensor],
        use: Callable[[Part, Tensor], object] = lambda part, rows: None,
    ) -> None:
        """Read the wanted parts of tensors into memory that `target` gives, each into its own, and give `use` both.

        Parts come in any order and from several threads. Raises CheckpointError as `fill`.
        """
        shards = [shard for shard in self.shards if any(map(wanted, shard.parts))]

        def read(shard: Shard) -> int:
            targets = [(part, target(part)) for part in shard.parts if wanted(part)]
            read_shard(self.path, shard, {part.name: rows for part, rows in targets})
            for part, rows in targets:
                use(part, rows)
            return shard.nbytes

        total = sum(shard.nbytes for shard in shards)
        with self.unless_replaced(), files.show(f"loading {self.path.name}", total) as advance:
            in_parallel(read, shards, advance)

    def shape_of(self, name: str) -> Kind:
        """Dtype and shape of a stored tensor."""
        if name not in self.shapes:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}; it holds {sorted(self.shapes)}.")
        return self.shapes[name]

    @contextmanager
    def unless_replaced(self) -> Iterator[None]:
        """Say so when an error comes from a save that replaced the checkpoint since it was opened."""
        try:
            yield
        except CheckpointError as error:
            now = None
            with suppress(CheckpointError):
                now = read_manifest(self.path).sha256
            if now == self.sha256:
                raise
            raise CheckpointError(
                f"checkpoint {self.path} was replaced by another save while it was read. Open it again."
            ) from error


def check_fit(source: str, tensors: Mapping[str, Tensor], shape_of: Callable[[str], Kind]) -> None:
    """Raise CheckpointError unless a source has, by name, the dtypes and shapes of tensors that it is to fill."""
    for name, out in tensors.items():
        (dtype, shape), asked = shape_of(name), tuple(out.shape)
        if (dtype, shape) != (out.dtype, asked):
            raise CheckpointError(
                f"tensor {name!r} in {source} is {dtype} of shape {shape}; asked to read it into {out.dtype} of shape "
                f"{asked}. Make the buffer with the settings that it was saved with."
            )


def write_shards(folder: Path, contents: list[tuple[Part, ...]], tensors: Mapping[str, Tensor]) -> list[Shard]:
    """The shards with these contents: those that the manifest in force does not name are written, and all synced."""
    token, hashes = secrets.token_hex(4), dict[tuple[Part, ...], str]()
    shards: dict[tuple[Part, ...], Shard] = {}
    # by the rows that they hold, the shards whose files nobody has touched since they were written
    in_force: dict[tuple[tuple[str, int, int], ...], Shard] = {}
    with suppress(CheckpointError):
        in_force = {_rows_of(shard.parts): shard for shard in read_manifest(folder).shards if shard.is_intact(folder)}

    def compare(parts: tuple[Part, ...]) -> Shard | None:
        found, hashes[parts] = in_force[_rows_of(parts)], sha256_of(parts, tensors)
        # the whole tensor may have grown or shrunk around these rows
        return replace(found, parts=parts) if hashes[parts] == found.sha256 else None

    def store(place: int) -> Shard:
        file, parts = f"piece-{token}-{place:05d}.safetensors", contents[place]
        return write_shard(folder, file, parts, tensors, hashes.get(parts))

    def note(shard: Shard | None) -> None:
        if shard is not None:
            shards[shard.parts] = shard
            advance(shard.nbytes)

    with files.show(f"saving {folder.name}", sum(map(file_bytes, contents))) as advance:
        in_parallel(compare, [parts for parts in contents if _rows_of(parts) in in_force], note)
        changed = [place for place, parts in enumerate(contents) if parts not in shards]
        require_free(folder, sum(file_bytes(contents[place]) for place in changed))
        in_parallel(store, changed, note)
    sync_folder(folder)
    return [shards[parts] for parts in contents]


def _rows_of(parts: tuple[Part, ...]) -> tuple[tuple[str, int, int], ...]:
    return tuple((part.name, part.start, part.stop) for part in parts)


def _remove_shards(folder: Path, keep: set[str]) -> None:
    """Remove the shards that unfinished saves left, or that the manifest no longer names."""
    for name in os.listdir(folder):
        if SHARD_NAME.fullmatch(name) and name not in keep:
            (folder / name).unlink()


def _refuse_other_contents(folder: Path) -> None:
    """Raise CheckpointError if `folder` is something else than a checkpoint, finished or not."""
    advice = "Nothing was written; save to another path, or move it away."
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not a checkpoint. {advice}")
    names = os.listdir(folder)
    if MANIFEST in names:
        if not is_ours(folder):
            raise CheckpointError(f"{folder} holds a {MANIFEST} that is damaged or not of gpu_replay. {advice}")
        _refuse_foreign_shards(folder)
        return
    other = sorted(name for name in names if name != UNFINISHED_MANIFEST and not SHARD_NAME.fullmatch(name))
    if other:
        raise CheckpointError(f"{folder} is not a checkpoint: it holds {', '.join(other[:3])}. {advice}")


def _refuse_foreign_shards(folder: Path) -> None:
    """Raise CheckpointError for a safetensors file that no save can have left here; other files are no concern."""
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors") and not SHARD_NAME.fullmatch(name):
            raise CheckpointError(f"checkpoint {folder} holds a file that no save wrote, {name}. Move it elsewhere.")
