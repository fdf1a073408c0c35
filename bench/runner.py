"""Runs cases on subjects and makes records of them, after looking whether each subject does its work at all.

Subjects that are compared take turns, case by case and in several rounds: whatever else the machine does then falls on
all of them alike, and a ratio between them is worth more than either figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch

from .cases import OPERATIONS, Case
from .progress import Progress
from .record import Environment, Record
from .rows import make_priorities, make_rows, mismatches
from .subjects import MissingPeer, SelfFilling, Subject
from .timing import Plan, Timing, measure

# rows of one add while filling, updates of one round of spreading priorities
CHUNK = 4096
Maker = Callable[[int], Subject]


class Refused(Exception):
    """A subject that gives wrong answers is not measured; the message says what was wrong."""


@dataclass(frozen=True)
class Run:
    """What all measurements of one run share.

    copy_bandwidth: bytes a second, as timing.copy_bandwidth measures it.
    versions:       of the implementations measured, by name, beside those of the environment.
    rounds:         parts into which the plan's time is split; in each, all subjects have their turn.
    """

    suite: str
    device: torch.device
    plan: Plan
    environment: Environment
    copy_bandwidth: float
    quick: bool
    versions: Mapping[str, str | None]
    rounds: int = 1

    def records(self, cases: list[Case], makers: Mapping[str, Maker], progress: Progress) -> Iterator[Record]:
        """Measure the cases on all implementations; yields each record as soon as it is known.

        makers: name of an implementation to what makes an empty subject of a capacity. Those that raise MissingPeer
                or fail their check are reported and left out; it is an error when they are the only ones.
        """
        for capacity, group in groupby(cases, lambda case: case.capacity):
            subjects = self._subjects(capacity, makers, progress)
            for case in group:
                progress.show(case.name)
                for name, timing in self._timings(case, subjects).items():
                    yield self._record(case, name, timing)
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

    def _timings(self, case: Case, subjects: Mapping[str, Subject]) -> dict[str, Timing]:
        bound = {name: case.bind(subject, self.device) for name, subject in subjects.items()}
        part = replace(
            self.plan,
            warmup=self.plan.warmup / self.rounds,
            seconds=self.plan.seconds / self.rounds,
            fewest=-(-self.plan.fewest // self.rounds),
        )
        parts: dict[str, list[Timing]] = {name: [] for name in subjects}
        for _ in range(self.rounds):
            for name, (call, prepare) in bound.items():
                parts[name].append(measure(call, prepare=prepare, plan=part, device=self.device))
        return {name: Timing.joined(timings) for name, timings in parts.items()}

    def _record(self, case: Case, implementation: str, timing: Timing) -> Record:
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
            fields=dict(OPERATIONS[case.operation].fields),
            unit="us",
            quantiles={name: round(value, 3) for name, value in spread.items()},
            repetitions=timing.repetitions,
            warmup=timing.warmup,
            bytes=case.bytes,
            copy_bandwidth=round(self.copy_bandwidth),
            copy_share=round(share, 5),
            quick=self.quick,
            environment=replace(self.environment, versions=versions),
        )


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
