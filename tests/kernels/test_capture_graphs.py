"""`buffer.capture` on a GPU that is not there: when a step is captured, what is replayed, what the host then knows.

Streams and graphs only remember what they were given (fake_cuda.py).
"""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import FakeCuda
from freed import collector_off_fixture as collector_off_fixture
from interpreted import run_rehearsed
from torch import Tensor

from gpu_replay import Batch, validation
from gpu_replay.base.buffer import Buffer
from gpu_replay.graphs import capture
from gpu_replay.graphs.stream_order import StreamOrder

CUDA = torch.device("cuda")


class Pretended(Buffer):
    """A buffer whose calls are nothing but work on the device."""

    device = CUDA

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._engine: Any = mock.Mock()
        self._sampling = self._engine
        self._stream_order = StreamOrder(CUDA)
        self._lock = threading.RLock()
        self.empty = False

    def _make_engine(self) -> Any:
        """Made here, not by `Buffer`."""

    def _sizes(self) -> dict[str, int]:
        return {}

    def _call(self, name: str) -> None:
        with self._lock, self._stream_order:
            self._cuda.work(name)

    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        self._check_enough(batch_size)
        self._call("sample")
        return Batch({"key": torch.arange(batch_size)})

    def update_priorities(self, keys: Any, priorities: Any) -> None:
        self._call("update")

    def add(self, name: str = "add") -> None:
        self._call(name)
        if self._stream_order.capturing() and self._stream_order.recorded is not None:
            self._stream_order.recorded += 5

    def _check_enough(self, batch: int) -> None:
        if self.empty:
            raise RuntimeError("the buffer holds nothing")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    # these priorities are not on a GPU
    monkeypatch.setattr(capture, "_check", lambda *_: None)
    return FakeCuda().install(monkeypatch)


def test_a_step_runs_as_it_is_a_few_times_and_is_replayed_from_then_on(cuda: FakeCuda) -> None:
    buffer, learned = Pretended(cuda), []

    def learn(batch: Batch) -> tuple[Tensor, Tensor]:
        learned.append(len(learned))
        cuda.work("learn")
        return torch.ones(4), batch.key

    step = buffer.capture(4, learn, warm_ups=2)
    parts = ["sample", "learn", "update"]
    for _ in range(2):
        cuda.work("mine")
        step()
        cuda.work("yours")
        # aside, but after what came before the call and before what comes after it
        assert "mine" in cuda.before("sample")
        assert set(parts) <= cuda.before("yours")
    assert (step.captured, step.replays) == (False, 0)
    cuda.done.clear()
    # the capture runs nothing, so a replay follows at once: one call, one step
    first = step()
    assert [name for name, _ in cuda.done] == [f"{part} replayed" for part in parts]
    assert (step.captured, step.replays) == (True, 1)
    assert step() is first
    assert [name for name, _ in cuda.done] == [f"{part} replayed" for part in parts] * 2
    assert step.replays == 2
    assert (cuda.captures, len(learned)) == (1, 3)


def test_a_replay_has_its_turn_among_the_calls_of_other_streams(cuda: FakeCuda) -> None:
    buffer, side = Pretended(cuda), cuda.Stream()
    step = buffer.capture(4, lambda batch: torch.ones(4), warm_ups=1)
    step()
    step()
    for turn in range(3):
        with cuda.stream(side):
            cuda.work(f"observed {turn}")
            buffer.add(f"add {turn}")
            cuda.work(f"acting {turn}")
        step()
        assert "update replayed" in cuda.before(f"add {turn}")
        came_after = cuda.before("sample replayed")
        assert {f"observed {turn}", f"add {turn}"} <= came_after
        assert f"acting {turn}" not in came_after


def test_a_call_that_raised_was_no_warm_up(cuda: FakeCuda) -> None:
    buffer = Pretended(cuda)
    step = buffer.capture(4, lambda batch: None, warm_ups=1)
    buffer.empty = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="holds nothing"):
            step()
    buffer.empty = False
    step()
    assert not step.captured
    # nor is there a capture, or a replay, of a draw from nothing
    for captured in (False, True):
        buffer.empty = True
        with pytest.raises(RuntimeError, match="^the buffer holds nothing$"):
            step()
        buffer.empty = False
        assert (step.captured, cuda.captures) == (captured, int(captured))
        step()
    assert step.replays == 2


CAUSE = RuntimeError("operation not permitted when stream is capturing\nand more that nobody reads")
FAILURES: dict[str, tuple[Exception | None, str | None, type[Exception], str]] = {
    # what learn raises while it is captured, what the end of such a capture raises, and what is raised then
    "waits for the device": (
        *(CAUSE, "operation failed due to a previous error during capture", RuntimeError),
        r"^learn cannot be captured as a CUDA graph: operation not permitted when stream is capturing\. .*item",
    ),
    "fails at its end": (None, "capture was invalidated", RuntimeError, "as a CUDA graph: capture was invalidated"),
    # torch ends this capture as if it had succeeded, and its graph releases the memory itself
    "raises": (KeyError("mine"), None, KeyError, "mine"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_capture_that_fails_leaves_nothing_behind(failure: str, cuda: FakeCuda) -> None:
    raised, refusal, error, message = FAILURES[failure]
    buffer, fails = Pretended(cuda), True

    def learn(batch: Batch) -> None:
        if torch.cuda.is_current_stream_capturing() and raised is not None and fails:
            buffer.add()
            raise raised

    step = buffer.capture(4, learn, warm_ups=1)
    step()
    cuda.refusal = refusal
    with pytest.raises(error, match=message) as caught:
        step()
    assert raised in (None, caught.value, caught.value.__cause__)
    assert (step.captured, step.replays, buffer._engine.count_added.call_count) == (False, 0, 0)
    assert cuda.current is cuda.default
    assert cuda.is_clean()
    assert buffer._stream_order.recorded is None
    # the memory of a capture that failed at its end is free again
    assert (1 in cuda.pools) == (refusal is None)
    cuda.refusal, fails = None, False
    step()
    assert step.captured


@pytest.mark.parametrize("refusal", [None, "capture was invalidated"])
def test_generators_that_learn_draws_from_are_captured_and_come_back(
    cuda: FakeCuda, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # this one is not on a GPU
    monkeypatch.setattr(validation, "check_generators", lambda generators, device: generators)
    generator, within = torch.Generator(), []

    def learn(batch: Batch) -> None:
        within.append(list(cuda.capturing_generators))

    step = Pretended(cuda).capture(4, learn, warm_ups=1, generators=[generator])
    step()
    cuda.refusal = refusal
    with pytest.raises(RuntimeError, match=refusal) if refusal else nullcontext():
        step()
    assert within == [[], [generator]]
    assert cuda.is_clean()


@pytest.mark.parametrize("refusal", [None, "capture was invalidated"])
@pytest.mark.usefixtures("collector_off")
def test_a_captured_step_that_is_dropped_lets_its_buffer_go(cuda: FakeCuda, refusal: str | None) -> None:
    buffer = Pretended(cuda)
    step = buffer.capture(4, lambda batch: None, warm_ups=1)
    step()
    cuda.refusal = refusal
    with suppress(RuntimeError):
        step()
    assert step.captured == (refusal is None)
    kept = [weakref.ref(each) for each in (buffer, step)]
    del buffer, step
    assert [each() for each in kept] == [None, None]


# tests of a GPU, and which of their cases are rehearsed by default
REHEARSED = {
    "cannot_be_captured": "item or host",
    "no_call_waits": "transitions-everything or next_step-uniform",
    "captured_steps": "transitions-uniform",
    "replayed_cycle": "goals-combined-rank",
    "host_counts": "host",
    "are_dropped": "graph",
}


def test_no_call_waits_and_no_kernel_is_first_launched_while_a_graph_is_captured(full: bool) -> None:
    """Tests of `test_gpu.py` in a rehearsal, in small: there a capture refuses what the driver refuses, a kernel that
    is launched for the first time, and outside of graphs too what would wait for the device is refused."""
    more = "item or host or everything or uniform or combined-rank" if full else ""
    chosen = " or ".join(f"({name} and ({more or case}))" for name, case in REHEARSED.items())
    assert run_rehearsed("tests/kernels/test_gpu.py", chosen) >= (52 if full else 8)
