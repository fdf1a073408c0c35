"""One shard of a checkpoint: a safetensors file, written and read in one pass that also hashes it.

The format is spelled out here rather than left to its library, so that saving needs nothing beyond torch, every byte is
hashed in the pass that moves it, and a CUDA tensor goes through 8 MiB of host memory instead of whole shards. It is
eight bytes of length, a JSON header and raw bytes; the library opens every shard.
SHA-256 was the fastest cryptographic digest of the standard library where it was measured (1.5 GB/s, twice blake2b),
and `sha256sum` checks a shard by hand. A few shards at a time are hashed, written or read, each in a thread: one core
cannot hash as fast as a disk reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from gpu_replay.checkpoint import CheckpointError
from gpu_replay.checkpoint.files import sync_file

SHARD_NAME = re.compile(r"piece-[0-9a-f]{8}-\d{5}\.safetensors")

CHUNK_BYTES = 8 << 20
"""Bytes hashed at once. A worker needs as much host memory for a tensor whose bytes do not lie in order in host memory,
such as one on a CUDA device."""
WORKERS = 4
"""Shards that are hashed, written or read at the same time."""
SHARED_SHARD_BYTES = 16 << 20
"""Small tensors share shards up to this size; a larger one has its own."""

Item = TypeVar("Item")
Result = TypeVar("Result")

# as safetensors has them: "U8" for uint8, and so on
DTYPE_NAMES = {torch.bool: "BOOL", torch.bfloat16: "BF16"} | {
    getattr(torch, f"{kind}{bits}"): f"{kind[0].upper()}{bits}"
    for kind, widths in (("uint", (8, 16, 32, 64)), ("int", (8, 16, 32, 64)), ("float", (16, 32, 64)))
    for bits in widths
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` along the first dimension of one tensor; a tensor without dimensions is one row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int

    @property
    def sides(self) -> tuple[int, ...]:
        """The shape of these rows."""
        return (self.stop - self.start, *self.shape[1:]) if self.shape else ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.sides) * self.dtype.itemsize

    def of(self, tensor: Tensor) -> Tensor:
        """This part of the whole tensor: a view."""
        return tensor.detach().narrow(0, self.start, self.stop - self.start) if self.shape else tensor.detach()

    def empty(self) -> Tensor:
        """Host memory for these rows."""
        return torch.empty(self.sides, dtype=self.dtype, device="cpu")


@dataclass(frozen=True)
class Shard:
    """One file: its parts in the order of their bytes, the SHA-256 of all of it, and when it was written (st_mtime_ns).

    Checkpoints of earlier versions do not say when.
    """

    file: str
    parts: tuple[Part, ...]
    sha256: str
    modified: int | None = None

    @property
    def nbytes(self) -> int:
        return file_bytes(self.parts)

    def is_intact(self, folder: Path) -> bool:
        """Whether the file lies in the folder as it was left, as far as that shows without reading it."""
        status = _status(folder / self.file, os.lstat)
        return status is not None and (status.st_size, status.st_mtime_ns) == (self.nbytes, self.modified)


def _status(file: Path, look: Callable[[Path], os.stat_result]) -> os.stat_result | None:
    """What one call says of a regular file, as another save may remove it between two; None for anything else."""
    try:
        status = look(file)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def split_into_shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[tuple[Part, ...]]:
    """Divide tensors into shards of at most `shard_bytes`: small ones together, large ones alone and in slices.

    The widest type comes first, which aligns every part. Raises ValueError for what safetensors cannot hold.
    """
    shards: list[tuple[Part, ...]] = []
    shared: tuple[Part, ...] = ()
    small = min(shard_bytes, SHARED_SHARD_BYTES)
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if name == "__metadata__":
            raise ValueError("a tensor cannot be named '__metadata__': the safetensors format reserves it.")
        if tensor.dtype not in DTYPE_NAMES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
            raise ValueError(f"tensor {name!r} is {tensor.dtype}, which a checkpoint cannot hold; it holds {names}.")
        shape = tuple(tensor.shape)
        whole = Part(name, tensor.dtype, shape, 0, shape[0] if shape else 1)
        if file_bytes((*shared, whole)) <= small:
            shared = (*shared, whole)
        elif file_bytes((whole,)) <= small:
            shards.append(shared)
            shared = (whole,)
        else:
            # room for the header of the longest tensor, so that one that grows is cut at the same rows
            longest = Part(name, tensor.dtype, (2**40, *shape[1:]), 0, 2**40)
            row_bytes = whole.nbytes // max(1, whole.stop)
            most = max(1, (shard_bytes - len(header_of((longest,)))) // max(1, row_bytes))
            for start in range(0, max(1, whole.stop), most):
                shards.append((Part(name, tensor.dtype, shape, start, min(whole.stop, start + most)),))
    return [*shards, shared] if shared else shards


def header_of(parts: tuple[Part, ...]) -> bytes:
    """The first bytes of a safetensors file with these parts, padded so that the data starts at a multiple of eight."""
    entries = {}
    offset = 0
    for part in parts:
        end = offset + part.nbytes
        entries[part.name] = {"dtype": DTYPE_NAMES[part.dtype], "shape": part.sides, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def file_bytes(parts: tuple[Part, ...]) -> int:
    return len(header_of(parts)) + sum(part.nbytes for part in parts)


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item], done: Callable[[Result], object]) -> None:
    """Call `work` with each item, a few at a time in threads, and `done` here with the results in any order.

    After an error the calls that have not begun are cancelled, and it is raised when the others have ended. A signal
    handler that raises within the threads' own code, such as that of Ctrl-C, may lose the whole: a save then leaves the
    checkpoint that was there, and it may take another Ctrl-C to return.
    """
    calls: list[Future[Result]] = []
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            # an interpreter that is ending takes no more calls: those that are left are made here
            with suppress(RuntimeError):
                for item in items:
                    calls.append(pool.submit(work, item))
            for item in items[len(calls) :]:
                done(work(item))
            for result in map(Future.result, as_completed(calls)):
                done(result)
        finally:
            pool.shutdown(cancel_futures=True)
            # an error and its frames would keep each other
            calls.clear()


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Wait for the kernels that fill these tensors, since worker threads use other streams."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _contents(parts: tuple[Part, ...], tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """All bytes of a shard in order."""
    yield header_of(parts)
    for part in parts:
        for chunk in _chunks(part.of(tensors[part.name])):
            yield _bytes(chunk.cpu().contiguous())


def sha256_of(parts: tuple[Part, ...], tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 that a shard of these parts would have."""
    digest = hashlib.sha256()
    for data in _contents(parts, tensors):
        digest.update(data)
    return digest.hexdigest()


def write_shard(
    folder: Path, file: str, parts: tuple[Part, ...], tensors: Mapping[str, Tensor], sha256: str | None = None
) -> Shard:
    """Write one new file, and wait until it is on the disk.

    sha256: of its contents, if it is known already.
    """
    digest = hashlib.sha256()
    # "x" follows no link and writes over nothing
    with open(folder / file, "xb") as out:
        for data in _contents(parts, tensors):
            if sha256 is None:
                digest.update(data)
            out.write(data)
        sync_file(out)
        modified = os.fstat(out.fileno()).st_mtime_ns
    return Shard(file, parts, sha256 or digest.hexdigest(), modified)


def check_length(folder: Path, shard: Shard) -> None:
    """Raise CheckpointError if the file is missing, or longer or shorter than it was written."""
    status = _status(folder / shard.file, os.stat)
    if status is None:
        raise _damaged(folder, shard, "it is missing")
    if status.st_size != shard.nbytes:
        raise _damaged(folder, shard, f"it was written with {shard.nbytes} bytes and now has {status.st_size}")


def read_shard(folder: Path, shard: Shard, targets: Mapping[str, Tensor]) -> None:
    """Fill these tensors with the parts of their names, in chunks, and compare the checksum of the whole file.

    Raises CheckpointError; the tensors may have been written to by then.
    """
    header = header_of(shard.parts)
    digest = hashlib.sha256(header)
    check_length(folder, shard)
    try:
        with open(folder / shard.file, "rb") as file:
            if file.read(len(header)) != header:
                raise _damaged(folder, shard, "its header is not the one that was written")
            for part in shard.parts:
                # what is not wanted counts for the checksum
                for chunk in _chunks(targets[part.name] if part.name in targets else part.empty()):
                    direct = chunk.is_cpu and chunk.is_contiguous()
                    host = chunk if direct else torch.empty(chunk.shape, dtype=chunk.dtype, device="cpu")
                    data = _bytes(host)
                    if file.readinto(data) != len(data):
                        raise _damaged(folder, shard, "it ends too early")
                    digest.update(data)
                    if not direct:
                        chunk.copy_(host)
    except OSError as error:
        raise _damaged(folder, shard, f"it cannot be read ({error.strerror})") from error
    if digest.hexdigest() != shard.sha256:
        raise _damaged(folder, shard, "its checksum differs, so it was changed after it was written")


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Views of at most `CHUNK_BYTES`, in the order of the elements; whole rows if the tensor is not contiguous."""
    rows = tensor.view(-1) if tensor.is_contiguous() else tensor
    step = max(1, CHUNK_BYTES // max(1, math.prod(rows.shape[1:]) * rows.element_size()))
    for start in range(0, rows.shape[0] if tensor.numel() else 0, step):
        yield rows[start : start + step]


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, not copied."""
    # a single element counts as contiguous whatever its stride is
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _damaged(folder: Path, shard: Shard, what: str) -> CheckpointError:
    names = ", ".join(part.name for part in shard.parts)
    return CheckpointError(
        f"checkpoint {folder} is damaged: {shard.file} (holding {names}): {what}. Load another checkpoint."
    )
