"""Rank statistics in NumPy: Spearman's correlation, over many resamples at once, and what a grouping explains."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from gpu_replay.study.results import Floats

# resamples ranked at a time: n * n comparisons each
CHUNK = 200
# all orders of so few points are tried one by one
MOST_PERMUTED = 7


def ranks(values: Floats) -> Floats:
    """Ranks along the last axis, from 1; equal values share the mean of their ranks.

    values: (..., n) float64 without NaN. Takes n * n comparisons for each of the rows.
    """
    below = (values[..., None, :] < values[..., :, None]).sum(axis=-1)
    equal = (values[..., None, :] == values[..., :, None]).sum(axis=-1)
    found: Floats = below + (equal + 1) / 2
    return found


def correlation(x: Floats, y: Floats) -> Floats:
    """Pearson's correlation along the last axis, NaN where one of the two is constant."""
    x = x - x.mean(axis=-1, keepdims=True)
    y = y - y.mean(axis=-1, keepdims=True)
    spread = np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Floats = np.where(spread > 0, np.clip((x * y).sum(axis=-1) / spread, -1.0, 1.0), np.nan)
    return found


def spearman(x: Floats, y: Floats) -> float:
    """Spearman's rank correlation of two (n,) float64, ties at their mean rank; NaN where one is constant or n < 2."""
    if len(x) < 2:
        return float("nan")
    return float(correlation(ranks(x), ranks(y)))


def centred_ranks(values: Floats) -> Floats:
    """Ranks along the last axis moved and scaled into (-1/2, 1/2), so that groups of other sizes can join them."""
    n = values.shape[-1]
    return (ranks(values) - (n + 1) / 2) / n


def pooled_spearman(pairs: list[tuple[Floats, Floats]]) -> Floats:
    """Correlation of ranks made within each group and then put together.

    pairs:   for each group x and y, (..., n) each; leading axes are shared, n may differ from group to group.
    returns: (...) float64, NaN where all is constant. One group gives Spearman's correlation.
    """
    x = np.concatenate([centred_ranks(pair[0]) for pair in pairs], axis=-1)
    y = np.concatenate([centred_ranks(pair[1]) for pair in pairs], axis=-1)
    return correlation(x, y)


def resampled_spearman(groups: list[tuple[Floats, Floats]], indices: list[NDArray[np.int64]]) -> Floats:
    """`pooled_spearman` of every resample.

    groups:  x and y of each group, (n,) each.
    indices: for each group (resamples, n) int64, which of its rows each resample holds.
    returns: (resamples,) float64, NaN for a resample in which x or y is constant.
    """
    total = len(indices[0])
    found = np.empty(total)
    for start in range(0, total, CHUNK):
        part = slice(start, start + CHUNK)
        taken = [(x[chosen[part]], y[chosen[part]]) for (x, y), chosen in zip(groups, indices, strict=True)]
        found[part] = pooled_spearman(taken)
    return found


def exact_p(x: Floats, y: Floats) -> float:
    """The share of all orders of y whose |Spearman correlation| with x is at least as large as theirs.

    NaN for more than 7 points, fewer than 3, or a constant.
    """
    observed = spearman(x, y)
    if not 3 <= len(x) <= MOST_PERMUTED or np.isnan(observed):
        return float("nan")
    orders = np.array(list(permutations(range(len(y)))))
    all_orders = correlation(np.broadcast_to(ranks(x), orders.shape), ranks(y)[orders])
    return float((np.abs(all_orders) >= abs(observed) - 1e-12).mean())


def group_share(values: Floats, groups: NDArray[np.int64], resamples: int, seed: int) -> tuple[float, float]:
    """How much of the variance of the ranks lies between groups (eta squared), and how often chance gives as much.

    values:  (n,) float64; groups: (n,) int64, the group of each.
    returns: the share from 0 to 1, and its p-value over `resamples` random permutations; NaN, NaN where the values are
             constant, or where there is one group, or one value in each.
    """
    names, place = np.unique(groups, return_inverse=True)
    ranked = ranks(values) - (len(values) + 1) / 2
    total = float((ranked * ranked).sum())
    if total == 0 or not 1 < len(names) < len(values):
        return float("nan"), float("nan")
    member = (place[:, None] == np.arange(len(names))).astype(np.float64)

    def between(rows: Floats) -> Floats:
        sums = rows @ member
        found: Floats = (sums * sums / member.sum(axis=0)).sum(axis=-1) / total
        return found

    shuffled = np.random.default_rng(seed).permuted(np.tile(ranked, (resamples, 1)), axis=1)
    share = float(between(ranked))
    # the order that was found is one of the possible ones
    chance = (1 + int((between(shuffled) >= share - 1e-12).sum())) / (1 + resamples)
    return share, chance
