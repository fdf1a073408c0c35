"""The estimators of the study against hand-worked numbers and against SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_replay.study.analysis import (
    AVERAGED,
    PAIRS,
    Correlation,
    Estimate,
    correlations,
    difference,
    mean_over_seeds,
    method_share,
    pooled_spearman,
    summarize,
)

pd = pytest.importorskip("pandas")
stats = pytest.importorskip("scipy.stats")

NAN = float("nan")


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def point(method: str, final: float, place: str = "CartPole-v1", **means: float) -> dict[str, Any]:
    return {"environment": place, "method": method, "final": final, **dict.fromkeys(AVERAGED, final), **means}


def by_td_mean(points: list[dict[str, Any]]) -> dict[str | None, Correlation]:
    return {each.place: each for each in correlations(pd.DataFrame(points)) if each.predictor == "td_mean"}


def share_of(points: list[dict[str, Any]]) -> tuple[float, float]:
    return method_share(pd.DataFrame(points))


def difference_of(points: list[dict[str, Any]], first: str, second: str) -> Estimate:
    return difference(pd.DataFrame(points), first, second)


def test_one_group_gives_spearman():
    random = np.random.default_rng(2)
    for n in (3, 10, 41):
        x, y = random.normal(size=n), random.integers(5, size=n).astype(np.float64)
        y[0] = 7.0
        assert pooled_spearman([(x, y)]) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert np.isnan(pooled_spearman([(array(1, 2, 3), array(5, 5, 5))]))


def test_pool_ranks_within_each_group():
    # within both groups y rises with x; over all of them it falls
    rising = [(array(1, 2, 3), array(10, 11, 12)), (array(7, 8, 9), array(1, 2, 3))]
    assert pooled_spearman(rising) == pytest.approx(1)
    # group one gives (0, 1, -1)/3 against (-1, 1, 0)/3; group two is exact: (1 + 2) / (2 + 2)
    mixed = [(array(5, 9, 1), array(1, 3, 2)), (array(1, 2, 3), array(1, 2, 3))]
    assert pooled_spearman(mixed) == pytest.approx(0.75)
    # resamples stand in rows
    stacked = [tuple(np.stack([side, side[::-1]]) for side in pair) for pair in mixed]
    np.testing.assert_allclose(pooled_spearman(stacked), [0.75, 0.75])


def test_method_share_is_one_where_methods_decide_and_zero_where_they_do_not():
    share, p = share_of([point(m, final) for m, final in zip("aabbcc", (1, 1, 2, 2, 3, 3), strict=True)])
    assert share == pytest.approx(1)
    # 6!/(2! 2! 2!) = 90 ways to deal three pairs, 6 of which keep them together
    assert p == pytest.approx(6 / 90, abs=0.02)
    found = share_of([point(m, final) for m, final in zip("aabb", (1, 4, 2, 3), strict=True)])
    assert found == (pytest.approx(0), pytest.approx(1))


def test_method_share_is_kruskal_and_wallis_over_n_minus_one():
    values = np.random.default_rng(4).normal(size=15)
    expected = stats.kruskal(*[values[i::3] for i in range(3)]).statistic / 14
    assert share_of([point("abc"[i % 3], value) for i, value in enumerate(values)])[0] == pytest.approx(expected)


@pytest.mark.parametrize("finals, methods", [((1, 1, 1, 1), "aabb"), ((1, 2, 3), "aaa"), ((1, 2), "ab")])
def test_method_share_is_undefined_where_there_is_nothing_to_share(finals, methods):
    assert np.isnan(share_of([point(m, final) for m, final in zip(methods, finals, strict=True)])).all()


def test_run_is_summarized_by_its_last_hundred_episodes_and_by_its_updates():
    measured = np.full(150, NAN)
    measured[1:3] = (1.0, 5.0)
    episodes = pd.DataFrame({"environment": "E", "method": "m", "seed": 0, **dict.fromkeys(AVERAGED, measured)})
    episodes["return"] = np.concatenate([np.full(50, -7.0), np.arange(100.0)])
    episodes["updates"] = np.concatenate([[0.0, 30.0, 10.0], np.zeros(147)])
    never = episodes.assign(seed=1, updates=0.0)
    first, second = summarize(pd.concat([episodes, never])).to_dict("records")
    assert (first["environment"], first["method"], first["seed"]) == ("E", "m", 0)
    assert first["final"] == pytest.approx(49.5)
    assert first["td_mean"] == pytest.approx((30 * 1 + 10 * 5) / 40)
    assert np.isnan(second["td_mean"])


def test_interval_over_seeds_covers_the_mean_and_needs_two_of_them():
    found = mean_over_seeds([1.0, 2.0, 6.0])
    # the smallest and the largest mean that a resample can have come up in 1 of 27, more often than 1 in 40
    assert (found.value, found.low, found.high) == (pytest.approx(3), 1.0, 6.0)
    assert not mean_over_seeds([4.0]).bounded
    assert mean_over_seeds([4.0]).value == 4.0


def test_interval_over_many_seeds_is_that_of_the_normal_distribution():
    values = np.random.default_rng(5).normal(size=60)
    error = values.std() / np.sqrt(60)
    found = mean_over_seeds(values.tolist())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.2 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.2 * error)


def test_correlation_over_runs_and_over_methods():
    # within each method the return falls with the predictor, between methods it rises
    found = [point(m, 10.0 * i - s, td_mean=10.0 * i + s) for i, m in enumerate("abcd") for s in range(3)]
    row = by_td_mean(found)["CartPole-v1"]
    x, y = (array(*[p[name] for p in found]) for name in ("td_mean", "final"))
    assert row.overall.value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert row.overall.low < row.overall.value < row.overall.high
    assert row.between.value == pytest.approx(1)
    assert (row.runs, row.without_hindsight) == (12, None)
    # of 4! = 24 orders: both extremes; with rho = 0.8 also the 3 neighbour swaps of each
    assert row.between_p == pytest.approx(2 / 24)
    swapped = [point(m, final, td_mean=x) for m, x, final in zip("abcd", (1, 2, 3, 4), (2, 1, 3, 4), strict=True)]
    assert by_td_mean(swapped)["CartPole-v1"].between_p == pytest.approx(8 / 24)


def test_hindsight_is_left_out_of_the_second_correlation():
    found = [point("uniform", float(s)) for s in range(6)]
    found += [point("hindsight", float(s), td_mean=-float(s)) for s in range(6)]
    row = by_td_mean(found)["CartPole-v1"]
    assert row.without_hindsight.value == pytest.approx(1)
    assert row.overall.value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "found, predictor, reason",
    [
        ([point("a", -200.0, td_mean=float(s)) for s in range(4)], "td_mean", "4 of 4 runs end with the same return"),
        ([point("a", -min(200.0, 198.0 + s)) for s in range(9)], "td_mean", "7 of 9 runs end with the same"),
        ([point("a", float(s), td_mean=3.0) for s in range(4)], "td_mean", "the same in all 4 runs (3)"),
        ([point("a", float(s), "MountainCar-v0") for s in range(4)], PAIRS, "two components"),
        ([point("a", float(s)) for s in range(2)], "td_mean", "2 runs are too few"),
        ([point("a", float(s), td_mean=NAN) for s in range(4)], "td_mean", "no batches"),
    ],
)
def test_an_undefined_correlation_has_a_reason(found, predictor, reason):
    row = next(each for each in correlations(pd.DataFrame(found)) if each.predictor == predictor)
    assert reason in row.why_not
    assert np.isnan(row.overall.value)


def test_pool_leaves_out_environments_without_a_correlation():
    found = [point(m, 3.0 * i + s) for i, m in enumerate("ab") for s in range(3)]
    flat = [point(m, -200.0, "MountainCar-v0", td_mean=float(s)) for m in "ab" for s in range(3)]
    pool = by_td_mean([*found, *flat])[None]
    assert (pool.runs, pool.overall.value) == (6, pytest.approx(1))
    assert None not in by_td_mean(flat)


def test_difference_compares_on_the_same_runs():
    random = np.random.default_rng(6)
    found = [point("a", float(s), correlated_pairs=-float(s), td_mean=random.normal()) for s in range(25)]
    assert difference_of(found, PAIRS, "td_mean").low > 0
    assert difference_of(found, "td_mean", PAIRS).value == pytest.approx(-difference_of(found, PAIRS, "td_mean").value)
    assert np.isnan(difference_of([point("a", 0.0) for _ in range(5)], PAIRS, "td_mean").value)


def test_no_interval_where_many_resamples_have_no_correlation():
    # three runs of nine differ; 2.6 % of the resamples have none of them, and of two of nine 10 %
    assert by_td_mean([point("a", float(max(s, 5)), td_mean=float(s)) for s in range(9)])["CartPole-v1"].overall.bounded
    # a predictor that differs in one run only
    odd = by_td_mean([point("a", float(s), td_mean=float(s == 8)) for s in range(9)])["CartPole-v1"].overall
    assert not np.isnan(odd.value)
    assert not odd.bounded
