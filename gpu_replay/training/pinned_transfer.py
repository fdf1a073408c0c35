"""Asynchronous copies from the host to the device through pinned memory.

A copy from pageable memory blocks the host until the device has finished all earlier work. A copy from pinned memory is
queued like a kernel, so the host can step the emulators while the network still learns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

# bytes: what the buffer's vector loads need, and enough for every dtype
ALIGNMENT = 16
SLOTS = 2


class PinnedTransfer:
    """Copies the same set of tensors to a device, call after call, in one transfer each.

    shapes: name to (shape, dtype) of each tensor.
    device: the destination.

    there:  what was copied last, by name, in memory that stays where it is, so that captured graphs read from it;
            zeros at first. The next copy comes after all that the current stream was given before it.

    Host memory is double-buffered: a call waits for the copy of the one before the last.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self._layout: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
        size = 0
        for name, (shape, dtype) in shapes.items():
            nbytes = math.prod(shape) * dtype.itemsize
            self._layout[name] = (size, size + nbytes, shape, dtype)
            size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        cuda = device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=cuda) for _ in range(SLOTS)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host_views = [self._views(memory) for memory in self._host]
        self.there = self._views(self._device)
        self._copied = [torch.cuda.Event() if cuda else None for _ in range(SLOTS)]
        self._calls = 0

    def copy(self, **values: Tensor) -> dict[str, Tensor]:
        """Bring host tensors of the named shapes and dtypes to the device; returns `there`."""
        slot = self._calls % SLOTS
        self._calls += 1
        copied = self._copied[slot]
        if copied is not None:
            # the copy before the last one, which has finished unless the device is two steps behind
            copied.synchronize()
        for name, value in values.items():
            self._host_views[slot][name].copy_(value)
        self._device.copy_(self._host[slot], non_blocking=True)
        if copied is not None:
            copied.record()
        return self.there

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        return {
            name: memory[start:end].view(dtype).view(shape) for name, (start, end, shape, dtype) in self._layout.items()
        }
