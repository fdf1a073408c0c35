"""`gpu-replay study` from its flags to its folder: the same figures again, going on, ending early, bad input."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu_replay.cli import main
from gpu_replay.study.run import RunId, make_run
from gpu_replay.study.settings import ENVIRONMENTS, METHODS, AgentSettings
from gpu_replay.study.workers import run_all

for module in ("gymnasium", "tqdm", "matplotlib", "pandas", "scipy"):
    pytest.importorskip(module)

ROOT = Path(__file__).resolve().parents[2]
TINY = ["study", "cartpole", "--methods", "none,uniform", "--seeds", "2", "--episodes", "4", "--jobs", "2"]


def figures(folder: Path) -> list[dict[str, str]]:
    """episodes.csv without the times."""
    with (folder / "episodes.csv").open(newline="") as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny study."""
    folder = tmp_path_factory.mktemp("study")
    assert main([*TINY, "--output", str(folder)]) == 0
    return folder


def test_a_study_leaves_its_table_settings_pictures_and_report(study: Path) -> None:
    rows = figures(study)
    keys = [(row["environment"], row["method"], row["seed"], row["episode"]) for row in rows]
    assert keys == [
        ("CartPole-v1", method, seed, str(episode))
        for method in ("none", "uniform")
        for seed in "01"
        for episode in (1, 2, 3, 4)
    ]
    # learning began in each run
    assert all(row["td_mean"] for row in rows if row["episode"] == "4")
    settings = json.loads((study / "settings.json").read_text())
    assert (settings["tuned"], settings["quick"], settings["episodes"], settings["seeds"]) == (False, False, 4, [0, 1])
    assert (list(settings["environments"]), list(settings["methods"])) == (["CartPole-v1"], ["none", "uniform"])
    assert (settings["wall_seconds"] > 0, settings["jobs"]) == (True, 2)
    assert {"torch", "numpy", "gymnasium"} <= settings["versions"].keys()
    assert "- Discount 0.8" in (study / "report.md").read_text()
    assert (len(list(study.glob("*.png"))), len(list((study / "runs").glob("*.csv")))) == (6, 4)


@pytest.mark.slow
def test_a_study_continues_where_it_stopped_and_finds_what_it_would_have_found(study: Path, tmp_path: Path) -> None:
    for name in ("settings.json", "runs/CartPole-v1-none-seed1.csv", "runs/CartPole-v1-uniform-seed0.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((study / name).read_bytes())
    kept = tmp_path / "runs" / "CartPole-v1-none-seed1.csv"
    before = kept.stat().st_mtime_ns
    # in another number of processes, so that the other two runs follow one another in one
    command = [sys.executable, "-m", "gpu_replay", *TINY[:-1], "1", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 of 4 runs are there already" in done.stdout
    assert kept.stat().st_mtime_ns == before
    assert figures(tmp_path) == figures(study)
    assert str(tmp_path / "report.md") in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_a_signal_ends_it_and_says_how_to_continue(tmp_path: Path, number: signal.Signals, code: int) -> None:
    # long enough that it cannot be over before the signal comes
    arguments = f"-m gpu_replay study cartpole --methods none uniform --seeds 3 --jobs 2 --output {tmp_path}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
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
    assert "interrupted with 0 of 6 runs finished; the same command continues from there." in err.splitlines()[-1]
    assert "Traceback" not in err
    assert json.loads((tmp_path / "settings.json").read_text())["wall_seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_a_finished_study_is_only_reported(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = study / "report.md"
    before = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    report.unlink()
    assert main([*TINY, "--output", str(study)]) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert str(report) in capsys.readouterr().out


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
    with pytest.raises(OSError, match="a worker process was killed. Is there enough memory?"):
        list(run_all(os.abort, {"a run": ()}, 1))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            "Pong-v5 --output new",
            "ENV: 'Pong-v5' is not part of the study; use CartPole-v1, Acrobot-v1, MountainCar-v0",
        ),
        ("--methods uniform,best --output new", "--methods: 'best' is not part of the study; use none, uniform"),
        ("--episodes 0 --output new", "argument --episodes: must be at least 1; found 0"),
        ("--jobs many --output new", "argument --jobs: must be a whole number"),
        ("cartpole", "required: --output"),
        ("--output file/study", "cannot be written: Not a directory"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("in the way")
    assert message in refused(arguments.split(), capsys)
    assert not Path("new").exists()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    try:
        code: object = main(["study", *arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    (line,) = captured.err.splitlines()
    return str(line)


def test_other_settings_in_the_same_folder_are_refused(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (study / "episodes.csv").read_bytes()
    line = refused([*TINY[1:], "--tuned", "--output", str(study)], capsys)
    assert "holds a study with other settings (they differ in" in line
    assert (study / "episodes.csv").read_bytes() == before


def test_names_may_be_short_and_in_any_order() -> None:
    from gpu_replay.study.command import _chosen

    assert _chosen("ENV", ["mountaincar", "CartPole-v1"], ENVIRONMENTS) == ["CartPole-v1", "MountainCar-v0"]
    assert _chosen("ENV", ["ACROBOT", "acrobot"], ENVIRONMENTS) == ["Acrobot-v1"]
    assert _chosen("--methods", None, list(METHODS)) == list(METHODS)
