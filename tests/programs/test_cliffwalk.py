"""The Blind Cliffwalk: its updates by hand, its recorded runs and what they say, and the command."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gpu_replay.cli import main
from gpu_replay.study.blind_cliffwalk import LEARNERS, Outcome, QTable, solve
from gpu_replay.study.cliffwalk import summarize, write_cliffwalk

pd = pytest.importorskip("pandas")

MOST = 1_000_000
FOLDER = Path(__file__).resolve().parents[2] / "bench" / "results" / "study"
RECORDED = pd.read_csv(FOLDER / "cliffwalk.csv")


def test_updates_by_hand():
    table = QTable(2, np.random.default_rng(0))
    table.values = [[0.0, 0.0], [0.0, 0.0]]
    # the last right step first: error 1, a quarter of it is learned
    assert table.update(1, 1, 1.0, True) == 1.0
    assert table.values == [[0.0, 0.0], [0.0, 0.25]]
    # discount 1/2 of the best value ahead
    assert table.update(0, 0, 0.0, False) == 0.125
    assert table.values == [[0.03125, 0.0], [0.0, 0.25]]
    # the wrong step leads nowhere
    assert table.update(0, 1, 0.0, True) == 0.0
    # true values are 1/2 and 1: by how much the next two updates would lower the sum of squares
    assert table.gain(1, 1, 1.0, True) == pytest.approx(0.75**2 - 0.5625**2)
    assert table.gain(0, 0, 0.0, False) == pytest.approx(0.46875**2 - (0.5 - 0.03125 - 0.25 * 0.09375) ** 2)


def test_recorded_runs_come_again():
    """Of each agent, to the update with which its values are right; at up to 13 states they stand in the report."""
    again = RECORDED[(RECORDED["states"] == 5) & (RECORDED["seed"] < 2)]
    assert set(again["agent"]) == set(LEARNERS)
    for row in again.itertuples():
        found = solve(row.agent, 5, row.seed, MOST)
        assert (found.updates, found.transitions, found.converged) == (row.updates, 62, True), row
    stopped = solve("uniform", 6, 0, 7)
    assert (stopped.updates, stopped.converged) == (7, False)


def test_quartiles_and_censored_runs():
    runs = [(10, True), (30, True), (99, False), (99, False)]
    for outcomes, expected in (
        ([(10, True), (30, True), (20, True), (40, True)], [17.5, 25, 32.5]),
        (runs, [25, np.inf, np.inf]),
        # the lower quartile of five runs is the second one, whatever comes after it
        ([*runs, (99, False)], [30, np.inf, np.inf]),
    ):
        group = [Outcome("uniform", 4, 30, seed, *run, 0.5) for seed, run in enumerate(outcomes)]
        assert summarize(pd.DataFrame(group)).loc[4].tolist() == expected


def test_recorded_runs_give_the_recorded_report(tmp_path, monkeypatch):
    """To the last digit; the conditions of the run stand below the tables."""
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **_: path.touch())
    outcomes = [Outcome(**row) for row in RECORDED.astype({"converged": bool}).to_dict("records")]
    write_cliffwalk(tmp_path, outcomes, {"time": "an hour"})
    assert (tmp_path / "cliffwalk.csv").read_text() == (FOLDER / "cliffwalk.csv").read_text()
    found, expected = ((each / "cliffwalk.md").read_text().split("## Conditions") for each in (tmp_path, FOLDER))
    assert found[0] == expected[0]
    assert "- time: an hour" in found[1]


@pytest.mark.usefixtures("threads")
def test_command_writes_runs_picture_and_report(tmp_path):
    pytest.importorskip("scipy")
    arguments = ["study", "cliffwalk", "--states-max", "3", "--seeds", "2", "--max-updates", "60"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cliffwalk.csv", "cliffwalk.md", "cliffwalk.png"]
    runs = pd.read_csv(tmp_path / "cliffwalk.csv")
    assert (len(runs), set(runs["converged"])) == (5 * 2 * 2, {0, 1})
    assert "| ∞ [∞, ∞] |" in re.sub(" +", " ", (tmp_path / "cliffwalk.md").read_text())
