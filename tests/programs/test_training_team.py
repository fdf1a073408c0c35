"""Data-parallel training: what each rank gets of the settings, averaged gradients, and runs under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from ranks import ranks_of  # noqa: E402

from gpu_replay.console.errors import UserError  # noqa: E402
from gpu_replay.training.settings import Settings  # noqa: E402
from gpu_replay.training.team import Team  # noqa: E402


def team_of(size: int, rank: int, **changes: Any) -> Team:
    team = object.__new__(Team)
    team.settings, team.rank, team.size = Settings.for_family("vector", **changes), rank, size
    return team


def test_settings_are_those_of_all_ranks_together() -> None:
    team = team_of(4, 1)
    share, whole = team.share(), team.settings
    assert (share.num_envs, share.batch_size, share.capacity, share.warmup) == (4, 32, 25_000, 250)
    assert (share.steps, share.epsilon_steps, share.eval_every) == (whole.steps, whole.epsilon_steps, whole.eval_every)
    assert team_of(4, 0).seed(7) == 7
    assert len({team_of(4, rank).seed(7) for rank in range(4)}) == 4
    with pytest.raises(UserError, match="--num-envs 16 cannot be divided among 3 ranks"):
        team_of(3, 0).share()


def together(group: Any) -> tuple[list[list[float]], list[str], list[float]]:
    team = Team(Settings.for_family("vector"))
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1, 3))]
    for place, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, float(team.rank + 10 * place))
    team.average(weights)
    reasons = [
        team.agree(""),
        team.agree("SIGTERM" if team.rank == 1 else ""),
        team.agree("solved" if team.rank else ""),
    ]
    gradients = [weight.grad.flatten().tolist() for weight in weights if weight.grad is not None]
    return gradients, reasons, team.of_first(torch.full((2,), float(team.rank))).tolist()


@pytest.mark.slow
def test_gradients_are_averaged_and_ends_agreed_on() -> None:
    with ranks_of(2) as ranks:
        for found in ranks.run(2, together):
            assert found == ([[0.5] * 2, [10.5] * 3], ["", "SIGTERM", "solved"], [0.0, 0.0])


def torchrun(output: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "gpu_replay", "train"]
    options = ["CartPole-v1", "--device", "cpu", "--output", str(output), *more]
    return subprocess.Popen(command + options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_torchrun_trains_one_run_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    process = torchrun(tmp_path / "run", "--steps", "2000", "--eval-episodes", "4")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert (settings["ranks"], settings["num_envs"], settings["batch_size"]) == (2, 16, 128)
    assert summary["steps"] == 2000
    # as many as of one process: two for each 16 steps after the warm-up, whose windows take some more
    assert 80 <= summary["updates"] <= 126
    assert said.count("written to") == 1
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    process = torchrun(tmp_path / "run", "--steps", "100000000", "--no-early-stop")
    try:
        progress, began = tmp_path / "run" / "progress.csv", time.monotonic()
        while not (progress.exists() and progress.read_text().count("\n") > 1):
            assert time.monotonic() - began < 120
            time.sleep(0.2)
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)
        process.communicate(timeout=90)
        assert process.returncode != 0
    finally:
        process.kill()
