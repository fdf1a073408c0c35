"""Host arrays to the device in one copy, through pinned memory, without waiting.

A copy from ordinary memory makes the host wait until the device is done with all that came before. From pinned memory
it is queued like a kernel, so the host can go on to the next step of the emulators while the network still learns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

# the buffer's wide loads want it, and no dtype needs more
ALIGNMENT = 16
SLOTS = 2


class Crossing:
    """Carries the same set of tensors again and again.

    shapes: name to (shape, dtype) of what is carried.
    device: where to.

    What `carry` returns are views of memory that is used again by every second call: what came with a call lasts until
    the call after the next one.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self._places: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
        size = 0
        for name, (shape, dtype) in shapes.items():
            nbytes = math.prod(shape) * dtype.itemsize
            self._places[name] = (size, size + nbytes, shape, dtype)
            size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        cuda = device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=cuda) for _ in range(SLOTS)]
        self._there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._from = [self._views(memory) for memory in self._host]
        self._to = [self._views(memory) for memory in self._there]
        self._left = [torch.cuda.Event() if cuda else None for _ in range(SLOTS)]
        self._calls = 0

    def carry(self, **values: Tensor) -> dict[str, Tensor]:
        """The values, host tensors of the shapes and dtypes that were named, as tensors on the device."""
        slot = self._calls % SLOTS
        self._calls += 1
        left = self._left[slot]
        if left is not None:
            # the copy before the last one; it is over unless the device is two steps behind
            left.synchronize()
        for name, value in values.items():
            self._from[slot][name].copy_(value)
        self._there[slot].copy_(self._host[slot], non_blocking=True)
        if left is not None:
            left.record()
        return {name: self._to[slot][name] for name in values}

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        return {
            name: memory[start:end].view(dtype).view(shape) for name, (start, end, shape, dtype) in self._places.items()
        }
