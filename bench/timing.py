"""How long one call takes: the only file that reads a clock.

A measurement is warmed up, then repeated, each repetition timed by itself, so that quantiles say how calls are spread
and not only their mean. On the CPU the clock is `perf_counter_ns`; on a GPU it is a pair of CUDA events around each
call, read after the last one, so that no repetition waits for the device. A call may be a replayed CUDA graph of
several calls, which leaves the time of the device alone, without that of Python and of launching.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

Call = Callable[[], object]
# how a call is timed: by the host's clock, between CUDA events, or between events around a replayed graph of calls
How = Literal["host", "events", "graph"]
# calls before a capture: they compile, choose algorithms and make what is made once
WARM_UPS = 3
# a graph holds as many calls as take about so many nanoseconds, and no more than so many
_GRAPH_NANOSECONDS, _GRAPH_CALLS = 500_000, 32
# a cache that nobody describes
_ASSUMED_CACHE = 2**25


@dataclass(frozen=True)
class Plan:
    """How much to repeat.

    warmup:  seconds of calls that are not recorded.
    seconds: seconds of recorded calls, as estimated from the warm-up.
    fewest:  repetitions at least, whatever they take.
    most:    repetitions at most.
    flush:   bytes overwritten before every repetition, to empty the caches; 0 leaves them as the calls before did,
             which is how a training loop finds them.
    """

    warmup: float = 0.15
    seconds: float = 0.6
    fewest: int = 100
    most: int = 20_000
    flush: int = 0


@dataclass(frozen=True)
class Timing:
    """What the clock saw.

    nanoseconds: (repetitions,) int64, in the order in which they ran.
    warmup:      calls before the first recorded one.
    """

    nanoseconds: np.ndarray
    warmup: int

    @property
    def repetitions(self) -> int:
        """Recorded calls."""
        return int(self.nanoseconds.size)

    @classmethod
    def joined(cls, parts: Sequence[Timing]) -> Timing:
        """One timing of several parts."""
        return cls(np.concatenate([part.nanoseconds for part in parts]), sum(part.warmup for part in parts))

    def microseconds(self) -> dict[str, float]:
        """The quantiles p10, p50 and p90 in microseconds."""
        return quantiles(self.nanoseconds / 1000)


def quantiles(values: np.ndarray) -> dict[str, float]:
    """p10, p50 (the median) and p90 of (n,) values, linear between neighbours."""
    if values.size == 0:
        raise ValueError("quantiles of nothing: measure at least one repetition.")
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
    return {"p10": float(low), "p50": float(middle), "p90": float(high)}


class Clock(Protocol):
    """Times each of several calls."""

    def run(self, call: Call, prepare: Call, repetitions: int) -> np.ndarray:
        """(repetitions,) int64 nanoseconds of `call`, with `prepare` before each, outside the measured time."""


class HostClock:
    """Wall-clock time of the calling thread's work."""

    def run(self, call: Call, prepare: Call, repetitions: int) -> np.ndarray:
        """See Clock. The clock itself adds about 0.1 µs, which is not subtracted."""
        now = time.perf_counter_ns
        elapsed = np.empty(repetitions, dtype=np.int64)
        for i in range(repetitions):
            prepare()
            start = now()
            call()
            elapsed[i] = now() - start
        return elapsed


class CudaClock:
    """Time between two CUDA events around each call, on the current stream."""

    def run(self, call: Call, prepare: Call, repetitions: int) -> np.ndarray:
        """See Clock. The device is waited for once, after the last call."""
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)
        ]
        for start, end in pairs:
            prepare()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return np.array([round(start.elapsed_time(end) * 1e6) for start, end in pairs], dtype=np.int64)


def clock_for(device: torch.device) -> Clock:
    """CUDA events on a GPU, the host's clock elsewhere."""
    return CudaClock() if device.type == "cuda" else HostClock()


def measure(call: Call, *, prepare: Call, plan: Plan, device: torch.device, calls: int = 1) -> Timing:
    """Warm up, then time as many repetitions as the plan has seconds for.

    call:    what is measured.
    prepare: runs before each repetition, outside the measured time.
    calls:   how often `call` does what is measured: the time of a repetition is divided by it.
    """
    clock = clock_for(device)
    prepare = _with_flush(prepare, plan.flush, device)
    warmup, spent, whole = 0, 0, 0.0
    budget = time.perf_counter() + plan.warmup
    while warmup < 3 or time.perf_counter() < budget:
        # the last warm-up calls decide the estimate: the first ones load caches and code
        began = time.perf_counter()
        spent = int(clock.run(call, prepare, 1)[0])
        whole = time.perf_counter() - began
        warmup += 1
    gc.collect()
    repetitions = int(plan.seconds * 1e9 / max(spent, 1))
    if plan.flush:
        # emptying caches may take a thousand times as long as the call
        repetitions = min(repetitions, int(4 * plan.seconds / whole))
    repetitions = min(plan.most, max(plan.fewest, repetitions))
    return Timing(clock.run(call, prepare, repetitions) // calls, warmup)


class NotCaptured(Exception):
    """A call that cannot go into a CUDA graph; the message says why in one line."""


def captured(call: Call, device: torch.device, calls: int) -> Call:
    """What replays `calls` calls of `call` as one CUDA graph.

    call: works on tensors that stay where they are while the graph lives, and waits for nothing.

    Raises NotCaptured where it does something that a graph cannot hold.
    """
    with torch.cuda.device(device):
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                call()
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    call()
        except RuntimeError as error:
            raise NotCaptured(str(error).strip().splitlines()[0]) from error
    replay: Call = graph.replay
    return replay


def calls_per_graph(call: Call, device: torch.device, *, cold: bool) -> int:
    """Calls that one graph holds: enough to be timed well; one where caches must be empty before each."""
    if cold:
        return 1
    fastest = int(clock_for(device).run(call, lambda: None, WARM_UPS).min())
    return max(1, min(_GRAPH_CALLS, _GRAPH_NANOSECONDS // max(1, fastest)))


def flush_bytes(device: torch.device) -> int:
    """Bytes to overwrite in order to empty the last cache of the device: twice its size."""
    if device.type == "cuda":
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    else:
        cache = _last_cache_of_cpu()
    return 2 * (cache or _ASSUMED_CACHE)


def _last_cache_of_cpu() -> int:
    """Bytes of the largest cache that Linux describes, 0 where it describes none."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes)


def _with_flush(prepare: Call, size: int, device: torch.device) -> Call:
    if size == 0:
        return prepare
    scratch = torch.empty(size, dtype=torch.uint8, device=device)

    def prepare_and_flush() -> None:
        prepare()
        scratch.zero_()

    return prepare_and_flush


def copy_bandwidth(device: torch.device, *, nbytes: int = 2**28, repetitions: int = 7) -> float:
    """Bytes a second, read and written together, of copying a tensor of so many bytes: the roof of all memory work.

    The median of several copies between two tensors of at least 256 MiB by default, far beyond any cache.
    """
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    clock = clock_for(device)
    clock.run(lambda: target.copy_(source), lambda: None, 2)
    elapsed = clock.run(lambda: target.copy_(source), lambda: None, repetitions)
    return 2 * nbytes / (float(np.median(elapsed)) / 1e9)
