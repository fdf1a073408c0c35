"""A finished study as arrays: what lies in `episodes.csv` and `settings.json`, before anything is computed from it."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_replay.console.errors import UserError

EPISODES = "episodes.csv"
SETTINGS = "settings.json"
KEYS = ("environment", "method", "seed", "episode")
COLUMNS = (
    "duration",
    "return",
    "td_mean",
    "td_median",
    "td_max",
    "td_std",
    "correlated_pairs",
    "q_mean",
    "q_max",
    "updates",
)
# the order in which a reader meets them everywhere; names that are not here come after these, by alphabet
METHODS = {
    "none": "no memory",
    "uniform": "uniform",
    "proportional": "proportional",
    "rank": "rank-based",
    "combined": "combined",
    "hindsight": "hindsight",
}
ENVIRONMENTS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """One method on one environment with one seed.

    columns: name to (episodes,) float64 in the order of the episodes; NaN where the file has nothing.
    """

    environment: str
    method: str
    seed: int
    columns: dict[str, Floats]

    @property
    def episodes(self) -> int:
        """How many it has."""
        return len(self.columns["return"])


@dataclass(frozen=True)
class Study:
    """All runs, those that are whole apart from those that are not."""

    runs: tuple[Run, ...]
    unfinished: tuple[Run, ...]
    settings: dict[str, Any]

    @property
    def environments(self) -> tuple[str, ...]:
        """Those with a whole run, in the order of the tables."""
        return _ordered({run.environment for run in self.runs}, ENVIRONMENTS)

    @property
    def methods(self) -> tuple[str, ...]:
        """Those with a whole run, in the order of the tables."""
        return _ordered({run.method for run in self.runs}, tuple(METHODS))

    def of(self, environment: str, method: str | None = None) -> tuple[Run, ...]:
        """The whole runs of an environment, of one method or of all."""
        return tuple(r for r in self.runs if r.environment == environment and method in (None, r.method))


def label(method: str) -> str:
    """A method's name for people."""
    return METHODS.get(method, method)


def read_study(folder: Path) -> Study:
    """Read a study's folder.

    A run is unfinished when it has fewer episodes than the settings ask for (than the longest run of its environment
    where they say nothing). Raises UserError for a file that is missing or is no such table.
    """
    settings = _settings(folder / SETTINGS)
    runs = _runs(folder / EPISODES)
    longest: dict[str, int] = {}
    for run in runs:
        longest[run.environment] = max(run.episodes, longest.get(run.environment, 0))
    whole = {name: expected_episodes(settings, name) or found for name, found in longest.items()}
    finished = tuple(run for run in runs if run.episodes >= whole[run.environment])
    unfinished = tuple(run for run in runs if run.episodes < whole[run.environment])
    return Study(finished, unfinished, settings)


def expected_episodes(settings: dict[str, Any], environment: str) -> int | None:
    """Episodes that a run of this environment should have, None where the settings do not say."""
    own = settings.get("environments")
    own = own.get(environment) if isinstance(own, dict) else None
    for found in (own.get("episodes") if isinstance(own, dict) else None, settings.get("episodes")):
        if isinstance(found, dict):
            found = found.get(environment)
        if isinstance(found, int):
            return found
    return None


def _ordered(found: set[str], known: tuple[str, ...]) -> tuple[str, ...]:
    return (*[name for name in known if name in found], *sorted(found - set(known)))


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} does not hold a JSON object.")
    return found


def _runs(path: Path) -> list[Run]:
    rows: dict[tuple[str, str, int], list[tuple[int, list[float]]]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in (*KEYS, *COLUMNS) if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{path} has no column {', '.join(missing)}. Is it the episodes of a study?")
            for row in reader:
                key = (row["environment"], row["method"], int(row["seed"]))
                values = [_number(row[name]) for name in COLUMNS]
                rows.setdefault(key, []).append((int(row["episode"]), values))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}.") from None
    runs = []
    for (environment, method, seed), episodes in sorted(rows.items()):
        table = np.array([values for _, values in sorted(episodes, key=lambda each: each[0])], dtype=np.float64)
        runs.append(Run(environment, method, seed, dict(zip(COLUMNS, table.T, strict=True))))
    return runs


def _number(text: str | None) -> float:
    if text is None:
        raise ValueError("a line is shorter than the first one")
    return float(text) if text else float("nan")
