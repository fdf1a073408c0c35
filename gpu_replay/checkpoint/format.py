"""Tensors and settings in a folder on disk, so that a crash at any moment leaves the old checkpoint or the new one.

The folder holds shards, `piece-TOKEN-00000.safetensors` and so on, and one `manifest.json` that names them. A save does
not touch what the manifest in force names: it writes shards under a new token, syncs them, and only then replaces the
manifest in one atomic rename; the shards that the new one does not name go last. A shard whose bytes would be those of
one in force is not written: the new manifest names the old file. A first save does the same in a hidden sibling folder
that is renamed when complete. What a crash leaves behind is recognised by its name and removed by the next save.
Replacing one small file is atomic on every file system; exchanging two folders (Linux, renameat2) is not to be had
everywhere, which is why the shards of two saves may stand side by side for a while.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
    Rows,
    Shard,
    check_length,
    file_bytes,
    in_parallel,
    plan_shards,
    read_shard,
    settle,
    sha256_of,
    write_shard,
)
from gpu_replay.errors import CheckpointError

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
    stands beside it, and what differs takes its space twice.
    Raises TypeError or ValueError for what cannot be written, CheckpointError if `path` is not a checkpoint or another
    save to it is under way, and OSError if the disk is full or fails; in each case the old checkpoint is as it was.
    """
    json.dumps(manifest)
    plan = plan_shards(tensors, shard_bytes)
    settle(tensors.values())
    with writing(path) as (folder, before):
        _write_contents(folder, manifest, plan, tensors, before)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[tuple[Path, set[str]]]:
    """The folder in which a checkpoint `path` is written, and the files there that must survive a failure.

    Whoever enters writes shards and then a manifest; on leaving, the checkpoint is at its place and the shards that the
    manifest does not name are gone. After an error the old checkpoint is as it was.
    """
    target = Path(os.path.realpath(path))
    hidden = target.with_name(f".{target.name}.saving")
    if target.exists():
        _remove_hidden_folder(hidden)
        with save_lock(target, target):
            _refuse_other_contents(target)
            before = files_in_force(target)
            _remove_shards(target, keep=before)
            try:
                yield target, before
            except BaseException:
                with suppress(OSError):
                    _remove_shards(target, keep=before | files_in_force(target))
                raise
            _remove_shards(target, keep=files_in_force(target))
        return
    with suppress(FileExistsError):
        hidden.mkdir(parents=True, exist_ok=True)
    with save_lock(hidden, target):
        _refuse_other_contents(hidden)
        _remove_contents(hidden)
        try:
            yield hidden, set()
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

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its shards in the folder."""
        return tuple(shard.file for shard in self._manifest.shards)

    def read(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """A new tensor with the stored contents."""
        dtype, shape = self._known(name)
        out = torch.empty(shape, dtype=dtype, device=device)
        self.fill({name: out})
        return out

    def read_all(self) -> dict[str, Tensor]:
        """New tensors with everything that is stored, by name, in host memory."""
        shapes = self._manifest.shapes.items()
        out = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (dtype, shape) in shapes}
        self.fill(out)
        return out

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, of the stored shapes and dtypes and on any device, one chunk at a time.

        Raises CheckpointError if one does not fit or a shard is damaged; in the second case they may have been written
        to already.
        """
        for name, out in tensors.items():
            self.require(name, out.dtype, tuple(out.shape))
        rows = {name: len(out) if out.dim() else 1 for name, out in tensors.items()}
        self.fill_rows({name: [Rows(0, rows[name], out)] for name, out in tensors.items()})

    def fill_rows(self, wanted: Mapping[str, Sequence[Rows]]) -> None:
        """Fill tensors with some rows of the stored ones by name; as `fill`, but whoever calls has compared shapes."""
        shards = [shard for shard in self._manifest.shards if any(_holds(part, wanted) for part in shard.parts)]
        settle(rows.out for each in wanted.values() for rows in each)
        total = sum(shard.nbytes for shard in shards)
        with self._unless_replaced(), bytes_bar(f"loading {self.path.name}", total) as advance:
            in_parallel(lambda shard: read_shard(self.path, shard, wanted), shards, lambda done: advance(done.nbytes))

    def read_parts(self, names: Container[str], use: Callable[[Part, Tensor], object]) -> None:
        """Give `use` each stored part of the tensors with these names, in any order and from several threads.

        Raises CheckpointError as `fill`.
        """
        shards = [shard for shard in self._manifest.shards if any(part.name in names for part in shard.parts)]

        def read(shard: Shard) -> Shard:
            found = [
                (part, torch.empty((part.stop - part.start, *part.shape[1:]), dtype=part.dtype, device="cpu"))
                for part in shard.parts
                if part.name in names
            ]
            read_shard(self.path, shard, {part.name: [Rows(part.start, part.stop, out)] for part, out in found})
            for part, out in found:
                use(part, out)
            return shard

        total = sum(shard.nbytes for shard in shards)
        with self._unless_replaced(), bytes_bar(f"loading {self.path.name}", total) as advance:
            in_parallel(read, shards, lambda done: advance(done.nbytes))

    @property
    def sha256(self) -> str:
        """Of the manifest: which checkpoint this is."""
        return self._manifest.sha256

    def require(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless a tensor is stored with this dtype and shape."""
        found = self._known(name)
        if found != (dtype, shape):
            raise CheckpointError(
                f"tensor {name!r} in {self.path} is {found[0]} of shape {found[1]}; asked to read it into {dtype} of "
                f"shape {shape}. Make the buffer with the settings that the checkpoint was saved with."
            )

    def shape_of(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a stored tensor."""
        return self._known(name)

    def _known(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
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


def write_shards(folder: Path, plan: list[tuple[Part, ...]], tensors: Mapping[str, Tensor]) -> list[Shard]:
    """Write the shards of a plan that the manifest in force does not name already, and sync all; in any order."""
    token = secrets.token_hex(4)
    in_force = _whole_shards(folder)
    shards: list[Shard] = []

    def store(place: int) -> Shard:
        parts, sha256 = plan[place], None
        earlier = in_force.get(_rows_of(parts))
        if earlier is not None:
            sha256 = sha256_of(parts, tensors)
            if sha256 == earlier.sha256:
                return earlier
        return write_shard(folder, f"piece-{token}-{place:05d}.safetensors", parts, tensors, sha256)

    def stored(shard: Shard) -> None:
        shards.append(shard)
        advance(shard.nbytes)

    require_free(folder, sum(file_bytes(parts) for parts in plan if _rows_of(parts) not in in_force))
    with bytes_bar(f"saving {folder.name}", sum(map(file_bytes, plan))) as advance:
        in_parallel(store, range(len(plan)), stored)
    sync_folder(folder)
    return shards


def _write_contents(
    folder: Path,
    manifest: Mapping[str, Any],
    plan: list[tuple[Part, ...]],
    tensors: Mapping[str, Tensor],
    before: set[str],
) -> None:
    """Write the shards that are new and put a manifest in force that names all; on any failure remove those.

    before: files that must survive a failure.
    """
    try:
        write_manifest(folder, manifest, write_shards(folder, plan, tensors))
    except BaseException as error:
        with suppress(OSError):
            _remove_shards(folder, keep=before | files_in_force(folder))
        if isinstance(error, OSError):
            state = "The checkpoint that was there is unharmed." if before else "There was no checkpoint before."
            raise OSError(error.errno, f"saving to {folder} failed: {error.strerror}. {state}") from error
        raise


def _holds(part: Part, wanted: Mapping[str, Sequence[Rows]]) -> bool:
    """Whether some of the wanted rows lie in this part."""
    found = wanted.get(part.name, ())
    return any((rows.start < part.stop and part.start < rows.stop) or not part.shape for rows in found)


def _rows_of(parts: tuple[Part, ...]) -> tuple[tuple[str, int, int], ...]:
    return tuple((part.name, part.start, part.stop) for part in parts)


def _whole_shards(folder: Path) -> dict[tuple[tuple[str, int, int], ...], Shard]:
    """By the rows that they hold, the shards in force whose files nobody has touched since they were written."""
    with suppress(CheckpointError):
        return {_rows_of(shard.parts): shard for shard in read_manifest(folder).shards if shard.is_whole(folder)}
    return {}


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
        # a link is refused by the lock, and stays as well
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
            raise CheckpointError(f"checkpoint {folder} holds a foreign piece, {name}. Move it elsewhere.")
