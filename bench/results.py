"""The files of records: where they are, how they are read, and how a new run is merged into them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch

from gpu_replay.console.atomic_files import write_text
from gpu_replay.console.errors import UserError
from gpu_replay.console.versions import device_name

from .environment import checkout
from .record import Record

# the folder of one GPU holds kernels.jsonl; elsewhere the kernels have a file for each device
NAMES = ("cpu", "gpu", "peers", "frames", "storage", "checkpoint", "bench", "kernels", "kernels-*")
QUICK = "-quick"
# the file beside records for the cases that failed
ERRORS = ".errors.jsonl"


def recorded_folder() -> Path | None:
    """The folder of all results in a checkout, None elsewhere."""
    root = checkout()
    return root / "bench" / "results" if root else None


def default_file(name: str) -> Path:
    """Where a run writes when no option says so: into the checkout, else into the current folder."""
    folder = recorded_folder()
    return folder / f"{name}.jsonl" if folder else Path(f"gpu-replay-bench-{name}.jsonl")


def device_slug(device: torch.device) -> str:
    """The name of a device in file names: "cpu", "nvidia-h200"."""
    return "cpu" if device.type == "cpu" else re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")


def recorded_files() -> list[Path]:
    """The results files that runs have left, those in folders of machines too; trial runs are left out.

    Raises UserError when there is none.
    """
    folder = recorded_folder()
    paths = (folder.rglob(f"{name}.jsonl") if folder else Path().glob(default_file(name).name) for name in NAMES)
    found = sorted({path for some in paths for path in some if not path.name.endswith((f"{QUICK}.jsonl", ERRORS))})
    if not found:
        raise UserError("no results are recorded here; run `gpu-replay bench cpu` first, or name the files.")
    return found


Line = TypeVar("Line")


def read_lines(path: Path, parse: Callable[[str], Line]) -> list[Line]:
    """All lines of a file; UserError names the one that `parse` refuses with a ValueError."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                found.append(parse(line))
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {error}") from error
    return found


def read(path: Path) -> list[Record]:
    """All records of a file, oldest first; UserError names the line that is none."""
    return read_lines(path, Record.parse)


def write(path: Path, records: Iterable[Record]) -> None:
    """Merge records into a file; a record of the same thing replaces the older one, all others are kept.

    The file is replaced in one step.
    """
    merged = {record.identity: record for record in (read(path) if path.is_file() else [])}
    for record in records:
        merged.pop(record.identity, None)
        merged[record.identity] = record
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(record.line() + "\n" for record in merged.values()))
