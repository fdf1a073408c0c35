"""The folder of a study: a CSV file for each finished run, all of them as one, and the settings beside them.

A run's file is there whole or not at all, so that an interrupted study goes on by what it finds. A folder belongs to
the settings it was begun with: figures of two agents never stand in one table.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_replay.console.atomic_files import write_text
from gpu_replay.console.errors import UserError
from gpu_replay.study.run import Episode, RunId
from gpu_replay.training.run_dir import SETTINGS, RunDir

EPISODES = "episodes.csv"
PARTS = "runs"
COLUMNS = tuple("return" if field.name == "total" else field.name for field in dataclasses.fields(Episode))
# what may differ between the commands that work on one study
_PASSING = frozenset({"versions", "cpu", "jobs", "wall_seconds", "notes"})
# versions that decide what comes out
_DECISIVE = ("gpu_replay", "torch", "numpy", "gymnasium")


class StudyFolder:
    """The output folder of a study. Raises UserError when it cannot be written."""

    def __init__(self, path: Path) -> None:
        # it refuses nothing here: whose study it is, `claim` decides
        self._folder = RunDir(path, "resume")
        self.path = path

    def claim(self, described: dict[str, Any]) -> float:
        """Make the folder that of these settings; returns the seconds that were worked on it before.

        Raises UserError when it holds a study with others.
        """
        found = self._folder.read_json(SETTINGS)
        # as they come back from the file
        described = json.loads(json.dumps(described))
        seconds = 0.0
        if found is None:
            if (self.path / PARTS).exists() or (self.path / EPISODES).exists():
                raise UserError(f"--output {self.path} holds runs without {SETTINGS}. Choose another folder.")
        else:
            self._refuse_others(found, described)
            given = found.get("wall_seconds")
            seconds = float(given) if isinstance(given, (int, float)) else 0.0
        try:
            (self.path / PARTS).mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {self.path} cannot be written: {error.strerror or error}.") from None
        self.note({**described, "wall_seconds": seconds})
        return seconds

    def _refuse_others(self, found: dict[str, Any], described: dict[str, Any]) -> None:
        if not {"environments", "methods", "seeds"} <= found.keys():
            raise UserError(f"--output {self.path} holds the {SETTINGS} of something else. Choose another folder.")
        differing = [
            name for name in {**described, **found} if name not in _PASSING and found.get(name) != described.get(name)
        ]
        if differing:
            raise UserError(
                f"--output {self.path} holds a study with other settings (they differ in {', '.join(differing)}). "
                "Go on with it by its own command, or choose another folder."
            )
        before, now = found.get("versions") or {}, described["versions"]
        moved = [
            f"{name} {before.get(name)}, now {now.get(name)}" for name in _DECISIVE if before.get(name) != now.get(name)
        ]
        if moved:
            raise UserError(
                f"--output {self.path} holds a study made with {'; '.join(moved)}. "
                "Go on with it with the old versions, or choose another folder."
            )

    def note(self, described: dict[str, Any]) -> None:
        """Write settings.json."""
        self._folder.write_json(SETTINGS, described)

    def finished(self, runs: Iterable[RunId]) -> set[RunId]:
        """Those of the runs whose file is there."""
        return {run for run in runs if self._part(run).exists()}

    def keep(self, run: RunId, episodes: Sequence[Episode]) -> None:
        """Write the file of a finished run."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([_shown(value) for value in dataclasses.astuple(episode)] for episode in episodes)
        self._write(f"{PARTS}/{run.name}.csv", text.getvalue())

    def join(self, runs: Iterable[RunId]) -> Path:
        """Write episodes.csv from the files of these finished runs, in their order; returns its path."""
        lines = [",".join(COLUMNS) + "\n"]
        for run in runs:
            part = self._part(run)
            head, *rows = part.read_text(encoding="utf-8").splitlines(keepends=True)
            if head != lines[0]:
                raise UserError(f"{part} is no file of a run. Remove it and run the same command again.")
            lines += rows
        self._write(EPISODES, "".join(lines))
        return self.path / EPISODES

    def _part(self, run: RunId) -> Path:
        return self.path / PARTS / f"{run.name}.csv"

    def _write(self, name: str, text: str) -> None:
        write_text(self.path / name, text)


def _shown(value: float | str | None) -> str:
    """A CSV cell: ten digits, more than a float32 has, and nothing for what was not measured."""
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else str(value)
