"""Where the fields of a buffer are: with everything else on its device, in pinned host memory, or in a mapped file."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.mapped_file import mapped
from gpu_replay.engines.pinned_memory import pinned_block
from gpu_replay.engines.read_ahead import ReadAhead
from gpu_replay.validation import check_path

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


def check_placement(device: torch.device, storage_device: object, storage_path: object) -> Placement:
    """The placement of the fields of a buffer on this device, or TypeError / ValueError that names the choices."""
    path = None if storage_path is None else Path(os.path.abspath(check_path("storage_path", storage_path)))
    if storage_device is None:
        asked = torch.device("cpu") if storage_path is not None else device
    elif isinstance(storage_device, (str, torch.device)):
        try:
            asked = torch.device(storage_device)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise ValueError(f"storage_device {storage_device!r} is not one that torch knows: {first}") from None
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
