"""How long one call takes: the only file that reads a clock.

A measurement is warmed up, then repeated, each repetition timed by itself, so that quantiles say how calls are spread
and not only their mean. On the CPU the clock is `perf_counter_ns`; on a GPU it is a pair of CUDA events around each
call, read after the last one, so that no repetition waits for the device.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

Call = Callable[[], object]


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


def measure(call: Call, *, prepare: Call, plan: Plan, device: torch.device) -> Timing:
    """Warm up, then time as many repetitions as the plan has seconds for.

    call:    what is measured.
    prepare: runs before each repetition, outside the measured time.
    """
    clock = clock_for(device)
    prepare = _with_flush(prepare, plan.flush, device)
    warmup, spent = 0, 0
    budget = time.perf_counter() + plan.warmup
    while warmup < 3 or time.perf_counter() < budget:
        # the last warm-up calls decide the estimate: the first ones load caches and code
        spent = int(clock.run(call, prepare, 1)[0])
        warmup += 1
    gc.collect()
    repetitions = min(plan.most, max(plan.fewest, int(plan.seconds * 1e9 / max(spent, 1))))
    return Timing(clock.run(call, prepare, repetitions), warmup)


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
