"""What the runs say: final returns, means over the batches of a run, and how the two go together.

One run is one point. The outcome is the mean return of its last episodes; what might explain it are means over all
batches that it learned from. Every interval is a percentile bootstrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_replay.study.ranks import exact_p, group_share, pooled_spearman, resampled_spearman, spearman
from gpu_replay.study.results import Floats, Run, Study

LAST = 100
RESAMPLES = 2000
SEED = 20160225
LEVEL = 0.95
# a correlation must exist in so many of the resamples for an interval: the others are no random choice
FEWEST_DEFINED = 0.95
# runs that must differ from the most common return, where most have the same, for ranks to mean anything
FEWEST_DIFFERENT = 3
# states of two components: their correlation is 1 or -1, whatever the states are
TWO_COMPONENTS = ("MountainCar-v0",)
PAIRS = "correlated_pairs"
# column to what it is called in the tables
PREDICTORS = {
    PAIRS: "correlated pairs",
    "td_mean": "mean TD error",
    "td_max": "max TD error",
    "td_std": "std of TD errors",
}
AVERAGED = (PAIRS, "td_mean", "td_median", "td_max", "td_std", "q_mean", "q_max")


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval; `low` and `high` are NaN where there is none."""

    value: float
    low: float
    high: float

    @property
    def bounded(self) -> bool:
        """Whether it has an interval."""
        return not np.isnan(self.low)


@dataclass(frozen=True)
class Connection:
    """Spearman's correlation of the final return with one predictor.

    place:         environment, or None for all of them by ranks within each.
    overall:       over runs, resampling runs within their environment.
    plain_goal:    the same without hindsight, whose TD errors belong to another task; None where there is no hindsight.
    between:       over the means of the methods, resampling the seeds within each method.
    between_p:     of all orders of the methods, the share that goes together at least as well; NaN for the pool.
    runs, methods: how many points there were.
    why_not:       why there is no correlation, "" where there is one.
    """

    place: str | None
    predictor: str
    overall: Estimate
    plain_goal: Estimate | None
    between: Estimate
    between_p: float
    runs: int
    methods: int
    why_not: str = ""


@dataclass(frozen=True)
class Point:
    """One run as the tables use it: the final return, and the mean of each column over its batches."""

    environment: str
    method: str
    seed: int
    final: float
    means: dict[str, float]


def summarise(run: Run) -> Point:
    """The mean return of the last 100 episodes (of all, where there are fewer) and means weighted by updates."""
    updates = run.columns["updates"]
    means = {name: _weighted(run.columns[name], updates) for name in AVERAGED}
    return Point(run.environment, run.method, run.seed, float(np.mean(run.columns["return"][-LAST:])), means)


def points(study: Study) -> tuple[Point, ...]:
    """Every whole run of a study, environments and methods in the order of the tables."""
    runs = (run for place in study.environments for method in study.methods for run in study.of(place, method))
    return tuple(summarise(run) for run in runs)


def mean_over_seeds(values: Sequence[float], seed: int = SEED) -> Estimate:
    """The mean and its interval, resampling the values; no interval for fewer than two."""
    found = np.array(values, dtype=np.float64)
    if len(found) < 2 or np.isnan(found).any():
        return Estimate(float(np.mean(found)) if len(found) else float("nan"), float("nan"), float("nan"))
    chosen = np.random.default_rng(seed).integers(len(found), size=(RESAMPLES, len(found)))
    return _estimate(float(found.mean()), found[chosen].mean(axis=1))


def method_share(of_environment: Sequence[Point]) -> tuple[float, float]:
    """How much of the variance of the ranks of the final returns lies between the methods, and its p-value."""
    names = {name: i for i, name in enumerate(dict.fromkeys(point.method for point in of_environment))}
    finals = np.array([point.final for point in of_environment])
    return group_share(finals, np.array([names[point.method] for point in of_environment]), RESAMPLES, SEED)


def connections(found: Sequence[Point]) -> tuple[Connection, ...]:
    """For every predictor: each environment, in the order of the points, then all together."""
    places = list(dict.fromkeys(point.environment for point in found))
    by_place = {place: [point for point in found if point.environment == place] for place in places}
    rows = []
    for predictor in PREDICTORS:
        obstacles = {place: _obstacle(group, predictor) for place, group in by_place.items()}
        for place, group in by_place.items():
            rows.append(_connection(place, predictor, [group], obstacles[place]))
        usable = [group for place, group in by_place.items() if not obstacles[place]]
        if len(places) > 1:
            why_not = "" if usable else "no environment has a correlation"
            rows.append(_connection(None, predictor, usable or list(by_place.values()), why_not))
    return tuple(rows)


def stronger(found: Sequence[Point], first: str, second: str, place: str | None) -> Estimate | None:
    """|correlation| of `first` with the final return minus that of `second`, on the same runs; None where undefined.

    place: environment, or None for all in which both have one.
    """
    places = list(dict.fromkeys(point.environment for point in found)) if place is None else [place]
    groups = [[point for point in found if point.environment == each] for each in places]
    groups = [group for group in groups if not (_obstacle(group, first) or _obstacle(group, second))]
    if not groups:
        return None
    indices = _resamples([len(group) for group in groups])
    sides = []
    for predictor in (first, second):
        pairs = [_pair(group, predictor) for group in groups]
        sides.append((abs(float(pooled_spearman(pairs))), np.abs(resampled_spearman(pairs, indices))))
    return _estimate(sides[0][0] - sides[1][0], sides[0][1] - sides[1][1])


def _connection(place: str | None, predictor: str, groups: list[list[Point]], why_not: str) -> Connection:
    runs = sum(map(len, groups))
    methods = len({point.method for group in groups for point in group})
    if why_not:
        return Connection(place, predictor, NOTHING, None, NOTHING, float("nan"), runs, methods, why_not)
    plain = [[point for point in group if point.method != "hindsight"] for group in groups]
    plain = [group for group in plain if not _obstacle(group, predictor)]
    has_hindsight = any(point.method == "hindsight" for group in groups for point in group)
    between, between_p = _between(groups, predictor)
    return Connection(
        place,
        predictor,
        overall=_over_runs(groups, predictor),
        plain_goal=_over_runs(plain, predictor) if has_hindsight and plain else None,
        between=between,
        between_p=between_p,
        runs=runs,
        methods=methods,
    )


def _over_runs(groups: list[list[Point]], predictor: str) -> Estimate:
    pairs = [_pair(group, predictor) for group in groups]
    return _estimate(float(pooled_spearman(pairs)), resampled_spearman(pairs, _resamples([len(g) for g in groups])))


def _between(groups: list[list[Point]], predictor: str) -> tuple[Estimate, float]:
    """Over the means of the methods; an interval where every method has two seeds at least."""
    tables = []
    for group in groups:
        by_method: dict[str, list[Point]] = {}
        for point in group:
            by_method.setdefault(point.method, []).append(point)
        tables.append([_pair(members, predictor) for members in by_method.values()])
    pairs = [
        (np.array([x.mean() for x, _ in table]), np.array([y.mean() for _, y in table]))
        for table in tables
        if len(table) > 1
    ]
    if not pairs:
        return NOTHING, float("nan")
    value = float(pooled_spearman(pairs))
    chance = exact_p(*pairs[0]) if len(groups) == 1 else float("nan")
    if np.isnan(value) or any(len(x) < 2 for table in tables for x, _ in table):
        return Estimate(value, float("nan"), float("nan")), chance
    random = np.random.default_rng(SEED)
    drawn = []
    for table in tables:
        if len(table) > 1:
            chosen = [random.integers(len(x), size=(RESAMPLES, len(x))) for x, _ in table]
            xs = np.stack([x[c].mean(axis=1) for (x, _), c in zip(table, chosen, strict=True)], axis=1)
            ys = np.stack([y[c].mean(axis=1) for (_, y), c in zip(table, chosen, strict=True)], axis=1)
            drawn.append((xs, ys))
    return _estimate(value, pooled_spearman(drawn)), chance


def _pair(group: Sequence[Point], predictor: str) -> tuple[Floats, Floats]:
    return np.array([point.means[predictor] for point in group]), np.array([point.final for point in group])


def _obstacle(group: Sequence[Point], predictor: str) -> str:
    """Why these runs have no correlation with the predictor, "" where they have."""
    if predictor == PAIRS and group and group[0].environment in TWO_COMPONENTS:
        return "its states have two components, whose correlation is always 1 or -1"
    x, y = _pair(group, predictor)
    if len(group) < 3:
        return f"{len(group)} runs are too few"
    if np.isnan(x).any():
        return "a run has no batches"
    if np.ptp(y) == 0:
        return f"all {len(group)} runs end with the same return ({y[0]:g})"
    common, count = _most_common(y)
    if len(y) - count < FEWEST_DIFFERENT and 2 * count > len(y):
        return f"all but {len(y) - count} of {len(group)} runs end with the same return ({common:g})"
    if np.isnan(spearman(x, y)):
        return f"it is the same in all {len(group)} runs ({x[0]:g})"
    return ""


def _most_common(values: Floats) -> tuple[float, int]:
    found, counts = np.unique(values, return_counts=True)
    place = int(counts.argmax())
    return float(found[place]), int(counts[place])


def _resamples(sizes: Sequence[int]) -> list[NDArray[np.int64]]:
    random = np.random.default_rng(SEED)
    return [random.integers(size, size=(RESAMPLES, size)) for size in sizes]


def _estimate(value: float, resampled: Floats) -> Estimate:
    """With the percentiles of the resamples that are defined; without, if most are not."""
    defined = resampled[~np.isnan(resampled)]
    if np.isnan(value) or len(defined) < FEWEST_DEFINED * len(resampled):
        return Estimate(value, float("nan"), float("nan"))
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(defined, [tail, 100 - tail])
    return Estimate(value, float(low), float(high))


def _weighted(values: Floats, weights: Floats) -> float:
    """The mean over updates of what is a mean over the updates of each episode; NaN without any."""
    present = ~np.isnan(values) & (np.nan_to_num(weights) > 0)
    if not present.any():
        return float("nan")
    return float(np.average(values[present], weights=weights[present]))


NOTHING = Estimate(float("nan"), float("nan"), float("nan"))
