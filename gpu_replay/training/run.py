"""Carry out a plan: make environments, buffer and trainer, run the loop, and write the closing files."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_replay import (
    CheckpointError,
    Combined,
    Field,
    LinearSchedule,
    Proportional,
    RankBased,
    TrajectoryReplayBuffer,
    Uniform,
)
from gpu_replay.console.errors import UserError
from gpu_replay.console.interrupt import EXIT_CODES, Stopped, StopRequest
from gpu_replay.console.seeds import stream_seed
from gpu_replay.console.versions import device_name, versions
from gpu_replay.training.actors import Fleet
from gpu_replay.training.checkpoints import CheckpointManager, SavedRun
from gpu_replay.training.environments import Environment, EnvironmentSpec
from gpu_replay.training.evaluation import Evaluation, Evaluator
from gpu_replay.training.records import CHECKPOINT, SETTINGS, SUMMARY, Recorder, RunDir, closing_lines
from gpu_replay.training.registry import EnvironmentId
from gpu_replay.training.settings import Settings
from gpu_replay.training.team import Team, launch
from gpu_replay.training.train import Trainer, beta_schedule

# steps of all environments that are moved at once from saved buffers to others
STEPS_MOVED = 1024


@dataclass(frozen=True)
class Plan:
    """What to run.

    output:   the folder of the run.
    actors:   `--actors`, checked; None steps environments in this process.
    checkpoint_every: seconds between checkpoints, `checkpoint_replay` whether they include the replay buffer.
    saved:    the checkpoint from which the run goes on, or None.
    rows:     the rows of progress.csv up to that checkpoint.
    """

    environment: EnvironmentId
    settings: Settings
    seed: int
    device: torch.device
    output: Path
    actors: str | None
    checkpoint_every: float
    checkpoint_replay: bool
    saved: SavedRun | None = None
    rows: list[dict[str, float]] = dataclasses.field(default_factory=list)

    @property
    def identity(self) -> dict[str, Any]:
        """What settings.json and checkpoints record of a run besides its settings."""
        found = {"env": self.environment.name, "seed": self.seed, "device": str(self.device)}
        return found if self.actors is None else found | {"actors": self.actors}


def carry_out(plan: Plan, run_dir: RunDir | None, team: Team, max_seconds: float | None, began: float) -> int:
    """Run the plan and write all its files; returns the exit code. Raises UserError for bad settings or files.

    run_dir: the folder, on the rank that evaluates and writes; None on others.
    """
    settings = team.share()
    earlier = {} if plan.saved is None else plan.saved.state
    torch.set_num_threads(settings.threads)
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)

    def wall_seconds() -> float:
        return float(earlier.get("wall_seconds", 0.0)) + time.perf_counter() - began

    with StopRequest() as stop, ExitStack() as stack:
        fleet = None
        if plan.actors is not None:
            # each part of a run plays new episodes; every actor has as many environments as the buffer has streams
            part = earlier["trainer"]["progress"]["resumed"] + 1 if earlier else 0
            seed = stream_seed(plan.seed, "actor", part)
            fleet = Fleet(plan.actors, plan.environment, settings, seed, earlier.get("streams"))
            stack.enter_context(closing(fleet))
        count = settings.num_envs if fleet is None else fleet.num_envs
        environment = plan.environment.make(count, settings, plan.device)
        stack.enter_context(closing(environment))
        judging = settings.eval_episodes if run_dir is not None else 1
        evaluation = plan.environment.make(judging, settings, plan.device, alone=True)
        stack.enter_context(closing(evaluation))
        evaluator = Evaluator(evaluation, settings, device=plan.device, seed=plan.seed, stop=stop)
        trainer = _make_trainer(plan, environment, evaluator, fleet, team)
        if team.largest(trainer.step) != trainer.step:
            raise UserError(
                f"{plan.output} is not the same folder on all ranks: give them a file system that they share."
            )

        def collect() -> tuple[int, dict[str, Any], TrajectoryReplayBuffer | None]:
            """The content of a checkpoint."""
            state = {
                "identity": plan.identity,
                "settings": plan.settings.to_dict(),
                "ranks": team.size,
                "streams": environment.num_envs,
                "checkpoint_every": plan.checkpoint_every,
                "checkpoint_replay": plan.checkpoint_replay,
                "wall_seconds": wall_seconds(),
                "trainer": trainer.state_dict(),
                "evaluator": evaluator.state_dict(),
            }
            return trainer.step, state, trainer.buffer if plan.checkpoint_replay else None

        checkpoints = CheckpointManager(plan.output / CHECKPOINT, plan.checkpoint_every, collect, team)
        if run_dir is None:
            return EXIT_CODES.get(trainer.run(None, stop, max_seconds, checkpoints), 0)
        run_dir.open()
        of_ranks = {"ranks": team.size, "launch": launch()} if launch() else {}
        run_dir.write_json(SETTINGS, plan.identity | of_ranks | plan.settings.to_dict())
        recorder = Recorder(run_dir.path, environment.spec, settings, plan.seed, rows=plan.rows, step=trainer.step)
        stack.enter_context(closing(recorder))
        if evaluator.best is not None:
            # the file may hold a later network, from after the checkpoint
            recorder.save(evaluator.best.network, evaluator.best.step)
        try:
            reason = trainer.run(recorder, stop, max_seconds, checkpoints)
        except ValueError:
            # the buffer refuses TD errors that are not finite as priorities
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
        summary = summarize(trainer, fresh, reason, plan.seed, wall_seconds())
        run_dir.write_json(SUMMARY, summary)
        recorder.draw()
        recorder.draw_buffer(trainer.buffer)
    print(closing_lines(summary, run_dir.path))
    return EXIT_CODES.get(reason, 0)


def _make_trainer(
    plan: Plan, environment: Environment, evaluator: Evaluator, fleet: Fleet | None, team: Team
) -> Trainer:
    """Make the trainer and its evaluator; a run that continues gives them their state."""
    saved, beta = plan.saved, beta_schedule(plan.settings)
    replays, same = ([], False) if saved is None else (saved.replays, saved.ranks == team.size)
    try:
        if saved is not None:
            state = saved.trainer(team.rank if same else 0)
            # a new buffer starts at the schedule's current place
            beta = LinearSchedule(beta(state["samples"]), beta.end, max(1, beta.steps - state["samples"]))
        if replays and same:
            buffer = TrajectoryReplayBuffer.load(replays[team.rank], plan.device)
        else:
            seed, count = stream_seed(team.seed(plan.seed), "replay"), environment.num_envs
            buffer = make_buffer(environment.spec, team.share(), beta, plan.device, seed, count)
            if replays:
                refill(buffer, replays, team.rank)
    except MemoryError as error:
        raise UserError(f"{str(error).splitlines()[0].rstrip(':')}. Lower --capacity.") from None
    except CheckpointError as error:
        raise UserError(f"the checkpoint of {plan.output}: {error}") from None
    trainer = Trainer(environment, evaluator, buffer, team, seed=plan.seed, fleet=fleet)
    if saved is not None:
        trainer.load_state_dict(state)
        evaluator.load_state_dict(saved.state["evaluator"], trainer.agent.online)
    return trainer


def refill(buffer: TrajectoryReplayBuffer, parts: Sequence[Path], rank: int) -> None:
    """Fill a rank's new buffer with the steps that its environments made in a run of another number of ranks.

    parts: folders of the saved buffers, in the order of ranks; together they hold all environments of the run.

    The oldest steps begin an episode, so their stacks are padded. Windows that a time limit cut off cannot be sampled
    any more: their final observations are not moved.
    """
    saved = [TrajectoryReplayBuffer.load(part, "cpu") for part in parts]
    first, end = rank * buffer.num_envs, (rank + 1) * buffer.num_envs
    for batches in zip(*(each.batches(STEPS_MOVED * each.num_envs) for each in saved), strict=True):
        found = [dict(batch.items()) for batch in batches]
        if not isinstance(buffer.sampler, Uniform):
            for each, columns in zip(saved, found, strict=True):
                columns["priority"] = each.priorities(columns["key"])
        moved: dict[str, Tensor] = {}
        for name in found[0].keys() - {"key"}:
            grids = [
                columns[name].unflatten(0, (-1, each.num_envs)) for each, columns in zip(saved, found, strict=True)
            ]
            moved[name] = torch.cat(grids, 1)[:, first:end]
        buffer.extend(**moved)


def make_buffer(
    spec: EnvironmentSpec, settings: Settings, beta: LinearSchedule, device: torch.device, seed: int, num_envs: int
) -> TrajectoryReplayBuffer:
    """An empty buffer, in which each frame is stored once. Raises MemoryError if it does not fit."""
    prioritized = Proportional(alpha=settings.alpha, beta=beta)
    samplers: dict[str, Uniform | Proportional | RankBased | Combined] = {
        "uniform": Uniform(),
        "proportional": prioritized,
        "rank": RankBased(alpha=settings.alpha, beta=beta),
        "combined": Combined(prioritized),
    }
    return TrajectoryReplayBuffer(
        settings.capacity,
        num_envs,
        # frames are sampled as stored: the network scales them in a pass over them that it makes anyway
        {"obs": Field(spec.observation.shape, spec.observation.dtype), "action": Field((), torch.int64)},
        stack=spec.stack,
        n_step=settings.n_step,
        gamma=settings.gamma,
        autoreset="same_step",
        # ALE's and the agent's own stacks begin with zeros, too
        padding="zero",
        sampler=samplers[settings.sampler],
        device=device,
        seed=seed,
    )


def summarize(
    trainer: Trainer, fresh: Evaluation | None, stopped_by: str, seed: int, wall_seconds: float
) -> dict[str, Any]:
    """The figures of a run.

    fresh: evaluation of the best network on episodes that were not used to choose it. An interrupted run has none: the
           evaluation that chose the network is then reported, and `eval_fresh` is false.

    Rates are over `wall_seconds`, which include evaluations, start-up and all parts of a resumed run. `time_split` is
    in seconds of the learning loop, extrapolated from timed steps on CUDA; `replay_share` is the replay buffer's share.
    """
    evaluator, progress, settings = trainer.evaluator, trainer.progress, trainer.settings
    best, last, shares = evaluator.best, trainer.last_row, trainer.watch.shares()
    reported = fresh if fresh is not None or best is None else best.evaluation
    loop_seconds = max(progress.mark[2], 1e-9)
    summary = {
        "env": trainer.environment.spec.name,
        "seed": seed,
        "device": str(trainer.device),
        "device_name": device_name(trainer.device),
        "stopped_by": stopped_by,
        "steps": progress.step,
        "updates": trainer.agent.updates,
        "episodes": last["episodes"],
        "wall_seconds": wall_seconds,
        "eval_return_mean": None if reported is None else reported.return_mean,
        "eval_return_std": None if reported is None else reported.return_std,
        "eval_length_mean": None if reported is None else reported.length_mean,
        "eval_episodes": 0 if reported is None else reported.episodes,
        "eval_fresh": fresh is not None,
        "best_step": progress.step if best is None else best.step,
        "solved": best is not None and best.solved,
        "reward_threshold": evaluator.threshold,
        "train_return_mean": last["return_mean"],
        "train_length_mean": last["length_mean"],
        "epsilon": last["epsilon"],
        "persistence": settings.persistence,
        "eval_epsilon": settings.eval_epsilon,
        "steps_per_second": progress.step / wall_seconds,
        "updates_per_second": trainer.agent.updates / wall_seconds,
        "replay_share": shares["replay"],
        "time_split": {part: share * loop_seconds for part, share in shares.items()},
        "loop_seconds": loop_seconds,
        "evaluation_seconds": evaluator.seconds,
        "checkpoint_seconds": progress.checkpoint_seconds,
        "resumed": progress.resumed,
        "replay_bytes": trainer.buffer.nbytes,
        "versions": versions(),
    }
    fleet = trainer.fleet
    if fleet is not None:
        summary |= {"actors": fleet.count, "envs_of_an_actor": fleet.num_envs, "actor_restarts": fleet.restarts}
    return summary
