"""The estimators of the study against hand-worked numbers and against SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from study_tables import by_errors, write_study

from gpu_replay.console.errors import UserError
from gpu_replay.study.analysis import (
    PAIRS,
    Point,
    connections,
    mean_over_seeds,
    method_share,
    points,
    stronger,
    summarise,
)
from gpu_replay.study.ranks import exact_p, group_share, pooled_spearman, ranks, resampled_spearman, spearman
from gpu_replay.study.results import Run, read_study
from gpu_replay.study.smoothing import over_runs, trailing_mean

NAN = float("nan")


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def point(method: str, seed: int, final: float, place: str = "CartPole-v1", **means: float) -> Point:
    names = (PAIRS, "td_mean", "td_median", "td_max", "td_std", "q_mean", "q_max")
    return Point(place, method, seed, final, {name: means.get(name, final) for name in names})


def test_trailing_mean_is_shorter_at_the_start():
    assert trailing_mean(array(1, 2, 3, 4, 5), window=3).tolist() == [1, 1.5, 2, 3, 4]
    assert trailing_mean(array(1, 2, 3), window=1).tolist() == [1, 2, 3]
    assert trailing_mean(array(2, 4), window=20).tolist() == [2, 3]


def test_trailing_mean_leaves_out_what_is_not_there():
    np.testing.assert_array_equal(trailing_mean(array(NAN, NAN, 6, NAN, 2), window=2), [NAN, NAN, 6, 6, 2])


def test_trailing_mean_refuses_an_empty_window():
    with pytest.raises(ValueError, match="at least 1; found 0"):
        trailing_mean(array(1), window=0)


def test_trailing_mean_sees_twenty_episodes_by_default():
    assert trailing_mean(np.arange(1.0, 41.0))[-1] == pytest.approx(30.5)


def test_band_is_the_standard_error_over_runs():
    band = over_runs([array(1, 2, 9), array(3, 2, 9), array(5, 8)])
    # of a common length; standard deviations 2 and sqrt(12), divided by sqrt(3)
    np.testing.assert_allclose(band.mean, [3, 4])
    np.testing.assert_allclose(band.error, [2 / np.sqrt(3), 2])
    assert over_runs([array(1, 2)]).error is None


def test_ranks_with_ties_are_those_of_scipy():
    values = np.random.default_rng(1).integers(6, size=(5, 13)).astype(np.float64)
    np.testing.assert_array_equal(ranks(values), stats.rankdata(values, axis=1))
    assert ranks(array(30, 10, 10, 20)).tolist() == [4, 1.5, 1.5, 3]


def test_spearman_is_that_of_scipy():
    random = np.random.default_rng(2)
    for n in (2, 3, 10, 41):
        x, y = random.normal(size=n), random.integers(5, size=n).astype(np.float64)
        y[0] = 7.0
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def test_spearman_of_a_constant_is_undefined():
    assert np.isnan(spearman(array(1, 2, 3), array(5, 5, 5)))
    assert np.isnan(spearman(array(1), array(1)))


def test_pool_ranks_within_each_group():
    # within both groups y rises with x; over all of them it falls
    rising = [(array(1, 2, 3), array(10, 11, 12)), (array(7, 8, 9), array(1, 2, 3))]
    assert pooled_spearman(rising) == pytest.approx(1)
    one = (array(1, 2, 3, 4), array(2, 1, 4, 3))
    assert pooled_spearman([one]) == pytest.approx(0.6)
    # group one gives (0, 1, -1)/3 against (-1, 1, 0)/3; group two is exact: (1 + 2) / (2 + 2)
    mixed = [(array(5, 9, 1), array(1, 3, 2)), (array(1, 2, 3), array(1, 2, 3))]
    assert pooled_spearman(mixed) == pytest.approx(0.75)


def test_resamples_are_pooled_correlations_of_the_chosen_rows():
    random = np.random.default_rng(3)
    groups = [(random.normal(size=n), random.normal(size=n)) for n in (6, 9)]
    indices = [random.integers(n, size=(450, n)) for n in (6, 9)]
    found = resampled_spearman(groups, indices)
    for row in (0, 199, 200, 449):
        chosen = [(x[i[row]], y[i[row]]) for (x, y), i in zip(groups, indices, strict=True)]
        assert found[row] == pytest.approx(float(pooled_spearman(chosen)))


def test_exact_p_counts_orders():
    # of the 6 orders of three, the rising and the falling one
    assert exact_p(array(1, 2, 3), array(4, 5, 6)) == pytest.approx(2 / 6)
    # of 24 orders, those with |rho| of at least 0.8: rising, its 3 neighbour swaps, and their mirror images
    assert exact_p(array(1, 2, 3, 4), array(2, 1, 3, 4)) == pytest.approx(8 / 24)
    assert np.isnan(exact_p(array(1, 2), array(1, 2)))
    assert np.isnan(exact_p(array(1, 2, 3), array(1, 1, 1)))
    assert np.isnan(exact_p(np.arange(8.0), np.arange(8.0)))


def test_group_share_is_one_where_groups_decide_and_zero_where_they_do_not():
    share, p = group_share(array(1, 1, 2, 2, 3, 3), np.array([0, 0, 1, 1, 2, 2]), 4000, 0)
    assert share == pytest.approx(1)
    # 6!/(2! 2! 2!) = 90 ways to deal three pairs, 6 of which keep them together
    assert p == pytest.approx(6 / 90, abs=0.02)
    share, p = group_share(array(1, 4, 2, 3), np.array([0, 0, 1, 1]), 500, 0)
    assert (share, p) == (pytest.approx(0), pytest.approx(1))


def test_group_share_is_kruskal_and_wallis_over_n_minus_one():
    random = np.random.default_rng(4)
    values, groups = random.normal(size=15), np.arange(15) % 3
    expected = stats.kruskal(*[values[groups == g] for g in range(3)]).statistic / 14
    assert group_share(values, groups, 10, 0)[0] == pytest.approx(expected)


@pytest.mark.parametrize("values, groups", [((1, 1, 1, 1), (0, 0, 1, 1)), ((1, 2, 3), (0, 0, 0)), ((1, 2), (0, 1))])
def test_group_share_is_undefined_where_there_is_nothing_to_share(values, groups):
    assert np.isnan(group_share(array(*values), np.array(groups), 10, 0)).all()


def test_run_is_summed_up_by_its_last_hundred_episodes_and_by_its_updates():
    columns = {
        "return": np.concatenate([np.full(50, -7.0), np.arange(100.0)]),
        "updates": np.concatenate([[0.0, 30.0, 10.0], np.zeros(147)]),
    }
    measured = np.full(150, NAN)
    measured[1:3] = (1.0, 5.0)
    names = ("duration", PAIRS, "td_mean", "td_median", "td_max", "td_std", "q_mean", "q_max")
    found = summarise(Run("E", "m", 0, {**dict.fromkeys(names, measured), **columns}))
    assert found.final == pytest.approx(49.5)
    assert found.means["td_mean"] == pytest.approx((30 * 1 + 10 * 5) / 40)


def test_interval_over_seeds_covers_the_mean_and_needs_two_of_them():
    found = mean_over_seeds([1.0, 2.0, 6.0])
    assert found.value == pytest.approx(3)
    # the smallest and the largest mean that a resample can have come up in 1 of 27, more often than 1 in 40
    assert (found.low, found.high) == (1.0, 6.0)
    assert not mean_over_seeds([4.0]).bounded
    assert mean_over_seeds([4.0]).value == 4.0


def test_interval_over_many_seeds_is_that_of_the_normal_distribution():
    values = np.random.default_rng(5).normal(size=60)
    error = values.std() / np.sqrt(60)
    found = mean_over_seeds(values.tolist())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.2 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.2 * error)


def test_connection_over_runs_and_over_methods():
    # within each method the return falls with the predictor, between methods it rises
    found = [point(m, s, 10.0 * i - s, td_mean=10.0 * i + s) for i, m in enumerate("abcd") for s in range(3)]
    row = next(each for each in connections(found) if each.predictor == "td_mean")
    x, y = array(*[p.means["td_mean"] for p in found]), array(*[p.final for p in found])
    assert row.overall.value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert row.overall.low < row.overall.value < row.overall.high
    assert row.between.value == pytest.approx(1)
    # both orders of the extremes, of 4! = 24
    assert row.between_p == pytest.approx(2 / 24)
    assert (row.runs, row.methods, row.plain_goal) == (12, 4, None)


def test_hindsight_is_left_out_of_the_second_correlation():
    found = [point("uniform", s, float(s)) for s in range(6)]
    found += [point("hindsight", s, float(s), td_mean=-float(s)) for s in range(6)]
    row = next(each for each in connections(found) if each.predictor == "td_mean")
    assert row.plain_goal is not None
    assert row.plain_goal.value == pytest.approx(1)
    assert row.overall.value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "found, predictor, reason",
    [
        ([point("a", s, -200.0, td_mean=float(s)) for s in range(4)], "td_mean", "all 4 runs end with the same return"),
        ([point("a", s, -min(200.0, 198.0 + s)) for s in range(9)], "td_mean", "all but 2 of 9 runs end with the same"),
        ([point("a", s, float(s), td_mean=3.0) for s in range(4)], "td_mean", "the same in all 4 runs (3)"),
        ([point("a", s, float(s), "MountainCar-v0") for s in range(4)], PAIRS, "two components"),
        ([point("a", s, float(s)) for s in range(2)], "td_mean", "2 runs are too few"),
        ([point("a", s, float(s), td_mean=NAN) for s in range(4)], "td_mean", "no batches"),
    ],
)
def test_a_correlation_that_cannot_be_says_why(found, predictor, reason):
    row = next(each for each in connections(found) if each.predictor == predictor)
    assert reason in row.why_not
    assert np.isnan(row.overall.value)


def test_pool_leaves_out_environments_without_a_correlation():
    found = [point(m, s, 3.0 * i + s) for i, m in enumerate("ab") for s in range(3)]
    flat = [point(m, s, -200.0, "MountainCar-v0", td_mean=float(s)) for m in "ab" for s in range(3)]
    rows = {(each.place, each.predictor): each for each in connections([*found, *flat])}
    assert rows[None, "td_mean"].runs == 6
    assert rows[None, "td_mean"].overall.value == pytest.approx(1)
    everywhere = {(each.place, each.predictor): each for each in connections(flat + flat)}
    assert (None, "td_mean") not in everywhere


def test_stronger_compares_on_the_same_runs():
    random = np.random.default_rng(6)
    found = [point("a", s, float(s), correlated_pairs=-float(s), td_mean=random.normal()) for s in range(25)]
    difference = stronger(found, PAIRS, "td_mean", "CartPole-v1")
    assert difference is not None
    assert difference.low > 0
    mirrored = stronger(found, "td_mean", PAIRS, "CartPole-v1")
    assert mirrored is not None
    assert mirrored.value == pytest.approx(-difference.value)
    assert stronger([point("a", s, 0.0) for s in range(5)], PAIRS, "td_mean", None) is None


def test_method_share_of_a_made_up_study(tmp_path):
    found = points(read_study(write_study(tmp_path)))
    share, p = method_share([each for each in found if each.environment == "CartPole-v1"])
    assert share > 0.95
    assert p < 0.01


def test_study_is_read_in_the_order_of_the_tables(tmp_path):
    study = read_study(write_study(tmp_path, by_errors, methods=("uniform", "none"), seeds=2, episodes=4))
    assert study.environments == ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
    assert study.methods == ("none", "uniform")
    run = study.of("CartPole-v1", "none")[0]
    assert run.episodes == 4
    assert np.isnan(run.columns["td_mean"][0])
    assert not np.isnan(run.columns["td_mean"][1:]).any()


def test_unfinished_runs_are_told_apart(tmp_path):
    folder = write_study(tmp_path, short={("CartPole-v1", "rank", 1): 5})
    study = read_study(folder)
    assert [(r.method, r.seed, r.episodes) for r in study.unfinished] == [("rank", 1, 5)]
    assert len(study.of("CartPole-v1", "rank")) == 2
    assert len(study.runs) == 53


def test_episodes_of_an_environment_may_be_its_own(tmp_path):
    folder = write_study(tmp_path, environments=("CartPole-v1",), episodes=5)
    settings = folder / "settings.json"
    settings.write_text('{"episodes": 9, "environments": {"CartPole-v1": {"episodes": 5}}}')
    assert read_study(folder).unfinished == ()
    settings.write_text('{"episodes": 9}')
    assert read_study(folder).runs == ()


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("episodes.csv", "environment,method\n", "has no column seed"),
        ("episodes.csv", None, "cannot be read"),
        ("settings.json", "[]", "does not hold a JSON object"),
        ("settings.json", "{", "cannot be read"),
        ("settings.json", None, "cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, text, message):
    write_study(tmp_path)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_study(tmp_path)
    assert file in str(caught.value)


def test_damaged_number_is_named(tmp_path):
    path = write_study(tmp_path) / "episodes.csv"
    path.write_text(path.read_text().replace("2016.0", "many", 1))
    with pytest.raises(UserError, match="many"):
        read_study(tmp_path)
    lines = path.read_text().replace("many", "2016.0").splitlines()
    path.write_text("\n".join([*lines[:-1], lines[-1].rpartition(",")[0].rpartition(",")[0]]))
    with pytest.raises(UserError, match="shorter"):
        read_study(tmp_path)


def test_no_interval_where_many_resamples_have_no_correlation():
    # three runs of nine differ; 2.6 % of the resamples have none of them, and of two of nine 10 %
    three = [point("a", s, float(max(s, 5)), td_mean=float(s)) for s in range(9)]
    row = next(each for each in connections(three) if each.predictor == "td_mean")
    assert row.overall.bounded
    # a predictor that differs in one run only
    odd = [point("a", s, float(s), td_mean=float(s == 8)) for s in range(9)]
    row = next(each for each in connections(odd) if each.predictor == "td_mean")
    assert not np.isnan(row.overall.value)
    assert not row.overall.bounded
