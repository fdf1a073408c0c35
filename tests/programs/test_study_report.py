"""The study's estimators by hand, its recorded reports, its folder, and the command."""

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

import numpy as np
import pytest
from training_runs import wait_for

from gpu_replay.cli import main
from gpu_replay.console.errors import UserError
from gpu_replay.console.figures import save
from gpu_replay.study.analysis import AVERAGED, PAIRS, Correlation, Estimate, correlations, method_share
from gpu_replay.study.report import verdict, write_report
from gpu_replay.study.results import StudyFolder, read_study
from gpu_replay.study.run import COLUMNS
from gpu_replay.study.settings import ENVIRONMENTS, agents, described
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

    def saving(figure: Any, path: Path) -> Path:
        said[path.stem] = " ".join([figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)])
        return save(figure, path)

    monkeypatch.setattr("gpu_replay.study.plots.save", saving)
    # what has no interval promises none
    write_report(part_of_it(tmp_path, ["MountainCar-v0"], seeds=1))
    assert "MountainCar-v0: shorter is better" in said["durations"]
    assert ("ρ undefined" in said["explained"], "interval" in said["explained"]) == (True, False)
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


def broken() -> None:
    """What a pool says of each run when one of its processes was killed."""
    raise BrokenProcessPool


def test_a_pool_that_broke_is_an_error(threads: None) -> None:
    # which the command line prints in one line
    with pytest.raises(OSError, match="worker process was killed.*memory"):
        list(run_all(broken, {"a run": ()}, 1))
