"""The ring of preallocated tensors, and whether its bytes are free before it is made.

On the host the small fields of a transition lie side by side in one record: a transition is then one trip to memory
instead of one for each field.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.memory import MakeMemory, Placement, ReadAhead, free_on_disk, known_device
from gpu_replay.fields import Field, as_numpy
from gpu_replay.ops._backend import choose
from gpu_replay.ops.steps import Streams
from gpu_replay.samplers import Uniform
from gpu_replay.validation import check_int

UNIFORM = Uniform()
MAX_CAPACITY = 2**31 - 1
# bytes of a field's row up to which it shares a record: a larger one is a trip to memory of its own anyway
_SMALL_ROW = 256


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


def check_capacity(capacity: object) -> int:
    """The capacity as an int, or TypeError / ValueError."""
    return check_int("capacity", capacity, 1, MAX_CAPACITY)


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


def record_dtype(fields: Mapping[str, Field]) -> np.dtype[Any] | None:
    """Small fields side by side, widest types first; None if there are fewer than two."""
    small = [(name, field) for name, field in fields.items() if field.row_bytes <= _SMALL_ROW]
    if len(small) < 2:
        return None
    small.sort(key=lambda item: -item[1].dtype.itemsize)
    parts = [
        (name, as_numpy(torch.empty(0, dtype=field.dtype, device="cpu")).dtype, field.shape) for name, field in small
    ]
    return np.dtype(parts, align=True)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor; on the host NumPy allocates it, which asks for huge pages: fewer misses of the TLB."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    memory = np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


class Storage:
    """One preallocated tensor `[capacity, *shape]` per field, and how often each slot was sampled.

    records: (capacity,) structured, the small fields of each transition; None where none lie side by side. The tensors
             of those fields are views of it. Only on the host, with `packed`.

    memory:  makes the memory of fields of these sizes, where they are not on the device.
    on_device: names of fields that are on the device all the same.

    Allocates all memory at once. On the meta device it has `sizes` and no memory, and fields of one row: the bytes of a
    tensor are counted in 63 bits.
    """

    def __init__(
        self,
        capacity: int,
        fields: dict[str, Field],
        device: torch.device,
        *,
        packed: bool = False,
        memory: MakeMemory | None = None,
        on_device: Collection[str] = (),
    ) -> None:
        self.capacity = capacity
        self.fields = fields
        self.device = device
        record = record_dtype(fields) if packed else None
        together = () if record is None else record.names or ()
        padding = 0 if record is None else record.itemsize - sum(fields[name].row_bytes for name in together)
        self._padding = capacity * padding
        alone = [name for name in fields if name not in together and name not in on_device]
        sizes = [] if record is None else [capacity * record.itemsize]
        sizes += [capacity * fields[name].row_bytes for name in alone]
        # kept: it owns a file or pinned pages
        self._memory = None if memory is None else memory(sizes)
        take = partial(allocate, device=device) if self._memory is None else self._memory.take
        self.records: np.ndarray | None = None
        if record is not None and device.type != "meta":
            self.records = take((sizes[0],), torch.uint8).numpy().view(record)
        self.tensors: dict[str, Tensor] = {}
        rows = 1 if device.type == "meta" else capacity
        for name, field in fields.items():
            if self.records is not None and name in together:
                # the record has the same dtype, or one of the same width for bfloat16, which NumPy lacks
                self.tensors[name] = torch.from_numpy(self.records[name]).view(field.dtype)
            elif name in on_device:
                self.tensors[name] = allocate((rows, *field.shape), field.dtype, device)
            else:
                self.tensors[name] = take((rows, *field.shape), field.dtype)
        self.times_sampled = torch.zeros(capacity, dtype=torch.int32, device=device)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by name: of each field, "alignment" of records, "times_sampled" and, of a trajectory buffer, more."""
        sizes = {name: self.capacity * field.row_bytes for name, field in self.fields.items()}
        sizes |= {"alignment": self._padding} if self._padding else {}
        return sizes | {"times_sampled": self.times_sampled.nbytes}

    def read_ahead(self) -> ReadAhead | None:
        """The read-ahead for fields in a mapped file; None if they are in memory."""
        return None if self._memory is None else self._memory.read_ahead(self.capacity)

    def stream_tensors(self, written: int) -> dict[str, Tensor]:
        """Views of the tensors kept apart from fields for the first `written` slots, by name; none for transitions."""
        return {}

    # of a trajectory buffer
    streams: Streams | None = None

    def waiting_arrays(self) -> tuple[np.ndarray, ...]:
        """What tells `loops/masses.py` where masses wait until their step can be drawn; empty for transitions."""
        return tuple([np.zeros(0, dtype=dtype) for dtype in (np.int64, np.uint8, np.int32, np.int64)])

    def reset_after(self, added: int) -> None:
        """Make all slots that so many transitions leave unwritten as if they had never been written."""
        self.times_sampled[min(added, self.capacity) :].zero_()


def check_live(keys: Tensor, first: int, added: int, eligible: Tensor | bool = True) -> None:
    """Raise KeyError that names the first of these keys that is not live, or not eligible.

    keys: (B,) int64; those from `first` to `added` are live. eligible: (B,) bool, or True: all are.
    """
    refused = keys[~((keys >= first) & (keys < added) & eligible)]
    if not len(refused):
        return
    key, contents = int(refused[0]), f"the keys from {first} to {added - 1}" if added > first else "nothing"
    if not first <= key < added:
        raise KeyError(f"key {key} is not live; the buffer holds {contents}.")
    raise KeyError(
        f"key {key} is stored but not eligible: a part of its stack or window is missing, its step only carries a "
        "final observation, or it was excluded; keys(eligible=True) are those of windows."
    )
