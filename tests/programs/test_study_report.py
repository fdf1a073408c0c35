"""The report of a study: its tables hold the numbers of the runs, and its verdicts follow signs and intervals."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from study_tables import by_errors, by_pairs, write_study

from gpu_replay.console.markdown import number
from gpu_replay.study.analysis import PAIRS, Correlation, Estimate
from gpu_replay.study.plots import mean_and_error
from gpu_replay.study.report import interval, p_value, verdict, write_report

pytest.importorskip("matplotlib")
pd = pytest.importorskip("pandas")
CURVES = ("durations", "td-errors", "correlated-pairs", "q-values")
PICTURES = ("final-returns", "explained", *CURVES)
NAN = float("nan")


def report(folder: Path) -> str:
    """The text alone, with single spaces: pictures take seconds and have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_replay.study.report.draw_all", lambda *given: [])
        assert write_report(folder) == [folder / "report.md"]
    return re.sub(r" +", " ", (folder / "report.md").read_text())


def test_everything_is_written_and_every_picture_shown(tmp_path):
    from matplotlib.image import imread

    written = write_report(write_study(tmp_path, environments=("CartPole-v1", "MountainCar-v0")))
    assert [path.name for path in written] == [*[f"{name}.png" for name in PICTURES], "report.md"]
    text = written[-1].read_text()
    for path in written[:-1]:
        assert f"]({path.name})" in text
        image = imread(path)
        assert image.shape[0] > 300
        assert image.shape[1] > 700
        # lines and dots are in colour, frames and words are not
        colourful = (image[..., :3].max(axis=-1) - image[..., :3].min(axis=-1)) > 0.3
        assert colourful.mean() > 0.001
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_pictures_of_very_little(tmp_path):
    def level(environment, method, seed):
        return -200.0, 2016.0, 0.0

    asked = {"seeds": 1, "methods": ("uniform",), "environments": ("MountainCar-v0",), "episodes": 1}
    assert len(write_report(write_study(tmp_path, level, **asked))) == len(PICTURES) + 1


def test_tables_hold_the_numbers_of_the_runs(tmp_path):
    text = report(write_study(tmp_path, environments=("CartPole-v1",), methods=("uniform",), seeds=2))
    finals = [by_pairs("CartPole-v1", "uniform", seed)[0] for seed in range(2)]
    assert f"| uniform | {np.mean(finals):.0f} [{min(finals):.0f}, {max(finals):.0f}] |" in text
    assert "1 methods, 1 environments, 2 seeds, 2 runs. Settings: those of the tutorial" in text
    assert "It took 2 minutes on a processor (`--jobs 2`)." in text
    assert "Versions: torch 9.9." in text
    assert "- Discount 0.8 looks about 5 steps ahead" in text
    assert "smoke run" not in text


def test_verdicts_follow_what_the_runs_were_made_of(tmp_path):
    pairs = report(write_study(tmp_path / "pairs", by_pairs))
    assert re.search(r"\| correlated pairs \| negative \| -(0\.9\d|1\.00) .*\| fits \| – \|", pairs)
    assert re.search(r"\| mean TD error \| positive \| .*\| no evidence \| \+0\.\d+ \[\+", pairs)
    assert "| MountainCar-v0 | -200 (no memory) | -200 (hindsight) | – | – |" in pairs
    assert "MountainCar-v0, mean TD error: 18 of 18 runs end with the same return (-200)." in pairs
    errors = report(write_study(tmp_path / "errors", by_errors))
    assert re.search(r"\| mean TD error \| positive \| \+(0\.9\d|1\.00) .*\| fits \| -0\.\d+ \[-", errors)


def test_one_seed_has_no_intervals(tmp_path):
    text = report(write_study(tmp_path, seeds=1, quick=True))
    final = by_pairs("CartPole-v1", "none", 0)[0]
    assert f"| no memory | {number(final)} [n/a] |" in text
    assert "**A smoke run** (`--quick`)" in text


def test_runs_without_updates_have_no_correlation(tmp_path):
    text = report(write_study(tmp_path, episodes=1, environments=("CartPole-v1",)))
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
    predictor, bounds, without_hindsight, expected
):
    plain = None if without_hindsight is None else Estimate(0.3, *without_hindsight)
    assert verdict(Correlation(None, predictor, 30, "", Estimate(0.3, *bounds), plain)) == expected


def test_numbers_are_written_with_three_digits():
    assert [number(x) for x in (1234.5, 123.4, 0.01234, -200.0, 0.0)] == ["1,234", "123", "0.0123", "-200", "0.00"]
    assert number(NAN) == interval(None) == interval(Estimate()) == p_value(NAN) == "–"
    assert interval(Estimate(1.0, 0.5, 1.5)) == "1.00 [0.500, 1.50]"
    assert interval(Estimate(1.0), 2) == "+1.00 [n/a]"
    assert [p_value(p) for p in (0.0004, 0.0583, 1.0)] == ["< 0.001", "0.058", "1"]


def test_curves_are_trailing_means_over_the_runs_with_their_standard_error():
    two = pd.DataFrame({0: np.arange(1.0, 41), 1: np.full(40, 5.0)})
    mean, error = mean_and_error(two)
    # shorter at the start, of twenty episodes at the end
    assert mean[[0, 1, 39]].tolist() == pytest.approx([(1 + 5) / 2, (1.5 + 5) / 2, (30.5 + 5) / 2])
    # the deviation of two values is their difference over sqrt(2), its error that over sqrt(2) again
    assert error[[0, 39]].tolist() == pytest.approx([(5 - 1) / 2, (30.5 - 5) / 2])
    # what is absent is left out
    mean, error = mean_and_error(pd.DataFrame([NAN, NAN, 6, NAN, 2]))
    np.testing.assert_array_equal(mean, [NAN, NAN, 6, 6, 4])
    assert error.tolist() == [0] * 5


@pytest.mark.parametrize("environments", [("CartPole-v1",), ("CartPole-v1", "MountainCar-v0")], ids=["one", "two"])
def test_titles_and_legends_are_whole(tmp_path, monkeypatch, environments):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = []
    monkeypatch.setattr("gpu_replay.study.plots.save", lambda figure, path: drawn.append(figure) or path)
    write_report(write_study(tmp_path, environments=environments))
    assert len(drawn) == len(PICTURES)
    for figure in drawn:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        for part in (*figure.texts, *figure.legends):
            box = part.get_window_extent(canvas.get_renderer())
            assert 0 <= box.x0 < box.x1 <= figure.bbox.width
            assert 0 <= box.y0 < box.y1 <= figure.bbox.height
