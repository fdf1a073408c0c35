"""Tensors and settings in a folder on disk, so that a crash at any moment leaves the old checkpoint or the new one.

The folder holds shards, `piece-TOKEN-00000.safetensors` and so on, and one `manifest.json` that names them. A save does
not touch what the manifest in force names: it writes shards under a new token, syncs them, and only then replaces the
manifest in one atomic rename; the old shards go last. A first save does the same in a hidden sibling folder that is
renamed when complete. What a crash leaves behind is recognised by its name and removed by the next save.
Replacing one small file is atomic on every file system; exchanging two folders (Linux, renameat2) is not to be had
everywhere, which is why the shards of two saves may stand side by side for a while.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_replay.checkpoint.fsync import replace, require_free, save_lock, sync_file, sync_folder
from gpu_replay.checkpoint.shards import (
    DTYPE_NAMES,
    DTYPES,
    SHARD_NAME,
    Part,
    Shard,
    check_length,
    file_bytes,
    plan_shards,
    read_part,
    verify_shard,
    write_shard,
)
from gpu_replay.errors import CheckpointError

FORMAT = "gpu_replay checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
UNFINISHED_MANIFEST = ".manifest.json.saving"


def write_checkpoint(
    path: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shard_bytes: int = 2**30,
) -> None:
    """Write `manifest` and `tensors` as the checkpoint `path`, replacing the one that is there.

    path:        a folder; made with its parents if missing, refused if it holds something else than a checkpoint.
    manifest:    whatever JSON can say; comes back as `Checkpoint.manifest`.
    tensors:     by name, on any device; they are read once and never copied whole.
    shard_bytes: the most that one shard file holds, except that a single row of a tensor is never split.

    Until the new checkpoint is complete the old one stands beside it and takes its space.
    Raises TypeError or ValueError for what cannot be written, CheckpointError if `path` is not a checkpoint or another
    save to it is under way, and OSError if the disk is full or fails; in each case the old checkpoint is as it was.
    """
    json.dumps(manifest)
    plan = plan_shards(tensors, shard_bytes)
    target = Path(os.path.realpath(path))
    hidden = target.with_name(f".{target.name}.saving")
    if target.exists():
        _remove_hidden_folder(hidden)
        with save_lock(target, target):
            _refuse_other_contents(target)
            before = _shards_in_force(target)
            _remove_shards(target, keep=before)
            shards = _write_contents(target, manifest, plan, tensors, before)
            _remove_shards(target, keep=shards)
        return
    hidden.mkdir(parents=True, exist_ok=True)
    with save_lock(hidden, target):
        _refuse_other_contents(hidden)
        _remove_contents(hidden)
        try:
            _write_contents(hidden, manifest, plan, tensors, set())
            os.rename(hidden, target)
        except BaseException:
            with suppress(OSError):
                _remove_contents(hidden)
                hidden.rmdir()
            raise
        sync_folder(target.parent)


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint `path`: its manifest is verified, its shards are present and of the right length.

    The contents of a shard are verified when they are read, so that opening takes no time.
    Raises CheckpointError naming what is missing, damaged, foreign or of another version.
    """
    return Checkpoint(Path(os.path.realpath(path)))


class Checkpoint:
    """An opened checkpoint: `manifest` as it was given, and tensors that stream into memory one chunk at a time.

    Nothing stays open between calls. Saving to the same path meanwhile removes the shards: open it again then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        body = _read_manifest(path)
        try:
            self.manifest: dict[str, Any] = body["manifest"]
            self._shapes = {
                name: (DTYPES[each["dtype"]], tuple(each["shape"])) for name, each in body["tensors"].items()
            }
            self._shards = [
                Shard(
                    each["file"],
                    tuple(
                        Part(name, *self._shapes[name], start, stop) for name, (start, stop) in each["holds"].items()
                    ),
                    each["sha256"],
                )
                for each in body["pieces"]
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path / MANIFEST} does not list its tensors and pieces: {error!r}.") from error
        self._verified: set[str] = set()
        for shard in self._shards:
            check_length(path, shard)
        _refuse_foreign_shards(path)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def read(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """A new tensor with the stored contents."""
        dtype, shape = self._known(name)
        out = torch.empty(shape, dtype=dtype, device=device)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out`, of the stored shape and dtype and on any device, one chunk at a time.

        Raises CheckpointError if `out` does not fit or a shard is damaged; in the second case `out` may have been
        written to already.
        """
        dtype, shape = self._known(name)
        if (out.dtype, tuple(out.shape)) != (dtype, shape):
            raise CheckpointError(
                f"tensor {name!r} in {self.path} is {dtype} of shape {shape}; asked to read it into {out.dtype} of "
                f"shape {tuple(out.shape)}. Make the buffer with the settings that the checkpoint was saved with."
            )
        for shard in self._shards:
            for part in shard.parts:
                if part.name == name:
                    if len(shard.parts) > 1 and shard.file not in self._verified:
                        verify_shard(self.path, shard)
                        self._verified.add(shard.file)
                    read_part(self.path, shard, part, part.of(out), verified=shard.file in self._verified)

    def _known(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        if name not in self._shapes:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}; it holds {sorted(self._shapes)}.")
        return self._shapes[name]


def _write_contents(
    folder: Path,
    manifest: Mapping[str, Any],
    plan: list[tuple[Part, ...]],
    tensors: Mapping[str, Tensor],
    before: set[str],
) -> set[str]:
    """Write new shards and put a manifest in force that names them; on any failure remove what was written.

    before:  files that must survive a failure.
    returns: the names of the new shards.
    """
    token = secrets.token_hex(4)
    try:
        require_free(folder, sum(file_bytes(parts) for parts in plan))
        shards = [
            write_shard(folder, f"piece-{token}-{index:05d}.safetensors", parts, tensors)
            for index, parts in enumerate(plan)
        ]
        sync_folder(folder)
        _write_manifest(folder, manifest, shards)
    except BaseException as error:
        with suppress(OSError):
            _remove_shards(folder, keep=before | _shards_in_force(folder))
        if isinstance(error, OSError):
            state = "The checkpoint that was there is unharmed." if before else "There was no checkpoint before."
            raise OSError(error.errno, f"saving to {folder} failed: {error.strerror}. {state}") from error
        raise
    return {shard.file for shard in shards}


def _write_manifest(folder: Path, manifest: Mapping[str, Any], shards: list[Shard]) -> None:
    """Put the new manifest in force: from the rename on, the new shards are the checkpoint."""
    parts = [part for shard in shards for part in shard.parts]
    body = {
        "manifest": manifest,
        "tensors": {part.name: {"dtype": DTYPE_NAMES[part.dtype], "shape": part.shape} for part in parts},
        "pieces": [
            {
                "file": shard.file,
                "bytes": shard.nbytes,
                "sha256": shard.sha256,
                "holds": {part.name: [part.start, part.stop] for part in shard.parts},
            }
            for shard in shards
        ],
    }
    outer = {"format": FORMAT, "version": VERSION, "sha256": _body_sha256(body), "body": body}

    def write(path: Path) -> None:
        with open(path, "w", encoding="utf-8") as out:
            json.dump(outer, out, indent=1)
            sync_file(out)

    replace(folder / MANIFEST, write, partial=folder / UNFINISHED_MANIFEST)
    sync_folder(folder)


def _body_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    """The verified body of the manifest. Raises CheckpointError."""
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}.")
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: {MANIFEST} is missing.")
    try:
        outer = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} is not valid JSON ({error}).") from error
    if not isinstance(outer, dict) or outer.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of gpu_replay: {MANIFEST} does not name the format.")
    if outer.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has schema version {outer.get('version')!r}; this gpu_replay reads version {VERSION}. "
            "Load it with the gpu_replay that wrote it."
        )
    body = outer.get("body")
    if not isinstance(body, dict) or _body_sha256(body) != outer.get("sha256"):
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} was changed after it was written.")
    return body


def _shards_in_force(folder: Path) -> set[str]:
    """The shard files that the manifest names; all there are, if it is too damaged to tell."""
    if not (folder / MANIFEST).exists():
        return set()
    try:
        return {shard["file"] for shard in json.loads((folder / MANIFEST).read_bytes())["body"]["pieces"]}
    except (ValueError, KeyError, TypeError):
        return {name for name in os.listdir(folder) if SHARD_NAME.fullmatch(name)}


def _remove_shards(folder: Path, keep: set[str]) -> None:
    """Remove the shards that unfinished saves left, or that the manifest no longer names."""
    for name in os.listdir(folder):
        if SHARD_NAME.fullmatch(name) and name not in keep:
            (folder / name).unlink()


def _remove_contents(hidden: Path) -> None:
    """Empty a hidden folder, the manifest first: without it the shards are nothing."""
    for name in (MANIFEST, UNFINISHED_MANIFEST):
        (hidden / name).unlink(missing_ok=True)
    _remove_shards(hidden, keep=set())


def _remove_hidden_folder(hidden: Path) -> None:
    """Remove what a first save left that crashed; a folder that is in use, or holds anything else, stays."""
    if hidden.is_dir():
        with suppress(OSError, CheckpointError), save_lock(hidden, hidden):
            _refuse_other_contents(hidden)
            _remove_contents(hidden)
            hidden.rmdir()


def _refuse_other_contents(folder: Path) -> None:
    """Raise CheckpointError if `folder` is something else than a checkpoint, finished or not."""
    advice = "Nothing was written; save to another path, or move it away."
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not a checkpoint. {advice}")
    names = os.listdir(folder)
    if MANIFEST in names:
        try:
            ours = json.loads((folder / MANIFEST).read_bytes())["format"] == FORMAT
        except (ValueError, KeyError, TypeError, RecursionError):
            ours = False
        if not ours:
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
            raise CheckpointError(f"checkpoint {folder} holds a foreign piece, {name}. Move it elsewhere.")
