"""Orders one buffer's calls across CUDA streams.

The buffer's lock orders the calls on the host. The device runs the work of a call later, on the stream that is current
in its thread, unordered with other streams: therefore each call waits for the event at the end of the one before. The
host waits for nothing, and work that other libraries put on those streams is not waited for either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

from gpu_replay.validation import record_stream


def number_of_current_stream(index: int) -> int:
    """The number by which CUDA knows the current stream of a device."""
    return int(torch.cuda.current_stream(index).cuda_stream)


# as Triton and code that Inductor makes ask for it, which takes a fortieth of the time of an object
_stream_number: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", number_of_current_stream)


_of_thread = threading.local()


def side_stream(device: torch.device, use: Literal["captures", "copies"]) -> torch.cuda.Stream:
    """A stream other than the current one: for each use one of each device and thread.

    A new one each time would soon be one that others use: torch has 32, which it hands out again and again.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    streams, key = vars(_of_thread), f"{index} {use}"
    if key not in streams:
        streams[key] = torch.cuda.Stream(device)
    return streams[key]


class StreamOrder(AbstractContextManager[None]):
    """Orders the calls of one buffer on its device: within it that device is current, and work comes after all earlier
    calls. The caller holds the buffer's lock. On a CPU it does nothing.

    device:   of the buffer.
    captures: whether the calls of the outermost one go into a graph instead of to the device.

    Calls captured into a CUDA graph are not ordered here: they run whenever the graph is replayed, in the order of the
    captured streams. A replay counts as one call where its owner wraps it in this.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch takes half the time for a number
        self._index = device.index
        self._streams = device.type == "cuda"
        self.captures = False
        # the rows that captured calls added so far, which the host must count with each replay; None: with none
        self.recorded: int | None = None
        # nested blocks, and what makes the device current within the outermost one; a single device always is
        self._depth = 0
        several = self._streams and torch.cuda.device_count() != 1
        self._current = torch.cuda.device(self._index) if several else None
        # the stream of the last call, its number and the event at its end, and the stream that the memory belongs to
        self._last: torch.cuda.Stream | None = None
        self._number: int | None = None
        self._home: torch.cuda.Stream | None = None
        self._end: torch.cuda.Event | None = None
        # where pinned memory was copied since the outermost block began
        self._copying: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        if not self._streams:
            return
        if self._depth:
            self._depth += 1
            return
        if self._current is not None:
            self._current.__enter__()
        try:
            self.captures = torch.cuda.is_current_stream_capturing()
            # a graph cannot wait for an event from outside, nor may anything outside wait for one of its own
            if not self.captures and (number := _stream_number(self._index)) != self._number:
                self._follow(number)
        except BaseException:
            self._leave()
            raise
        self._depth = 1

    def _follow(self, number: int) -> None:
        """Let the current stream, of this number, wait for the end of the last call."""
        stream = torch.cuda.current_stream(self._index)
        if self._end is None:
            self._end, self._home = torch.cuda.Event(), stream
        else:
            stream.wait_event(self._end)
        self._last, self._number = stream, number

    def __exit__(self, *error: object) -> None:
        if not self._streams:
            return
        self._depth -= 1
        if self._depth:
            return
        try:
            if not self.captures and self._end is not None and self._last is not None:
                self._end.record(self._last)
            if self._copying is not None:
                # from here on the owner of the pinned memory may change it
                copying, self._copying = self._copying, None
                copying.synchronize()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._current is not None:
            self._current.__exit__(None, None, None)

    def reads(self, tensors: Iterable[Tensor]) -> None:
        """Within it: keep memory that may belong to other streams until this call has read it."""
        if self._streams:
            stream = torch.cuda.current_stream(self._index) if self.captures else self._last
            for tensor in tensors:
                tensor.record_stream(stream)  # type: ignore[arg-type]

    def copied(self, pinned: Tensor) -> Tensor:
        """Pinned memory as a tensor on the device, within it; it ends when the copy is made.

        The copy waits for nothing that is queued on the device: neither does the host.
        """
        current = torch.cuda.current_stream(self._device)
        self._copying = side_stream(self._device, "copies")
        with torch.cuda.stream(self._copying):
            # allocated here: memory of another stream may still be in use there
            copy = pinned.to(self._device, non_blocking=True)
        current.wait_stream(self._copying)
        return record_stream(copy, current)

    def capturing(self) -> bool:
        """Whether the calls of this moment go into a graph instead of to the device."""
        if not self._streams:
            return False
        if self._depth:
            return self.captures
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Wait, within it, for the device to do all earlier calls: the host can then touch their memory."""
        if self._streams:
            torch.cuda.current_stream(self._device).synchronize()

    def drain(self) -> None:
        """Wait for the device to do all calls; none comes after."""
        if self._end is not None:
            self._end.synchronize()

    def close(self) -> None:
        """Before the memory is freed, on the stream of the first call: let that stream wait for all later calls.

        Otherwise the allocator could reuse the memory while another stream still works on it.
        """
        if self._home is None or self._end is None or self._last == self._home:
            return
        with torch.cuda.stream(self._home):
            # a stream under capture cannot wait; the captured work runs much later
            if not torch.cuda.is_current_stream_capturing():
                self._home.wait_event(self._end)
