"""Tensors far larger than the machine's memory, for interpreted kernels, and a record of how far each kernel reached.

Every tensor of a megabyte or more that is made within `sparse` is a map of pages that exist once they are written, with
room for offsets that went negative before it. Every access of a kernel is noted: one that leaves its tensor fails the
test, whether or not a result shows it. Programs of a launch can be left out, since most would walk over emptiness.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_replay.base import state as base_state
from gpu_replay.engines import storage

# tensors from this size on, in bytes
LARGE = 2**20
# Linux; the module names it from Python 3.13 on
_NO_RESERVE = 0x4000
# an index of 32 bits that wrapped lies at most so many elements before its tensor
_ROOM = 2**31
# elements on both sides of a place that are filled
NEAR = 4096
# the interpreter's operations that touch memory: positions of the addresses and of the mask
_ACCESSES = {"create_masked_load": (0, 1), "create_masked_store": (0, 2), "create_atomic_rmw": (1, 3)}


class _Map(NamedTuple):
    begin: int
    start: int
    stop: int


class SparseMemory:
    """What was made, where kernels have been, and which programs of a launch run.

    programs: which of so many programs to run; all by default.
    places:   of a large tensor that is filled, the parts of its length around which it really is.
    kernel:   the one launched last.
    """

    def __init__(self) -> None:
        self.programs: Callable[[int], Sequence[int]] = range
        self.places: Sequence[float] = (0, 1)
        self._maps: list[_Map] = []
        self._reached: dict[tuple[str, int], int] = {}
        self.kernel = ""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros, whatever the size; what is written takes memory by pages of 4 KB."""
        size, room = math.prod(shape) * dtype.itemsize, _ROOM * dtype.itemsize
        memory = mmap.mmap(-1, room + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        tensor = torch.frombuffer(memory, dtype=dtype)[_ROOM:].view(*shape)
        made = _Map(tensor.data_ptr() - room, tensor.data_ptr(), tensor.data_ptr() + size)
        # memory that was given back may be given out again
        gone = [each for each in self._maps if each.begin < made.stop and made.begin < each.stop]
        self._maps = [each for each in self._maps if each not in gone] + [made]
        starts = {each.start for each in gone}
        self._reached = {place: far for place, far in self._reached.items() if place[1] not in starts}
        return tensor

    def note(self, kernel: str, pointers: np.ndarray, mask: np.ndarray) -> None:
        """An access of these addresses where the mask is set; fails before it is made if it leaves its tensor."""
        touched = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.uint64)
        if not touched.size:
            return
        low, high = int(touched.min()), int(touched.max())
        for found in self._maps:
            if found.begin <= low and high < found.stop:
                assert low >= found.start, f"{kernel} went {found.start - low} bytes before the start of a tensor"
                place = kernel, found.start
                self._reached[place] = max(self._reached.get(place, 0), high - found.start)

    def reached_ends(self, least: int) -> dict[str, int]:
        """For each kernel, of how many tensors of so many bytes it has reached the last megabyte."""
        stops = {each.start: each.stop - each.start for each in self._maps}
        ends = [name for (name, start), far in self._reached.items() if least <= stops[start] < far + LARGE]
        return dict(Counter(ends))

    def fill(self, tensor: Tensor, value: Any) -> Tensor:
        """Fill a large tensor where something will be looked for."""
        for place in self.places:
            middle = int(place * len(tensor))
            tensor[max(0, middle - NEAR) : middle + NEAR] = value
        return tensor


@contextmanager
def sparse() -> Iterator[SparseMemory]:
    """Within it large tensors are sparse, and those with another value than 0 hold it near some places alone."""
    from triton.runtime import interpreter

    memory, builder = SparseMemory(), interpreter.interpreter_builder
    fill, zero = Tensor.fill_, Tensor.zero_
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "zeros", "full"):
            patch.setattr(torch, name, _sparse_if_large(getattr(torch, name), memory))
        patch.setattr(storage, "allocate", lambda shape, dtype, device: torch.empty(shape, dtype=dtype))
        patch.setattr(base_state, "check_room", lambda *_: None)
        patch.setattr(Tensor, "fill_", lambda each, value: (memory.fill if _large(each) else fill)(each, value))
        patch.setattr(Tensor, "zero_", lambda each: each if _large(each) else zero(each))
        patch.setattr(interpreter.GridExecutor, "__call__", _chosen_programs(interpreter, memory))
        for name, (pointers, mask) in _ACCESSES.items():
            patch.setattr(builder, name, _noted(getattr(builder, name), pointers, mask, memory))
        yield memory


def _large(tensor: Tensor) -> bool:
    return tensor.nbytes >= LARGE


def _sparse_if_large(made: Callable[..., Tensor], memory: SparseMemory) -> Callable[..., Tensor]:
    def allocate(shape: Any, *value: Any, dtype: torch.dtype = torch.float32, **named: Any) -> Tensor:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if math.prod(shape) * dtype.itemsize < LARGE:
            return made(shape, *value, dtype=dtype, **named)
        tensor = memory.allocate(shape, dtype)
        return memory.fill(tensor, *value) if value else tensor

    return allocate


def _chosen_programs(interpreter: Any, memory: SparseMemory) -> Callable[..., Any]:
    original, builder = interpreter.GridExecutor.__call__, interpreter.interpreter_builder

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        count, *_ = self.grid
        chosen = list(memory.programs(count))
        memory.kernel = self.fn.__name__
        self.grid = (len(chosen),)
        set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(builder, "set_grid_dim", lambda x, y, z: set_dim(count, y, z))
            patch.setattr(builder, "set_grid_idx", lambda x, y, z: set_idx(chosen[x], y, z))
            return original(self, *arguments, **named)

    return call


def _noted(access: Callable[..., Any], pointers: int, mask: int, memory: SparseMemory) -> Callable[..., Any]:
    def made(*arguments: Any) -> Any:
        memory.note(memory.kernel, arguments[pointers].data, arguments[mask].data)
        return access(*arguments)

    return made
