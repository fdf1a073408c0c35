"""From what was asked to a finished run folder: a new run, or one that goes on where it stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_replay import TrajectoryReplayBuffer
from gpu_replay.console.errors import UserError
from gpu_replay.console.interrupt import EXIT_CODES, Stopped, StopRequest
from gpu_replay.errors import CheckpointError
from gpu_replay.training.checkpoints import CheckpointManager, Saveable
from gpu_replay.training.evaluation import Evaluation, Evaluator
from gpu_replay.training.recorder import Recorder
from gpu_replay.training.registry import EnvironmentId, make_environment
from gpu_replay.training.run_dir import CHECKPOINT, SETTINGS, SUMMARY, RunFolder
from gpu_replay.training.settings import Settings
from gpu_replay.training.summary import closing_words, summarize
from gpu_replay.training.trainer import Trainer


@dataclass(frozen=True)
class ResumeState:
    """The part of a run that was done before: its state, and where its replay buffer lies if it was saved."""

    state: Mapping[str, Any]
    replay: Path | None


@dataclass(frozen=True)
class Plan:
    """A run to be made.

    max_seconds:       of the whole run, earlier parts included; None is no limit.
    checkpoint_every:  seconds between checkpoints.
    checkpoint_replay: whether the replay buffer is part of them.
    began:             when this part of the run was started, by `time.perf_counter`.
    """

    environment: EnvironmentId
    settings: Settings
    seed: int
    device: torch.device
    folder: RunFolder
    max_seconds: float | None
    checkpoint_every: float
    checkpoint_replay: bool
    began: float
    earlier: ResumeState | None = None


class Session:
    """The parts of one run, wired together. Raises UserError for what cannot be made."""

    def __init__(self, plan: Plan, stop: StopRequest, stack: ExitStack) -> None:
        self._plan = plan
        self._stop = stop
        settings, device, earlier = plan.settings, plan.device, plan.earlier
        self._wall_before = 0.0 if earlier is None else float(earlier.state["wall_seconds"])
        environment, evaluation = (
            stack.enter_context(closing(make_environment(plan.environment, count, settings, device)))
            for count in (settings.num_envs, settings.eval_episodes)
        )
        self._examiner = Evaluator(evaluation, settings, device=device, seed=plan.seed, stop=stop)
        try:
            buffer = None
            if earlier is not None and earlier.replay is not None:
                buffer = TrajectoryReplayBuffer.load(earlier.replay, device)
            self._trainer = Trainer(environment, self._examiner, settings, device=device, seed=plan.seed, buffer=buffer)
        except MemoryError as error:
            raise UserError(f"{str(error).splitlines()[0].rstrip(':')}. Lower --capacity.") from None
        except CheckpointError as error:
            raise UserError(f"--resume: {error}") from None
        if earlier is not None:
            self._trainer.restore(earlier.state["trainer"], filled=buffer is not None)
            self._examiner.restore(earlier.state["evaluator"], self._trainer.agent.online)
        plan.folder.open()
        identity = {"env": plan.environment.name, "seed": plan.seed, "device": str(device)}
        plan.folder.write_json(SETTINGS, identity | settings.to_dict())
        self._recorder = stack.enter_context(
            Recorder(
                plan.folder,
                environment.spec,
                settings,
                plan.seed,
                resumed=None if earlier is None else earlier.state["recorder"],
                step=self._trainer.step,
            )
        )
        best = self._examiner.best
        if best is not None:
            # the file may hold a later one, from after the checkpoint
            self._recorder.save(best.network, best.step)

    def run(self) -> str:
        """Learn, evaluate, and write all files but the summary; returns why the run ended."""
        plan, trainer, evaluator, recorder = self._plan, self._trainer, self._examiner, self._recorder
        keeper = CheckpointManager(plan.folder.path / CHECKPOINT, plan.checkpoint_every, self._collect)
        reason = trainer.run(recorder, self._stop, plan.max_seconds, keeper)
        self._fresh: Evaluation | None = None
        try:
            self._stop.check()
            self._fresh = evaluator.final()
        except Stopped as stopped:
            reason = stopped.reason
        if evaluator.best is None:
            recorder.save(trainer.agent.online, trainer.step)
        recorder.draw()
        return reason

    def conclude(self, reason: str) -> None:
        """Write the summary, and say in a few lines how it went."""
        wall_seconds = self._wall_seconds
        summary = summarize(
            self._trainer,
            self._examiner,
            self._fresh,
            stopped_by=reason,
            seed=self._plan.seed,
            wall_seconds=wall_seconds,
        )
        self._plan.folder.write_json(SUMMARY, summary)
        print(closing_words(summary, self._plan.folder.path))

    @property
    def _wall_seconds(self) -> float:
        return self._wall_before + time.perf_counter() - self._plan.began

    def _collect(self) -> tuple[int, dict[str, Any], Saveable | None]:
        """What a checkpoint of this moment holds."""
        state = {
            "settings": self._plan.settings.to_dict(),
            "wall_seconds": self._wall_seconds,
            "trainer": self._trainer.state(),
            "evaluator": self._examiner.state(),
            "recorder": self._recorder.state(),
        }
        return self._trainer.step, state, self._trainer.buffer if self._plan.checkpoint_replay else None


def carry_out(plan: Plan) -> int:
    """Make the run of a plan; returns the exit code. Raises UserError for what cannot be done."""
    torch.set_num_threads(plan.settings.threads)
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)
    with StopRequest() as stop:
        with ExitStack() as stack:
            session = Session(plan, stop, stack)
            reason = session.run()
        session.conclude(reason)
    return EXIT_CODES.get(reason, 0)
