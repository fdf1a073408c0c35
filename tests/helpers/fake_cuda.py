"""CUDA streams, events and graphs that only remember what must have happened before what.

For tests of the order in which work reaches a GPU, without one. `work` stands for anything that is sent to the device.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

from gpu_replay.graphs import stream_order

NAMES = (
    *("Event", "CUDAGraph", "Stream", "current_stream", "current_device", "stream", "device"),
    *("graph", "graph_pool_handle", "is_current_stream_capturing", "_sleep", "cudart", "check_error"),
)


class Point:
    """A point in the work of a stream; `seen` is all that has ended there."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.seen: set[str] = set()

    def synchronize(self) -> None:
        self._cuda.waited |= self.seen


class FakeStream(Point):
    """Work in order; the next work on it begins at its point."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(cuda)
        self.captures: FakeGraph | None = None
        self.cuda_stream = id(self)

    def wait_event(self, event: FakeEvent) -> None:
        if (self.captures is not None) != event.captured:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        self.seen |= event.seen

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent(self._cuda)
        event.record(other)
        self.wait_event(event)


class FakeEvent(Point):
    captured = False

    def record(self, stream: FakeStream) -> None:
        self.seen = set(stream.seen)
        self.captured = stream.captures is not None


class FakeGraph:
    """The work that was captured; each replay is work of its own."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.pool: int | None = None
        self.generators: list[Any] = []
        self._names: list[str] = []

    def register_generator_state(self, generator: Any) -> None:
        assert self._cuda.current.captures is None
        self.generators.append(generator)

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
        # all that the host has waited for
        self.waited: set[str] = set()
        # what the end of a capture of more than a sleep says
        self.refusal: str | None = None
        self.captures = 0
        # as torch's generator, others that are registered and the allocator are outside of a capture
        self.generator_captures = False
        self.capturing_generators: list[Any] = []
        self.pools: set[int] = set()
        self.recorded_pools: set[int] = set()
        self._handles = itertools.count(1)
        # bytes of pinned memory by its address, what the host had waited for when some was unpinned, and what the
        # driver answers
        self.pinned: dict[int, int] = {}
        self.unpinned: list[set[str]] = []
        self.answer = self.error = 0

    def install(self, patch: pytest.MonkeyPatch) -> FakeCuda:
        for name in NAMES:
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(stream_order, "_stream_number", stream_order.number_of_current_stream)
        # what was made before is of another machine
        patch.setattr(stream_order, "_of_thread", threading.local())
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            patch.setattr(torch._C, name, getattr(self, name), raising=False)
        return self

    def is_clean(self) -> bool:
        """Whether nothing is left of captures but the graphs that were made."""
        left = self.generator_captures or self.capturing_generators or self.recorded_pools
        return not left and self.current.captures is None

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
        return FakeEvent(self)

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

    def device(self, device: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def current_device(self) -> int:
        return 0

    def graph_pool_handle(self) -> int:
        return next(self._handles)

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        # portable and mapped
        assert flags == 3
        # kept by the runtime until a launch looks for what failed before it
        self.error = self.answer
        if not self.answer:
            self.pinned[address] = nbytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        assert not self.is_current_stream_capturing()
        del self.pinned[address]
        self.unpinned.append(set(self.waited))
        return 0

    def check_error(self, answer: int) -> None:
        if answer:
            raise RuntimeError(f"CUDA driver error: {answer}")

    def _sleep(self, cycles: int) -> None:
        error, self.error = self.error, 0
        self.check_error(error)
        self.work("sleep")

    @contextmanager
    def graph(
        self, graph: FakeGraph, *, pool: int = 0, stream: FakeStream | None = None, capture_error_mode: str
    ) -> Iterator[None]:
        # other threads may use the device
        assert capture_error_mode == "thread_local"
        recovering = stream is None
        stream, pool = stream or self.Stream(), pool or self.graph_pool_handle()
        self.captures += not recovering
        before, self.current = self.current, stream
        stream.captures, graph.pool = graph, pool
        self.generator_captures = True
        self.capturing_generators += [each for each in graph.generators if each not in self.capturing_generators]
        self.pools.add(pool)
        self.recorded_pools.add(pool)
        try:
            yield
        finally:
            stream.captures = None
            # as torch does, which then leaves all the rest as it is
            if self.refusal is not None and not recovering:
                raise RuntimeError(self.refusal)
            self.recorded_pools.remove(pool)
            self.generator_captures = False
            self.capturing_generators = [each for each in self.capturing_generators if each not in graph.generators]
            self.current = before

    def _cuda_endAllocateToPool(self, device: int, pool: int) -> None:
        if pool not in self.recorded_pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recorded_pools.remove(pool)

    def _cuda_releasePool(self, device: int, pool: int) -> None:
        self.pools.remove(pool)


@pytest.fixture(name="cuda")
def cuda_fixture(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """What stands for `torch.cuda` during the test."""
    return FakeCuda().install(monkeypatch)
