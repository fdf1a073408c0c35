"""The study: estimators and measures by hand, recorded reports, runs and cliffwalks, its folder, and the command."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from training_runs import wait_for

from gpu_replay.cli import main
from gpu_replay.console.errors import UserError
from gpu_replay.console.figures import save
from gpu_replay.study.analysis import AVERAGED, PAIRS, Correlation, Estimate, correlations, method_share
from gpu_replay.study.blind_cliffwalk import LEARNERS, Outcome, QTable, solve
from gpu_replay.study.cliffwalk import summarize, write_cliffwalk
from gpu_replay.study.methods import Memory
from gpu_replay.study.report import verdict, write_report
from gpu_replay.study.results import StudyFolder, read_study
from gpu_replay.study.run import COLUMNS, KEYS, RunId, make_run
from gpu_replay.study.settings import ENVIRONMENTS, METHODS, AgentSettings, agents, described
from gpu_replay.study.statistics import correlated_pairs, td_statistics
from gpu_replay.study.workers import run_all

pytest.importorskip("gymnasium")
pd = pytest.importorskip("pandas")
stats = pytest.importorskip("scipy.stats")

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "bench" / "results"
NAMES = ("final-returns", "explained", "durations", "td-errors", "correlated-pairs", "q-values")
PICTURES = [f"{name}.png" for name in NAMES]


@pytest.fixture
def undrawn(monkeypatch: Patch) -> None:
    """Reports name their pictures, which take seconds and have a test of their own."""
    monkeypatch.setattr("gpu_replay.study.report.draw_all", lambda folder, *_: [folder / name for name in PICTURES])


# estimators


def point(method: str, final: float, place: str = "CartPole-v1", **means: float) -> dict[str, Any]:
    return {"environment": place, "method": method, "final": final, **dict.fromkeys(AVERAGED, final), **means}


def correlated(found: list[dict[str, Any]]) -> Correlation:
    """Of the final returns with the mean TD errors."""
    return next(each for each in correlations(pd.DataFrame(found)) if each.predictor == "td_mean")


def share_of(methods: Any, finals: Any) -> tuple[float, float]:
    return method_share(pd.DataFrame([point(*each) for each in zip(methods, finals, strict=True)]))


def test_method_share_is_kruskal_and_wallis_over_n_minus_one() -> None:
    # 6!/(2! 2! 2!) = 90 ways to deal three pairs, 6 of which keep them together
    assert share_of("aabbcc", (1, 1, 2, 2, 3, 3)) == (pytest.approx(1), pytest.approx(6 / 90, abs=0.02))
    values = np.random.default_rng(4).normal(size=15)
    expected = stats.kruskal(*[values[i::3] for i in range(3)]).statistic / 14
    assert share_of("abc" * 5, values)[0] == pytest.approx(expected)


def test_correlation_over_runs_and_over_methods() -> None:
    # within each method the return falls with the predictor, between methods it rises
    found = [point(m, 10.0 * i - s, td_mean=10.0 * i + s) for i, m in enumerate("abcd") for s in range(3)]
    row = correlated(found)
    assert row.overall.low < row.overall.value < row.overall.high
    # of 4! = 24 orders: both extremes
    assert (row.runs, row.between.value, row.between_p) == (12, pytest.approx(1), pytest.approx(2 / 24))
    # 2.6 % of the resamples have none of three runs that differ, and 35 % not the only one
    assert correlated([point("a", float(max(s, 5)), td_mean=float(s)) for s in range(9)]).overall.bounded
    assert not correlated([point("a", float(s), td_mean=float(s == 8)) for s in range(9)]).overall.bounded


def test_an_interval_on_the_other_side_contradicts() -> None:
    for predictor, low, high in (("td_mean", -0.6, -0.2), (PAIRS, 0.2, 0.6)):
        assert verdict(Correlation(None, predictor, 30, "", Estimate(0.3, low, high))) == "contradicts"


# the report


def part_of_it(folder: Path, environments: Any = ENVIRONMENTS, seeds: int = 2, episodes: int = 8, **more: Any) -> Path:
    """Write the settings and the episodes of some runs of the recorded study, and return the folder."""
    folder.mkdir(exist_ok=True)
    settings, table = read_study(RECORDED / "study")
    agents = {name: settings["environments"][name] | {"episodes": episodes} for name in environments}
    settings |= {"environments": agents, "seeds": list(range(seeds))} | more
    (folder / "settings.json").write_text(json.dumps(settings))
    table = table.astype({"environment": str, "method": str, "seed": int})
    chosen = table["environment"].isin(environments) & (table["seed"] < seeds)
    # in another order than that of the report
    rows = table[chosen & (table["episode"] <= episodes)].sort_values(["environment", "method", "seed", "episode"])
    rows.to_csv(folder / "episodes.csv", index=False)
    return folder


def report(folder: Path) -> str:
    """Its text, with single spaces."""
    assert write_report(folder)[-1] == folder / "report.md"
    return re.sub(r" +", " ", (folder / "report.md").read_text())


@pytest.mark.parametrize("name", ["study-tuned", pytest.param("study", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("undrawn")
def test_recorded_episodes_give_the_recorded_report(name: str, tmp_path: Path) -> None:
    """To the last digit: summaries of runs, intervals, correlations, their verdicts and differences, settings."""
    recorded = RECORDED / name
    for file in ("settings.json", "episodes.csv.gz"):
        shutil.copy(recorded / file, tmp_path)
    write_report(tmp_path)
    assert (tmp_path / "report.md").read_text() == (recorded / "report.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_reports_of_little_say_so(tmp_path: Path) -> None:
    text = report(part_of_it(tmp_path / "quick", seeds=1, quick=True))
    assert "**A smoke run** (`--quick`)" in text
    # one seed has no intervals, and what does not differ no correlation
    assert "| no memory | 22.8 [n/a] | -341 [n/a] | -200 [n/a] |" in text
    assert "MountainCar-v0, mean TD error: 6 of 6 runs end with the same return (-200)." in text
    # nor have runs without updates
    text = report(part_of_it(tmp_path / "short", ["CartPole-v1"], episodes=1))
    assert "CartPole-v1, mean TD error: a run has no batches." in text
    assert "| mean TD error | positive | – | 12 | – | undefined | – |" in text


def test_every_picture_is_shown_and_whole(monkeypatch: Patch, tmp_path: Path) -> None:
    from matplotlib.image import imread

    said: dict[str, str] = {}

    def noted(figure: Any, path: Path) -> Path:
        said[path.stem] = " ".join([figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)])
        return path

    monkeypatch.setattr("gpu_replay.study.plots.save", noted)
    # what has no interval promises none
    write_report(part_of_it(tmp_path, ["MountainCar-v0"], seeds=1))
    assert "MountainCar-v0: shorter is better" in said["durations"]
    assert ("ρ undefined" in said["explained"], "interval" in said["explained"]) == (True, False)
    monkeypatch.setattr("gpu_replay.study.plots.save", lambda figure, path: save(figure, noted(figure, path)))
    written = write_report(part_of_it(tmp_path, ["CartPole-v1"]))
    assert [path.name for path in written] == [*PICTURES, "report.md"]
    assert not list(tmp_path.glob(".*"))
    assert "CartPole-v1: longer is better" in said["durations"]
    assert re.search(r"95% interval ρ = [+-]0\.\d\d  \[", said["explained"])
    for path in written[:-1]:
        assert f"]({path.name})" in written[-1].read_text()
        image = imread(path)
        assert (image.shape[0] > 300, image.shape[1] > 700) == (True, True)
        # lines and dots are in colour, frames and words are not
        assert ((image[..., :3].max(axis=-1) - image[..., :3].min(axis=-1)) > 0.3).mean() > 0.001


# the folder

VERSIONS = {"gpu_replay": "0.1.0", "torch": "2.13.0", "numpy": "2.4", "gymnasium": "1.4", "matplotlib": "3.8"}


def settings_with(**changes: Any) -> dict[str, Any]:
    settings = described(agents(["CartPole-v1"], tuned=False, episodes=3), ["uniform"], 2, tuned=False, quick=False)
    return {**settings, "versions": VERSIONS, "cpu": "one", "jobs": 2, **changes}


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
    # a folder of something else
    for text, message in (('{"steps": 3}', "not hold the settings of a study"), ("{", "cannot be read")):
        other.write_text(text)
        with pytest.raises(UserError, match=message):
            claim()
    other.unlink()
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(UserError, match="holds episodes.csv.gz, report.md without settings.json"):
        claim()
    (tmp_path / "episodes.csv.gz").unlink()
    with pytest.raises(UserError, match="holds report.md without settings.json"):
        claim()


def test_a_study_is_read_in_the_order_of_the_tables_and_damaged_files_are_named(tmp_path: Path) -> None:
    table = part_of_it(tmp_path) / "episodes.csv"
    _, episodes = read_study(tmp_path)
    assert [place for place, _ in episodes.groupby("environment", observed=True)] == list(ENVIRONMENTS)
    whole, packed = table.read_bytes(), gzip.compress(table.read_bytes(), mtime=0)
    for file, damaged, message in (
        # cut off, and with wrong bytes
        ("episodes.csv.gz", packed[:40], "cannot be read"),
        ("episodes.csv.gz", packed[:30] + packed[30:].swapcase(), "cannot be read"),
        ("episodes.csv", whole.replace(b"td_mean", b"td_men"), "damaged: .*td_mean"),
        ("episodes.csv", whole.replace(b"Acrobot-v1,rank,1", b"Acrobot-v1,rank,0"), "16 of 8 .* Acrobot-v1-rank-seed0"),
        ("settings.json", b"{", "cannot be read"),
    ):
        (tmp_path / file).write_bytes(damaged)
        with pytest.raises(UserError, match=message) as caught:
            read_study(tmp_path)
        assert file in str(caught.value)
        table.with_suffix(".csv.gz").unlink(missing_ok=True)


# the command

TINY = ["study", "cartpole", "--methods", "none,uniform", "--seeds", "2", "--episodes", "4", "--jobs", "1"]


def figures(folder: Path) -> list[dict[str, str]]:
    """episodes.csv without the times."""
    with (folder / "episodes.csv").open(newline="") as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.usefixtures("undrawn", "threads")
def test_a_study_leaves_its_files_and_goes_on_where_it_stopped(tmp_path: Path, capsys: Capture) -> None:
    arguments = [*TINY, "--output", str(tmp_path)]
    assert main(arguments) == 0
    rows = figures(tmp_path)
    keys = [tuple(row[name] for name in ("environment", "method", "seed", "episode")) for row in rows]
    assert keys == [("CartPole-v1", name, seed, at) for name in ("none", "uniform") for seed in "01" for at in "1234"]
    assert tuple(rows[0]) == COLUMNS[:-1]
    # learning began in each run
    assert all(row["td_mean"] for row in rows if row["episode"] == "4")
    assert rows[0]["td_mean"] == ""
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert (settings["tuned"], settings["quick"], settings["episodes"], settings["seeds"]) == (False, False, 4, [0, 1])
    assert (list(settings["environments"]), list(settings["methods"])) == (["CartPole-v1"], ["none", "uniform"])
    assert settings["wall_seconds"] > 0
    # a finished study is only reported, and not mixed with another one
    (tmp_path / "report.md").unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(arguments) == 0
    assert str(tmp_path / "report.md") in capsys.readouterr().out
    assert "- Discount 0.8 looks about 5 steps ahead" in (tmp_path / "report.md").read_text()
    assert main([*arguments, "--tuned"]) == 2
    assert "holds a study with other settings (they differ in" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    # what is missing of an unfinished one is found as it would have been
    for name in ("episodes.csv", "runs/CartPole-v1-none-seed0.csv", "runs/CartPole-v1-uniform-seed1.csv"):
        (tmp_path / name).unlink()
    kept = tmp_path / "runs" / "CartPole-v1-none-seed1.csv"
    written = kept.stat().st_mtime_ns
    assert main(arguments) == 0
    assert "2 of 4 runs are there already" in capsys.readouterr().out
    assert (kept.stat().st_mtime_ns, figures(tmp_path)) == (written, rows)
    assert not list(tmp_path.rglob("*partial*"))
    # what is no run is not joined with others
    (tmp_path / "episodes.csv").unlink()
    kept.write_text("td_men\n")
    assert main(arguments) == 2
    assert "not the file of a run. Remove it" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_find_what_threads_find(tmp_path: Path, threads: None, undrawn: None) -> None:
    assert main([*TINY, "--output", str(tmp_path / "here")]) == 0
    command = [sys.executable, "-m", "gpu_replay", *TINY[:-1], "2", "--output", str(tmp_path / "there")]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert figures(tmp_path / "there") == figures(tmp_path / "here")


@pytest.mark.slow
def test_ctrl_c_ends_it_and_says_how_to_continue(tmp_path: Path) -> None:
    # long enough that it cannot be over before the signal comes
    arguments = f"-m gpu_replay study cartpole --methods none uniform --seeds 3 --jobs 2 --output {tmp_path}"
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, *arguments.split()], cwd=ROOT, **pipes)
    try:
        wait_for(process, (tmp_path / "settings.json").exists)
        time.sleep(3)
        # as a terminal does: to all processes of the group
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out) == (130, ""), err
    assert "0 of 6 runs finished; the same command continues from there." in err.splitlines()[-1]
    assert "Traceback" not in err
    assert json.loads((tmp_path / "settings.json").read_text())["wall_seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_a_run_that_fails_is_named_and_those_before_it_are_kept(threads: None) -> None:
    first_is_kept = threading.Event()

    def fail(name: str) -> str:
        if name == "second" and first_is_kept.wait(60):
            raise KeyError("a reason")
        return name

    made = run_all(fail, {name: (name,) for name in ("first", "second")}, 1)
    assert next(made) == ("first", "first")
    first_is_kept.set()
    with pytest.raises(RuntimeError, match="the run second failed") as caught:
        next(made)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_pool_that_broke_is_an_error(threads: None) -> None:
    # what it says of each run when one of its processes was killed; the command line prints it in one line
    broken = mock.Mock(side_effect=BrokenProcessPool)
    with pytest.raises(OSError, match="worker process was killed.*memory"):
        list(run_all(broken, {"a run": ()}, 1))


# what is measured in runs


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
