"""The files of records: where they lie, how they are read, and how a new run is written into them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from .environment import checkout
from .record import Record

# what a run on a GPU leaves in the folder of its machine is called bench.jsonl and kernels.jsonl; elsewhere the kernels
# have a file for each device
NAMES = ("cpu", "gpu", "peers", "frames", "storage", "bench", "kernels", "kernels-*")
QUICK = "-quick"


def default_file(name: str) -> Path:
    """Where a run writes when no option says so: into the checkout, else into the current folder."""
    root = checkout()
    return root / "bench" / "results" / f"{name}.jsonl" if root else Path(f"gpu-replay-bench-{name}.jsonl")


def device_name(device: torch.device) -> str:
    """How files name a device: "cpu", or its own name in small letters, "nvidia-h200"."""
    if device.type == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def recorded_folder() -> Path | None:
    """The folder of all results in a checkout, None elsewhere."""
    root = checkout()
    return root / "bench" / "results" if root else None


def recorded_files() -> list[Path]:
    """The results files that runs have left, those in folders of machines too; trial runs are left out.

    Raises ValueError when there is none.
    """
    root = checkout()
    if root:
        found = sorted({file for name in NAMES for file in (root / "bench" / "results").rglob(f"{name}.jsonl")})
    else:
        found = sorted({file for name in NAMES for file in Path().glob(default_file(name).name)})
    found = [file for file in found if not file.stem.endswith(QUICK)]
    if not found:
        raise ValueError("no results are recorded here; run `gpu-replay bench cpu` first, or name the files.")
    return found


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
