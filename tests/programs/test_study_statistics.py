"""The study's estimators against numbers worked out by hand, and against NumPy one pair at a time."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_replay.study.statistics import correlated_pairs, td_statistics


def test_td_statistics_by_hand() -> None:
    # absolute values 1, 2, 3, 6: mean 3, median 2.5, deviation sqrt((4 + 1 + 0 + 9) / 4)
    found = td_statistics(np.array([[-2.0, 1.0, 6.0, -3.0], [0.0, 0.0, 0.0, 0.0]], dtype=np.float32))
    assert {name: values.tolist() for name, values in found.items()} == {
        "td_mean": [3.0, 0.0],
        "td_median": [2.5, 0.0],
        "td_max": [6.0, 0.0],
        "td_std": [pytest.approx(3.5**0.5, rel=1e-15), 0.0],
    }


# with a: (1, 2, 3): b rises with it (r = 1), c falls (r = -1), d is flat and has no correlation,
# f: (2, 1, 5) has r = 3 / sqrt(2 * 26 / 3) = 0.7206
A, B, C, D, F = (1, 2, 3), (10, 20, 30), (3, 2, 1), (7, 7, 7), (2, 1, 5)


@pytest.mark.parametrize(
    "batch, above, pairs",
    [
        ([A, B, C, D, D], 0.8, 3),
        ([A, F], 0.72, 1),
        ([A, F], 0.73, 0),
        ([C, F], 0.72, 1),
        ([A], 0.8, 0),
        ([A, A, A, A], 0.8, 6),
    ],
)
def test_correlated_pairs_by_hand(batch: list[tuple[int, ...]], above: float, pairs: int) -> None:
    assert correlated_pairs(np.array([batch], dtype=np.float32), above).tolist() == [pairs]


def test_two_components_are_always_correlated_unless_they_are_equal() -> None:
    # MountainCar's states: the count depends only on how many are flat
    states = np.random.default_rng(0).standard_normal((2, 10, 2)).astype(np.float32)
    states[1, 4] = 0.5
    assert correlated_pairs(states, 0.8).tolist() == [45, 36]


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("components", [3, 4, 6])
def test_correlated_pairs_are_those_of_corrcoef(components: int, size: float) -> None:
    # more updates than are computed at a time
    states = np.random.default_rng(components).standard_normal((70, 33, components)).astype(np.float32)
    matrices = np.abs([np.corrcoef(batch) for batch in states.astype(np.float64)])
    expected = (np.triu(matrices, 1) > 0.8).sum(axis=(1, 2)).tolist()
    assert len(set(expected)) > 5
    assert correlated_pairs((states * np.float32(size)).astype(np.float32), 0.8).tolist() == expected


def test_flat_vectors_of_numbers_that_do_not_add_up_exactly_are_not_counted() -> None:
    # three times 0.1 divided by three is not 0.1 in floating point
    states = np.full((1, 4, 3), 0.1, dtype=np.float32)
    states[0, 0] = (1, 2, 3)
    assert correlated_pairs(states, 0.8).tolist() == [0]
