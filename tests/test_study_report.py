"""The report of a study: its words follow its numbers, whatever is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from study_tables import METHODS, by_errors, by_pairs, write_study

from gpu_replay.study.analysis import NOTHING, PAIRS, Connection, Estimate, connections, points
from gpu_replay.study.findings import (
    connection_sentence,
    differences,
    interval,
    number,
    place_sentence,
    standing,
    verdict,
)
from gpu_replay.study.report import write_report
from gpu_replay.study.results import read_study

pytest.importorskip("matplotlib")
PICTURES = (
    "final-returns.png",
    "explained.png",
    "durations.png",
    "durations-by-method.png",
    "td-errors.png",
    "correlated-pairs.png",
    "q-values.png",
)


def connection(
    predictor: str,
    low: float,
    high: float,
    *,
    place: str | None = None,
    plain: tuple[float, float] | None = None,
    why_not: str = "",
) -> Connection:
    def estimate(low: float, high: float) -> Estimate:
        return Estimate((low + high) / 2, low, high)

    return Connection(
        place,
        predictor,
        overall=NOTHING if why_not else estimate(low, high),
        plain_goal=None if plain is None else estimate(*plain),
        between=NOTHING,
        between_p=float("nan"),
        runs=30,
        methods=6,
        why_not=why_not,
    )


def pooled(pairs: tuple[float, float], td: tuple[float, float]) -> dict[str, Connection]:
    bounds = {PAIRS: pairs, "td_mean": td, "td_max": td, "td_std": td}
    return {name: connection(name, *found) for name, found in bounds.items()}


def report(folder: Path) -> str:
    """The text alone: pictures take seconds and have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_replay.study.report._draw", lambda *given: [])
        assert write_report(folder) == [folder / "report.md"]
    return (folder / "report.md").read_text()


def test_everything_is_written_and_every_picture_shown(tmp_path):
    from matplotlib.image import imread

    written = write_report(write_study(tmp_path, environments=("CartPole-v1", "MountainCar-v0")))
    assert [path.name for path in written] == [*PICTURES, "report.md"]
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


def test_tables_hold_the_numbers_of_the_runs(tmp_path):
    text = report(write_study(tmp_path, environments=("CartPole-v1",), methods=("uniform",), seeds=2))
    finals = [by_pairs("CartPole-v1", "uniform", seed)[0] for seed in range(2)]
    expected = f"| uniform | {np.mean(finals):.0f} [{min(finals):.0f}, {max(finals):.0f}] |"
    assert expected in re.sub(r" +", " ", text)


def test_words_follow_the_pairs(tmp_path):
    text = report(write_study(tmp_path, by_pairs))
    assert "**Only the i.i.d. property fits throughout" in text
    assert "correlated pairs goes more closely with returns" in text
    assert "all 18 runs end with a mean return of -200: there is no difference to explain" in text
    assert "every run ends with a return of -200" in text


def test_words_follow_the_errors(tmp_path):
    text = report(write_study(tmp_path, by_errors))
    assert "**Only the size of the TD errors fits throughout" in text
    assert "mean TD error goes more closely with returns" in text


def test_one_seed_has_no_intervals_and_says_so(tmp_path):
    text = report(write_study(tmp_path, seeds=1))
    assert "[n/a]" in text
    assert "One seed for each method" in text
    assert "trailing mean over 20 episodes; one seed" in text
    assert "standard error" not in text


@pytest.mark.parametrize("methods", [("uniform",), ("none", "hindsight"), ("uniform", "new-method")])
def test_missing_and_unknown_methods_and_environments(tmp_path, methods):
    def level(environment, method, seed):
        known = method if method in METHODS else "rank"
        return by_pairs(environment, known, seed)

    text = report(write_study(tmp_path, level, environments=("Acrobot-v1", "Other-v3"), methods=methods, seeds=2))
    assert "CartPole" not in text
    assert "Other-v3" in text
    assert ("hindsight belong to another task" in text) == ("hindsight" in methods)


def test_combination_that_did_not_run_leaves_a_gap(tmp_path):
    folder = write_study(tmp_path, methods=("none", "uniform"))
    table = folder / "episodes.csv"
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(line for line in lines if not line.startswith("Acrobot-v1,none")))
    text = re.sub(r" +", " ", report(folder))
    assert re.search(r"\| no memory \| [^|]+ \| – \| [^|]+ \|", text)


def test_unfinished_runs_are_named_and_left_out(tmp_path):
    text = report(write_study(tmp_path, short={("CartPole-v1", "rank", 1): 5}))
    assert "Unfinished runs are left out everywhere below**: CartPole-v1 rank seed 1 (5 episodes)." in text
    assert "over 35 runs" in text


def test_study_without_a_whole_run_gets_a_report_that_says_so(tmp_path):
    folder = write_study(tmp_path, environments=("CartPole-v1",), methods=("none",), seeds=1, episodes=3)
    (folder / "settings.json").write_text('{"episodes": 300}')
    assert [path.name for path in write_report(folder)] == ["report.md"]
    text = (folder / "report.md").read_text()
    assert "No run is whole yet" in text
    assert "CartPole-v1 none seed 0 (3 episodes)" in text


def test_runs_without_updates(tmp_path):
    text = report(write_study(tmp_path, episodes=1, environments=("CartPole-v1",)))
    assert "a run has no batches" in text
    assert "**Nothing can be told about either explanation" in text


def test_settings_notes_and_smoke_run_are_printed(tmp_path):
    text = report(
        write_study(
            tmp_path,
            environments=("CartPole-v1",),
            methods=("none", "uniform"),
            quick=True,
            notes=["the target network is copied rarely"],
            cpu="a processor",
            jobs=2,
            wall_seconds=90.0,
            versions={"torch": "9.9"},
        )
    )
    assert "**A smoke run** (`--quick`)" in text
    assert "- the target network is copied rarely" in text
    assert "a processor, 2 processes" in text
    assert "It took 1.5 minutes" in text
    assert "torch 9.9" in text


@pytest.mark.parametrize(
    "asked",
    [
        {"seeds": 1, "methods": ("uniform",), "environments": ("MountainCar-v0",)},
        {"seeds": 1, "methods": ("uniform", "new"), "environments": ("Other-v3",), "episodes": 1},
    ],
)
def test_pictures_of_very_little(tmp_path, asked):
    def level(environment, method, seed):
        return -200.0, 2016.0, 0.0

    assert len(write_report(write_study(tmp_path, level, **asked))) == len(PICTURES) + 1


def test_report_is_the_same_each_time(tmp_path):
    folder = write_study(tmp_path, environments=("CartPole-v1",), seeds=2)
    first = report(folder)
    assert report(folder) == first


@pytest.mark.parametrize(
    "pairs, td, expected",
    [
        ((-0.8, -0.4), (0.2, 0.6), "Both fit: fewer correlated pairs and larger TD errors"),
        ((-0.8, -0.4), (-0.2, 0.6), "Only the i.i.d. property fits"),
        ((-0.4, 0.4), (0.2, 0.6), "Only the size of the TD errors fits"),
        ((0.3, 0.7), (0.2, 0.6), "more correlated pairs went with higher returns, against the i.i.d. explanation"),
        ((-0.4, 0.4), (-0.2, 0.6), "Neither explanation fits: correlated pairs show no connection"),
        ((-0.4, 0.4), (-0.6, -0.1), "TD errors were larger where returns were lower"),
    ],
)
def test_verdict_follows_signs_and_intervals(pairs, td, expected):
    assert expected in verdict(pooled(pairs, td))


def test_verdict_tells_the_td_statistics_apart():
    mixed = {**pooled((-0.1, 0.1), (-0.2, 0.2)), "td_max": connection("td_max", -0.9, -0.5)}
    assert "mean TD error and std of TD errors show no connection, max TD error were larger" in verdict(mixed)


def test_standing_needs_the_same_verdict_without_hindsight():
    assert standing(connection("td_mean", 0.2, 0.6, plain=(0.1, 0.5))) == "as expected"
    assert standing(connection("td_mean", 0.2, 0.6, plain=(-0.1, 0.5))) == "depends on hindsight"
    assert standing(connection(PAIRS, 0.2, 0.6)) == "the opposite"
    assert standing(connection(PAIRS, 0.0, 0.6)) == "no evidence"
    assert standing(connection(PAIRS, 0, 0, why_not="constant")) == "undefined"


@pytest.mark.parametrize(
    "found, expected",
    [
        (connection(PAIRS, -0.9, -0.5), "more correlated pairs go with lower returns, a strong connection"),
        (connection("td_max", 0.1, 0.3), "a larger max TD error goes with higher returns, a weak connection"),
        (connection("td_max", -0.1, 0.3), "no evidence of a connection between max TD error and returns"),
        (connection("td_std", 0, 0, why_not="it is flat"), "cannot be correlated with returns: it is flat."),
        (connection("td_mean", 0.1, 0.3, plain=(-0.3, -0.1)), "which changes the verdict"),
        (connection("td_mean", 0.1, 0.3, plain=(0.2, 0.5)), "the same verdict"),
    ],
)
def test_sentence_of_a_correlation(found, expected):
    assert expected in connection_sentence(found)


def test_sentence_of_an_environment_sorts_by_sign():
    found = [
        connection(PAIRS, -0.9, -0.5, place="E"),
        connection("td_mean", 0.1, 0.3, place="E"),
        connection("td_max", -0.2, 0.3, place="E"),
        connection("td_std", 0, 0, place="E", why_not="it is flat"),
        connection("td_mean", -0.3, -0.1, place="F"),
    ]
    assert place_sentence("E", found) == (
        "E: returns rise with mean TD error (ρ = +0.20 [+0.10, +0.30]); returns fall with correlated pairs "
        "(ρ = -0.70 [-0.90, -0.50]); no evidence for max TD error (ρ = +0.05 [-0.20, +0.30]); nothing can be said of "
        "std of TD errors: it is flat."
    )


def test_differences_by_chance_are_called_so(tmp_path):
    def noise(environment, method, seed):
        return float(np.random.default_rng([METHODS.index(method), seed, 7]).normal()), 500.0, 1.0

    found = points(read_study(write_study(tmp_path, noise, environments=("CartPole-v1",))))
    assert "the differences between methods may be chance" in differences(found, "CartPole-v1")
    nearly = [replace(each, final=-200.0 - (each.seed == 1) / 1000) for each in found]
    assert "mean returns are all -200; the method accounts for 0%" in differences(nearly, "CartPole-v1")
    by_method = points(read_study(write_study(tmp_path, environments=("CartPole-v1",))))
    assert "so the methods differ" in differences(by_method, "CartPole-v1")
    assert all(each.place == "CartPole-v1" for each in connections(by_method))


def test_numbers_are_written_with_three_digits():
    assert [number(x) for x in (1234.5, 123.4, 0.01234, -200.0, 0.0)] == ["1,234", "123", "0.0123", "-200", "0.00"]
    assert number(float("nan")) == "–"
    assert interval(Estimate(1.0, 0.5, 1.5)) == "1.00 [0.500, 1.50]"
    assert interval(Estimate(1.0, float("nan"), float("nan")), 2) == "+1.00 [n/a]"
    assert interval(NOTHING) == "–"
