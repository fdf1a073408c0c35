"""One measurement, one JSON line: what was measured, where, with which versions, and all its figures.

Tables in the documentation are generated from these lines, so a line holds everything needed to repeat the measurement
or to question it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = 1


@dataclass(frozen=True)
class Environment:
    """Where and with what a run was made; the same for all its records.

    device:  "cpu", or the name of the GPU.
    cores:   CPU cores that this process may use.
    threads: threads of torch.
    load:    one-minute load average when the run began; figures from a busy machine are less reliable.
    commit:  git commit of the checkout, with "+changes" when files differ from it; None outside of one.
    """

    device: str
    cpu: str
    cores: int
    threads: int
    load: float
    versions: dict[str, str | None]
    commit: str | None
    date: str


@dataclass(frozen=True)
class Record:
    """One line of a results file.

    case:           name of the case, unique within an operation's suite; "cycle/N=1M/B=256".
    implementation: "gpu_replay", or the peer that was measured.
    added:          rows added by one call, 0 where nothing is added.
    fields:         what one stored row holds: name to [dtype, shape].
    unit:           of the quantiles: microseconds a call, or bytes.
    bytes:          bytes that a call must move, read and written together; for memory, bytes of one row's fields.
    copy_bandwidth: bytes a second of a plain copy, read and written together, measured in the same run.
    copy_share:     bytes / median time / copy_bandwidth; None where the unit is not a time.
    counted:        bytes a row that the buffer itself reports; None where the unit is a time.
    seconds:        of all recorded calls together, where the suite reports it.
    quick:          made with few repetitions, not to be quoted.
    flush:          bytes overwritten before each repetition to flush the caches, outside the measured time; 0 for
                    caches as the previous calls left them.
    timing:         "host" for the host's clock, "events" for CUDA events around each call, "graph" for events around a
                    replayed CUDA graph of calls; None in lines older than this field.
    tests:          whether the tests of the operations passed before the run; None when they were not run.
    failed_tests:   their names.
    """

    suite: str
    case: str
    operation: str
    implementation: str
    capacity: int
    batch: int
    added: int
    fields: dict[str, list[Any]]
    unit: Literal["us", "bytes"]
    quantiles: dict[str, float]
    repetitions: int
    warmup: int
    bytes: int
    copy_bandwidth: float
    copy_share: float | None
    quick: bool
    environment: Environment
    counted: float | None = None
    seconds: float | None = None
    flush: int = 0
    timing: Literal["host", "events", "graph"] | None = None
    tests: Literal["passed", "failed"] | None = None
    failed_tests: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def identity(self) -> tuple[str, ...]:
        """The identity of a measurement: a newer record with the same one replaces this record."""
        machine = (self.environment.device, self.environment.cpu)
        return (self.suite, self.case, self.implementation, *machine, self.clock)

    @property
    def clock(self) -> str:
        """How it was timed; lines older than the field have one way for each device."""
        return self.timing or ("host" if self.environment.device == "cpu" else "events")

    @property
    def median(self) -> float:
        """p50, in the record's unit."""
        return self.quantiles["p50"]

    def line(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @classmethod
    def parse(cls, line: str) -> Record:
        """The record that a line holds; ValueError for a line that is none."""
        try:
            values = json.loads(line)
            if values["schema"] != SCHEMA:
                raise ValueError(f"schema {values['schema']!r} found, {SCHEMA} expected")
            return cls(**{**values, "environment": Environment(**values["environment"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a benchmark record ({error}): {line[:80]!r}") from error
