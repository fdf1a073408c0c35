"""The folder of a study and the forecast of how long the rest takes."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gpu_replay.console.errors import UserError
from gpu_replay.study.progress import Forecast, clock, expected_seconds
from gpu_replay.study.records import COLUMNS, StudyFolder
from gpu_replay.study.run import Episode, RunId
from gpu_replay.study.settings import TUNED, AgentSettings, StudySettings

VERSIONS = {"gpu_replay": "0.1.0", "torch": "2.13.0", "numpy": "2.4", "gymnasium": "1.4", "matplotlib": "3.8"}


def described(**changes: Any) -> dict[str, Any]:
    settings = StudySettings.of(["CartPole-v1"], ["uniform"], 2, episodes=3)
    return {**settings.described(), "versions": VERSIONS, "cpu": "one", "jobs": 2, **changes}


def episode(run: RunId, number: int, **changes: Any) -> Episode:
    values: dict[str, Any] = {field.name: 0.1 for field in dataclasses.fields(Episode)}
    values |= dataclasses.asdict(run) | {"episode": number, "steps": 7 * number, "duration": 7, "updates": 5}
    return Episode(**(values | changes))


def test_the_table_has_the_agreed_columns() -> None:
    assert ",".join(COLUMNS) == (
        "environment,method,seed,episode,steps,duration,return,td_mean,td_median,td_max,td_std,"
        "correlated_pairs,q_mean,q_max,loss,epsilon,updates,seconds"
    )


def test_runs_are_kept_one_by_one_and_joined_in_order(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "new" / "study")
    folder.claim(described())
    runs = [RunId("CartPole-v1", "uniform", seed) for seed in (0, 1)]
    assert folder.finished(runs) == set()
    folder.keep(runs[1], [episode(runs[1], 1, total=0.123456789012345, loss=None)])
    assert folder.finished(runs) == {runs[1]}
    folder.keep(runs[0], [episode(runs[0], 1, td_max=1e-12), episode(runs[0], 2)])
    path = folder.join(runs)
    assert path == tmp_path / "new" / "study" / "episodes.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["episode"], row["steps"]) for row in rows] == [
        ("0", "1", "7"),
        ("0", "2", "14"),
        ("1", "1", "7"),
    ]
    assert rows[0]["td_max"] == "1e-12"
    assert (rows[2]["return"], rows[2]["loss"], rows[2]["td_mean"]) == ("0.123456789", "", "0.1")
    assert not [each for each in path.parent.rglob("*") if "partial" in each.name]


def test_a_file_that_is_no_run_is_not_joined(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    folder.claim(described())
    run = RunId("CartPole-v1", "uniform", 0)
    folder.keep(run, [episode(run, 1)])
    (part,) = (tmp_path / "runs").iterdir()
    part.write_text(part.read_text().replace("td_mean", "td_men"))
    with pytest.raises(UserError, match="is no file of a run. Remove it"):
        folder.join([run])


def test_a_study_goes_on_with_the_same_settings(tmp_path: Path) -> None:
    assert StudyFolder(tmp_path).claim(described()) == 0.0
    StudyFolder(tmp_path).note({**described(), "wall_seconds": 12.5})
    # what does not decide the figures may differ
    changes = {"jobs": 7, "cpu": "two", "versions": {**VERSIONS, "matplotlib": "4.0"}, "notes": []}
    assert StudyFolder(tmp_path).claim(described(**changes)) == 12.5
    assert json.loads((tmp_path / "settings.json").read_text())["jobs"] == 7


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seeds": [0, 1, 2]}, "other settings .they differ in seeds.. Go on with it by its own command"),
        ({"tuned": True, "episodes": 4}, "they differ in tuned, episodes"),
        ({"methods": {}}, "they differ in methods"),
        ({"versions": {**VERSIONS, "torch": "2.14.0"}}, "made with torch 2.13.0, now 2.14.0"),
    ],
)
def test_another_study_is_refused_and_left_as_it_is(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    StudyFolder(tmp_path).claim(described())
    before = (tmp_path / "settings.json").read_bytes()
    with pytest.raises(UserError, match=message):
        StudyFolder(tmp_path).claim(described(**changes))
    assert (tmp_path / "settings.json").read_bytes() == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="holds runs without settings.json"):
        StudyFolder(tmp_path).claim(described())
    (tmp_path / "settings.json").write_text('{"steps": 3}')
    with pytest.raises(UserError, match="settings.json of something else"):
        StudyFolder(tmp_path).claim(described())
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        StudyFolder(tmp_path).claim(described())


AGENT = AgentSettings(episodes=10)
RUNS = [(RunId(name, "uniform", seed), AGENT) for name in ("CartPole-v1", "Acrobot-v1") for seed in (0, 1)]


def test_a_forecast_before_anything_is_the_expectation() -> None:
    forecast = Forecast(RUNS)
    one, other = expected_seconds(*RUNS[0]), expected_seconds(*RUNS[2])
    assert forecast.share() == 0
    assert forecast.open == 4
    assert forecast.seconds_left(1) == pytest.approx(20 * (one + other))
    assert forecast.seconds_left(2) == pytest.approx(10 * (one + other))
    # more processes than runs do not help the longest one
    assert forecast.seconds_left(16) == pytest.approx(10 * other)


def test_a_forecast_learns_the_machine_from_the_first_episodes() -> None:
    forecast = Forecast(RUNS)
    one, other = expected_seconds(*RUNS[0]), expected_seconds(*RUNS[2])
    # a machine of a third of the speed: what was not seen yet is scaled as well
    forecast.count(RUNS[0][0], 5, 5 * 3 * one)
    assert forecast.seconds_left(1) == pytest.approx(3 * (15 * one + 20 * other))
    assert forecast.share() == pytest.approx(5 * one / (20 * one + 20 * other))


def test_a_forecast_counts_finished_runs_and_ends_at_one() -> None:
    forecast = Forecast(RUNS, finished=[RUNS[3][0]])
    assert forecast.open == 3
    assert 0.25 < forecast.share() < 0.5
    shares = []
    for run, _ in RUNS[:3]:
        for _ in range(5):
            forecast.count(run, 2, 0.5)
            shares.append(forecast.share())
    assert shares[-1] == pytest.approx(1)
    assert forecast.open == 0
    assert forecast.seconds_left(2) == 0


def test_larger_networks_and_rarer_updates_are_expected_to_cost_what_they_do() -> None:
    run = RunId("CartPole-v1", "uniform", 0)
    small, large = AgentSettings(), AgentSettings(hidden=(256, 256))
    assert expected_seconds(run, large) > 3 * expected_seconds(run, small)
    assert expected_seconds(run, dataclasses.replace(small, train_every=4)) < expected_seconds(run, small) / 2
    assert all(expected_seconds(RunId(name, "uniform", 0), agent) > 0 for name, agent in TUNED.items())


@pytest.mark.parametrize(
    "seconds, text", [(0.2, "0 s"), (89, "89 s"), (90, "2 min"), (3_600, "60 min"), (7_500, "2 h 05 min")]
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert clock(seconds) == text
