"""How calls are timed on a GPU: graphs of calls, what is done where one cannot be captured, and empty caches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench_records import GPU, Capture, Patch
from fake_cuda import FakeCuda
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_replay.bench import measure as timing
from gpu_replay.bench.measure import CALLS_PER_GRAPH, Plan, Run, Timing, captured, flush_bytes
from gpu_replay.bench.operations import Case
from gpu_replay.bench.records import Record
from gpu_replay.console.progress import Progress

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def fixed_clock(monkeypatch: Patch, nanoseconds: int) -> None:
    """Every call takes the same time."""

    def clock(call: Callable[[], object], prepare: Callable[[], object], repetitions: int) -> np.ndarray:
        for _ in range(repetitions):
            prepare()
            call()
        return np.full(repetitions, nanoseconds, dtype=np.int64)

    monkeypatch.setattr(timing, "clock_for", lambda device: clock)
    # a collection of the whole heap takes longer than the test
    monkeypatch.setattr(timing.gc, "collect", int)


def timed(bound: dict[str, Any], way: timing.How, rounds: int = 1, flush: int = 0) -> dict[str, Record]:
    """The records of one case timed in one way."""
    plan = Plan(warmup=0, seconds=0, fewest=3, most=3)
    run = Run("gpu", CUDA, plan, GPU, 1e9, False, versions={}, rounds=rounds, way=way)
    with Progress(1, "test") as progress:
        records = run.timed(Case("sample", 1000, 32), bound, progress, flush)
        return {each.implementation: each for each in records}


@pytest.mark.parametrize("refuses", [False, True])
def test_a_call_is_replayed_or_else_timed_by_events(refuses: bool, monkeypatch: Patch, capsys: Capture) -> None:
    cuda = FakeCuda().install(monkeypatch)
    cuda.refusal = "operation not permitted when stream is capturing\nand more that is not shown" if refuses else None
    fixed_clock(monkeypatch, 250_000)

    def call() -> None:
        cuda.work("call")

    def prepare() -> None:
        assert not cuda.is_current_stream_capturing()
        cuda.work("prepare")

    found = timed({"ours": (call, prepare)}, "graph")["ours"]
    log = [name for name, _ in cuda.done]
    assert log[0] == "prepare"
    assert log.count("call") >= CALLS_PER_GRAPH
    assert found.repetitions == 3
    # a capture that failed leaves nothing behind
    assert (cuda.is_clean(), cuda.current) == (True, cuda.default)
    if refuses:
        # a call that is no graph does its work once, and is prepared each time
        assert ((found.timing, found.median), log[-2:]) == (("events", 250.0), ["prepare", "call"])
        assert "ours is timed by events, since it cannot be captured: operation not" in capsys.readouterr().err
    else:
        # nothing is prepared any more, since a graph works on what stays; each replay is queued behind a sleep
        assert ((found.timing, found.median), log.count("prepare")) == (("graph", 250.0 / CALLS_PER_GRAPH), 1)
        assert log[-1 - CALLS_PER_GRAPH :] == ["sleep"] + ["call replayed"] * CALLS_PER_GRAPH
        # caches cannot be flushed between the calls of one graph
        monkeypatch.setattr(timing.torch, "empty", lambda size, **where: torch.zeros(size))
        assert timed({"ours": (call, prepare)}, "graph", flush=4096)["ours"].median == 250.0


def test_a_flush_is_twice_the_last_cache(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 * 2**20))
    assert flush_bytes(CUDA) == 100 * 2**20
    assert flush_bytes(CPU) >= 2**16


def test_a_flush_ends_with_a_read_so_that_nothing_is_written_back_during_the_call() -> None:
    log: list[str] = []

    class Logged(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            log.append(func.overloadpacket.__name__)
            assert log[-1] == "empty" or args[0].nbytes == 4096
            return func(*args, **(kwargs or {}))

    with Logged():
        timing.measure(
            lambda: log.append("call"),
            prepare=lambda: log.append("prepare"),
            plan=Plan(0, 0, fewest=2, most=2, flush=4096),
            device=CPU,
        )
    assert log == ["empty"] + ["prepare", "zero_", "sum", "call"] * 3


def test_several_implementations_are_interleaved(monkeypatch: Patch) -> None:
    log: list[str] = []

    def watched(call: Callable[[], object], *, plan: Plan, **arguments: Any) -> Timing:
        assert plan.fewest == 1
        call()
        return Timing(np.array([1000]), 1)

    monkeypatch.setattr(timing, "measure", watched)
    found = timed({name: ((lambda name=name: log.append(name)), int) for name in ("a", "b")}, "events", rounds=3)
    assert log == ["a", "b"] * 3
    assert {(each.repetitions, each.warmup, each.timing) for each in found.values()} == {(3, 3, "events")}


# on a GPU


@pytest.mark.gpu
def test_a_graph_of_calls_does_them_all() -> None:
    count = torch.zeros(1, dtype=torch.int64, device="cuda")
    replay, before = captured(lambda: count.add_(1), CUDA, 5), int(count)
    replay()
    assert int(count) == before + 5
