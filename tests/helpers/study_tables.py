"""Made-up studies: an episodes.csv of runs whose figures are chosen."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_replay.study.run import COLUMNS
from gpu_replay.study.settings import ENVIRONMENTS, METHODS, AgentSettings, described


def measured(environment: str, method: str, seed: int) -> tuple[float, float, float]:
    """Final return, correlated pairs and TD error of a run: returns fall with the pairs, none learns MountainCar."""
    place = list(METHODS).index(method)
    random = np.random.default_rng([place, seed, len(environment)])
    pairs = 900.0 - 120 * place + random.normal(0, 10)
    error = float(np.exp(random.normal(0, 0.5)))
    return (-200.0, 2016.0, error) if environment == "MountainCar-v0" else (1000.0 - pairs, pairs, error)


def write_study(
    folder: Path,
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
        final, pairs, error = measured(*run)
        for episode in range(1, episodes + 1):
            # there is no update in the first episode
            updates = 10 * (episode > 1)
            means: list[object] = [error, error / 2, error * 4, error / 3, pairs, 1.0, 2.0, error**2]
            learned = means if updates else [""] * len(means)
            rows.append([*run, episode, 10 * episode, 10, final, *learned, 0.05, updates, 0.1 * episode])
    with (folder / "episodes.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder
