"""The output directory of a run: the names of its files, and what may happen to a run that is already there."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gpu_replay.console.atomic_files import write_text
from gpu_replay.console.errors import UserError

PROGRESS = "progress.csv"
CURVE = "curve.png"
BUFFER = "buffer.png"
NETWORK = "network.safetensors"
SETTINGS = "settings.json"
SUMMARY = "summary.json"
TENSORBOARD = "tensorboard"
CHECKPOINT = "checkpoint"
FILES = (PROGRESS, CURVE, BUFFER, NETWORK, SETTINGS, SUMMARY)


class RunDir:
    """The directory of one run; nothing in it changes before `open`.

    existing: what to do with a run that is already there: "refuse" it, "replace" it, or "resume" it.

    Raises UserError if the directory holds a run that is refused, or is not writable.
    """

    def __init__(self, path: Path, existing: Literal["refuse", "replace", "resume"]) -> None:
        self._existing = existing
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            # another rank of the same run may have removed it
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"--output {path} cannot be written: {error.strerror or error}.") from None
        present = [name for name in (*FILES, CHECKPOINT) if (path / name).exists()]
        if present and existing == "refuse":
            raise UserError(
                f"--output {path} already holds a run ({', '.join(present)}). Continue it with --resume, replace it "
                "with --overwrite, or choose another directory."
            )

    def open(self) -> None:
        """Remove the previous run; of a run that is resumed, only its summary."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        if self._existing == "resume":
            return
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
        for name in (TENSORBOARD, CHECKPOINT):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """What `write_json` wrote, or None if there is no such file. Raises UserError for anything else."""
        path = self.path / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}.") from None
        if not isinstance(found, dict):
            raise UserError(f"{path} does not hold a JSON object.")
        return found

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file; non-finite numbers become null, which JSON has no other way to write."""
        write_text(self.path / name, json.dumps(_finite(values), indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
