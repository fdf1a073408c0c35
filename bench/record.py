"""One measurement, one JSON line: what was measured, where, with which versions, and every figure of it.

Tables in the documentation are made from these lines and never typed, so a line carries all that a reader needs in
order to repeat the measurement or to doubt it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

SCHEMA = 1


@dataclass(frozen=True)
class Environment:
    """Where and with what a run was made; the same for all its records.

    device:  "cpu", or the name of the GPU.
    cores:   CPU cores that this process may use.
    threads: threads of torch.
    load:    the machine's load average over a minute when the run began; figures from a busy machine are worth less.
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
    counted:        bytes a row as the buffer itself counts them; None where the unit is a time.
    quick:          made with few repetitions, not to be quoted.
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
    schema: int = SCHEMA

    @property
    def identity(self) -> tuple[str, ...]:
        """What a newer record of the same thing replaces."""
        return (self.suite, self.case, self.implementation, self.environment.device, self.environment.cpu)

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


def current_environment(device: torch.device) -> Environment:
    """Look at this machine, this process and this checkout."""
    cuda = device.type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        versions={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "triton": installed_version("triton"),
            "gpu_replay": installed_version("gpu_replay") or _version_of_checkout(),
            "cuda": torch.version.cuda if cuda else None,
        },
        commit=_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def checkout() -> Path | None:
    """Root of the checkout that this file belongs to; None when the package was installed elsewhere."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() and (root / "gpu_replay").is_dir() else None


def _version_of_checkout() -> str | None:
    root = checkout()
    if root is None:
        return None
    found = re.search(r'^version\s*=\s*"([^"]+)"', (root / "pyproject.toml").read_text(), re.MULTILINE)
    return found.group(1) if found else None


def _commit() -> str | None:
    root = checkout()
    if root is None:
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        # results of earlier runs are no change of what is measured
        changes = _git(root, "status", "--porcelain", "--", ".", ":!bench/results")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head[:12]}+changes" if changes else head[:12]


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def read(path: Path) -> list[Record]:
    """All records of a file, oldest first; ValueError names the line that is none."""
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                records.append(Record.parse(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return records


def write(path: Path, records: Iterable[Record]) -> None:
    """Write records beside those that the file holds; a record of the same thing replaces the older one.

    So a run of a few cases renews these and keeps the others. The file is replaced in one step.
    """
    merged = {record.identity: record for record in (read(path) if path.is_file() else [])}
    for record in records:
        merged.pop(record.identity, None)
        merged[record.identity] = record
    path.parent.mkdir(parents=True, exist_ok=True)
    sibling = path.with_name(path.name + ".part")
    sibling.write_text("".join(record.line() + "\n" for record in merged.values()))
    sibling.replace(path)
