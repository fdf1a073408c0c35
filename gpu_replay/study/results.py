"""The folder of a study: a CSV file for each finished run, all of them as one table, and the settings beside them.

A run's file is there whole or not at all, so that an interrupted study continues from what it finds. A folder belongs
to the settings it was begun with: figures of two agents never stand in one table.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_replay.console.atomic_files import write_text
from gpu_replay.console.errors import UserError
from gpu_replay.study.run import Episode, RunId

EPISODES, SETTINGS, PARTS = "episodes.csv", "settings.json", "runs"
COLUMNS = tuple("return" if field.name == "total" else field.name for field in dataclasses.fields(Episode))
# settings that may differ between the commands that work on one study
_MAY_DIFFER = frozenset({"versions", "cpu", "jobs", "wall_seconds", "notes"})
# versions that decide the results
_DECISIVE = ("gpu_replay", "torch", "numpy", "gymnasium")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Study:
    """A finished study.

    runs: in the order of the tables; name of a column to (episodes,) float64, NaN where nothing was measured.
    """

    settings: dict[str, Any]
    runs: dict[RunId, dict[str, Floats]]

    @property
    def environments(self) -> list[str]:
        return list(self.settings["environments"])

    @property
    def methods(self) -> list[str]:
        return list(self.settings["methods"])

    def column(self, environment: str, method: str, name: str) -> list[Floats]:
        """One column of the runs of an environment and a method."""
        return [
            columns[name]
            for run, columns in self.runs.items()
            if (run.environment, run.method) == (environment, method)
        ]


class StudyFolder:
    """The output folder of a study; nothing is written before `claim`. Raises UserError when it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def complete(self) -> bool:
        """Whether the table of all runs is there."""
        return _table(self.path).exists()

    def claim(self, described: dict[str, Any]) -> float:
        """Make the folder that of these settings; returns the seconds that were worked on it before.

        Raises UserError when it holds a study with others, or an unfinished one made with other versions.
        """
        # as they come back from the file
        described, found = json.loads(json.dumps(described)), {}
        if (self.path / SETTINGS).exists():
            found = read_settings(self.path)
            names = [name for name in {**described, **found} if name not in _MAY_DIFFER]
            if differing := [name for name in names if found.get(name) != described.get(name)]:
                self._refuse(
                    f"a study with other settings (they differ in {', '.join(differing)}). Use its own command"
                )
            before, now = found.get("versions", {}), described["versions"]
            changed = [
                f"{each} {before.get(each)}, now {now[each]}" for each in _DECISIVE if before.get(each) != now[each]
            ]
            if changed and not self.complete:
                self._refuse(f"a study made with {'; '.join(changed)}. Continue it with the old versions")
        elif (self.path / PARTS).exists() or self.complete:
            self._refuse(f"runs without {SETTINGS}. Remove them")
        if not self.complete:
            self.note({**described, "wall_seconds": found.get("wall_seconds", 0.0)})
        return float(found.get("wall_seconds", 0.0))

    def _refuse(self, what: str) -> None:
        raise UserError(f"--output {self.path} holds {what}, or choose another folder.")

    def note(self, described: dict[str, Any]) -> None:
        """Write settings.json."""
        self._write(SETTINGS, json.dumps(described, indent=2) + "\n")

    def finished(self, runs: Iterable[RunId]) -> set[RunId]:
        """Those of the runs whose file is there."""
        return {run for run in runs if self._part(run).exists()}

    def keep(self, run: RunId, episodes: Sequence[Episode]) -> None:
        """Write the file of a finished run."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([_cell(value) for value in dataclasses.astuple(episode)] for episode in episodes)
        self._write(f"{PARTS}/{run}.csv", text.getvalue())

    def join(self, runs: Iterable[RunId]) -> Path:
        """Write episodes.csv from the files of these finished runs, in their order; returns its path."""
        lines = [",".join(COLUMNS) + "\n"]
        for run in runs:
            head, *rows = self._part(run).read_text(encoding="utf-8").splitlines(keepends=True)
            if head != lines[0]:
                raise UserError(
                    f"{self._part(run)} is not the file of a run. Remove it and run the same command again."
                )
            lines += rows
        return self._write(EPISODES, "".join(lines))

    def _part(self, run: RunId) -> Path:
        return self.path / PARTS / f"{run}.csv"

    def _write(self, name: str, text: str) -> Path:
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return write_text(path, text)
        except OSError as error:
            raise UserError(f"--output {self.path} cannot be written: {error.strerror or error}.") from None


def read_settings(folder: Path) -> dict[str, Any]:
    """Read settings.json. Raises UserError where it is missing or not that of a study."""
    path = folder / SETTINGS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    if not isinstance(found, dict) or not {"environments", "methods", "seeds"} <= found.keys():
        raise UserError(f"{path} does not hold the settings of a study. Choose another folder.")
    return found


def read_study(folder: Path) -> Study:
    """Read settings.json and episodes.csv, or episodes.csv.gz. Raises UserError where one is missing or damaged."""
    settings, path = read_settings(folder), _table(folder)
    names = [name for name in COLUMNS if name not in ("environment", "method")]
    rows: dict[RunId, list[list[float]]] = {}
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for row in csv.DictReader(io.StringIO(text.decode("utf-8"))):
            run = RunId(row["environment"], row["method"], int(row["seed"]))
            rows.setdefault(run, []).append([float(row[name] or "nan") for name in names])
    except (OSError, EOFError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not the table of a study, or damaged: {error}.") from None
    runs = {}
    for environment, agent in settings["environments"].items():
        for run in (RunId(environment, method, seed) for method in settings["methods"] for seed in settings["seeds"]):
            if len(rows.get(run, ())) != agent["episodes"]:
                raise UserError(f"{path} holds {len(rows.get(run, ()))} of {agent['episodes']} episodes of {run}.")
            runs[run] = dict(zip(names, np.array(rows[run]).T, strict=True))
    return Study(settings, runs)


def _table(folder: Path) -> Path:
    packed = folder / f"{EPISODES}.gz"
    return packed if packed.exists() else folder / EPISODES


def _cell(value: float | str | None) -> str:
    """A CSV cell: ten digits, more than a float32 has, and nothing for what was not measured."""
    return "" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)
