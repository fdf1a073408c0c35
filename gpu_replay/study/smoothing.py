"""The lines of the pictures: a trailing mean within a run, then mean and standard error over the runs of a method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpu_replay.study.results import Floats

WINDOW = 20


def trailing_mean(values: Floats, window: int = WINDOW) -> Floats:
    """The mean of each value and the `window - 1` before it; of all so far at the start.

    values:  (n,) float64; NaN counts as absent.
    returns: (n,) float64, NaN where nothing in the window is there.

    It trails, so that no point of a line knows what comes after it, and the last one is the mean of the last `window`.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1; found {window}.")
    present = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(present, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(present)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(stop - window, 0)
    number = counts[stop] - counts[start]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(number > 0, (sums[stop] - sums[start]) / number, np.nan)


@dataclass(frozen=True)
class Band:
    """Mean and standard error over runs, all (n,) float64; `error` is None where there is one run only."""

    mean: Floats
    error: Floats | None


def over_runs(lines: Sequence[Floats]) -> Band:
    """Mean and standard error (sample standard deviation / sqrt(runs)) of smoothed lines, point by point.

    lines: at least one, (n,) each; of unequal ones the common beginning. A point is NaN as soon as one run has none.
    """
    shortest = min(len(line) for line in lines)
    table = np.stack([line[:shortest] for line in lines])
    if len(lines) == 1:
        return Band(table[0], None)
    return Band(table.mean(axis=0), table.std(axis=0, ddof=1) / np.sqrt(len(lines)))
