"""Orders one buffer's calls across CUDA streams.

The buffer's lock orders the calls on the host. The device runs the work of a call later, on the stream that is current
in its thread, unordered with other streams: therefore each call waits for the event at the end of the one before. The
host waits for nothing, and work that other libraries put on those streams is not waited for either.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gpu_replay.validation import record_stream

_INTERRUPTED = (
    "a `load_state_dict` of this buffer was interrupted, and so was the clear after it: rows may be mixtures of two "
    "states. Call clear(), or load a state that was saved."
)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.streams: dict[tuple[int, str], torch.cuda.Stream] = {}


_of_thread = _OfThread()


def side_stream(device: torch.device, use: Literal["captures", "copies"]) -> torch.cuda.Stream:
    """A stream beside the current one: for each use one of each device and thread.

    A new one each time would soon be one that others use: torch has 32, which it hands out again and again.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    streams, key = _of_thread.streams, (index, use)
    if key not in streams:
        streams[key] = torch.cuda.Stream(device)
    return streams[key]


@dataclass
class Recorded:
    """The rows that one replay of a graph adds, which the host must count."""

    rows: int = 0


class StreamOrder(AbstractContextManager[None]):
    """Orders the calls of one buffer on its device; the caller holds the buffer's lock. On a CPU it does nothing.

    device:      of the buffer.
    interrupted: whether rows of the buffer may be mixtures of two, because a load ended half-way: calls then raise
                 RuntimeError.

    Calls captured into a CUDA graph are not ordered here: they run whenever the graph is replayed, in the order of the
    captured streams. A replay counts as one call where its owner wraps it in `ordered`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch takes half the time for a number
        self._index = device.index
        self._streams = device.type == "cuda"
        self.interrupted = self._mending = False
        # counts the rows that captured calls add, where the buffer is notified of replays
        self.recorded: Recorded | None = None
        # nested `ordered` blocks, and the device and the stream of the outermost one
        self._depth = 0
        self._current: tuple[torch.cuda.device, torch.cuda.Stream] | None = None
        self._captures = False
        # the stream of the last call and the event at its end, and the stream that the memory belongs to
        self._last: torch.cuda.Stream | None = None
        self._home: torch.cuda.Stream | None = None
        self._end: torch.cuda.Event | None = None
        # where pinned memory was copied since the outermost `ordered` began
        self._copying: torch.cuda.Stream | None = None

    def ordered(self) -> AbstractContextManager[None]:
        """On a GPU, a context that makes the buffer's device current and runs work after all earlier calls.

        The object itself, since a generator takes three times as long to enter and to leave.
        """
        return self

    def __enter__(self) -> None:
        if self.interrupted and not self._mending:
            raise RuntimeError(_INTERRUPTED)
        if not self._streams:
            return
        if self._depth:
            self._depth += 1
            return
        device = torch.cuda.device(self._index)
        device.__enter__()
        try:
            stream = torch.cuda.current_stream(self._index)
            self._captures = torch.cuda.is_current_stream_capturing()
            # a graph cannot wait for an event from outside, nor may anything outside wait for one of its own
            if not self._captures and self._end is not None and self._last != stream:
                stream.wait_event(self._end)
        except BaseException:
            device.__exit__(None, None, None)
            raise
        self._current, self._depth = (device, stream), 1

    def __exit__(self, *error: object) -> None:
        if not self._streams:
            return
        if self._depth > 1 or self._current is None:
            self._depth -= 1
            return
        (device, stream), self._current = self._current, None
        self._depth = 0
        try:
            if not self._captures:
                self._finish(stream)
            if self._copying is not None:
                # from here on the owner of the pinned memory may change it
                copying, self._copying = self._copying, None
                copying.synchronize()
        finally:
            device.__exit__(None, None, None)

    @contextmanager
    def mending(self) -> Iterator[None]:
        """Within it calls are made of an interrupted buffer too. The caller holds the buffer's lock."""
        self._mending = True
        try:
            yield
        finally:
            self._mending = False

    def current(self) -> torch.cuda.Stream | None:
        """The stream that is current in this thread; None on a CPU."""
        return torch.cuda.current_stream(self._index) if self._streams else None

    def copied(self, pinned: Tensor) -> Tensor:
        """Pinned memory as a tensor on the device, within `ordered`, which ends when the copy is made.

        The copy waits for nothing that is queued on the device: neither does the host.
        """
        current = torch.cuda.current_stream(self._device)
        self._copying = side_stream(self._device, "copies")
        with torch.cuda.stream(self._copying):
            # allocated here: memory of another stream may still be in use there
            copy = pinned.to(self._device, non_blocking=True)
        current.wait_stream(self._copying)
        return record_stream(copy, current)

    def _finish(self, stream: torch.cuda.Stream) -> None:
        if self._end is None:
            self._end, self._home = torch.cuda.Event(), stream
        self._end.record(stream)
        self._last = stream

    def capturing(self) -> bool:
        """Whether the calls of this moment go into a graph instead of to the device."""
        if not self._streams:
            return False
        if self._depth:
            return self._captures
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def settle(self) -> None:
        """Wait, within `ordered`, for the device to do all earlier calls: the host can then touch their memory."""
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
