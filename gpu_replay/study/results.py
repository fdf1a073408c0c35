"""The folder of a study: a CSV file for each finished run, all of them as one table, and the settings.

A run's file is written atomically, so that an interrupted study continues with the missing ones. A folder belongs to
the settings it was begun with, so no table mixes two agents.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_replay.checkpoint.files import replace_text
from gpu_replay.console.errors import UserError
from gpu_replay.study.run import COLUMNS, KEYS, RunId

if TYPE_CHECKING:
    from pandas import DataFrame

EPISODES, SETTINGS, PARTS = "episodes.csv", "settings.json", "runs"
# what a study writes beside its settings and pictures
OURS = (PARTS, EPISODES, f"{EPISODES}.gz", "report.md")
# settings that may differ between the commands that work on one study
_MAY_DIFFER = frozenset({"versions", "cpu", "jobs", "wall_seconds", "notes"})
# packages whose versions influence the results
_VERSIONS = ("gpu_replay", "torch", "numpy", "gymnasium")


class StudyFolder:
    """The output folder of a study; nothing is written before `claim`. Raises UserError when it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def complete(self) -> bool:
        """Whether the table of all runs exists."""
        return _table(self.path).exists()

    def claim(self, described: dict[str, Any]) -> float:
        """Reserve the folder for these settings; returns the seconds already spent on the study.

        Raises UserError if it holds a study with other settings, or an unfinished one made with other versions.
        """
        # compare the settings as JSON returns them
        described, found = json.loads(json.dumps(described)), {}
        if (self.path / SETTINGS).exists():
            found = read_settings(self.path)
            before, now = (self._decisive(each) for each in (found, described))
            if differing := [name for name in {**now, **before} if before.get(name) != now.get(name)]:
                self._refuse(
                    f"a study with other settings (they differ in {', '.join(differing)}). Use its own command"
                )
        elif present := [name for name in OURS if (self.path / name).exists()]:
            self._refuse(f"{', '.join(present)} without {SETTINGS}: no study wrote that. Move it away")
        seconds = float(found.get("wall_seconds", 0.0))
        if not self.complete:
            self.note({**described, "wall_seconds": seconds})
        return seconds

    def _decisive(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings that decide the figures; versions of packages do not count once all runs are finished."""
        versions = {} if self.complete else {name: settings.get("versions", {}).get(name) for name in _VERSIONS}
        return versions | {name: value for name, value in settings.items() if name not in _MAY_DIFFER}

    def _refuse(self, what: str) -> None:
        raise UserError(f"--output {self.path} holds {what}, or choose another folder.")

    def note(self, described: dict[str, Any]) -> None:
        """Write settings.json."""
        self._write(SETTINGS, json.dumps(described, indent=2) + "\n")

    def finished(self, runs: Iterable[RunId]) -> set[RunId]:
        """The runs whose file exists."""
        return {run for run in runs if self._part(run).exists()}

    def keep(self, run: RunId, episodes: Sequence[Mapping[str, Any]]) -> None:
        """Write the file of a finished run with ten digits, more than a float32 has."""
        import pandas as pd

        table = pd.DataFrame(episodes, columns=COLUMNS)
        self._write(f"{PARTS}/{run}.csv", table.to_csv(index=False, float_format="%.10g", lineterminator="\n"))

    def join(self, runs: Iterable[RunId]) -> Path:
        """Write episodes.csv from the files of these finished runs, in their order; returns its path."""
        header, text = ",".join(COLUMNS) + "\n", ""
        for part in map(self._part, runs):
            head, found, rows = part.read_text(encoding="utf-8").partition(header)
            if head or not found:
                raise UserError(f"{part} is not the file of a run. Remove it and run the same command again.")
            text += rows
        return self._write(EPISODES, header + text)

    def _part(self, run: RunId) -> Path:
        return self.path / PARTS / f"{run}.csv"

    def _write(self, name: str, text: str) -> Path:
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return replace_text(path, text)
        except OSError as error:
            raise UserError(f"--output {self.path} cannot be written: {error.strerror or error}.") from None


def read_settings(folder: Path) -> dict[str, Any]:
    """Read settings.json. Raises UserError if it is missing or not the settings of a study."""
    path = folder / SETTINGS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    if not isinstance(found, dict) or not {"environments", "methods", "seeds"} <= found.keys():
        raise UserError(f"{path} does not hold the settings of a study. Choose another folder.")
    return found


def read_study(folder: Path) -> tuple[dict[str, Any], DataFrame]:
    """Read settings.json and episodes.csv, or episodes.csv.gz. Raises UserError if one is missing or damaged.

    returns: the settings, and the table: `KEYS` as categories in the order of the report, numbers in all other columns,
             NaN where nothing was measured.
    """
    import pandas as pd

    settings, path = read_settings(folder), _table(folder)
    orders = [list(settings["environments"]), list(settings["methods"]), settings["seeds"]]
    kinds: dict[str, Any] = dict.fromkeys(COLUMNS, float)
    kinds |= {name: pd.CategoricalDtype(order, ordered=True) for name, order in zip(KEYS, orders, strict=True)}
    try:
        episodes = pd.read_csv(path, usecols=list(COLUMNS), dtype=kinds)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    except ValueError as error:
        raise UserError(f"{path} is not the table of a study, or damaged: {error}.") from None
    counts = episodes.value_counts(list(KEYS))
    for run in itertools.starmap(RunId, itertools.product(*orders)):
        found, wanted = counts.get(run, 0), settings["environments"][run.environment]["episodes"]
        if found != wanted:
            raise UserError(f"{path} holds {found} of {wanted} episodes of {run}.")
    return settings, episodes


def _table(folder: Path) -> Path:
    packed = folder / f"{EPISODES}.gz"
    return packed if packed.exists() else folder / EPISODES
