"""Timing of single calls.

A measurement is warmed up, then repeated, and each repetition is timed by itself, so that quantiles show the
distribution and not only its mean. On the CPU the clock is `perf_counter_ns`; on a GPU it is a pair of CUDA events
around each call, read after the last one, so that no repetition waits for the device. A call may be a replayed CUDA
graph of several calls: the time is then device time alone, without Python and launch overhead.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from gpu_replay.graphs.cuda_graph import captured_into

Call = Callable[[], object]
# how a call is timed: by the host's clock, between CUDA events, or between events around a replayed graph of calls
How = Literal["host", "events", "graph"]
# calls before a capture: they compile, autotune and allocate what is allocated once
WARM_UPS = 3
# calls per graph: the same number for all, so that each time contains the same share of a replay's cost; one call if
# caches must be flushed before each
CALLS_PER_GRAPH = 16
# device cycles slept before the first event of a replay, so that the replay is queued when the event is reached
_SLEEP = 100_000
# assumed bytes of the last-level cache if the system does not report them
_ASSUMED_CACHE = 2**25


@dataclass(frozen=True)
class Plan:
    """How much to repeat.

    warmup:  seconds of calls that are not recorded.
    seconds: seconds of recorded calls, as estimated from the warm-up.
    fewest:  minimum number of repetitions, however long they take.
    most:    maximum number of repetitions.
    flush:   bytes overwritten before every repetition, to empty the caches; 0 leaves the caches as earlier calls left
             them, as in a training loop.
    """

    warmup: float = 0.15
    seconds: float = 0.6
    fewest: int = 100
    most: int = 20_000
    flush: int = 0

    def split(self, rounds: int) -> Plan:
        """One of so many rounds that together do what this plan says."""
        fewest = -(-self.fewest // rounds)
        return replace(self, warmup=self.warmup / rounds, seconds=self.seconds / rounds, fewest=fewest)


@dataclass(frozen=True)
class Timing:
    """The times of all repetitions.

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
        """One timing of several rounds."""
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


# (repetitions,) int64 nanoseconds of a call, with a preparation before each, outside the measured time
Clock = Callable[[Call, Call, int], np.ndarray]


def host_clock(call: Call, prepare: Call, repetitions: int) -> np.ndarray:
    """Wall-clock time. Reading the clock adds about 0.1 µs, which is not subtracted."""
    now = time.perf_counter_ns
    elapsed = np.empty(repetitions, dtype=np.int64)
    for i in range(repetitions):
        prepare()
        start = now()
        call()
        elapsed[i] = now() - start
    return elapsed


def cuda_clock(call: Call, prepare: Call, repetitions: int) -> np.ndarray:
    """Time between two CUDA events around each call, on the current stream; one synchronisation, after the last."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for start, end in pairs:
        prepare()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return np.array([round(start.elapsed_time(end) * 1e6) for start, end in pairs], dtype=np.int64)


def clock_for(device: torch.device) -> Clock:
    """CUDA events on a GPU, the host's clock elsewhere."""
    return cuda_clock if device.type == "cuda" else host_clock


def measure(call: Call, *, prepare: Call, plan: Plan, device: torch.device, calls: int = 1) -> Timing:
    """Warm up, then time as many repetitions as the plan has seconds for.

    call:    what is measured.
    prepare: runs before each repetition, outside the measured time.
    calls:   how often `call` does what is measured: the time of a repetition is divided by it.
    """
    clock = clock_for(device)
    ready = _flushing(prepare, plan.flush, device) if plan.flush else prepare
    warmup, spent, whole = 0, 0, 0.0
    budget = time.perf_counter() + plan.warmup
    while warmup < 3 or time.perf_counter() < budget:
        # the last warm-up calls decide the estimate: the first ones load caches and code
        began = time.perf_counter()
        spent = int(clock(call, ready, 1)[0])
        whole = time.perf_counter() - began
        warmup += 1
    gc.collect()
    repetitions = int(plan.seconds * 1e9 / max(spent, 1))
    if plan.flush:
        # emptying caches may take a thousand times as long as the call
        repetitions = min(repetitions, int(4 * plan.seconds / whole))
    repetitions = min(plan.most, max(plan.fewest, repetitions))
    return Timing(clock(call, ready, repetitions) // calls, warmup)


class NotCaptured(Exception):
    """A call that cannot go into a CUDA graph; the message says why in one line."""


def captured(call: Call, device: torch.device, calls: int) -> Call:
    """A function that replays `calls` calls of `call` as one CUDA graph.

    call: works on tensors that stay allocated while the graph lives, and does not synchronise.

    Raises NotCaptured where it does something that cannot be captured.
    """
    with torch.cuda.device(device):
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                call()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with captured_into(graph, side, device):
                for _ in range(calls):
                    call()
        except RuntimeError as error:
            raise NotCaptured(str(error).strip().splitlines()[0]) from error
    replay: Call = graph.replay
    return replay


def queue_ahead() -> None:
    """Keep the device busy for about 50 µs, while the host submits what is to be timed."""
    torch.cuda._sleep(_SLEEP)


def flush_bytes(device: torch.device) -> int:
    """Bytes to overwrite in order to flush the device's last-level cache: twice its size."""
    if device.type == "cuda":
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    else:
        cache = _last_cache_of_cpu()
    return 2 * (cache or _ASSUMED_CACHE)


def _last_cache_of_cpu() -> int:
    """Bytes of the largest cache that Linux reports, 0 where it reports none."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes)


def _flushing(prepare: Call, size: int, device: torch.device) -> Call:
    scratch = torch.empty(size, dtype=torch.uint8, device=device)

    def prepare_and_flush() -> None:
        prepare()
        scratch.zero_()

    return prepare_and_flush


def copy_bandwidth(device: torch.device, *, nbytes: int = 2**28, repetitions: int = 7) -> float:
    """Bytes a second, read and written together, of copying a tensor: the roof of all memory-bound work.

    The median of several copies between two tensors of at least 256 MiB by default, far beyond any cache.
    """
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    clock = clock_for(device)
    clock(lambda: target.copy_(source), lambda: None, 2)
    elapsed = clock(lambda: target.copy_(source), lambda: None, repetitions)
    return 2 * nbytes / (float(np.median(elapsed)) / 1e9)
