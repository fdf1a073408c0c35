"""Runs cases on subjects and makes records of them, after looking whether each subject does its work at all.

Subjects that are compared take turns, case by case and in several rounds: whatever else the machine does then falls on
all of them alike, and a ratio between them is worth more than either figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np
import torch

from gpu_replay.console.progress import Progress

from .cases import Case
from .record import Environment, Record
from .rows import make_priorities, make_rows, mismatches
from .subjects import MissingPeer, SelfFilling, Subject
from .timing import Call, How, NotCaptured, Plan, Timing, calls_per_graph, captured, measure

# rows of one add while filling, updates of one round of spreading priorities
CHUNK = 4096
Maker = Callable[[int], Subject]


class Refused(Exception):
    """A subject that gives wrong answers is not measured; the message says what was wrong."""


class Measured(Protocol):
    """What a record says of its case."""

    @property
    def name(self) -> str:
        """Unique within the suite."""

    @property
    def operation(self) -> str:
        """What is measured."""

    @property
    def capacity(self) -> int:
        """Slots."""

    @property
    def batch(self) -> int:
        """Transitions of a call."""

    @property
    def added(self) -> int:
        """Rows that a call adds."""

    @property
    def bytes(self) -> int:
        """Bytes that must move."""

    @property
    def fields(self) -> Mapping[str, list[Any]]:
        """What one stored row holds: name to [dtype, shape]."""


@dataclass(frozen=True)
class Run:
    """What all measurements of one run share.

    copy_bandwidth: bytes a second, as timing.copy_bandwidth measures it.
    versions:       of the implementations measured, by name, beside those of the environment.
    rounds:         parts into which the plan's time is split; in each, all subjects have their turn.
    ways:           how calls are timed, one after the other; "graph" where they can be captured.
    tests:          "passed" when those of all operations did.
    """

    suite: str
    device: torch.device
    plan: Plan
    environment: Environment
    copy_bandwidth: float
    quick: bool
    versions: Mapping[str, str | None]
    rounds: int = 1
    ways: tuple[How, ...] = ("host",)
    tests: Literal["passed"] | None = None

    def records(self, cases: list[Case], makers: Mapping[str, Maker], progress: Progress) -> Iterator[Record]:
        """Measure the cases on all implementations; yields each record as soon as it is known.

        makers: name of an implementation to what makes an empty subject of a capacity. Those that raise MissingPeer
                or fail their check are reported and left out; it is an error when they are the only ones.
        """
        for capacity, group in groupby(cases, lambda case: case.capacity):
            subjects = self._subjects(capacity, makers, progress)
            for case in group:
                progress.show(case.name)
                for way in self.ways:
                    bound = {name: case.bind(subject, self.device) for name, subject in subjects.items()}
                    for name, (timing, how) in self.timings(bound, self.plan, way, progress).items():
                        yield self.record(case, name, timing, how)
                progress.advance()

    def _subjects(self, capacity: int, makers: Mapping[str, Maker], progress: Progress) -> dict[str, Subject]:
        subjects: dict[str, Subject] = {}
        for name, make in makers.items():
            progress.show(f"filling {name}, {capacity:,} rows")
            try:
                subject = make(capacity)
                fill(subject, capacity, self.device, rounds=4 if self.quick else 256)
                check(subject, name)
            except (MissingPeer, Refused) as reason:
                if len(makers) == 1:
                    raise
                progress.say(str(reason))
            else:
                subjects[name] = subject
        return subjects

    def timings(
        self, bound: Mapping[str, tuple[Call, Call]], plan: Plan, way: How, progress: Progress
    ) -> dict[str, tuple[Timing, How]]:
        """What the clock saw of each call, prepared by the second of its pair, and how it was timed; they take turns.

        Where calls are captured, they are prepared once, before the capture: a graph works on tensors that stay. One
        that cannot be captured is timed by events, and a line says so.
        """
        ready: dict[str, tuple[Call, Call, int, How]] = {}
        for name, (call, prepare) in bound.items():
            ready[name] = (call, prepare, 1, way)
            if way == "graph":
                prepare()
                calls = calls_per_graph(call, self.device, cold=plan.flush > 0)
                try:
                    ready[name] = (captured(call, self.device, calls), _nothing, calls, "graph")
                except NotCaptured as reason:
                    progress.say(f"{name} is timed by events, since it cannot be captured: {reason}")
                    ready[name] = (call, prepare, 1, "events")
        part = replace(
            plan,
            warmup=plan.warmup / self.rounds,
            seconds=plan.seconds / self.rounds,
            fewest=-(-plan.fewest // self.rounds),
        )
        parts: dict[str, list[Timing]] = {name: [] for name in ready}
        for _ in range(self.rounds):
            for name, (call, prepare, calls, _) in ready.items():
                parts[name].append(measure(call, prepare=prepare, plan=part, device=self.device, calls=calls))
        return {name: (Timing.joined(timings), ready[name][3]) for name, timings in parts.items()}

    def record(self, case: Measured, implementation: str, timing: Timing, how: How, flush: int = 0) -> Record:
        """The record of one implementation of one case."""
        spread = timing.microseconds()
        share = case.bytes / (spread["p50"] / 1e6) / self.copy_bandwidth
        version = self.versions.get(implementation)
        versions = {**self.environment.versions, **({implementation: version} if version else {})}
        return Record(
            suite=self.suite,
            case=case.name,
            operation=case.operation,
            implementation=implementation,
            capacity=case.capacity,
            batch=case.batch,
            added=case.added,
            fields=dict(case.fields),
            unit="us",
            quantiles={name: round(value, 3) for name, value in spread.items()},
            repetitions=timing.repetitions,
            warmup=timing.warmup,
            bytes=case.bytes,
            copy_bandwidth=round(self.copy_bandwidth),
            copy_share=round(share, 5),
            quick=self.quick,
            environment=replace(self.environment, versions=versions),
            flush=flush,
            timing=how,
            tests=self.tests,
        )


def _nothing() -> None:
    pass


def fill(subject: Subject, capacity: int, device: torch.device, *, rounds: int) -> None:
    """Fill the ring past its end, then spread the priorities with up to so many rounds of 4,096 updates."""
    if isinstance(subject, SelfFilling):
        subject.fill(rounds)
        return
    random = np.random.default_rng(0)
    size = subject.add_size or min(CHUNK, capacity)
    pool = [subject.inputs(make_rows(size, random)) for _ in range(16)]
    for i in range(-(-capacity // size) + 1):
        subject.add(pool[i % len(pool)])
    batch = min(CHUNK, capacity)
    for _ in range(min(rounds, -(-2 * capacity // batch))):
        subject.update(subject.sample(batch), make_priorities(batch, random).to(device))


def check(subject: Subject, implementation: str) -> None:
    """Look whether sampled rows are whole and weights are weights.

    Raises Refused, naming what is wrong.
    """
    wrong = _wrong(subject)
    if wrong:
        raise Refused(f"{implementation} is not measured: {'; '.join(wrong)}.")


def _wrong(subject: Subject) -> list[str]:
    if isinstance(subject, SelfFilling):
        return subject.wrong()
    batch = 256
    fields = subject.fields(subject.sample(batch))
    wrong = [
        f"sampled {name!r} does not belong to the sampled observation"
        for name in mismatches(fields, has_next_obs=subject.has_next_obs)
    ]
    weight = fields["weight"].cpu().numpy().reshape(-1)
    if weight.shape != (batch,) or not np.all(np.isfinite(weight)) or weight.min() <= 0:
        wrong.append(f"the weights are not {batch} positive numbers")
    return wrong
