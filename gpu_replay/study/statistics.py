"""Statistics of sampled batches: their TD errors, and the number of correlated pairs of states.

All functions take the batches of many updates at once: one call per batch would cost more than the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def td_statistics(td_errors: Floats) -> dict[str, Floats]:
    """Mean, median, maximum and population standard deviation of the absolute TD errors of each batch.

    td_errors: (U, B), of either sign; one row for each update.
    returns:   (U,) each, under the names of their columns in episodes.csv.
    """
    sizes = np.abs(td_errors).astype(np.float64)
    return {
        "td_mean": sizes.mean(axis=1),
        "td_median": np.median(sizes, axis=1),
        "td_max": sizes.max(axis=1),
        "td_std": sizes.std(axis=1),
    }


def correlated_pairs(states: Floats, above: float) -> NDArray[np.int64]:
    """(U,) pairs i < j of each batch whose state vectors have a Pearson correlation r with |r| > `above`.

    states: (U, B, D); the correlation of two vectors is over their D components, as in `numpy.corrcoef` of the rows.

    A vector whose components are all equal has no correlation with any other and is not counted. With D = 2 every
    other pair has |r| = 1.
    """
    # components first: sums over the few components then add long rows
    centred = np.ascontiguousarray(states.transpose(0, 2, 1))
    constant = centred.max(axis=1) == centred.min(axis=1)
    centred -= centred.mean(axis=1, keepdims=True)
    # the largest component becomes 1, so that no square underflows or overflows
    largest = np.abs(centred).max(axis=1)
    scale = np.where(constant, 0, 1 / np.where(constant, 1, largest))
    centred *= scale[:, None]
    length = np.sqrt(np.square(centred).sum(axis=1))
    centred /= np.where(constant, 1, length)[:, None]
    close = np.abs(centred.transpose(0, 2, 1) @ centred) > above
    # the matrix holds each pair twice, and each vector once with itself
    return (close.sum(axis=(1, 2)) - close.diagonal(axis1=1, axis2=2).sum(axis=1)) // 2
