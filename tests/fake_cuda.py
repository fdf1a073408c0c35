"""CUDA streams, events and graphs that only remember what must have happened before what.

For tests of the order in which work reaches a GPU, without one. `work` stands for anything that is sent to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

NAMES = ("Event", "CUDAGraph", "Stream", "current_stream", "stream", "device", "graph", "is_current_stream_capturing")


class FakeStream:
    """Work in order; `seen` is all that ends before the next work on it begins."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.seen: set[str] = set()
        self.captures: FakeGraph | None = None

    def wait_event(self, event: FakeEvent) -> None:
        if (self.captures is not None) != event.captured:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        self.seen |= event.seen

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)


class FakeEvent:
    """A point in the work of a stream."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.captured = False

    def record(self, stream: FakeStream) -> None:
        self.seen = set(stream.seen)
        self.captured = stream.captures is not None


class FakeGraph:
    """The work that was captured; each replay is work of its own."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._names: list[str] = []

    def add(self, name: str) -> None:
        self._names.append(name)

    def replay(self) -> None:
        for name in self._names:
            self._cuda.work(f"{name} replayed")


class FakeCuda:
    """Stands for `torch.cuda` where a test installs it."""

    def __init__(self) -> None:
        self.default = self.current = FakeStream(self)
        # each work with all that it came after
        self.done: list[tuple[str, set[str]]] = []
        # what the next end of a capture says
        self.refusal: str | None = None
        self.captures = 0

    def install(self, patch: pytest.MonkeyPatch) -> FakeCuda:
        for name in NAMES:
            patch.setattr(torch.cuda, name, getattr(self, name))
        return self

    def work(self, name: str) -> None:
        """Send something to the device on the current stream."""
        stream = self.current
        if stream.captures is not None:
            stream.captures.add(name)
            return
        self.done.append((name, set(stream.seen)))
        stream.seen.add(name)

    def before(self, name: str) -> set[str]:
        """All that the last work of this name came after."""
        return next(seen for each, seen in reversed(self.done) if each == name)

    # what torch.cuda has

    def Event(self) -> FakeEvent:
        return FakeEvent()

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def Stream(self, device: Any = None) -> FakeStream:
        return FakeStream(self)

    def current_stream(self, device: Any = None) -> FakeStream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.current.captures is not None

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, graph: FakeGraph, *, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        # other threads may use the device
        assert capture_error_mode == "thread_local"
        self.captures += 1
        before, self.current = self.current, stream
        stream.captures = graph
        try:
            yield
        finally:
            stream.captures = None
            # as torch does, which then leaves the stream where it is
            if self.refusal is not None:
                raise RuntimeError(self.refusal)
            self.current = before
