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
from torch import Tensor

from gpu_replay import Field, TrajectoryReplayBuffer
from gpu_replay.console.interrupt import StopRequest
from gpu_replay.console.seeds import stream_seed
from gpu_replay.training import records
from gpu_replay.training.environments import Environment, EnvironmentSpec, Step
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


# a game in host memory whose frames say all that happened in it

SETTINGS: dict[str, Any] = {"num_envs": 6, "capacity": 400, "warmup": 40, "batch_size": 8, "hidden": (16,), "n_step": 2}
SETTINGS |= {"frame_stack": 3, "target_every": 5, "eval_episodes": 2, "learning_rate_end": 1e-5, "epsilon_steps": 90}
SETTINGS["clip_reward"] = True


class Sums(Environment):
    """Each environment counts its actions; episodes end by the number, or after seven steps."""

    def __init__(self, num_envs: int, stack: int) -> None:
        super().__init__()
        self.spec = EnvironmentSpec("sums", Field((3, 2), torch.uint8, torch.float32, 1 / 255), 3, None, None, stack)
        self.num_envs, self._envs = num_envs, torch.arange(num_envs)
        for name in ("number", "t"):
            self.register_buffer(name, torch.zeros_like(self._envs))

    def reset(self, seed: int) -> Tensor:
        self.t, self.number = torch.zeros_like(self._envs), (self._envs * 17 + seed) % 251
        return self._frames()

    def send(self, actions: Tensor) -> None:
        self._actions = actions.cpu().clone()

    def recv(self) -> Step:
        self.t += 1
        self.number = (self.number * 31 + self._actions * 7 + self._envs + 1) % 251
        reward, final = (self.number % 5 - 2).float(), self._frames()
        terminated = self.number % 11 == 0
        ended = terminated | (self.t == 7)
        self.number = torch.where(ended, (self.number + self._envs) % 251, self.number)
        self.t[ended] = 0
        # as ALE, which gives anything where none ended
        final[~ended] = 255
        return Step(self._frames(), reward, terminated, ended & ~terminated, final if bool(ended.any()) else None)

    def _frames(self) -> Tensor:
        return self.number.to(torch.uint8)[:, None, None].repeat(1, 3, 2)


def sums_trainer(device: torch.device = CPU, **changes: Any) -> Trainer:
    """A trainer of six such games."""
    settings = Settings.for_family("catch", **{**SETTINGS, **changes})
    return trainer_of(Sums(settings.num_envs, settings.frame_stack), Sums(2, settings.frame_stack), settings, device)
