"""Runs of the agent for tests: trainers of small environments, training in a process of its own, and what a run wrote.

Modules that import this are skipped where the packages of training are not installed.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_replay import TrajectoryReplayBuffer
from gpu_replay.console.interrupt import StopRequest
from gpu_replay.console.seeds import stream_seed
from gpu_replay.training import records
from gpu_replay.training.environments import Environment
from gpu_replay.training.evaluation import Evaluation, Evaluator
from gpu_replay.training.records import Recorder
from gpu_replay.training.registry import identify
from gpu_replay.training.run import make_buffer
from gpu_replay.training.settings import Settings
from gpu_replay.training.team import Team
from gpu_replay.training.train import Trainer, beta_schedule

for package in ("gymnasium", "tqdm", "matplotlib", "safetensors", "tensorboard"):
    pytest.importorskip(package)

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
# a run of seconds
CATCH = ("train", "catch", "--device", "cpu", "--steps", "3000", "--seed", "3", "--eval-every", "1500")
CATCH += ("--eval-episodes", "32")
# columns of progress.csv that depend on the clock
TIMES = ("seconds", "updates_per_second", "steps_per_second")


class Events(Recorder):
    """Keeps rows and evaluations, and writes nothing."""

    def __init__(self) -> None:
        self.rows = []
        self.evaluations: list[float] = []

    def advance(self, step: int) -> None:
        pass

    def row(self, row: Any) -> None:
        self.rows.append(row)

    def evaluated(self, step: int, evaluation: Evaluation, best: Any) -> None:
        self.evaluations.append(evaluation.return_mean)


def trainer_of(
    games: Environment,
    judged: Environment,
    settings: Settings,
    device: torch.device = CPU,
    seed: int = 0,
    buffer: TrajectoryReplayBuffer | None = None,
) -> Trainer:
    """A trainer of these environments, and those of its evaluations."""
    evaluator = Evaluator(judged, settings, device=device, seed=seed, stop=StopRequest())
    if buffer is None:
        beta, replay = beta_schedule(settings), stream_seed(seed, "replay")
        buffer = make_buffer(games.spec, settings, beta, device, replay, settings.num_envs)
    return Trainer(games, evaluator, buffer, Team(settings), seed=seed)


def make_trainer(name: str = "catch", device: torch.device = CPU, **changes: Any) -> Trainer:
    """A trainer with the settings of the environment's family, and changes to them; the seed and buffer follow."""
    found = identify(name)
    seed, buffer = changes.pop("seed", 0), changes.pop("buffer", None)
    settings = found.settings(device, **{"bfloat16": False, **changes})
    games, judged = (found.make(count, settings, device) for count in (settings.num_envs, settings.eval_episodes))
    return trainer_of(games, judged, settings, device, seed, buffer)


def train(seed: int = 0, **changes: Any) -> tuple[Trainer, Events, str]:
    """A whole run of Catch: its trainer, its events, and why it ended."""
    trainer, events = make_trainer(seed=seed, **changes), Events()
    return trainer, events, trainer.run(events, StopRequest())


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """`gpu-replay train` in a process of its own."""
    command = [sys.executable, "-m", "gpu_replay", "train", *flags, "--output", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool], seconds: float = 90.0) -> None:
    """Until the condition holds; the process must not end before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_rows(folder: Path) -> list[dict[str, float]]:
    """The rows of progress.csv; none where there is no such file."""
    return records.read_rows(folder, sys.maxsize)


def summary(folder: Path) -> dict[str, Any]:
    """What a run says of itself at its end."""
    return dict(json.loads((folder / "summary.json").read_text()))


def tensorboard_of(folder: Path) -> Any:
    """What TensorBoard reads of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def without_times(folder: Path) -> list[dict[str, str]]:
    """The rows of progress.csv as text, without the columns that depend on the clock."""
    with (folder / "progress.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in TIMES} for row in csv.DictReader(file)]
