"""Tensors and settings in a folder on disk, so that a crash at any moment leaves the old checkpoint or the new one.

The folder holds shards, `piece-TOKEN-00000.safetensors` and so on, and one `manifest.json` that names them. A save does
not touch what the manifest in force names: it writes shards under a new token, syncs them, and only then replaces the
manifest in one atomic rename; the shards that the new one does not name go last. Without a manifest a folder is no
checkpoint, so a first save does the same. A shard whose bytes would be those of one in force is not written: the new
manifest names the old file. What a crash leaves behind is recognised by its name and removed by the next save.
Replacing one small file is atomic on every file system; exchanging two folders (Linux, renameat2) is not to be had
everywhere, which is why the shards of two saves may stand side by side for a while.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_replay.checkpoint.fsync import require_free, save_lock, sync_folder
from gpu_replay.checkpoint.manifest import (
    MANIFEST,
    UNFINISHED_MANIFEST,
    files_in_force,
    is_ours,
    read_manifest,
    write_manifest,
)
from gpu_replay.checkpoint.progress import bytes_bar
from gpu_replay.checkpoint.shards import (
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
from gpu_replay.errors import CheckpointError
from gpu_replay.validation import check_path

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
    with writing(path) as (folder, before):
        try:
            write_manifest(folder, manifest, write_shards(folder, contents, tensors))
        except OSError as error:
            state = "The checkpoint that was there is unharmed." if before else "There was no checkpoint before."
            raise OSError(error.errno, f"saving to {folder} failed: {error.strerror}. {state}") from error


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[tuple[Path, set[str]]]:
    """The folder of a checkpoint `path`, made if missing, and the files there that must survive a failure.

    Whoever enters writes shards and then a manifest; on leaving, the shards that the manifest does not name are gone.
    After an error the old checkpoint is as it was.
    """
    target = Path(os.path.realpath(check_path("path", path)))
    made = not target.exists()
    # another save may make it at the same time, and then holds the lock
    if made:
        target.mkdir(parents=True, exist_ok=True)
    with save_lock(target, target):
        _refuse_other_contents(target)
        before = files_in_force(target)
        _remove_shards(target, keep=before)
        try:
            yield target, before
        except BaseException:
            with suppress(OSError):
                _remove_shards(target, keep=before | files_in_force(target))
                if made:
                    target.rmdir()
            raise
        _remove_shards(target, keep=files_in_force(target))
        if made:
            sync_folder(target.parent)


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint `path`: its manifest is verified, its shards are present and of the right length.

    The contents of a shard are verified when they are read, so that opening takes no time.
    Raises CheckpointError naming what is missing, damaged, foreign or of another version.
    """
    return Checkpoint(Path(os.path.realpath(check_path("path", path))))


class Checkpoint:
    """An opened checkpoint: `manifest` as it was given, and tensors that stream into memory one chunk at a time.

    Nothing stays open between calls. Saving to the same path meanwhile removes shards; then CheckpointError says to
    open it again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        self.manifest = self._manifest.given
        with self._unless_replaced():
            for shard in self._manifest.shards:
                check_length(path, shard)
            _refuse_foreign_shards(path)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._manifest.shapes)

    def read_all(self) -> dict[str, Tensor]:
        """New tensors with everything that is stored, by name, in host memory."""
        shapes = {name: self.shape_of(name) for name in self.tensor_names}
        out = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (dtype, shape) in shapes.items()}
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
        shards = [shard for shard in self._manifest.shards if any(map(wanted, shard.parts))]

        def read(shard: Shard) -> int:
            targets = [(part, target(part)) for part in shard.parts if wanted(part)]
            read_shard(self.path, shard, {part.name: rows for part, rows in targets})
            for part, rows in targets:
                use(part, rows)
            return shard.nbytes

        total = sum(shard.nbytes for shard in shards)
        with self._unless_replaced(), bytes_bar(f"loading {self.path.name}", total) as advance:
            in_parallel(read, shards, advance)

    def shape_of(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a stored tensor."""
        if name not in self._manifest.shapes:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}; it holds {sorted(self._manifest.shapes)}.")
        return self._manifest.shapes[name]

    @contextmanager
    def _unless_replaced(self) -> Iterator[None]:
        """Say so when an error comes from a save that replaced the checkpoint since it was opened."""
        try:
            yield
        except CheckpointError as error:
            now = None
            with suppress(CheckpointError):
                now = read_manifest(self.path).sha256
            if now == self._manifest.sha256:
                raise
            raise CheckpointError(
                f"checkpoint {self.path} was replaced by another save while it was read. Open it again."
            ) from error


def check_fit(
    source: str, tensors: Mapping[str, Tensor], shape_of: Callable[[str], tuple[torch.dtype, tuple[int, ...]]]
) -> None:
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
    token = secrets.token_hex(4)
    in_force = _intact_shards(folder)
    shards: list[Shard] = []
    hashes: dict[int, str] = {}

    def keep_or_note(hashed: tuple[int, str]) -> None:
        place, sha256 = hashed
        earlier = in_force[_rows_of(contents[place])]
        if sha256 == earlier.sha256:
            # the whole tensor may have grown or shrunk around these rows
            stored(replace(earlier, parts=contents[place]))
        else:
            hashes[place] = sha256

    def store(place: int) -> Shard:
        return write_shard(
            folder, f"piece-{token}-{place:05d}.safetensors", contents[place], tensors, hashes.get(place)
        )

    def stored(shard: Shard) -> None:
        shards.append(shard)
        advance(shard.nbytes)

    candidates = [place for place, parts in enumerate(contents) if _rows_of(parts) in in_force]
    with bytes_bar(f"saving {folder.name}", sum(map(file_bytes, contents))) as advance:
        in_parallel(lambda place: (place, sha256_of(contents[place], tensors)), candidates, keep_or_note)
        changed = sorted({*range(len(contents))} - {*candidates} | {*hashes})
        require_free(folder, sum(file_bytes(contents[place]) for place in changed))
        in_parallel(store, changed, stored)
    sync_folder(folder)
    order = {parts: place for place, parts in enumerate(contents)}
    return sorted(shards, key=lambda shard: order[shard.parts])


def _rows_of(parts: tuple[Part, ...]) -> tuple[tuple[str, int, int], ...]:
    return tuple((part.name, part.start, part.stop) for part in parts)


def _intact_shards(folder: Path) -> dict[tuple[tuple[str, int, int], ...], Shard]:
    """By the rows that they hold, the shards in force whose files nobody has touched since they were written."""
    with suppress(CheckpointError):
        return {_rows_of(shard.parts): shard for shard in read_manifest(folder).shards if shard.is_intact(folder)}
    return {}


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
