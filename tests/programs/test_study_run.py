"""Runs of the study and of the Blind Cliffwalk: recorded ones come again, and measures by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_replay.cli import main
from gpu_replay.study.blind_cliffwalk import LEARNERS, Outcome, QTable, solve
from gpu_replay.study.cliffwalk import summarize, write_cliffwalk
from gpu_replay.study.methods import Memory
from gpu_replay.study.results import read_study
from gpu_replay.study.run import COLUMNS, KEYS, RunId, make_run
from gpu_replay.study.settings import ENVIRONMENTS, METHODS, AgentSettings, agents, described
from gpu_replay.study.statistics import correlated_pairs, td_statistics

pytest.importorskip("gymnasium")
pd = pytest.importorskip("pandas")

RECORDED = Path(__file__).resolve().parents[2] / "bench" / "results"


# what is measured


def test_td_statistics_by_hand() -> None:
    # absolute values 1, 2, 3, 6: deviation sqrt((4 + 1 + 0 + 9) / 4)
    found = td_statistics(np.array([[-2.0, 1.0, 6.0, -3.0], [0.0, 0.0, 0.0, 0.0]], dtype=np.float32))
    expected = {"td_mean": 3.0, "td_median": 2.5, "td_max": 6.0, "td_std": pytest.approx(3.5**0.5, rel=1e-15)}
    assert {name: values.tolist() for name, values in found.items()} == {n: [x, 0.0] for n, x in expected.items()}


# with a: (1, 2, 3): b rises with it (r = 1), c falls (r = -1), d is flat and has no correlation,
# f: (2, 1, 5) has r = 3 / sqrt(2 * 26 / 3) = 0.7206
A, B, C, D, F = (1, 2, 3), (10, 20, 30), (3, 2, 1), (7, 7, 7), (2, 1, 5)
# three times 0.1 divided by three is not 0.1 in floating point
TENTHS = (0.1, 0.1, 0.1)
# two components are always correlated unless they are equal: 10 states, one of them flat
TWO = [(float(at), float(at * at - 3)) for at in range(1, 10)] + [(0.5, 0.5)]


BY_HAND: list[tuple[list[tuple[float, ...]], float, int]] = [
    *(([A, B, C, D, D], 0.8, 3), ([A, F], 0.72, 1), ([A, F], 0.73, 0), ([C, F], 0.72, 1)),
    *(([A, TENTHS, TENTHS], 0.8, 0), (TWO, 0.8, 36)),
]


def test_correlated_pairs_by_hand() -> None:
    for batch, above, pairs in BY_HAND:
        assert correlated_pairs(np.array([batch], dtype=np.float32), above).tolist() == [pairs], batch


def test_correlated_pairs_are_those_of_corrcoef_at_any_size() -> None:
    # more updates than are computed at a time
    states = np.random.default_rng(4).standard_normal((70, 33, 4)).astype(np.float32)
    matrices = np.abs([np.corrcoef(batch) for batch in states.astype(np.float64)])
    expected = (np.triu(matrices, 1) > 0.8).sum(axis=(1, 2)).tolist()
    for size in (1e-30, 1.0, 1e30):
        assert correlated_pairs((states * np.float32(size)).astype(np.float32), 0.8).tolist() == expected


# runs


@pytest.fixture(scope="module")
def recorded() -> Any:
    return read_study(RECORDED / "study")[1]


RUNS = [("CartPole-v1", "none", 0), ("CartPole-v1", "uniform", 1), ("CartPole-v1", "rank", 2)]
RUNS += [("CartPole-v1", "combined", 3), ("CartPole-v1", "hindsight", 4), ("Acrobot-v1", "hindsight", 0)]
# episodes that are cut off
RUNS += [("MountainCar-v0", "hindsight", 0), ("MountainCar-v0", "uniform", 0)]


@pytest.mark.parametrize("run", RUNS)
def test_recorded_episodes_come_again(run: tuple[str, str, int], recorded: Any) -> None:
    """The first ones of each method but proportional replay, whose beta follows from the number of episodes."""
    count = {"CartPole-v1": 8, "Acrobot-v1": 1, "MountainCar-v0": 2}[run[0]]
    settings = agents([run[0]], tuned=False, episodes=count)[run[0]]
    found = pd.DataFrame(make_run(RunId(*run), settings))
    which = np.all([recorded[name] == each for name, each in zip(KEYS, run, strict=True)], axis=0)
    # steps, durations and returns; epsilon; means over the updates, of which the first episodes have none
    for name in (name for name in COLUMNS if name not in (*KEYS, "seconds")):
        wanted = recorded[which][name].head(count)
        np.testing.assert_allclose(found[name].astype(float), wanted, rtol=1e-4, err_msg=name)


def test_importance_weights_grow_stronger_over_the_run() -> None:
    def weights(method: str, progress: float) -> np.ndarray:
        memory, obs = Memory(method, AgentSettings(memory=60), "CartPole-v1", 4, 0), np.zeros(4, dtype=np.float32)
        for _ in range(60):
            memory.add(obs, 0, 1.0, obs, terminated=False, truncated=False)
        memory.update_priorities(torch.arange(60), np.linspace(0.01, 3, 60, dtype=np.float32))
        return memory.sample(32, progress).weight

    assert weights("combined", 0.5).tolist() == [1.0] * 32
    early, late = weights("proportional", 0.0), weights("proportional", 1.0)
    assert early.min() < 0.7
    # the same draws, weighted by P ** -0.4 and by P ** -1
    np.testing.assert_allclose(late, early ** (1 / 0.4), rtol=1e-4)
    assert weights("rank", 0.0).tolist() == weights("rank", 1.0).tolist()


@pytest.mark.parametrize("name, tuned", [("study", False), ("study-tuned", True)])
def test_settings_are_those_of_the_recorded_studies_and_may_be_shortened(name: str, tuned: bool) -> None:
    recorded = json.loads((RECORDED / name / "settings.json").read_text())
    found = described(agents(ENVIRONMENTS, tuned=tuned), list(METHODS), 5, tuned=tuned, quick=False)
    for each in ("environments", "seeds", "tuned", "quick"):
        assert json.loads(json.dumps(found[each])) == recorded[each]
    assert [each.episodes for each in agents(ENVIRONMENTS, tuned=tuned, episodes=7).values()] == [7, 7, 7]


# the Blind Cliffwalk: its updates by hand, its recorded runs and what they say, and the command

MOST = 1_000_000
CLIFFWALK = pd.read_csv(RECORDED / "study" / "cliffwalk.csv")


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
    again = CLIFFWALK[(CLIFFWALK["states"] == 5) & (CLIFFWALK["seed"] < 2)]
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
    outcomes = [Outcome(**row) for row in CLIFFWALK.astype({"converged": bool}).to_dict("records")]
    write_cliffwalk(tmp_path, outcomes, {"time": "an hour"})
    assert (tmp_path / "cliffwalk.csv").read_text() == (RECORDED / "study" / "cliffwalk.csv").read_text()
    found, expected = (
        (each / "cliffwalk.md").read_text().split("## Conditions") for each in (tmp_path, RECORDED / "study")
    )
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
