"""Chi-square tests with a stated rate of false alarms.

Seeds are fixed, so a test passes always or never; the rate says how likely a correct buffer was to fail when the seed
was chosen, and how likely it is to fail after a change of the random stream.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import pytest

FALSE_ALARMS = 1e-6  # of each call of `check_counts`
LEAST_EXPECTED = 5.0  # cells that expect less are pooled, the usual condition for the chi-square approximation


def pooled(observed: Sequence[int], expected: Sequence[float]) -> list[tuple[int, float]]:
    """(observed, expected) of each cell, those that expect little added up until they expect enough."""
    cells: list[tuple[int, float]] = []
    rest_seen, rest_expected = 0, 0.0
    for seen, wanted in zip(observed, expected, strict=True):
        if wanted >= LEAST_EXPECTED:
            cells.append((seen, wanted))
            continue
        rest_seen, rest_expected = rest_seen + seen, rest_expected + wanted
        if rest_expected >= LEAST_EXPECTED:
            cells.append((rest_seen, rest_expected))
            rest_seen, rest_expected = 0, 0.0
    if rest_expected:
        last_seen, last_expected = cells.pop()
        cells.append((last_seen + rest_seen, last_expected + rest_expected))
    return cells


def check_counts(counts: Mapping[Hashable, int], weights: Mapping[Hashable, float]) -> None:
    """Fail unless `counts` look like independent draws with probabilities proportional to `weights`.

    Every outcome that may occur is a key of `weights`; any other outcome in `counts` fails at once.
    """
    impossible = {outcome: count for outcome, count in counts.items() if not weights.get(outcome)}
    assert not impossible, f"drawn, though their probability is zero: {impossible}"
    drawn, total = sum(counts.values()), sum(weights.values())
    outcomes = list(weights)
    cells = pooled(
        [counts.get(outcome, 0) for outcome in outcomes], [drawn * weights[outcome] / total for outcome in outcomes]
    )
    assert len(cells) >= 2, "too few draws or outcomes to say anything"
    chi2 = pytest.importorskip("scipy.stats").chi2
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    limit = chi2.isf(FALSE_ALARMS, len(cells) - 1)
    assert statistic <= limit, f"chi-square {statistic:.1f} over {len(cells)} cells exceeds {limit:.1f}"
