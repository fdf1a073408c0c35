"""`train --from`: a new run that begins where another one's checkpoint is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from training_runs import read_rows

from gpu_replay.cli import main
from gpu_replay.training.checkpoints import latest

SMALL = ("--eval-episodes", "4", "--log-every", "320", "--warmup", "320")


def learned(folder: Path) -> torch.Tensor:
    """The weights of the newest checkpoint, flat."""
    saved = latest(folder / "checkpoint")
    assert saved is not None
    return torch.cat([weight.flatten() for weight in saved.state()["trainer"]["agent"]["online"].values()])


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("branch") / "parent"
    assert main(["train", "catch", "--device", "cpu", "--steps", "960", *SMALL, "--output", str(folder)]) == 0
    return folder


def test_a_branch_goes_on_from_the_checkpoint_with_other_settings(parent: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in sorted(parent.rglob("*")) if path.is_file()}
    # a step size of zero shows whose weights they are
    rates = ["--learning-rate", "0", "--learning-rate-end", "0"]
    branch = tmp_path / "branch"
    assert main(["train", "--from", str(parent), "--steps", "1280", *rates, "--output", str(branch)]) == 0
    settings = json.loads((branch / "settings.json").read_text())
    assert (settings["env"], settings["learning_rate"], settings["warmup"], settings["steps"]) == (
        "catch",
        0,
        320,
        1280,
    )
    assert torch.equal(learned(branch), learned(parent))
    assert [row["step"] for row in read_rows(branch)] == [320, 640, 960, 1280]
    assert json.loads((branch / "summary.json").read_text())["updates"] > read_rows(parent)[-1]["updates"]
    assert {path: path.read_bytes() for path in sorted(parent.rglob("*")) if path.is_file()} == before


def test_a_branch_with_another_buffer_fills_it_anew(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--n-step", "1", "--steps", "1600", "--output", str(tmp_path / "branch")]
    assert main(["train", "--from", str(parent), *flags]) == 0
    assert "a new replay buffer is filled, for another n_step" in capsys.readouterr().err
    rows = read_rows(tmp_path / "branch")
    assert rows[-1]["stored"] == 640
    # it learned once the warm-up was there again
    assert rows[2]["updates"] == rows[3]["updates"] < rows[-1]["updates"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden", "8"], r"another --hidden \(it is \(128, 128\)\)"),
        (["--steps", "960"], "--steps 960 are done: the checkpoint in .* is of step 960"),
        (["--actors", "2"], "--from does not go with --actors"),
        (["CartPole-v1"], "is a run of catch, not of CartPole-v1"),
    ],
)
def test_a_branch_that_cannot_be_is_refused(
    flags: list[str], message: str, parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if flags[0].startswith("CartPole"):
        pytest.importorskip("gymnasium")
    assert main(["train", *flags, "--from", str(parent), "--output", str(tmp_path / "branch")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)


def test_a_folder_without_a_run_and_the_run_itself_are_refused(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {str(tmp_path / "none"): "no such folder", str(tmp_path): "settings.json is missing"}
    for source, message in cases.items():
        assert main(["train", "--from", source, "--output", str(tmp_path / "branch")]) == 2
        assert message in capsys.readouterr().err
    assert main(["train", "--from", str(parent), "--output", str(parent)]) == 2
    assert "already holds a run" in capsys.readouterr().err
