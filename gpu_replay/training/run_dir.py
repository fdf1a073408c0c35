"""The output folder of a run: what lies in it, and how files get there whole."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from gpu_replay.console import atomic_files
from gpu_replay.console.errors import UserError

PROGRESS = "progress.csv"
CURVE = "curve.png"
NETWORK = "network.safetensors"
SETTINGS = "settings.json"
SUMMARY = "summary.json"
TENSORBOARD = "tensorboard"
CHECKPOINT = "checkpoint"
FILES = (PROGRESS, CURVE, NETWORK, SETTINGS, SUMMARY)


class RunFolder:
    """A folder for one run; `open` makes it ready, and nothing in it changes before that.

    existing: what to do with a run that is there: "refuse" it, "replace" it, or "resume" it.

    Raises UserError when the folder holds a run that is refused, or cannot be written.
    """

    def __init__(self, path: Path, existing: Literal["refuse", "replace", "resume"]) -> None:
        self._existing = existing
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(f"--output {path} cannot be written: {error.strerror or error}.") from None
        present = [name for name in (*FILES, CHECKPOINT) if (path / name).exists()]
        if present and existing == "refuse":
            raise UserError(
                f"--output {path} already holds a run ({', '.join(present)}). Go on with it by --resume, replace it by "
                "--overwrite, or choose another."
            )

    def open(self) -> None:
        """Remove the run that is there; of one that is resumed, only the summary of what was not its end."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        if self._existing == "resume":
            return
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
        for name in (TENSORBOARD, CHECKPOINT):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """What `write_json` wrote, or None where there is no such file. Raises UserError for anything else."""
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
        """Write a JSON file; numbers that are not finite become null, as JSON has no word for them."""
        text = json.dumps(_finite(values), indent=2) + "\n"
        self.replace(name, lambda path: path.write_text(text, encoding="utf-8"))

    def replace(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file beside its place and move it there, so that a reader never sees half of it.

        write: gets the path to write to, which ends as `name` does.
        """
        atomic_files.replace(self.path / name, write)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
