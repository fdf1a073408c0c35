"""Runs a plan from start to end: a new run, or one that is resumed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_replay import CheckpointError, TrajectoryReplayBuffer
from gpu_replay.checkpoint.format import read_checkpoint
from gpu_replay.console.errors import UserError
from gpu_replay.console.interrupt import EXIT_CODES, Stopped, StopRequest
from gpu_replay.console.seeds import stream_seed
from gpu_replay.training.checkpoints import CheckpointManager
from gpu_replay.training.environments import Environment
from gpu_replay.training.evaluation import Evaluation, Evaluator
from gpu_replay.training.precision import with_precision
from gpu_replay.training.ray_actors import ActorTrainer, Fleet
from gpu_replay.training.recorder import Recorder
from gpu_replay.training.registry import EnvironmentId, make_environment
from gpu_replay.training.run_dir import CHECKPOINT, SETTINGS, SUMMARY, RunDir
from gpu_replay.training.settings import Settings
from gpu_replay.training.summary import closing_lines, summarize
from gpu_replay.training.team import Team
from gpu_replay.training.trainer import Listener, Trainer


@dataclass(frozen=True)
class ResumeState:
    """The saved state of a run that is resumed, and the checkpoint of its replay buffer if there is one."""

    state: Mapping[str, Any]
    replay: Path | None


@dataclass(frozen=True)
class Plan:
    """What to run.

    max_seconds:       of the whole run, earlier parts included; None is no limit.
    checkpoint_every:  seconds between checkpoints.
    checkpoint_replay: whether checkpoints include the replay buffer.
    began:             when this part of the run was started, by `time.perf_counter`.
    earlier:           the run to resume, or None for a new one.
    actors:            `--actors`, checked; None steps environments in this process.
    team:              the ranks that share the run, of whose settings these are a share; None for a single process.
    """

    environment: EnvironmentId
    settings: Settings
    seed: int
    device: torch.device
    run_dir: RunDir
    max_seconds: float | None
    checkpoint_every: float
    checkpoint_replay: bool
    began: float
    earlier: ResumeState | None = None
    actors: str | None = None
    team: Team | None = None


def run_plan(plan: Plan) -> int:
    """Run the plan and write all its files; returns the exit code. Raises UserError for what cannot be made."""
    settings, run_dir, team = plan.settings, plan.run_dir, plan.team
    leads = team is None or team.rank == 0
    earlier = None if plan.earlier is None else plan.earlier.state
    torch.set_num_threads(settings.threads)
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)

    def wall_seconds() -> float:
        before = 0.0 if earlier is None else float(earlier["wall_seconds"])
        return before + time.perf_counter() - plan.began

    with StopRequest() as stop:
        with ExitStack() as stack:
            fleet = None if plan.actors is None else stack.enter_context(closing(_make_fleet(plan, plan.actors)))
            training, judging = settings.num_envs if fleet is None else fleet.num_envs, settings.eval_episodes
            make = partial(make_environment, plan.environment, settings=settings, device=plan.device)
            environment = stack.enter_context(closing(make(training, groups=settings.groups)))
            evaluation = stack.enter_context(closing(make(judging if leads else 1, alone=True)))
            settings = with_precision(settings, environment.spec, plan.device)
            plan = dataclasses.replace(plan, settings=settings)
            evaluator = Evaluator(evaluation, settings, device=plan.device, seed=plan.seed, stop=stop)
            trainer = _make_trainer(plan, environment, evaluator, fleet)
            if not leads:
                return EXIT_CODES.get(trainer.run(Listener(), stop, plan.max_seconds), 0)
            run_dir.open()
            identity: dict[str, Any] = {"env": plan.environment.name, "seed": plan.seed, "device": str(plan.device)}
            if plan.actors is not None:
                identity["actors"] = plan.actors
            if team is not None:
                identity["ranks"] = team.size
            run_dir.write_json(SETTINGS, identity | (settings if team is None else team.settings).to_dict())
            rows = None if earlier is None else earlier["recorder"]
            recorder = Recorder(run_dir, environment.spec, settings, plan.seed, resumed=rows, step=trainer.step)
            stack.enter_context(closing(recorder))
            if evaluator.best is not None:
                # the file may hold a later network, from after the checkpoint
                recorder.save(evaluator.best.network, evaluator.best.step)

            def collect() -> tuple[int, dict[str, Any], TrajectoryReplayBuffer | None]:
                """The content of a checkpoint."""
                state = {
                    "settings": settings.to_dict(),
                    "wall_seconds": wall_seconds(),
                    "trainer": trainer.state(),
                    # the name in checkpoints, which stays
                    "examiner": evaluator.state(),
                    "recorder": recorder.state(),
                }
                return trainer.step, state, trainer.buffer if plan.checkpoint_replay else None

            checkpoints = None
            if team is None:
                checkpoints = CheckpointManager(run_dir.path / CHECKPOINT, plan.checkpoint_every, collect)
            try:
                reason = trainer.run(recorder, stop, plan.max_seconds, checkpoints)
            except ValueError:
                # TD errors that are not finite are no priorities
                if all(bool(each.isfinite().all()) for each in trainer.agent.online.parameters()):
                    raise
                raise UserError(
                    f"the network's weights are not finite after {trainer.step} steps: training diverged. Lower "
                    f"--learning-rate; {run_dir.path} has the run so far."
                ) from None
            fresh: Evaluation | None = None
            try:
                stop.check()
                fresh = evaluator.final()
            except Stopped as stopped:
                reason = stopped.reason
            if evaluator.best is None:
                recorder.save(trainer.agent.judged, trainer.step)
            recorder.draw()
            recorder.draw_buffer(trainer.buffer)
        seconds = wall_seconds()
        summary = summarize(trainer, evaluator, fresh, stopped_by=reason, seed=plan.seed, wall_seconds=seconds)
        run_dir.write_json(SUMMARY, summary)
        print(closing_lines(summary, run_dir.path))
    return EXIT_CODES.get(reason, 0)


def _make_fleet(plan: Plan, actors: str) -> Fleet:
    """The actors; those of a resumed run have as many environments each as its buffer has streams."""
    streams = None
    if plan.earlier is not None and plan.earlier.replay is not None:
        streams = int(read_checkpoint(plan.earlier.replay).manifest["settings"]["num_envs"])
    parts = 0 if plan.earlier is None else int(plan.earlier.state["trainer"]["resumed"]) + 1
    return Fleet(actors, plan.environment, plan.settings, stream_seed(plan.seed, "actor", parts), streams)


def _make_trainer(plan: Plan, environment: Environment, evaluator: Evaluator, fleet: Fleet | None) -> Trainer:
    """The trainer, and with it the evaluator, in the state of the run that is resumed."""
    earlier, buffer = plan.earlier, None
    try:
        if earlier is not None and earlier.replay is not None:
            buffer = TrajectoryReplayBuffer.load(earlier.replay, plan.device)
        arguments: dict[str, Any] = {"device": plan.device, "seed": plan.seed, "buffer": buffer}
        if fleet is None:
            trainer = Trainer(environment, evaluator, plan.settings, **arguments, team=plan.team)
        else:
            trainer = ActorTrainer(fleet, environment, evaluator, plan.settings, **arguments)
    except MemoryError as error:
        raise UserError(f"{str(error).splitlines()[0].rstrip(':')}. Lower --capacity.") from None
    except CheckpointError as error:
        raise UserError(f"--resume: {error}") from None
    if earlier is not None:
        trainer.restore(earlier.state["trainer"], filled=buffer is not None)
        evaluator.restore(earlier.state["examiner"], trainer.agent.online)
    return trainer
