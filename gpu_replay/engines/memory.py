"""Where the fields of a buffer are: with everything else on its device, in pinned host memory, or in a mapped file; and
whether their bytes are free there.

The file has no name: the system frees its blocks with the last mapping, however the process ends. It is scratch: `save`
writes the data that must last. The pages of drawn rows are asked for at once, where reading them one by one would wait
for the disk.

Pinned memory is taken in exactly the bytes that are needed. torch's own comes in powers of two: a ring of 40 GB would
take 64.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops._backend import choose
from gpu_replay.validation import check_path

# written at once where the system cannot reserve the blocks of a file
_PIECE = 2**24


def mapped(folder: Path, nbytes: int) -> mmap.mmap:
    """`nbytes` of a new file in a folder, which is made if it is missing, mapped into memory; zeros.

    All blocks of the disk are reserved at once: a full disk is an error here, and no SIGBUS later. Raises MemoryError
    then, OSError where the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise MemoryError(
                f"the disk has no room for the fields at storage_path {folder} ({error.strerror}). Lower the capacity, "
                "or name a folder on another disk."
            ) from error
        advice = "Name a folder that can be written to, or one that can be made"
        raise type(error)(
            error.errno, f"the fields cannot be kept at storage_path: {error.strerror}. {advice}", str(folder)
        ) from error


def _reserve(file: BinaryIO, nbytes: int) -> None:
    """Give a new file its length and all its blocks."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    for begin in range(0, nbytes, _PIECE):
        file.write(bytes(min(_PIECE, nbytes - begin)))
    file.flush()


def free_on_disk(folder: Path) -> int | None:
    """Bytes that a new file there can have, or None where the system does not tell."""
    there = next((each for each in (folder, *folder.parents) if each.is_dir()), None)
    try:
        usage = None if there is None else shutil.disk_usage(there)
    except OSError:
        return None
    # some network file systems report no sizes at all
    return usage.free if usage is not None and usage.total else None


# pin for all devices of the process, and map into their address space
_PORTABLE, _MAPPED = 1, 2
# memory that was dropped while a graph was being captured, when nothing may be unpinned
_left: list[tuple[Any, ...]] = []


def pinned_block(nbytes: int, device: torch.device, drain: Callable[[], None]) -> np.ndarray:
    """(nbytes,) uint8, zeros, in pinned host memory that kernels on the device take by its own address.

    drain: waits until no kernel uses it any more; called before it is unpinned.

    Raises MemoryError where the driver does not pin so much.
    """
    _release_left()
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # a child made by fork would make the parent's pages copies of those that the device writes
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    block = np.frombuffer(memory, dtype=np.uint8)
    address = block.ctypes.data
    with torch.cuda.device(device):
        try:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED)))
        except RuntimeError as error:
            _forget_error()
            raise MemoryError(
                f"{nbytes:,} bytes of host memory could not be pinned for {device} ({error}). Lower the capacity."
            ) from error
    # the arguments keep the memory until it is unpinned; unnecessary when the process ends
    weakref.finalize(block, _release, memory, address, device, drain).atexit = False
    return block


def seen_from(device: torch.device, store: Tensor) -> Tensor:
    """The memory of a tensor on this device, or in pinned memory of it, as a tensor of the device."""
    if store.device == device:
        return store
    memory = {"data": (store.data_ptr(), False), "shape": (store.nbytes,), "typestr": "|u1", "version": 2}
    seen = SimpleNamespace(__cuda_array_interface__=memory, store=store)
    return torch.as_tensor(seen, device=device).view(store.dtype).view(store.shape)


def _forget_error() -> None:
    """Clear the last error of the CUDA runtime, which the next launch would raise otherwise."""
    with suppress(RuntimeError):
        torch.cuda._sleep(1)


def _release(memory: mmap.mmap, address: int, device: torch.device, drain: Callable[[], None]) -> None:
    if torch.cuda.is_current_stream_capturing():
        _left.append((memory, address, device, drain))
        return
    with torch.cuda.device(device):
        drain()
        torch.cuda.cudart().cudaHostUnregister(address)


def _release_left() -> None:
    while _left and not torch.cuda.is_current_stream_capturing():
        _release(*_left.pop())


class ReadAhead:
    """Asks only while gathers read from the disk: to ask for pages that are in memory takes longer than to copy a small
    row.

    mapping: of the whole file.
    pieces:  where in it the rows of a field, or records of several, begin, and the bytes of one.
    """

    def __init__(self, mapping: mmap.mmap, pieces: Sequence[tuple[int, int]]) -> None:
        # not on Windows, where `mmap` has no MADV_WILLNEED either
        import resource

        self._mapping, self._pieces = mapping, pieces
        self._usage = lambda: resource.getrusage(resource.RUSAGE_SELF)
        # blocks that this process had read when the last gather began, those that it asked for included
        self._before = 0
        # whether the last gather read from the disk
        self.reads = False

    def begin(self, slots: np.ndarray) -> None:
        """Rows of these slots are gathered from here on."""
        self._before = self._usage().ru_inblock
        if self.reads:
            self._ask(slots)

    def end(self) -> None:
        """All of them are gathered."""
        self.reads = self._usage().ru_inblock > self._before

    def _ask(self, slots: np.ndarray) -> None:
        rows = np.unique(slots)
        for begin, nbytes in self._pieces:
            first = begin + rows * nbytes
            pages = first // mmap.PAGESIZE * mmap.PAGESIZE
            for page, length in zip(pages.tolist(), (first + nbytes - pages).tolist(), strict=True):
                self._mapping.madvise(mmap.MADV_WILLNEED, page, length)


# each field begins with a page
_PAGE = 4096

StoragePath = str | os.PathLike[str]


@dataclass(frozen=True)
class Placement:
    """The device of masses, keys and batches, and where the fields are if not there.

    pinned: in host memory, which kernels of the device read and write over the bus.
    path:   the folder of a file that is mapped into memory; on a CPU.
    """

    device: torch.device
    pinned: bool = False
    path: Path | None = None

    @property
    def apart(self) -> bool:
        """Whether the fields are elsewhere than everything else."""
        return self.pinned or self.path is not None

    @property
    def storage_device(self) -> torch.device:
        """The device of the fields."""
        return torch.device("cpu") if self.apart else self.device

    def memory(self, drain: Callable[[], None]) -> MakeMemory | None:
        """Makes the memory of fields of given sizes; None where they are on the device.

        drain: waits until no kernel uses it any more.
        """
        return partial(FieldMemory, self, drain) if self.apart else None

    @property
    def where(self) -> str:
        """The place of the fields, for messages."""
        if self.path is not None:
            return f"on the disk at {self.path}"
        return "in pinned host memory" if self.pinned else f"on {self.device}"


def known_device(name: str, device: Any) -> torch.device:
    """The device of this name, or ValueError where torch knows none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} {device!r} is not one that torch knows: {str(error).splitlines()[0]}") from None


def check_device(device: torch.device | str | None) -> torch.device:
    """The device to build on: the current CUDA device when none is named and there is one, else the CPU.

    Raises ValueError for a device that this package or this machine does not have.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = known_device("device", device)
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f'device {str(device)!r}: torch finds no CUDA device here; use device="cpu".')
        index = torch.cuda.current_device() if resolved.index is None else resolved.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"device {str(device)!r}: there are {torch.cuda.device_count()} CUDA devices here.")
        resolved = torch.device("cuda", index)
    choose(resolved)
    return resolved


def check_placement(device: torch.device, storage_device: object, storage_path: object) -> Placement:
    """The placement of the fields of a buffer on this device, or TypeError / ValueError that names the choices."""
    path = None if storage_path is None else Path(os.path.abspath(check_path("storage_path", storage_path)))
    if storage_device is None:
        asked = torch.device("cpu") if storage_path is not None else device
    elif isinstance(storage_device, (str, torch.device)):
        asked = known_device("storage_device", storage_device)
    else:
        raise TypeError(f'storage_device must be a device such as "cpu"; found {storage_device!r}.')
    if asked.type == device.type and asked.index in (None, device.index):
        asked = device
    if storage_path is not None and (device.type != "cpu" or asked.type != "cpu"):
        found = f"device {str(device)!r}" if device.type != "cpu" else f"storage_device {str(storage_device)!r}"
        raise ValueError(
            f'storage_path keeps the fields of a buffer on the CPU in a file; found {found}. Give device="cpu" and '
            "leave storage_device out; the fields of a buffer on a GPU can be kept in pinned host memory, with "
            'storage_device="cpu" and without storage_path.'
        )
    if asked not in (device, torch.device("cpu")):
        other = "" if device.type == "cpu" else ', or in host memory with storage_device="cpu"'
        raise ValueError(
            f"storage_device {str(storage_device)!r} with device {str(device)!r}: fields can be on the buffer's own "
            f"device{other}. Leave storage_device out, or give device={str(storage_device)!r}."
        )
    return Placement(device, asked.type == "cpu" and device.type != "cpu", path)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the device, or None where the system does not tell."""
    if device.type == "cuda":
        # memory of freed tensors that torch caches is free as well
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    limits = [size for size in (_available_memory(), _left_in_cgroup()) if size is not None]
    return min(limits) if limits else None


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        # other systems than Linux
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_cgroup() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        return int((root / "memory.max").read_text()) - int((root / "memory.current").read_text())
    except (OSError, ValueError):
        # no cgroup, or one without a limit ("max")
        return None


def size_table(sizes: Mapping[str, int]) -> str:
    """The sizes and their sum, one aligned line each."""
    rows = [*sizes.items(), ("total", sum(sizes.values()))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {size:>20,} bytes  {size / 1e9:10.3f} GB" for name, size in rows)


def sizes_by_place(
    sizes: Mapping[str, int], placement: Placement, fields: Collection[str], *, absent: bool = False
) -> list[tuple[str, dict[str, int], int | None]]:
    """Sizes by place: the name of each place, the sizes there and the free bytes, if known.

    fields: names of those sizes that go where the placement says. absent: whether the device is not of this machine.
    """
    there = {name: size for name, size in sizes.items() if placement.apart and name in fields}
    here = {name: size for name, size in sizes.items() if name not in there}
    places = [(f"on {placement.device}", here, None if absent else free_bytes(placement.device))]
    if there:
        free = free_bytes(torch.device("cpu")) if placement.path is None else free_on_disk(placement.path)
        places.append((placement.where, there, free))
    return places


def check_room(sizes: Mapping[str, int], placement: Placement, fields: Collection[str]) -> None:
    """Raise MemoryError with a per-field table that names the place, of device, host memory and disk, that is short."""
    for place, needs, free in sizes_by_place(sizes, placement, fields):
        needed = sum(needs.values())
        if free is not None and needed > free:
            elsewhere = 'in host memory with storage_device="cpu"'
            if placement.device.type == "cpu":
                elsewhere = "in a file with storage_path"
            remedy = "." if placement.apart else f", or keep the fields {elsewhere}."
            raise MemoryError(
                f"the buffer needs {needed:,} bytes {place}, where {free:,} are free:\n{size_table(needs)}\n"
                f"Lower the capacity, or store fields in smaller dtypes{remedy}"
            )


class FieldMemory:
    """One block of memory outside the device's own, for fields of these sizes, handed out in their order."""

    def __init__(self, placement: Placement, drain: Callable[[], None], sizes: Iterable[int]) -> None:
        nbytes = sum(map(_pages, sizes))
        self._mapping = None if placement.path is None else mapped(placement.path, nbytes)
        if self._mapping is not None:
            self._block = np.frombuffer(self._mapping, dtype=np.uint8)
        else:
            self._block = pinned_block(nbytes, placement.device, drain)
        # where each piece begins, and its bytes
        self._pieces: list[tuple[int, int]] = []
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of the next field."""
        begin, nbytes = self._used, math.prod(shape) * dtype.itemsize
        self._pieces.append((begin, nbytes))
        self._used += _pages(nbytes)
        part: np.ndarray = self._block[begin : begin + nbytes]
        return torch.from_numpy(part).view(dtype).view(shape)

    def read_ahead(self, rows: int) -> ReadAhead | None:
        """The read-ahead for gathers of `rows` rows of each field; None if no field is in a mapped file."""
        if self._mapping is None or not hasattr(mmap, "MADV_WILLNEED"):
            return None
        return ReadAhead(self._mapping, [(begin, nbytes // rows) for begin, nbytes in self._pieces])


# makes the memory of fields from their sizes in bytes
MakeMemory = Callable[[Iterable[int]], FieldMemory]


def _pages(nbytes: int) -> int:
    """The bytes rounded up to whole pages."""
    return -(-nbytes // _PAGE) * _PAGE
