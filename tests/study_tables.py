"""Made-up studies: an episodes.csv in which it is known what goes with what."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_replay.study.records import COLUMNS

HEADER = list(COLUMNS)
METHODS = ("none", "uniform", "proportional", "rank", "combined", "hindsight")
ENVIRONMENTS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
# what one run is made of: final return, correlated pairs, TD error
Level = Callable[[str, str, int], tuple[float, float, float]]


def by_pairs(environment: str, method: str, seed: int) -> tuple[float, float, float]:
    """Returns fall with the pairs, TD errors are noise, nobody learns MountainCar."""
    random = np.random.default_rng([METHODS.index(method), seed, len(environment)])
    pairs = 900.0 - 120 * METHODS.index(method) + random.normal(0, 10)
    error = float(np.exp(random.normal(0, 0.5)))
    if environment == "MountainCar-v0":
        return -200.0, 2016.0, error
    return 1000.0 - pairs, pairs, error


def by_errors(environment: str, method: str, seed: int) -> tuple[float, float, float]:
    """Returns rise with the TD errors, pairs are noise."""
    final, pairs, error = by_pairs(environment, method, seed)
    noise = 500.0 + 100 * error
    return (final, pairs, error) if final == -200.0 else (final, noise, final / 1000)


def write_study(
    folder: Path,
    level: Level = by_pairs,
    *,
    environments: Sequence[str] = ENVIRONMENTS,
    methods: Sequence[str] = METHODS,
    seeds: int = 3,
    episodes: int = 12,
    short: dict[tuple[str, str, int], int] | None = None,
    **settings: Any,
) -> Path:
    """Write episodes.csv and settings.json of such a study and return the folder.

    short: episodes of the runs that are not whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for environment in sorted(environments):
        for method in sorted(methods):
            for seed in range(seeds):
                final, pairs, error = level(environment, method, seed)
                for episode in range(1, 1 + (short or {}).get((environment, method, seed), episodes)):
                    rows.append(_row(environment, method, seed, episode, final, pairs, error))
    with (folder / "episodes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])
    described = {"tuned": False, "episodes": episodes, "seeds": list(range(seeds)), **settings}
    (folder / "settings.json").write_text(json.dumps(described))
    return folder


def _row(
    environment: str, method: str, seed: int, episode: int, final: float, pairs: float, error: float
) -> list[object]:
    measured: list[object] = [error, error / 2, error * 4, error / 3, pairs, 1.0, 2.0, error**2]
    if episode == 1:
        # no update yet
        measured = [""] * len(measured)
    updates = 0 if episode == 1 else 10
    return [environment, method, seed, episode, 10 * episode, 10, final, *measured, 0.05, updates, 0.1 * episode]
