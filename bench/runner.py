"""Runs cases on subjects and makes records of them, after checking that each subject's answers are right.

Compared subjects are interleaved, case by case and in several rounds: background load then hits all of them alike, and
their ratio is more reliable than either time.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_replay.console.progress import Progress

from .cases import Bound, Case, bind
from .environment import CannotMeasure, DeviceLost
from .record import Environment, Record
from .rows import make_priorities
from .subjects import Subject
from .timing import CALLS_PER_GRAPH, Call, How, NotCaptured, Plan, Timing, captured, measure, queue_ahead

Maker = Callable[[int], Subject]


@dataclass(frozen=True)
class Run:
    """What all measurements of one run share.

    copy_bandwidth: bytes a second, as timing.copy_bandwidth measures it.
    versions:       of the implementations measured, by name, beside those of the environment.
    rounds:         parts into which the plan's time is split; each measures all subjects.
    way:            how calls are timed; "graph" where they can be captured.
    failed_tests:   of all operations; None where they were not run.
    errors:         a file for a line of JSON for each case that fails.
    """

    suite: str
    device: torch.device
    plan: Plan
    environment: Environment
    copy_bandwidth: float
    quick: bool
    versions: Mapping[str, str | None]
    rounds: int = 1
    way: How = "host"
    failed_tests: Sequence[str] | None = None
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

    def records(self, cases: Sequence[Case], makers: Mapping[str, Maker], progress: Progress) -> Iterator[Record]:
        """Measure the cases on all implementations; yields each record as soon as it is known.

        makers: name of an implementation to what makes an empty subject of a capacity, or gives one that is filled.
                Those that raise CannotMeasure or fail their check are reported and left out; a case fails when they are
                the only ones.
        """
        for _, group in groupby(cases, lambda case: case.capacity):
            subjects: dict[str, Subject] = {}

            def measured(case: Case, subjects: dict[str, Subject] = subjects) -> Iterator[Record]:
                if not subjects:
                    subjects.update(self._subjects(case.capacity, makers, progress))
                bound = {name: bind(case, subject, self.device) for name, subject in subjects.items()}
                return self.timed(case, bound, progress)

            yield from self.each(group, progress, measured)

    def _subjects(self, capacity: int, makers: Mapping[str, Maker], progress: Progress) -> dict[str, Subject]:
        subjects: dict[str, Subject] = {}
        for name, make in makers.items():
            progress.show(f"filling {name}, {capacity:,} rows")
            try:
                subject = make(capacity)
                if not subject.filled:
                    fill(subject, capacity, self.device, rounds=4 if self.quick else 256)
                    check(subject, name)
                    subject.filled = True
            except CannotMeasure as reason:
                if len(makers) == 1:
                    raise
                progress.say(str(reason))
            else:
                subjects[name] = subject
        return subjects

    def timed(self, case: Case, bound: Mapping[str, Bound], progress: Progress, flush: int = 0) -> Iterator[Record]:
        """Time each implementation's call, interleaved with the others; one record each.

        bound: name to the call and what prepares it. Where calls are captured, they are prepared once, before the
               capture: a graph works on tensors that stay. A call that cannot be captured is timed by events, which
               is reported.
        """
        plan = replace(self.plan, flush=flush)
        ready: dict[str, tuple[Call, Call, int, How]] = {}
        for name, (call, prepare) in bound.items():
            ready[name] = (call, prepare, 1, self.way)
            if self.way == "graph":
                prepare()
                calls = 1 if flush else CALLS_PER_GRAPH
                try:
                    ready[name] = (captured(call, self.device, calls), queue_ahead, calls, "graph")
                except NotCaptured as reason:
                    progress.say(f"{name} is timed by events, since it cannot be captured: {reason}")
                    ready[name] = (call, prepare, 1, "events")
        part = plan.split(self.rounds)
        parts: dict[str, list[Timing]] = {name: [] for name in ready}
        for _ in range(self.rounds):
            for name, (call, prepare, calls, _) in ready.items():
                parts[name].append(measure(call, prepare=prepare, plan=part, device=self.device, calls=calls))
        for name, timings in parts.items():
            found = Timing.joined(timings)
            how = {"warmup": found.warmup, "flush": flush, "timing": ready[name][3]}
            yield self.record(case, name, found.microseconds(), found.repetitions, **how)

    def record(
        self, case: Case, implementation: str, quantiles: Mapping[str, float], repetitions: int, **more: Any
    ) -> Record:
        """The record of one implementation of one case; `more` holds other fields of Record."""
        version = self.versions.get(implementation)
        versions = {**self.environment.versions, **({implementation: version} if version else {})}
        record = Record(
            suite=self.suite,
            case=case.name,
            operation=case.operation,
            implementation=implementation,
            capacity=case.capacity,
            batch=case.batch,
            added=case.added,
            fields=dict(case.kind.fields),
            unit="us",
            quantiles={name: round(value, 4) for name, value in quantiles.items()},
            repetitions=repetitions,
            warmup=0,
            bytes=case.bytes,
            copy_bandwidth=round(self.copy_bandwidth),
            # a peak of memory can be 0 bytes above what was there
            copy_share=round(case.bytes / (quantiles["p50"] / 1e6) / self.copy_bandwidth, 5)
            if quantiles["p50"]
            else None,
            quick=self.quick,
            environment=replace(self.environment, versions=versions),
            tests=None if self.failed_tests is None else "failed" if self.failed_tests else "passed",
            failed_tests=list(self.failed_tests or ()),
        )
        return replace(record, **more)


# cases, and what measures them
Part = tuple[Sequence[Case], Callable[[Run, Sequence[Case], Progress], Iterator[Record]]]


def compared(makers: Mapping[str, Maker]) -> Callable[[Run, Sequence[Case], Progress], Iterator[Record]]:
    """The part of a suite that measures these implementations, as `Run.records` does."""
    return partial(_records, makers)


def _records(makers: Mapping[str, Maker], run: Run, cases: Sequence[Case], progress: Progress) -> Iterator[Record]:
    return run.records(cases, makers, progress)


def fill(subject: Subject, capacity: int, device: torch.device, *, rounds: int) -> None:
    """Fill the ring past its end, then spread the priorities with up to so many rounds of updates."""
    size = subject.add_size or min(subject.chunk, capacity)
    for rows in islice(subject.stream(size, pool=16), -(-capacity // size) + 8):
        subject.add(rows)
    random, batch = np.random.default_rng(0), min(subject.chunk, capacity)
    for _ in range(min(rounds, -(-2 * capacity // batch))):
        subject.update(subject.sample(batch), make_priorities(batch, random).to(device))


def check(subject: Subject, implementation: str) -> None:
    """Check that sampled rows belong together and weights are positive; raises CannotMeasure, naming what is wrong."""
    wrong = subject.wrong()
    if wrong:
        raise CannotMeasure(f"{implementation} is not measured: {'; '.join(wrong)}.")
