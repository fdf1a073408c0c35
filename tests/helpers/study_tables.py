"""Made-up studies: an episodes.csv in which it is known what correlates with what."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_replay.study.run import COLUMNS
from gpu_replay.study.settings import ENVIRONMENTS, METHODS, AgentSettings, described

# final return, correlated pairs and TD error of one run
Level = Callable[[str, str, int], tuple[float, float, float]]


def by_pairs(environment: str, method: str, seed: int) -> tuple[float, float, float]:
    """Returns fall with the pairs, TD errors are noise, no method learns MountainCar."""
    place = list(METHODS).index(method)
    random = np.random.default_rng([place, seed, len(environment)])
    pairs = 900.0 - 120 * place + random.normal(0, 10)
    error = float(np.exp(random.normal(0, 0.5)))
    if environment == "MountainCar-v0":
        return -200.0, 2016.0, error
    return 1000.0 - pairs, pairs, error


def by_errors(environment: str, method: str, seed: int) -> tuple[float, float, float]:
    """Returns rise with the TD errors, pairs are noise."""
    final, _, error = by_pairs(environment, method, seed)
    return final, 500.0 + 100 * error, error if final == -200.0 else final / 1000


def write_study(
    folder: Path,
    level: Level = by_pairs,
    *,
    environments: Sequence[str] = ENVIRONMENTS,
    methods: Sequence[str] = tuple(METHODS),
    seeds: int = 3,
    episodes: int = 12,
    **settings: Any,
) -> Path:
    """Write episodes.csv and settings.json of such a study and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    agents = {name: AgentSettings(episodes=episodes) for name in environments}
    found = described(agents, methods, seeds, tuned=False, quick=False)
    found |= {"versions": {"torch": "9.9"}, "cpu": "a processor", "jobs": 2, "wall_seconds": 90.0, **settings}
    (folder / "settings.json").write_text(json.dumps(found))
    rows: list[list[object]] = [list(COLUMNS)]
    for run in ((e, m, s) for e in sorted(environments) for m in sorted(methods) for s in range(seeds)):
        final, pairs, error = level(*run)
        for episode in range(1, episodes + 1):
            # there is no update in the first episode
            updates = 10 * (episode > 1)
            measured: list[object] = [error, error / 2, error * 4, error / 3, pairs, 1.0, 2.0, error**2]
            learned = measured if updates else [""] * len(measured)
            rows.append([*run, episode, 10 * episode, 10, final, *learned, 0.05, updates, 0.1 * episode])
    with (folder / "episodes.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder
