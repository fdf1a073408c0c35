"""Records of measurements: one JSON line each, with everything needed to repeat the measurement or to question it.

Where and with what it was made, which files hold such lines, and how a new run is merged into them. Tables in the
documentation are generated from these lines.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from gpu_replay.checkpoint.files import replace_text
from gpu_replay.console.errors import UserError
from gpu_replay.console.versions import cpu_cores, device_name, versions

SCHEMA = 1
_VERSIONS = ("python", "numpy", "torch", "triton", "numba", "gpu_replay", "cuda", "rocm")
QUICK = "-quick"
# the file beside records for the cases that failed, and that of the features that were tried on a GPU
ERRORS, CONTACT = ".errors.jsonl", "contact.jsonl"


class CannotMeasure(Exception):
    """What was asked for cannot be measured here; the message says why."""


class DeviceLost(CannotMeasure):
    """The device no longer answers; another process can measure the remaining cases."""


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
    unit:           of the quantiles: microseconds a call, bytes, or rows of other ranks.
    bytes:          bytes that a call must move, read and written together; for memory, bytes of one row's fields.
    copy_bandwidth: bytes a second of a plain copy, read and written together, measured in the same run.
    copy_share:     bytes / median time / copy_bandwidth; None where the unit is not a time.
    seconds:        of all recorded calls together, where the suite reports it.
    quick:          made with few repetitions, not to be quoted.
    flush:          bytes overwritten and read before each repetition to flush the caches, outside the measured time; 0
                    for caches as the previous calls left them.
    timing:         "host" for the host's clock, "events" for CUDA events around each call, "graph" for events around a
                    replayed CUDA graph of calls.
    """

    suite: str
    case: str
    operation: str
    implementation: str
    capacity: int
    batch: int
    added: int
    fields: dict[str, list[Any]]
    unit: Literal["us", "bytes", "rows"]
    quantiles: dict[str, float]
    repetitions: int
    warmup: int
    bytes: int
    copy_bandwidth: float
    copy_share: float | None
    quick: bool
    environment: Environment
    seconds: float | None = None
    flush: int = 0
    timing: Literal["host", "events", "graph"] = "host"
    schema: int = SCHEMA

    @property
    def identity(self) -> tuple[str, ...]:
        """The identity of a measurement: a newer record with the same one replaces this record."""
        machine = (self.environment.device, self.environment.cpu)
        return (self.suite, self.case, self.implementation, *machine, self.timing)

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


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def current_environment(device: torch.device) -> Environment:
    """This machine, this process and this checkout."""
    found = versions()
    return Environment(
        device=device_name(device) if device.type == "cuda" else "cpu",
        cpu=device_name(torch.device("cpu")),
        cores=cpu_cores(),
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        versions={name: found.get(name) for name in _VERSIONS},
        commit=_commit(),
        date=now(),
    )


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


def _commit() -> str | None:
    # a copy of the checkout has no history
    told, root = os.environ.get("GPU_REPLAY_COMMIT"), checkout()
    if told or root is None:
        return told or None

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    with suppress(OSError, subprocess.SubprocessError):
        # results of earlier runs do not change what is measured
        changes = git("status", "--porcelain", "--", ".", ":!bench/results")
        return git("rev-parse", "HEAD")[:12] + ("+changes" if changes else "")
    return None


def recorded_folder() -> Path | None:
    """The folder of all results in a checkout, None elsewhere."""
    root = checkout()
    return root / "bench" / "results" if root else None


def default_file(name: str) -> Path:
    """Where a run writes when no option says so: into the checkout, else into the current folder."""
    folder = recorded_folder()
    return folder / f"{name}.jsonl" if folder else Path(f"gpu-replay-bench-{name}.jsonl")


def recorded_files() -> list[Path]:
    """The results files that runs have left, those in folders of machines too; trial runs are left out.

    Raises UserError when there is none.
    """
    folder = recorded_folder()
    paths = folder.rglob("*.jsonl") if folder else Path().glob(default_file("*").name)
    found = sorted(path for path in paths if not path.name.endswith((f"{QUICK}.jsonl", ERRORS, CONTACT)))
    if not found:
        raise UserError("no results are recorded here; run `gpu-replay bench cpu` first, or name the files.")
    return found


def read(path: Path) -> list[Record]:
    """All records of a file, oldest first; UserError names the line that is none."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                found.append(Record.parse(line))
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {error}") from error
    return found


def write(path: Path, records: Iterable[Record]) -> None:
    """Merge records into a file; a record of the same thing replaces the older one, all others are kept.

    The file is replaced in one step.
    """
    merged = {record.identity: record for record in (read(path) if path.is_file() else [])}
    for record in records:
        merged.pop(record.identity, None)
        merged[record.identity] = record
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(record.line() + "\n" for record in merged.values()))
