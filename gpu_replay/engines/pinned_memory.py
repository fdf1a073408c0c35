"""Host memory that a GPU reads and writes over the bus, pinned in exactly the bytes that are needed.

torch's own pinned memory comes in powers of two: a ring of 40 GB would take 64.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
