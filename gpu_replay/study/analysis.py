"""Estimates from the runs: final returns, means over the batches of a run, and their rank correlations.

One run is one point. The outcome is the mean return of its last episodes; the predictors are means over all batches
that it learned from. Every interval is a percentile bootstrap.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gpu_replay.study.run import KEYS

if TYPE_CHECKING:
    from pandas import DataFrame

LAST = 100
RESAMPLES = 2000
SEED = 20160225
# an interval needs a correlation defined in this share of the resamples: those without one are not a random choice
FEWEST_DEFINED = 0.95
# if most runs end with the same return and fewer than this many with another one, ranks are meaningless
FEWEST_DIFFERENT = 3
# states of two components: their correlation is 1 or -1, whatever the states are
TWO_COMPONENTS = ("MountainCar-v0",)
PAIRS = "correlated_pairs"
# column to its name in the tables
PREDICTORS = {
    PAIRS: "correlated pairs",
    "td_mean": "mean TD error",
    "td_max": "max TD error",
    "td_std": "std of TD errors",
}
AVERAGED = [PAIRS, "td_mean", "td_median", "td_max", "td_std", "q_mean", "q_max"]
Floats = NDArray[np.float64]
Pair = tuple[Floats, Floats]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval; `low` and `high` are NaN if it has no interval."""

    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")

    @property
    def bounded(self) -> bool:
        """Whether it has an interval."""
        return not np.isnan(self.low)

    @property
    def sign(self) -> int:
        """1 or -1 for an interval on one side of 0, otherwise 0."""
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class Correlation:
    """Spearman's correlation of the final return with one predictor.

    place:             environment, or None for all of them by ranks within each.
    overall:           over runs, resampling runs within their environment.
    without_hindsight: the same without hindsight, whose TD errors belong to another task; None if not applicable.
    between:           over the means of the methods, resampling the seeds within each method.
    between_p:         exact p-value of `between`, over all orders of the methods; NaN for the pool.
    why_not:           why the correlation is undefined, "" where it is defined.
    """

    place: str | None
    predictor: str
    runs: int
    why_not: str = ""
    overall: Estimate = Estimate()
    without_hindsight: Estimate | None = None
    between: Estimate = Estimate()
    between_p: float = float("nan")


def summarize(episodes: DataFrame) -> DataFrame:
    """One row per run: its environment, method and seed, its outcome, and the predictors.

    final: the mean return of its last 100 episodes, or of all if there are fewer. The columns `AVERAGED` are means
    weighted by updates, NaN for a run without updates.
    """
    keys = [episodes[name] for name in KEYS]
    updates = episodes["updates"]
    sums = episodes[AVERAGED].mul(updates, axis=0).groupby(keys, observed=True).sum()
    finals = episodes["return"].groupby(keys, observed=True).apply(lambda returns: returns.tail(LAST).mean())
    means = sums.div(updates.groupby(keys, observed=True).sum(), axis=0)
    return means.assign(final=finals).reset_index()


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """The mean and its interval, resampling the values; no interval for fewer than two."""
    found = np.array(values, dtype=np.float64)
    return _bootstrap([len(found)], lambda chosen: found[chosen].mean(axis=-1))


def pooled_spearman(pairs: Sequence[tuple[Floats, ...]]) -> Floats:
    """Pearson correlation of ranks that are computed within each group and then pooled.

    pairs:   x and y of each group, (..., n) each; leading axes are shared, n may differ between groups.
    returns: (...) float64, NaN where all values are constant. One group gives Spearman's correlation.
    """
    from scipy import stats

    x, y = (np.concatenate([_centred_ranks(pair[side]) for pair in pairs], axis=-1) for side in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        return stats.pearsonr(x, y, axis=-1).statistic


def method_share(points: DataFrame) -> tuple[float, float]:
    """How much of the variance of the ranks of the final returns lies between the methods, and its p-value.

    returns: eta squared of the ranks (the statistic of Kruskal and Wallis over n - 1), and the share of random
             permutations that reach it. Both are NaN for constant returns, one method, or one run per method.
    """
    methods = points["method"].to_numpy()
    names = np.unique(methods)
    ranks = _centred_ranks(points["final"].to_numpy())
    total = float((ranks * ranks).sum())
    if total == 0 or not 1 < len(names) < len(points):
        return float("nan"), float("nan")
    member = (methods[:, None] == names).astype(np.float64)
    shuffled = np.random.default_rng(SEED).permuted(np.tile(ranks, (RESAMPLES, 1)), axis=1)
    # the observed order is one of the possible ones
    sums = np.vstack([ranks, shuffled]) @ member
    shares = (np.square(sums) / member.sum(axis=0)).sum(axis=1) / total
    return float(shares[0]), float((shares >= shares[0] - 1e-12).mean())


def correlations(points: DataFrame) -> list[Correlation]:
    """For every predictor: each environment, in the order of the points, then all together."""
    groups = _by("environment", points)
    found = []
    for predictor in PREDICTORS:
        reasons = {place: _undefined(group, predictor) for place, group in groups.items()}
        found += [_correlation(place, predictor, [group], reasons[place]) for place, group in groups.items()]
        if len(groups) > 1:
            usable = [group for place, group in groups.items() if not reasons[place]]
            found.append(_correlation(None, predictor, usable, "" if usable else "it is in every environment"))
    return found


def difference(points: DataFrame, first: str, second: str) -> Estimate:
    """|correlation| of `first` with the final return minus that of `second`, on the same runs.

    Over all environments in which both correlations are defined; NaN if there is none.
    """
    everywhere = _by("environment", points).values()
    groups = [group for group in everywhere if not (_undefined(group, first) or _undefined(group, second))]
    sides = [[_pair(group, predictor) for group in groups] for predictor in (first, second)]

    def statistic(*chosen: Indices) -> Floats:
        one, other = (np.abs(pooled_spearman(_take(pairs, chosen))) for pairs in sides)
        return one - other

    return _bootstrap([len(group) for group in groups], statistic)


def _correlation(place: str | None, predictor: str, groups: list[DataFrame], why_not: str) -> Correlation:
    runs = sum(map(len, groups))
    if why_not:
        return Correlation(place, predictor, runs, why_not)
    plain = [group[group["method"] != "hindsight"] for group in groups]
    has_hindsight = sum(map(len, plain)) < runs
    plain = [group for group in plain if not _undefined(group, predictor)]
    without = _over_runs(plain, predictor) if has_hindsight and plain else None
    exact = _exact_p(groups[0], predictor) if len(groups) == 1 else float("nan")
    overall, between = _over_runs(groups, predictor), _over_methods(groups, predictor)
    return Correlation(place, predictor, runs, "", overall, without, between, exact)


def _over_runs(groups: list[DataFrame], predictor: str) -> Estimate:
    pairs = [_pair(group, predictor) for group in groups]
    return _bootstrap([len(group) for group in groups], lambda *chosen: pooled_spearman(_take(pairs, chosen)))


def _over_methods(groups: list[DataFrame], predictor: str) -> Estimate:
    """The correlation over the means of the methods, with an interval if every method has at least two seeds."""
    tables = [[_pair(group, predictor) for group in _by("method", each).values()] for each in groups]
    tables = [table for table in tables if len(table) > 1]

    def statistic(*chosen: Indices) -> Floats:
        indices, means = iter(chosen), []
        for table in tables:
            taken = _take(table, list(itertools.islice(indices, len(table))))
            means.append(tuple(np.stack([pair[side].mean(axis=-1) for pair in taken], axis=-1) for side in (0, 1)))
        return pooled_spearman(means)

    return _bootstrap([len(x) for table in tables for x, _ in table], statistic)


def _exact_p(group: DataFrame, predictor: str) -> float:
    """p-value of the correlation of the methods' means over all their orders; NaN for fewer than three methods."""
    from scipy import stats

    x, y = group.groupby("method", observed=True)[[predictor, "final"]].mean().to_numpy().T
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")

    def statistic(x: Floats, axis: int) -> Floats:
        return pooled_spearman([(x, np.broadcast_to(y, x.shape))])

    return float(stats.permutation_test((x,), statistic, permutation_type="pairings", vectorized=True).pvalue)


def _bootstrap(sizes: Sequence[int], statistic: Callable[..., Floats]) -> Estimate:
    """The percentile interval of a statistic of groups that are resampled independently.

    sizes:     rows of each group.
    statistic: (..., n) row indices of each group -> (...), NaN where undefined.
    """
    value = float(statistic(*map(np.arange, sizes))) if sizes else float("nan")
    if np.isnan(value) or min(sizes) < 2:
        return Estimate(value)
    random = np.random.default_rng(SEED)
    resampled = statistic(*[random.integers(size, size=(RESAMPLES, size)) for size in sizes])
    if np.isnan(resampled).mean() > 1 - FEWEST_DEFINED:
        return Estimate(value)
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def _centred_ranks(values: Floats) -> Floats:
    """Ranks along the last axis, scaled to (-1/2, 1/2) so that groups of different sizes are comparable."""
    from scipy import stats

    n = values.shape[-1]
    return (stats.rankdata(values, axis=-1) - (n + 1) / 2) / n


def _take(pairs: Sequence[Pair], chosen: Sequence[Indices]) -> list[Pair]:
    return [(x[rows], y[rows]) for (x, y), rows in zip(pairs, chosen, strict=True)]


def _pair(group: DataFrame, predictor: str) -> Pair:
    return group[predictor].to_numpy(), group["final"].to_numpy()


def _by(name: str, points: DataFrame) -> dict[str, DataFrame]:
    """The points of each environment or method, in the order of the tables."""
    return {str(key): group for key, group in points.groupby(name, observed=True, sort=False)}


def _undefined(group: DataFrame, predictor: str) -> str:
    """Why these runs have no correlation with the predictor, or "" if they have one."""
    if predictor == PAIRS and group["environment"].isin(TWO_COMPONENTS).any():
        return "its states have two components, whose correlation is always 1 or -1"
    x, y = _pair(group, predictor)
    if len(group) < 3:
        return f"{len(group)} runs are too few"
    if np.isnan(x).any():
        return "a run has no batches"
    values, counts = np.unique(y, return_counts=True)
    most = int(counts.max())
    if len(y) == most or (len(y) - most < FEWEST_DIFFERENT and 2 * most > len(y)):
        return f"{most} of {len(group)} runs end with the same return ({values[counts.argmax()]:g})"
    if np.ptp(x) == 0:
        return f"it is the same in all {len(group)} runs ({x[0]:g})"
    return ""
