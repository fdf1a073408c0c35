"""The folder of a study: what is written run by run, whose it is, and what is read back."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from study_tables import write_study

from gpu_replay.console.errors import UserError
from gpu_replay.study.results import StudyFolder, read_study
from gpu_replay.study.run import COLUMNS, RunId
from gpu_replay.study.settings import agents
from gpu_replay.study.settings import described as described_settings

pytest.importorskip("pandas")

VERSIONS = {"gpu_replay": "0.1.0", "torch": "2.13.0", "numpy": "2.4", "gymnasium": "1.4", "matplotlib": "3.8"}
RUN = RunId("CartPole-v1", "uniform", 0)


def described(**changes: Any) -> dict[str, Any]:
    chosen = agents(["CartPole-v1"], tuned=False, episodes=3)
    settings = described_settings(chosen, ["uniform"], 2, tuned=False, quick=False)
    return {**settings, "versions": VERSIONS, "cpu": "one", "jobs": 2, **changes}


def episode(run: RunId, number: int, **changes: Any) -> dict[str, Any]:
    numbers = {"episode": number, "steps": 7 * number, "duration": 7, "updates": 5}
    return {**dict.fromkeys(COLUMNS, 0.1), **run._asdict(), **numbers, **changes}


def test_the_table_has_the_agreed_columns() -> None:
    first = "environment,method,seed,episode,steps,duration,return,td_mean,td_median,td_max,td_std"
    assert ",".join(COLUMNS) == f"{first},correlated_pairs,q_mean,q_max,loss,epsilon,updates,seconds"


def test_runs_are_kept_one_by_one_and_joined_in_order(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "new" / "study")
    folder.claim(described())
    runs = [RUN, RUN._replace(seed=1)]
    assert folder.finished(runs) == set()
    folder.keep(runs[1], [episode(runs[1], 1, **{"return": 0.123456789012345}, loss=None)])
    assert folder.finished(runs) == {runs[1]}
    assert not folder.complete
    folder.keep(runs[0], [episode(runs[0], 1, td_max=1e-12), episode(runs[0], 2)])
    path = folder.join(runs)
    assert path == tmp_path / "new" / "study" / "episodes.csv"
    assert folder.complete
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(row["seed"], row["episode"], row["steps"]) for row in rows]
    assert found == [("0", "1", "7"), ("0", "2", "14"), ("1", "1", "7")]
    assert rows[0]["td_max"] == "1e-12"
    assert (rows[2]["return"], rows[2]["loss"], rows[2]["td_mean"]) == ("0.123456789", "", "0.1")
    assert not [each for each in path.parent.rglob("*") if "partial" in each.name]
    (path.parent / "runs" / f"{RUN}.csv").write_text("td_men\n")
    with pytest.raises(UserError, match="is not the file of a run. Remove it"):
        folder.join([RUN])


def test_a_study_continues_with_the_same_settings(tmp_path: Path) -> None:
    assert StudyFolder(tmp_path).claim(described(wall_seconds=0.0)) == 0.0
    StudyFolder(tmp_path).note(described(wall_seconds=12.5))
    # what does not decide the figures may differ
    changes = {"jobs": 7, "cpu": "two", "versions": {**VERSIONS, "matplotlib": "4.0"}, "notes": []}
    assert StudyFolder(tmp_path).claim(described(**changes)) == 12.5
    assert json.loads((tmp_path / "settings.json").read_text())["jobs"] == 7


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tuned": True, "seeds": [0]}, "other settings .they differ in tuned, seeds.. Use its own command, or choose"),
        ({"versions": {**VERSIONS, "torch": "2.14.0"}}, "other settings .they differ in torch.. Use its own"),
    ],
)
def test_another_study_is_refused_and_left_as_it_is(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    StudyFolder(tmp_path).claim(described())
    before = (tmp_path / "settings.json").read_bytes()
    with pytest.raises(UserError, match=message):
        StudyFolder(tmp_path).claim(described(**changes))
    assert (tmp_path / "settings.json").read_bytes() == before


def test_a_finished_study_may_be_reported_with_other_versions_and_keeps_its_settings(tmp_path: Path) -> None:
    StudyFolder(tmp_path).claim(described())
    (tmp_path / "episodes.csv.gz").write_bytes(b"")
    before = (tmp_path / "settings.json").read_bytes()
    StudyFolder(tmp_path).claim(described(versions={**VERSIONS, "torch": "2.14.0"}, jobs=9))
    assert (tmp_path / "settings.json").read_bytes() == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="holds runs without settings.json"):
        StudyFolder(tmp_path).claim(described())
    for text, message in (('{"steps": 3}', "not hold the settings of a study"), ("{", "cannot be read")):
        (tmp_path / "settings.json").write_text(text)
        with pytest.raises(UserError, match=message):
            StudyFolder(tmp_path).claim(described())


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


@pytest.mark.parametrize(
    "file, before, after, message",
    [
        ("episodes.csv", "td_mean", "td_men", "is not the table of a study, or damaged: .*'td_mean'"),
        ("episodes.csv", "2016.0", "many", "damaged: .*many"),
        ("episodes.csv", "Acrobot-v1,rank,1", "Acrobot-v1,rank,2", "holds 0 of 12 episodes of Acrobot-v1-rank-seed1"),
        ("episodes.csv", None, None, "cannot be read"),
        ("settings.json", None, None, "cannot be read"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, file: str, before: str | None, after: str | None, message: str
) -> None:
    path = write_study(tmp_path) / file
    if before is None or after is None:
        path.unlink()
    else:
        path.write_text(path.read_text().replace(before, after))
    with pytest.raises(UserError, match=message) as caught:
        read_study(tmp_path)
    assert file in str(caught.value)


@pytest.mark.parametrize("cut, flipped", [(40, None), (None, 30)], ids=["cut off", "a byte is wrong"])
def test_a_damaged_archive_is_named(tmp_path: Path, cut: int | None, flipped: int | None) -> None:
    packed = bytearray(gzip.compress((write_study(tmp_path) / "episodes.csv").read_bytes(), mtime=0))
    if flipped is not None:
        packed[flipped:] = bytes(255 - byte for byte in packed[flipped:])
    (tmp_path / "episodes.csv.gz").write_bytes(packed[:cut])
    with pytest.raises(UserError, match=r"episodes.csv.gz cannot be read"):
        read_study(tmp_path)
