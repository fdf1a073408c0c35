"""Times calls, and makes records of cases on subjects whose answers are right.

A measurement is warmed up, then repeated, and each repetition is timed by itself, so that quantiles show the
distribution and not only its mean. On the CPU the clock is `perf_counter_ns`; on a GPU it is a pair of CUDA events
around each call, read after the last one, so that no repetition waits for the device. A call may be a replayed CUDA
graph of several calls: the time is then device time alone, without Python and launch overhead.

Compared subjects are interleaved, case by case and in several rounds: background load then hits all of them alike, and
their ratio is more reliable than either time.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, groupby, islice, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.console.progress import Progress
from gpu_replay.graphs.capture import CaptureError, capture_into
from gpu_replay.graphs.stream_order import side_stream

from . import subjects
from .operations import OURS, Case
from .records import CannotMeasure, DeviceLost, Environment, Record
from .subjects import POOL, Bound, Call, Subject

Maker = Callable[[int], Subject]
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

    warmup:  seconds of calls that are not recorded, three at least; 0 for one call.
    seconds: seconds of recorded calls, as estimated from the warm-up.
    fewest:  minimum number of repetitions, however long they take.
    most:    maximum number of repetitions.
    flush:   bytes overwritten, then read, before every repetition, to empty the caches; 0 leaves the caches as earlier
             calls left them, as in a training loop.
    """

    warmup: float = 0.15
    seconds: float = 0.6
    fewest: int = 100
    most: int = 20_000
    flush: int = 0


class Timing(NamedTuple):
    """(repetitions,) int64 nanoseconds in the order in which they ran, and the calls before the first recorded one."""

    nanoseconds: np.ndarray
    warmup: int


def quantiles(values: np.ndarray) -> dict[str, float]:
    """p10, p50 (the median) and p90 of (n,) values, linear between neighbours."""
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
    clock, scratch = clock_for(device), None
    if plan.flush:
        scratch = torch.empty(plan.flush // 8, dtype=torch.int64, device=device)

    def ready() -> None:
        prepare()
        if scratch is not None:
            # a read last: nothing that was written waits in a cache to be written back during the call
            scratch.zero_().sum()

    warmup, spent, whole = 0, 0, 0.0
    budget = time.perf_counter() + plan.warmup
    while warmup < (3 if plan.warmup else 1) or time.perf_counter() < budget:
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


def captured(call: Call, device: torch.device, calls: int) -> Call:
    """A function that replays `calls` calls of `call` as one CUDA graph.

    call: works on tensors that stay allocated while the graph lives, and does not synchronise.

    Raises CaptureError where it does something that cannot be captured.
    """

    graph, side, current = torch.cuda.CUDAGraph(), side_stream(device, "captures"), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(max(WARM_UPS, calls)):
            call()
    current.wait_stream(side)
    with capture_into(graph, side, device):
        for _ in range(calls):
            call()
    return graph.replay


def queue_ahead() -> None:
    """Keep the device busy for about 50 µs, while the host submits what is to be timed."""
    torch.cuda._sleep(_SLEEP)


def flush_bytes(device: torch.device) -> int:
    """Bytes to overwrite in order to flush the device's last-level cache: twice its size."""
    if device.type == "cuda":
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    else:
        # the largest that Linux reports
        texts = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        cache = max([0, *(int(text[:-1]) * 1024 for text in texts if text.endswith("K"))])
    return 2 * (cache or _ASSUMED_CACHE)


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


def make_priorities(batch: int, random: np.random.Generator) -> Tensor:
    """(batch,) float32 absolute TD errors, as a learner would give them."""
    return torch.from_numpy(np.abs(random.standard_normal(batch, dtype=np.float32)))


def bind(operation: str, subject: Subject, batch: int, added: int, device: torch.device) -> Bound:
    """A call of a full subject to measure ("add", "sample", "update", "cycle", "read"), and what to do before each."""
    random, sample, update = np.random.default_rng(1), subject.sample, subject.update
    rows = subject.stream(added, POOL) if added else repeat(None)
    priorities = cycle([make_priorities(batch, random).to(device) for _ in range(POOL)])
    # inputs of the next call: rows, priorities, what was sampled
    given: list[Any] = [None, None, None]

    def prepare() -> None:
        # a copy is as fresh as the tensor that a learner has just computed
        given[:2] = next(rows), next(priorities).clone()
        if operation == "update":
            given[2] = sample(batch)[0]

    def whole_cycle() -> None:
        subject.add(given[0])
        update(sample(batch)[0], given[1])

    def add_and_sample() -> None:
        subject.add(given[0])
        sample(batch)

    calls: dict[str, Call] = {
        "add": lambda: subject.add(given[0]),
        "sample": lambda: sample(batch),
        "update": lambda: update(given[2], given[1]),
        "cycle": whole_cycle,
        "read": add_and_sample,
    }
    return calls[operation], (lambda: None) if operation == "sample" else prepare


def fill(subject: Subject, capacity: int, device: torch.device, *, rounds: int) -> None:
    """Fill the ring past its end, then spread the priorities with up to so many rounds of updates."""
    size = subject.add_size or min(subject.chunk, capacity)
    for rows in islice(subject.stream(size, 16), -(-capacity // size) + 8):
        subject.add(rows)
    random, batch = np.random.default_rng(0), min(subject.chunk, capacity)
    for _ in range(min(rounds, -(-2 * capacity // batch))):
        subject.update(subject.sample(batch)[0], make_priorities(batch, random).to(device))


def check(subject: Subject, implementation: str) -> None:
    """Check that sampled rows belong together and weights are positive; raises CannotMeasure, naming what is wrong."""
    if wrong := subject.wrong(subject.sample(subjects.CHECKED)[1]):
        raise CannotMeasure(f"{implementation} is not measured: {'; '.join(wrong)}.")


@dataclass(frozen=True)
class Run:
    """What all measurements of one run share.

    copy_bandwidth: bytes a second, as timing.copy_bandwidth measures it.
    versions:       of the implementations measured, by name, beside those of the environment.
    rounds:         parts into which the plan's time is split; each measures all subjects.
    way:            how calls are timed; "graph" where they can be captured.
    errors:         a file for a line of JSON for each case that fails.
    """

    suite: str
    device: torch.device
    plan: Plan
    environment: Environment
    copy_bandwidth: float
    quick: bool
    versions: Mapping[str, str | None] = field(default_factory=dict)
    rounds: int = 1
    way: How = "host"
    errors: Path | None = None

    def each(
        self, cases: Iterable[Case], progress: Progress, measured: Callable[[Case], Iterator[Record]]
    ) -> Iterator[Record]:
        """The records of one case after the other; one that fails is reported and the next one is measured.

        Raises DeviceLost where the device answers nothing after a failure.
        """
        for case in cases:
            progress.show(case.name)
            try:
                yield from measured(case)
            except Exception as error:
                self._failed(case, error, progress)
            progress.advance()

    def _failed(self, case: Case, error: Exception, progress: Progress) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, CannotMeasure):
            progress.say("".join(traceback.format_exception(error)))
        progress.say(f"{case.name} failed: {reason}")
        if self.errors is not None:
            self.errors.parent.mkdir(parents=True, exist_ok=True)
            with self.errors.open("a") as file:
                file.write(json.dumps({"case": case.name, "timing": self.way, "error": reason}) + "\n")
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as lost:
                raise DeviceLost(f"the device is lost since {case.name}: {reason}") from lost

    def records(self, cases: Sequence[Case], progress: Progress, makers: Mapping[str, Maker]) -> Iterator[Record]:
        """Measure the cases on all implementations; yields each record as soon as it is known.

        makers: name of an implementation to what makes an empty subject of a capacity, or gives one that is filled.
                Those that raise CannotMeasure or fail their check are reported and left out; a case fails when they are
                the only ones. Captured calls are those of this package alone.
        """
        if self.way == "graph":
            makers = {name: make for name, make in makers.items() if name.startswith(OURS)}
        for _, group in groupby(cases, lambda case: case.capacity):
            full: dict[str, Subject] = {}

            def measured(case: Case, full: dict[str, Subject] = full) -> Iterator[Record]:
                if not full:
                    full.update(self.subjects(case.capacity, makers, progress))
                given = (case.batch, case.added, self.device)
                bound = {name: bind(case.kind.call, subject, *given) for name, subject in full.items()}
                return self.timed(case, bound, progress)

            yield from self.each(group, progress, measured)

    def subjects(self, capacity: int, makers: Mapping[str, Maker], progress: Progress) -> dict[str, Subject]:
        """Full subjects whose answers are right, by name; see `records`."""
        found: dict[str, Subject] = {}
        for name, make in makers.items():
            progress.show(f"filling {name}, {capacity:,} rows")
            try:
                subject = make(capacity)
                if not subject.filled:
                    fill(subject, capacity, self.device, rounds=4 if self.quick else 256)
                    check(subject, name)
                    subject.filled = True
                found[name] = subject
            except CannotMeasure as reason:
                if len(makers) == 1:
                    raise
                progress.say(str(reason))
        return found

    def timed(
        self, case: Case, bound: Mapping[str, Bound], progress: Progress, flush: int = 0, calls: int = 1
    ) -> Iterator[Record]:
        """Time each implementation's call, interleaved with the others; one record each.

        bound: name to the call and what prepares it. Where calls are captured, they are prepared once, before the
               capture: a graph works on tensors that stay. A call that cannot be captured is timed by events, which
               is reported.
        calls: how often a call does what is measured; the record then tells the seconds of all together.
        """
        # one of so many rounds that together do what the plan says
        parted = {name: getattr(self.plan, name) / self.rounds for name in ("warmup", "seconds")}
        plan = replace(self.plan, flush=flush, fewest=-(-self.plan.fewest // self.rounds), **parted)
        ready: dict[str, tuple[Call, Call, int, How]] = {}
        for name, (call, prepare) in bound.items():
            ready[name] = (call, prepare, calls, self.way)
            if self.way == "graph":
                prepare()
                held = 1 if flush else CALLS_PER_GRAPH
                try:
                    ready[name] = (captured(call, self.device, held), queue_ahead, held, "graph")
                except CaptureError as reason:
                    progress.say(f"{name} is timed by events, since it cannot be captured: {reason}")
                    ready[name] = (call, prepare, calls, "events")
        parts: dict[str, list[Timing]] = {name: [] for name in ready}
        for _ in range(self.rounds):
            for name, (call, prepare, each, _) in ready.items():
                parts[name].append(measure(call, prepare=prepare, plan=plan, device=self.device, calls=each))
        for name, timings in parts.items():
            found = np.concatenate([each.nanoseconds for each in timings])
            how = {"warmup": sum(each.warmup for each in timings), "flush": flush, "timing": ready[name][3]}
            seconds = {"seconds": round(float(found.sum()) * calls / 1e9, 6)} if calls > 1 else {}
            yield self.record(case, name, quantiles(found / 1000), found.size * calls, **how, **seconds)

    def record(
        self, case: Case, implementation: str, quantiles: Mapping[str, float], repetitions: int, **more: Any
    ) -> Record:
        """The record of one implementation of one case; `more` holds other fields of Record."""
        version, middle = self.versions.get(implementation), quantiles["p50"]
        versions = {**self.environment.versions, **({implementation: version} if version else {})}
        named = ("operation", "capacity", "batch", "added", "bytes")
        values: dict[str, Any] = {name: getattr(case, name) for name in named}
        values |= {"suite": self.suite, "case": case.name, "fields": dict(case.kind.fields), "quick": self.quick}
        values |= {"implementation": implementation, "repetitions": repetitions, "warmup": 0, "unit": "us"}
        values |= {"quantiles": {name: round(value, 4) for name, value in quantiles.items()}}
        # a rank may get no rows from others
        share = round(case.bytes / (middle / 1e6) / self.copy_bandwidth, 5) if middle else None
        values |= {"copy_bandwidth": round(self.copy_bandwidth), "copy_share": share}
        return Record(**{**values, "environment": replace(self.environment, versions=versions), **more})


# cases, and what measures them
Records = Callable[[Run, Sequence[Case], Progress], Iterator[Record]]
Part = tuple[Sequence[Case], Records]
