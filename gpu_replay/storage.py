"""The ring of preallocated tensors, and how many bytes it will take before it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpu_replay.fields import Field
from gpu_replay.ops._backend import Backend, choose
from gpu_replay.ops.host_ranks import host_ranks_bytes
from gpu_replay.ops.mass_tree import tree_bytes
from gpu_replay.ops.rank_draw import ranks_bytes
from gpu_replay.samplers import Combined, Proportional, RankBased, Sampler, Uniform

MAX_CAPACITY = 2**31 - 1


def base_sampler(sampler: Sampler) -> Sampler:
    """The sampler that holds priorities, if any does: what `Combined` is built on, or the sampler itself."""
    return sampler.base if isinstance(sampler, Combined) else sampler


def estimate(
    capacity: int, fields: Mapping[str, Field], sampler: Sampler | None = None, backend: Backend = "host"
) -> dict[str, int]:
    """Bytes that a buffer will take: one entry per field, "times_sampled", and "priorities" and "ranks" if any."""
    sizes = {name: capacity * field.row_bytes for name, field in fields.items()}
    sizes["times_sampled"] = capacity * torch.int32.itemsize
    base = base_sampler(sampler if sampler is not None else Uniform())
    if isinstance(base, Proportional):
        low, high = base.normalize == "buffer", base.initial == "stored"
        sizes["priorities"] = tree_bytes(capacity, backend, low=low, high=high)
        if backend == "triton":
            sizes["priorities"] += capacity * torch.int32.itemsize
    if isinstance(base, RankBased):
        sizes["priorities"] = tree_bytes(capacity, backend, high=base.initial == "stored", summed=False)
        sizes["ranks"] = host_ranks_bytes(capacity, base.resort_every)
        if backend == "triton":
            sizes["priorities"] += capacity * torch.int32.itemsize
            sizes["ranks"] = ranks_bytes(capacity)
    return sizes


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the device, or None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [size for size in (_available_memory(), _left_in_cgroup()) if size is not None]
    return min(found) if found else None


def _available_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _left_in_cgroup() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = (root / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit) - int(used)


def size_table(sizes: Mapping[str, int]) -> str:
    """The sizes and their sum, one aligned line each."""
    rows = [*sizes.items(), ("total", sum(sizes.values()))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {size:>20,} bytes  {size / 1e9:10.3f} GB" for name, size in rows)


def check_memory(sizes: Mapping[str, int], device: torch.device) -> None:
    """Raise MemoryError with a per-field table unless the bytes fit what is free on the device."""
    free = free_bytes(device)
    needed = sum(sizes.values())
    if free is not None and needed > free:
        raise MemoryError(
            f"the buffer needs {needed:,} bytes on {device}, where {free:,} are free:\n{size_table(sizes)}\n"
            "Lower the capacity, or store fields in smaller dtypes."
        )


def check_capacity(capacity: object) -> int:
    """The capacity as an int, or TypeError / ValueError."""
    if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)):
        raise TypeError(f"capacity must be an int; found {capacity!r}.")
    if not 1 <= capacity <= MAX_CAPACITY:
        raise ValueError(f"capacity must be from 1 to {MAX_CAPACITY:,} transitions; found {capacity:,}.")
    return int(capacity)


def check_device(device: torch.device | str | None) -> torch.device:
    """The device to build on: the current CUDA device when none is named and there is one, else the CPU.

    Raises ValueError for a device that this package or this machine does not have.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is not one that torch knows: {str(error).splitlines()[0]}") from None
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f'device {str(device)!r}: torch finds no CUDA device here; use device="cpu".')
        index = torch.cuda.current_device() if found.index is None else found.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"device {str(device)!r}: there are {torch.cuda.device_count()} CUDA devices here.")
        found = torch.device("cuda", index)
    choose(found)
    return found


class Storage:
    """One preallocated tensor `[capacity, *shape]` per field, and how often each slot was sampled.

    Allocates all memory at once; raises MemoryError with a per-field table before it does when it cannot fit.
    """

    def __init__(self, capacity: int, fields: dict[str, Field], device: torch.device) -> None:
        self.capacity = capacity
        self.fields = fields
        self.device = device
        self.tensors: dict[str, Tensor] = {
            name: torch.empty((capacity, *field.shape), dtype=field.dtype, device=device)
            for name, field in fields.items()
        }
        self.times_sampled = torch.zeros(capacity, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) + self.times_sampled.nbytes
