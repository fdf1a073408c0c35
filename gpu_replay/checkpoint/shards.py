"""One shard of a checkpoint: a safetensors file, written and read in one pass that also hashes it.

The format is spelled out here rather than left to its library, so that saving needs nothing beyond torch, every byte is
hashed in the pass that moves it, and a CUDA tensor goes through 32 MiB of host memory instead of whole shards. It is
eight bytes of length, a JSON header and raw bytes; the library opens every shard.
SHA-256 was the fastest cryptographic digest of the standard library where it was measured (1.5 GB/s, twice blake2b),
and `sha256sum` checks a shard by hand.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_replay.checkpoint.fsync import sync_file
from gpu_replay.errors import CheckpointError

SHARD_NAME = re.compile(r"piece-[0-9a-f]{8}-\d{5}\.safetensors")

CHUNK_BYTES = 32 << 20
"""What moves at once between a tensor and a file, and the most host memory that a CUDA tensor needs."""
SHARED_SHARD_BYTES = 16 << 20
"""Small tensors share shards up to this size; a larger one has its own, which is hashed in the pass that reads it."""

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
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.row_bytes

    def of(self, tensor: Tensor) -> Tensor:
        """This part of the whole tensor: a view."""
        return tensor.detach().narrow(0, self.start, self.stop - self.start) if self.shape else tensor.detach()


@dataclass(frozen=True)
class Shard:
    """One file: its parts in the order of their bytes, and the SHA-256 of all of it."""

    file: str
    parts: tuple[Part, ...]
    sha256: str

    @property
    def nbytes(self) -> int:
        return file_bytes(self.parts)


def plan_shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[tuple[Part, ...]]:
    """Divide tensors into shards of at most `shard_bytes`: small ones together, large ones alone and in slices.

    The widest type comes first, which aligns every part. Raises ValueError for what safetensors cannot hold.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1; found {shard_bytes}.")
    plan: list[tuple[Part, ...]] = []
    shared: tuple[Part, ...] = ()
    small = min(shard_bytes, SHARED_SHARD_BYTES)
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if name == "__metadata__":
            raise ValueError("a tensor cannot be named '__metadata__': the safetensors format reserves it.")
        if tensor.dtype not in DTYPE_NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
            raise ValueError(f"tensor {name!r} is {tensor.dtype}, which a checkpoint cannot hold; it holds {known}.")
        shape = tuple(tensor.shape)
        whole = Part(name, tensor.dtype, shape, 0, shape[0] if shape else 1)
        if file_bytes((*shared, whole)) <= small:
            shared = (*shared, whole)
        elif file_bytes((whole,)) <= small:
            plan.append(shared)
            shared = (whole,)
        else:
            most = max(1, (shard_bytes - len(header_of((whole,)))) // max(1, whole.row_bytes))
            for start in range(0, max(1, whole.stop), most):
                plan.append((Part(name, tensor.dtype, shape, start, min(whole.stop, start + most)),))
    return [*plan, shared] if shared else plan


def header_of(parts: tuple[Part, ...]) -> bytes:
    """The first bytes of a safetensors file with these parts, padded so that the data starts at a multiple of eight."""
    entries = {}
    offset = 0
    for part in parts:
        shape = [part.stop - part.start, *part.shape[1:]] if part.shape else []
        end = offset + part.nbytes
        entries[part.name] = {"dtype": DTYPE_NAMES[part.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def file_bytes(parts: tuple[Part, ...]) -> int:
    return len(header_of(parts)) + sum(part.nbytes for part in parts)


def write_shard(folder: Path, file: str, parts: tuple[Part, ...], tensors: Mapping[str, Tensor]) -> Shard:
    """Write one new file, and wait until it is on the disk."""
    header = header_of(parts)
    digest = hashlib.sha256(header)
    with open(folder / file, "xb") as out:
        out.write(header)
        for part in parts:
            for chunk in _chunks(part.of(tensors[part.name])):
                data = _bytes(chunk.cpu().contiguous())
                digest.update(data)
                out.write(data)
        sync_file(out)
    return Shard(file, parts, digest.hexdigest())


def check_length(folder: Path, shard: Shard) -> None:
    """Raise CheckpointError if the file is missing, or longer or shorter than it was written."""
    file = folder / shard.file
    if not file.is_file():
        raise _damaged(folder, shard, "it is missing")
    found = file.stat().st_size
    if found != shard.nbytes:
        raise _damaged(folder, shard, f"it was written with {shard.nbytes} bytes and now has {found}")


def verify_shard(folder: Path, shard: Shard) -> None:
    """Read the whole file and compare its checksum. Raises CheckpointError."""
    digest = hashlib.sha256()
    with _opened(folder, shard) as file:
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
    _compare(folder, shard, digest.hexdigest())


def read_part(folder: Path, shard: Shard, part: Part, out: Tensor, *, verified: bool) -> None:
    """Fill `out`, of the part's shape and on any device, one chunk at a time.

    verified: the checksum of the file is known to be right. Otherwise it is compared after the last chunk, which takes
              a part that has the shard to itself.
    Raises CheckpointError; `out` may have been written to by then.
    """
    header = header_of(shard.parts)
    digest = hashlib.sha256(header)
    with _opened(folder, shard) as file:
        if file.read(len(header)) != header:
            raise _damaged(folder, shard, "its header is not the one that was written")
        file.seek(sum(before.nbytes for before in shard.parts[: shard.parts.index(part)]), os.SEEK_CUR)
        for chunk in _chunks(out):
            direct = chunk.is_cpu and chunk.is_contiguous()
            host = chunk if direct else torch.empty(chunk.shape, dtype=chunk.dtype)
            data = _bytes(host)
            if file.readinto(data) != len(data):
                raise _damaged(folder, shard, "it ends too early")
            if not verified:
                digest.update(data)
            if not direct:
                chunk.copy_(host)
    if not verified:
        _compare(folder, shard, digest.hexdigest())


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


@contextmanager
def _opened(folder: Path, shard: Shard) -> Iterator[Any]:
    check_length(folder, shard)
    try:
        with open(folder / shard.file, "rb") as file:
            yield file
    except OSError as error:
        raise _damaged(folder, shard, f"it cannot be read ({error.strerror})") from error


def _compare(folder: Path, shard: Shard, found: str) -> None:
    if found != shard.sha256:
        raise _damaged(folder, shard, "its checksum differs, so it was changed after it was written")


def _damaged(folder: Path, shard: Shard, what: str) -> CheckpointError:
    names = ", ".join(part.name for part in shard.parts)
    return CheckpointError(
        f"checkpoint {folder} is damaged: {shard.file} (holding {names}): {what}. Load another checkpoint."
    )
