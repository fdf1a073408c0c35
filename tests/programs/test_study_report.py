"""The study's estimators against SciPy and by hand, its folder, its report, and the command from flags to pictures."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from study_tables import by_errors, by_pairs, write_study

from gpu_replay.cli import main
from gpu_replay.console.errors import UserError
from gpu_replay.console.markdown import number
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
from gpu_replay.study.plots import mean_and_error
from gpu_replay.study.report import interval, p_value, verdict, write_report
from gpu_replay.study.results import StudyFolder, read_study
from gpu_replay.study.run import COLUMNS, RunId, make_run
from gpu_replay.study.settings import ENVIRONMENTS, AgentSettings, agents, described
from gpu_replay.study.workers import run_all

for module in ("gymnasium", "tqdm", "matplotlib"):
    pytest.importorskip(module)
pd = pytest.importorskip("pandas")
stats = pytest.importorskip("scipy.stats")

Capture = pytest.CaptureFixture[str]
NAN = float("nan")
ROOT = Path(__file__).resolve().parents[2]


# estimators


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def point(method: str, final: float, place: str = "CartPole-v1", **means: float) -> dict[str, Any]:
    return {"environment": place, "method": method, "final": final, **dict.fromkeys(AVERAGED, final), **means}


def by_td_mean(points: list[dict[str, Any]]) -> dict[str | None, Correlation]:
    return {each.place: each for each in correlations(pd.DataFrame(points)) if each.predictor == "td_mean"}


def share_of(methods: Any, finals: Any) -> tuple[float, float]:
    return method_share(pd.DataFrame([point(*each) for each in zip(methods, finals, strict=True)]))


def test_one_group_gives_spearman_and_several_are_ranked_within_each() -> None:
    random = np.random.default_rng(2)
    x, y = random.normal(size=41), random.integers(5, size=41).astype(np.float64)
    assert pooled_spearman([(x, y)]) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert np.isnan(pooled_spearman([(array(1, 2, 3), array(5, 5, 5))]))
    # group one gives (0, 1, -1)/3 against (-1, 1, 0)/3; group two is exact: (1 + 2) / (2 + 2)
    groups = [(array(5, 9, 1), array(11, 13, 12)), (array(1, 2, 3), array(1, 2, 3))]
    assert pooled_spearman(groups) == pytest.approx(0.75)
    # resamples stand in rows
    stacked = [tuple(np.stack([side, side[::-1]]) for side in pair) for pair in groups]
    np.testing.assert_allclose(pooled_spearman(stacked), [0.75, 0.75])


def test_method_share_is_kruskal_and_wallis_over_n_minus_one() -> None:
    # 6!/(2! 2! 2!) = 90 ways to deal three pairs, 6 of which keep them together
    assert share_of("aabbcc", (1, 1, 2, 2, 3, 3)) == (pytest.approx(1), pytest.approx(6 / 90, abs=0.02))
    assert share_of("aabb", (1, 4, 2, 3)) == (pytest.approx(0), pytest.approx(1))
    values = np.random.default_rng(4).normal(size=15)
    expected = stats.kruskal(*[values[i::3] for i in range(3)]).statistic / 14
    assert share_of("abc" * 5, values)[0] == pytest.approx(expected)
    # where there is nothing to share
    for methods, finals in (("aabb", (1, 1, 1, 1)), ("aaa", (1, 2, 3)), ("ab", (1, 2))):
        assert np.isnan(share_of(methods, finals)).all()


def test_run_is_summarized_by_its_last_hundred_episodes_and_by_its_updates() -> None:
    measured = np.full(150, NAN)
    measured[1:3] = (1.0, 5.0)
    episodes = pd.DataFrame({"environment": "E", "method": "m", "seed": 0, **dict.fromkeys(AVERAGED, measured)})
    episodes["return"] = np.concatenate([np.full(50, -7.0), np.arange(100.0)])
    episodes["updates"] = np.concatenate([[0.0, 30.0, 10.0], np.zeros(147)])
    never = episodes.assign(seed=1, updates=0.0)
    first, second = summarize(pd.concat([episodes, never])).to_dict("records")
    assert (first["environment"], first["method"], first["seed"]) == ("E", "m", 0)
    assert (first["final"], first["td_mean"]) == pytest.approx((49.5, (30 * 1 + 10 * 5) / 40))
    assert np.isnan(second["td_mean"])


def test_interval_over_seeds_covers_the_mean_and_needs_two_of_them() -> None:
    found = mean_over_seeds([1.0, 2.0, 6.0])
    # the smallest and the largest mean that a resample can have come up in 1 of 27, more often than 1 in 40
    assert (found.value, found.low, found.high) == (pytest.approx(3), 1.0, 6.0)
    assert (mean_over_seeds([4.0]).value, mean_over_seeds([4.0]).bounded) == (4.0, False)
    # of many seeds it is that of the normal distribution
    values = np.random.default_rng(5).normal(size=60)
    found, error = mean_over_seeds(values.tolist()), values.std() / np.sqrt(60)
    expected = values.mean() + 1.96 * error * array(-1, 1)
    assert (found.low, found.high) == pytest.approx(expected.tolist(), abs=0.2 * error)


def test_correlation_over_runs_and_over_methods() -> None:
    # within each method the return falls with the predictor, between methods it rises
    found = [point(m, 10.0 * i - s, td_mean=10.0 * i + s) for i, m in enumerate("abcd") for s in range(3)]
    row = by_td_mean(found)["CartPole-v1"]
    x, y = (array(*[p[name] for p in found]) for name in ("td_mean", "final"))
    assert row.overall.value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert row.overall.low < row.overall.value < row.overall.high
    assert (row.runs, row.between.value, row.without_hindsight) == (12, pytest.approx(1), None)
    # of 4! = 24 orders: both extremes; with rho = 0.8 also the 3 neighbour swaps of each
    assert row.between_p == pytest.approx(2 / 24)
    swapped = [point(m, final, td_mean=x) for m, x, final in zip("abcd", (1, 2, 3, 4), (2, 1, 3, 4), strict=True)]
    assert by_td_mean(swapped)["CartPole-v1"].between_p == pytest.approx(8 / 24)
    # hindsight is left out of the second correlation
    found = [point("uniform", float(s)) for s in range(6)]
    found += [point("hindsight", float(s), td_mean=-float(s)) for s in range(6)]
    row = by_td_mean(found)["CartPole-v1"]
    assert (row.without_hindsight.value, row.overall.value) == pytest.approx((1, 0), abs=1e-12)


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
def test_an_undefined_correlation_has_a_reason(found: Any, predictor: str, reason: str) -> None:
    row = next(each for each in correlations(pd.DataFrame(found)) if each.predictor == predictor)
    assert reason in row.why_not
    assert np.isnan(row.overall.value)


def test_pool_leaves_out_environments_without_a_correlation() -> None:
    found = [point(m, 3.0 * i + s) for i, m in enumerate("ab") for s in range(3)]
    flat = [point(m, -200.0, "MountainCar-v0", td_mean=float(s)) for m in "ab" for s in range(3)]
    pool = by_td_mean([*found, *flat])[None]
    assert (pool.runs, pool.overall.value) == (6, pytest.approx(1))
    assert None not in by_td_mean(flat)


def test_difference_compares_on_the_same_runs() -> None:
    random = np.random.default_rng(6)
    found = pd.DataFrame([point("a", float(s), correlated_pairs=-float(s), td_mean=random.normal()) for s in range(25)])
    one, other = difference(found, PAIRS, "td_mean"), difference(found, "td_mean", PAIRS)
    assert (one.low > 0, one.value) == (True, pytest.approx(-other.value))
    assert np.isnan(difference(pd.DataFrame([point("a", 0.0)] * 5), PAIRS, "td_mean").value)


def test_no_interval_where_many_resamples_have_no_correlation() -> None:
    # three runs of nine differ; 2.6 % of the resamples have none of them, and of two of nine 10 %
    assert by_td_mean([point("a", float(max(s, 5)), td_mean=float(s)) for s in range(9)])["CartPole-v1"].overall.bounded
    # a predictor that differs in one run only
    odd = by_td_mean([point("a", float(s), td_mean=float(s == 8)) for s in range(9)])["CartPole-v1"].overall
    assert not np.isnan(odd.value)
    assert not odd.bounded


# the folder

VERSIONS = {"gpu_replay": "0.1.0", "torch": "2.13.0", "numpy": "2.4", "gymnasium": "1.4", "matplotlib": "3.8"}
RUN = RunId("CartPole-v1", "uniform", 0)


def settings_with(**changes: Any) -> dict[str, Any]:
    settings = described(agents(["CartPole-v1"], tuned=False, episodes=3), ["uniform"], 2, tuned=False, quick=False)
    return {**settings, "versions": VERSIONS, "cpu": "one", "jobs": 2, **changes}


def episode(run: RunId, number: int, **changes: Any) -> dict[str, Any]:
    numbers = {"episode": number, "steps": 7 * number, "duration": 7, "updates": 5}
    return {**dict.fromkeys(COLUMNS, 0.1), **run._asdict(), **numbers, **changes}


def test_runs_are_kept_one_by_one_and_joined_in_order(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "new" / "study")
    folder.claim(settings_with())
    runs = [RUN, RUN._replace(seed=1)]
    assert folder.finished(runs) == set()
    folder.keep(runs[1], [episode(runs[1], 1, **{"return": 0.123456789012345}, loss=None)])
    assert (folder.finished(runs), folder.complete) == ({runs[1]}, False)
    folder.keep(runs[0], [episode(runs[0], 1, td_max=1e-12), episode(runs[0], 2)])
    path = folder.join(runs)
    assert (path, folder.complete) == (tmp_path / "new" / "study" / "episodes.csv", True)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = "environment method seed episode steps duration return td_mean td_median td_max td_std correlated_pairs "
    assert list(rows[0]) == (names + "q_mean q_max loss epsilon updates seconds").split()
    found = [(row["seed"], row["episode"], row["steps"]) for row in rows]
    assert found == [("0", "1", "7"), ("0", "2", "14"), ("1", "1", "7")]
    assert rows[0]["td_max"] == "1e-12"
    assert (rows[2]["return"], rows[2]["loss"], rows[2]["td_mean"]) == ("0.123456789", "", "0.1")
    assert not [each for each in path.parent.rglob("*") if "partial" in each.name]
    (path.parent / "runs" / f"{RUN}.csv").write_text("td_men\n")
    with pytest.raises(UserError, match="not the file of a run. Remove it"):
        folder.join([RUN])


def test_a_folder_goes_on_with_the_same_settings_alone(tmp_path: Path) -> None:
    def claim(**changes: Any) -> float:
        return StudyFolder(tmp_path).claim(settings_with(**changes))

    other, later = tmp_path / "settings.json", {**VERSIONS, "torch": "2.14.0"}
    assert claim(wall_seconds=0.0) == 0.0
    StudyFolder(tmp_path).note(settings_with(wall_seconds=12.5))
    # what does not decide the figures may differ
    assert claim(jobs=7, cpu="two", versions={**VERSIONS, "matplotlib": "4.0"}, notes=[]) == 12.5
    assert json.loads(other.read_text())["jobs"] == 7
    before = other.read_bytes()
    for changes, names in (({"tuned": True, "seeds": [0]}, "tuned, seeds"), ({"versions": later}, "torch")):
        with pytest.raises(UserError, match=f"other settings .*differ in {names}"):
            claim(**changes)
    # a finished study may be reported with other versions, and keeps its settings
    (tmp_path / "episodes.csv.gz").write_bytes(b"")
    claim(versions=later, jobs=9)
    assert other.read_bytes() == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="runs without settings.json"):
        StudyFolder(tmp_path).claim(settings_with())
    for text, message in (('{"steps": 3}', "not hold the settings of a study"), ("{", "cannot be read")):
        (tmp_path / "settings.json").write_text(text)
        with pytest.raises(UserError, match=message):
            StudyFolder(tmp_path).claim(settings_with())


@pytest.mark.parametrize("packed", [False, True])
def test_a_study_is_read_in_the_order_of_the_tables(tmp_path: Path, packed: bool) -> None:
    table = write_study(tmp_path, methods=("none", "uniform"), seeds=2, episodes=4) / "episodes.csv"
    if packed:
        (tmp_path / "episodes.csv.gz").write_bytes(gzip.compress(table.read_bytes()))
        table.unlink()
    settings, episodes = read_study(tmp_path)
    assert list(settings["environments"]) == ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"]
    runs = [group for group, _ in episodes.groupby(["environment", "method", "seed"], observed=True)]
    assert runs[:3] == [RunId("CartPole-v1", *key) for key in (("none", 0), ("none", 1), ("uniform", 0))]
    first = episodes[(episodes["environment"] == "CartPole-v1") & (episodes["method"] == "none")]
    assert first["td_mean"].isna().tolist() == [True, False, False, False] * 2


def test_damaged_files_are_named(tmp_path: Path) -> None:
    table = write_study(tmp_path) / "episodes.csv"
    whole, packed = table.read_bytes(), gzip.compress(table.read_bytes(), mtime=0)
    # cut off, and with wrong bytes
    damages = [("episodes.csv.gz", each, "") for each in (packed[:40], packed[:30] + packed[30:].swapcase())]
    damages += [
        ("episodes.csv", whole.replace(old, new), message)
        for old, new, message in (
            (b"td_mean", b"td_men", "damaged: .*td_mean"),
            (b"2016.0", b"many", "damaged: .*many"),
            (b"Acrobot-v1,rank,1", b"Acrobot-v1,rank,2", "0 of 12 episodes of Acrobot-v1-rank-seed1"),
        )
    ]
    for file, damaged, message in [*damages, ("episodes.csv", None, ""), ("settings.json", None, "")]:
        path = tmp_path / file
        path.unlink(missing_ok=True) if damaged is None else path.write_bytes(damaged)
        with pytest.raises(UserError, match=message or "cannot be read") as caught:
            read_study(tmp_path)
        assert file in str(caught.value)
        table.with_suffix(".csv.gz").unlink(missing_ok=True)


# the report

PICTURES = ("final-returns", "explained", "durations", "td-errors", "correlated-pairs", "q-values")


def report(folder: Path) -> str:
    """The text alone, with single spaces: pictures take seconds and have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_replay.study.report.draw_all", lambda *given: [])
        assert write_report(folder) == [folder / "report.md"]
    return re.sub(r" +", " ", (folder / "report.md").read_text())


@pytest.mark.parametrize("places", [pytest.param(ENVIRONMENTS[:1], marks=pytest.mark.slow), ENVIRONMENTS[::2]])
def test_every_picture_is_shown_and_its_titles_and_legends_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: Sequence[str]
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    drawn: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *given, **more: (drawn.append(self), save(self, *given, **more))
    )
    written = write_report(write_study(tmp_path, environments=places))
    assert [path.name for path in written] == [*[f"{name}.png" for name in PICTURES], "report.md"]
    assert not list(tmp_path.glob(".*"))
    assert len(drawn) == len(PICTURES)
    for path, figure in zip(written, drawn, strict=False):
        assert f"]({path.name})" in written[-1].read_text()
        image = imread(path)
        assert (image.shape[0] > 300, image.shape[1] > 700) == (True, True)
        # lines and dots are in colour, frames and words are not
        assert ((image[..., :3].max(axis=-1) - image[..., :3].min(axis=-1)) > 0.3).mean() > 0.001
        renderer = FigureCanvasAgg(figure).get_renderer()
        for part in (*figure.texts, *figure.legends):
            box = part.get_window_extent(renderer)
            assert 0 <= box.x0 < box.x1 <= figure.bbox.width
            assert 0 <= box.y0 < box.y1 <= figure.bbox.height


@pytest.mark.slow
def test_pictures_of_very_little(tmp_path: Path) -> None:
    asked: Any = {"seeds": 1, "methods": ("uniform",), "environments": ("MountainCar-v0",), "episodes": 1}
    assert len(write_report(write_study(tmp_path, lambda *_: (-200.0, 2016.0, 0.0), **asked))) == len(PICTURES) + 1


def test_tables_and_verdicts_hold_what_the_runs_were_made_of(tmp_path: Path) -> None:
    one: dict[str, Any] = {"environments": ("CartPole-v1",)}
    text = report(write_study(tmp_path / "small", methods=("uniform",), seeds=2, **one))
    finals = [by_pairs("CartPole-v1", "uniform", seed)[0] for seed in range(2)]
    assert f"| uniform | {np.mean(finals):.0f} [{min(finals):.0f}, {max(finals):.0f}] |" in text
    assert "1 methods, 1 environments, 2 seeds, 2 runs. Settings: those of the tutorial" in text
    assert "It took 2 minutes on a processor (`--jobs 2`)." in text
    assert "Versions: torch 9.9." in text
    assert "- Discount 0.8 looks about 5 steps ahead" in text
    assert "smoke run" not in text
    pairs = report(write_study(tmp_path / "pairs", by_pairs))
    assert re.search(r"\| correlated pairs \| negative \| -(0\.9\d|1\.00) .*\| fits \| – \|", pairs)
    assert re.search(r"\| mean TD error \| positive \| .*\| no evidence \| \+0\.\d+ \[\+", pairs)
    assert "| MountainCar-v0 | -200 (no memory) | -200 (hindsight) | – | – |" in pairs
    assert "MountainCar-v0, mean TD error: 18 of 18 runs end with the same return (-200)." in pairs
    errors = report(write_study(tmp_path / "errors", by_errors))
    assert re.search(r"\| mean TD error \| positive \| \+(0\.9\d|1\.00) .*\| fits \| -0\.\d+ \[-", errors)
    # one seed has no intervals
    text = report(write_study(tmp_path / "quick", seeds=1, quick=True))
    assert f"| no memory | {number(by_pairs('CartPole-v1', 'none', 0)[0])} [n/a] |" in text
    assert "**A smoke run** (`--quick`)" in text
    # runs without updates have no correlation
    text = report(write_study(tmp_path / "short", episodes=1, **one))
    assert "CartPole-v1, mean TD error: a run has no batches." in text
    assert "| mean TD error | positive | – | 18 | – | undefined | – |" in text


@pytest.mark.parametrize(
    "predictor, bounds, without_hindsight, expected",
    [
        ("td_mean", (0.2, 0.6), (0.1, 0.5), "fits"),
        ("td_mean", (0.2, 0.6), (-0.1, 0.5), "depends on hindsight"),
        ("td_mean", (-0.6, -0.2), None, "contradicts"),
        (PAIRS, (-0.6, -0.2), None, "fits"),
        (PAIRS, (0.2, 0.6), None, "contradicts"),
        (PAIRS, (0.0, 0.6), None, "no evidence"),
        (PAIRS, (NAN, NAN), None, "undefined"),
    ],
)
def test_a_verdict_needs_an_interval_off_zero_with_and_without_hindsight(
    predictor: str, bounds: tuple[float, float], without_hindsight: tuple[float, float] | None, expected: str
) -> None:
    plain = None if without_hindsight is None else Estimate(0.3, *without_hindsight)
    assert verdict(Correlation(None, predictor, 30, "", Estimate(0.3, *bounds), plain)) == expected


def test_numbers_are_written_with_three_digits() -> None:
    assert [number(x) for x in (1234.5, 123.4, 0.01234, -200.0, 0.0)] == ["1,234", "123", "0.0123", "-200", "0.00"]
    assert number(NAN) == interval(None) == interval(Estimate()) == p_value(NAN) == "–"
    assert interval(Estimate(1.0, 0.5, 1.5)) == "1.00 [0.500, 1.50]"
    assert interval(Estimate(1.0), 2) == "+1.00 [n/a]"
    assert [p_value(p) for p in (0.0004, 0.0583, 1.0)] == ["< 0.001", "0.058", "1"]


def test_curves_are_trailing_means_over_the_runs_with_their_standard_error() -> None:
    mean, error = mean_and_error(pd.DataFrame({0: np.arange(1.0, 41), 1: np.full(40, 5.0)}))
    # shorter at the start, of twenty episodes at the end
    assert mean[[0, 1, 39]].tolist() == pytest.approx([(1 + 5) / 2, (1.5 + 5) / 2, (30.5 + 5) / 2])
    # the deviation of two values is their difference over sqrt(2), its error that over sqrt(2) again
    assert error[[0, 39]].tolist() == pytest.approx([(5 - 1) / 2, (30.5 - 5) / 2])
    # what is absent is left out
    mean, error = mean_and_error(pd.DataFrame([NAN, NAN, 6, NAN, 2]))
    np.testing.assert_array_equal(mean, [NAN, NAN, 6, 6, 4])
    assert error.tolist() == [0] * 5


# the command

TINY = ["study", "cartpole", "--methods", "none,uniform", "--seeds", "2", "--episodes", "4", "--jobs", "1"]


def figures(folder: Path) -> list[dict[str, str]]:
    """episodes.csv without the times."""
    with (folder / "episodes.csv").open(newline="") as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny study without plots."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_replay.study.report.draw_all", lambda *given: [])
        assert main([*TINY, "--output", str(folder)]) == 0
    return folder


def test_a_study_leaves_its_table_settings_pictures_and_report(study: Path, capsys: Capture) -> None:
    rows = figures(study)
    keys = [tuple(row[name] for name in ("environment", "method", "seed", "episode")) for row in rows]
    assert keys == [("CartPole-v1", name, seed, at) for name in ("none", "uniform") for seed in "01" for at in "1234"]
    # learning began in each run
    assert all(row["td_mean"] for row in rows if row["episode"] == "4")
    settings = json.loads((study / "settings.json").read_text())
    assert (settings["tuned"], settings["quick"], settings["episodes"], settings["seeds"]) == (False, False, 4, [0, 1])
    assert (list(settings["environments"]), list(settings["methods"])) == (["CartPole-v1"], ["none", "uniform"])
    assert (settings["wall_seconds"] > 0, settings["jobs"]) == (True, 1)
    assert {"torch", "numpy", "gymnasium"} <= settings["versions"].keys()
    assert "- Discount 0.8" in (study / "report.md").read_text()
    assert len(list((study / "runs").glob("*.csv"))) == 4
    # a finished study is only reported, now with its plots, and not mixed with another one
    (study / "report.md").unlink()
    before = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    assert main([*TINY, "--output", str(study)]) == 0
    assert len(list(study.glob("*.png"))) == len(PICTURES)
    assert str(study / "report.md") in capsys.readouterr().out
    assert main([*TINY, "--tuned", "--output", str(study)]) == 2
    assert "holds a study with other settings (they differ in" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_a_study_continues_where_it_stopped_and_finds_what_it_would_have_found(study: Path, tmp_path: Path) -> None:
    for name in ("settings.json", "runs/CartPole-v1-none-seed1.csv", "runs/CartPole-v1-uniform-seed0.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((study / name).read_bytes())
    kept = tmp_path / "runs" / "CartPole-v1-none-seed1.csv"
    before = kept.stat().st_mtime_ns
    # in another number of processes, so that the other two runs do not follow one another in one
    command = [sys.executable, "-m", "gpu_replay", *TINY[:-1], "2", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 of 4 runs are there already" in done.stdout
    assert kept.stat().st_mtime_ns == before
    assert figures(tmp_path) == figures(study)


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_a_signal_ends_it_and_says_how_to_continue(tmp_path: Path, number: signal.Signals, code: int) -> None:
    # long enough that it cannot be over before the signal comes
    arguments = f"-m gpu_replay study cartpole --methods none uniform --seeds 3 --jobs 2 --output {tmp_path}"
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, *arguments.split()], cwd=ROOT, **pipes)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "settings.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(3)
        # as a terminal does: to all processes of the group
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out) == (code, ""), err
    assert "0 of 6 runs finished; the same command continues from there." in err.splitlines()[-1]
    assert "Traceback" not in err
    assert json.loads((tmp_path / "settings.json").read_text())["wall_seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_those_before_it_are_kept() -> None:
    names = ("CartPole-v1", "NoSuchPole-v1")
    made = run_all(make_run, {name: (RunId(name, "uniform", 0), AgentSettings(episodes=1)) for name in names}, 1)
    assert next(made)[0] == "CartPole-v1"
    with pytest.raises(RuntimeError, match="the run NoSuchPole-v1 failed") as caught:
        next(made)
    # what it raised, with the traceback of its process
    reason = caught.value.__cause__
    assert type(reason).__name__ == "NameNotFound"
    assert "in make_run" in str(reason.__cause__)


def test_a_process_that_dies_is_noticed() -> None:
    # which the command line prints in one line
    with pytest.raises(OSError, match="worker process was killed.*memory"):
        list(run_all(os.abort, {"a run": ()}, 1))
