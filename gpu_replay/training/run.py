"""A run from its flags to its closing files: the plan, environments, buffer and trainer, the loop, the summary."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpu_replay
from gpu_replay import CheckpointError, Field, LinearSchedule, TrajectoryReplayBuffer
from gpu_replay.console.errors import UserError, require
from gpu_replay.console.interrupt import EXIT_CODES, Stopped, StopRequest
from gpu_replay.console.progress import telling_of_compiling
from gpu_replay.console.seeds import stream_seed
from gpu_replay.console.versions import device_name, versions
from gpu_replay.training import records
from gpu_replay.training.actors import Fleet, check_actors
from gpu_replay.training.checkpoints import CheckpointManager, SavedRun, latest, newest
from gpu_replay.training.environments import Environment, EnvironmentSpec
from gpu_replay.training.evaluation import Evaluation, Evaluator
from gpu_replay.training.records import CHECKPOINT, SETTINGS, SUMMARY, Recorder, RunDir, read_json
from gpu_replay.training.registry import EnvironmentId, identify
from gpu_replay.training.settings import TYPES, Settings
from gpu_replay.training.team import Team, is_first, join, launch, launched_together
from gpu_replay.training.train import Trainer, beta_schedule

# saved networks, statistics and environments depend on these settings: a branch cannot change them
SHAPES = ("network", "hidden", "layer_norm", "whiten", "num_envs", "return_window", "frame_size", "frame_stack")
# the saved replay buffer depends on these settings: with another value a new buffer is filled
BUFFER = ("capacity", "n_step", "gamma", "sampler", "alpha", "beta_start", "beta_end", "clip_reward")

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


def run(options: argparse.Namespace) -> int:
    """Train as the flags say; returns the exit code. Raises UserError for bad input."""
    require("tqdm", "matplotlib", "safetensors", purpose="gpu-replay train")
    if options.actors is not None:
        if options.source is not None:
            raise UserError("--from does not go with --actors, whose games have no common start.")
        if launched_together():
            raise UserError("--actors does not go with torchrun: choose one of them.")
        check_actors(options.actors)
    if options.resume and options.output is None:
        raise UserError("--resume needs --output DIR, the directory of the run to continue.")
    if not (options.env or options.source or options.resume):
        raise UserError("the following arguments are required: ENV, such as pong, or --resume --output DIR.")
    if options.print_settings:
        plan = continued(options) if options.resume or options.source is not None else new(options)
        print(f"{plan.environment.name}, seed {plan.seed}, on {plan.device}", *plan.settings.lines(), sep="\n")
        return 0
    options.output = options.output or _default_output(options)
    if launch() and read_json(options.output / SETTINGS).get("launch") == launch():
        # torchrun started its ranks again with the same command line: go on with their run, or begin it again
        options.resume = newest(options.output / CHECKPOINT) is not None
        options.overwrite, options.source = not options.resume, None if options.resume else options.source
    with ExitStack() as stack:
        run_dir = None
        if options.resume and not options.output.is_dir():
            raise UserError(f"--output {options.output} holds no run to resume: there is no such folder.")
        if options.resume and is_first():
            run_dir = stack.enter_context(closing(RunDir(options.output, "resume")))
        plan = continued(options) if options.resume or options.source is not None else new(options)
        if done := _finished(plan) if options.resume else "":
            print(done)
            return 0
        if launched_together():
            plan = dataclasses.replace(plan, device=join(plan.device))
        team = Team(plan.settings)
        if run_dir is None and team.rank == 0:
            run_dir = stack.enter_context(closing(RunDir(plan.output, "replace" if options.overwrite else "refuse")))
        return carry_out(plan, run_dir, team, options.max_seconds, options.began)


def _default_output(options: argparse.Namespace) -> Path:
    """A folder whose name says what is run; ranks that torchrun starts again find it."""
    name = options.source.name if options.source is not None else re.sub("[/:]", "-", identify(options.env).name)
    return Path("runs") / f"{name}-seed{options.seed or 0}-{launch() or time.strftime('%Y%m%d-%H%M%S')}"


def new(options: argparse.Namespace) -> Plan:
    """The plan of a new run."""
    device, environment = given_device(options.device), identify(options.env)
    settings = environment.settings(device, **given_settings(options))
    if settings.bfloat16 is None:
        half = settings.network in ("fine", "nature") and (device.type == "cuda" or cpu_is_faster_in_bfloat16())
        settings = dataclasses.replace(settings, bfloat16=half)
    every, replay = options.checkpoint_every or 300.0, options.checkpoint_replay is not False
    return Plan(environment, settings, options.seed or 0, device, options.output, options.actors, every, replay)


def continued(options: argparse.Namespace) -> Plan:
    """The plan that continues from a checkpoint: the same run with `--resume`, a new one with `--from`.

    A resumed run keeps its own settings, and may get more steps. A branch takes the settings that are given, and the
    others from the checkpoint. Step, networks, optimiser, replay buffer, rows and seconds continue from the
    checkpoint; the best network is chosen anew.

    Raises UserError if there is no checkpoint, or if flags contradict it.
    """
    flag, source = ("--resume", options.output) if options.resume else ("--from", options.source)
    try:
        saved = latest(source / CHECKPOINT)
        if saved is None:
            raise UserError(f"{flag}: {source} holds no checkpoint, from which a run could go on. Start one anew.")
        state, before = saved.state, Settings.from_dict(saved.state["settings"])
    except (CheckpointError, KeyError) as error:
        raise UserError(f"{flag}: {error}") from None
    identity, progress, given = state["identity"], state["trainer"]["progress"], given_settings(options)
    if options.source is not None and "actors" in identity:
        raise UserError(f"--from {source} is a run with --actors, whose games have no common start to branch from.")
    name = None if options.env is None else identify(options.env).name
    device = identity["device"] if options.device is None else str(given_device(options.device))
    asked = given | {"ENV": name, "seed": options.seed, "device": device, "actors": options.actors}
    found = before.to_dict() | {"actors": "none", "ENV": identity["env"]} | identity
    fixed = asked.keys() - {"steps", *identity.keys() & {"actors"}} if options.resume else {*SHAPES, "ENV"}
    clash = [name for name in asked if name in fixed and asked[name] not in (None, found[name])]
    wrong = [f"--{name.replace('_', '-')} {asked[name]} (it has {found[name]})".replace("--ENV ", "") for name in clash]
    if options.resume and given.get("steps", before.steps) < before.steps:
        wrong.append(f"--steps {given['steps']} (it has {before.steps}, which can only be raised)")
    if wrong:
        contradictions = f"these flags contradict it: {', '.join(wrong)}. Leave them out, or start another run."
        raise UserError(f"{flag} goes on from the run in {source}; {contradictions}")
    settings = dataclasses.replace(before, **given)
    if options.source is not None and settings.steps <= progress["step"]:
        raise UserError(f"--steps {settings.steps} are done: {source} is at step {progress['step']}. Raise it.")
    if options.max_seconds is not None and options.max_seconds <= progress["seconds"]:
        taken = f"the run has taken {progress['seconds']:.1f} s so far, all its parts together"
        raise UserError(f"--max-seconds {options.max_seconds:g} is used up: {taken}. Raise it, or leave it out.")
    refilled = [name for name in BUFFER if getattr(settings, name) != getattr(before, name)]
    if refilled and saved.replays:
        print(f"{flag}: a new replay buffer is filled, for another {', '.join(refilled)}", file=sys.stderr)
        saved = dataclasses.replace(saved, replays=[])
    actors = options.actors or identity.get("actors")
    if actors is not None:
        check_actors(actors)
    if options.source is not None:
        # evaluations under other settings do not compare with the coming ones
        progress["solved"], state["evaluator"]["best"] = False, None
    seed = identity["seed"] if options.seed is None else options.seed
    every = options.checkpoint_every or state["checkpoint_every"]
    replay = state["checkpoint_replay"] if options.checkpoint_replay is None else options.checkpoint_replay
    where = (given_device(device), options.output, actors, every, replay)
    return Plan(identify(identity["env"]), settings, seed, *where, saved, records.read_rows(source, progress["logged"]))


def _finished(plan: Plan) -> str:
    """A message if the run is complete and the steps of the plan add nothing to it."""
    summary, steps = read_json(plan.output / SUMMARY), plan.settings.steps
    if summary.get("stopped_by") == "solved":
        return f"the run in {plan.output} is finished: solved after {summary.get('steps'):,} steps."
    if summary.get("stopped_by") == "steps" and summary.get("steps", 0) >= steps:
        return f"the run in {plan.output} is finished: all {steps:,} steps are done. Raise --steps to go on."
    return ""


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the agent that were given as flags."""
    return {name: value for name in TYPES if (value := getattr(options, name)) is not None}


def given_device(name: str | None) -> torch.device:
    """The device of `--device`, by default a GPU if one is available. Raises UserError if the device is not."""
    try:
        # the buffer's own check names what is wrong with a device
        return gpu_replay.ReplayBuffer(1, {"x": Field((), torch.bool)}, device=name).device
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--device: {error}") from None


def cpu_is_faster_in_bfloat16() -> bool:
    """Whether an update of Pong takes less time in bfloat16 than in float32, by the kind of CPU.

    By AVX-512 it took 0.73 of the time on an AMD EPYC, and 1.46 times as long on an Intel Xeon; by AMX nobody has
    measured it. Other CPUs only emulate it, at half the speed of float32.
    """
    # new in torch 2.11
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    by_vectors = capabilities.get("avx512_bf16") and "AMD" in capabilities.get("cpu_name", "")
    return bool(by_vectors or capabilities.get("amx_bf16"))


def carry_out(plan: Plan, run_dir: RunDir | None, team: Team, max_seconds: float | None, began: float) -> int:
    """Run the plan and write all its files; returns the exit code. Raises UserError for bad settings or files.

    run_dir: the folder, on the rank that evaluates and writes; None on others.
    began:   when the command began, by `time.perf_counter`.
    """
    settings = team.share()
    earlier = {} if plan.saved is None else plan.saved.state
    torch.set_num_threads(settings.threads)
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)

    def wall_seconds() -> float:
        return float(earlier.get("wall_seconds", 0.0)) + time.perf_counter() - began

    with StopRequest() as stop, ExitStack() as stack:
        if run_dir is not None:
            stack.enter_context(telling_of_compiling(partial(print, file=sys.stderr, flush=True)))
        fleet = None
        if plan.actors is not None:
            # each part of a run plays new episodes; every actor has as many environments as the buffer has streams
            part = earlier["trainer"]["progress"]["resumed"] + 1 if earlier else 0
            seed, streams = stream_seed(plan.seed, "actor", part), earlier.get("streams")
            fleet = stack.enter_context(closing(Fleet(plan.actors, plan.environment, settings, seed, streams)))
        count = settings.num_envs if fleet is None else fleet.num_envs
        environment = stack.enter_context(closing(plan.environment.make(count, settings, plan.device)))
        judging = settings.eval_episodes if run_dir is not None else 1
        evaluation = stack.enter_context(closing(plan.environment.make(judging, settings, plan.device, alone=True)))
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
        recorded = (run_dir.path, environment.spec, settings, plan.seed, plan.rows, trainer.step)
        recorder = stack.enter_context(closing(Recorder(*recorded)))
        stack.enter_context(telling_of_compiling(recorder.say))
        if evaluator.best is not None:
            # the file may hold a later network, from after the checkpoint
            recorder.save(evaluator.best.network, evaluator.best.step)
        try:
            reason = trainer.run(recorder, stop, max_seconds, checkpoints)
        except ValueError:
            # the buffer refuses TD errors that are not finite as priorities
            if all(bool(each.isfinite().all()) for each in trainer.agent.online.parameters()):
                raise
            diverged = f"the network's weights are not finite after {trainer.step} steps: training diverged"
            raise UserError(f"{diverged}. Lower --learning-rate; {run_dir.path} has the run so far.") from None
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
        recorder.plot()
        recorder.plot_buffer(trainer.buffer)
    print(records.closing_lines(summary, run_dir.path))
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
        if not isinstance(buffer.sampler, gpu_replay.Uniform):
            for each, columns in zip(saved, found, strict=True):
                found_here = each.priorities(columns["key"])
                # a start whose window is still open has none
                columns["priority"] = found_here.where(found_here > 0, found_here.max())
        moved: dict[str, Tensor] = {}
        for name in found[0].keys() - {"key"}:
            grids = [
                columns[name].unflatten(0, (-1, each.num_envs)) for each, columns in zip(saved, found, strict=True)
            ]
            moved[name] = torch.cat(grids, 1)[:, first:end]
        with warnings.catch_warnings():
            # of the final observations
            warnings.simplefilter("ignore", UserWarning)
            buffer.extend(**moved)


def make_buffer(
    spec: EnvironmentSpec, settings: Settings, beta: LinearSchedule, device: torch.device, seed: int, num_envs: int
) -> TrajectoryReplayBuffer:
    """An empty buffer, in which each frame is stored once. Raises MemoryError if it does not fit."""
    prioritized = gpu_replay.Proportional(alpha=settings.alpha, beta=beta)
    by_name: dict[str, Any] = {"proportional": prioritized, "combined": gpu_replay.Combined(prioritized)}
    by_name |= {"uniform": gpu_replay.Uniform(), "rank": gpu_replay.RankBased(alpha=settings.alpha, beta=beta)}
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
        sampler=by_name[settings.sampler],
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
    evaluator, progress, fleet = trainer.evaluator, trainer.progress, trainer.fleet
    best, last, shares = evaluator.best, trainer.last_row, trainer.watch.shares()
    reported = fresh or (Evaluation() if best is None else best.evaluation)
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
        **{f"eval_{name}": value for name, value in reported._asdict().items()},
        "eval_fresh": fresh is not None,
        "best_step": progress.step if best is None else best.step,
        "solved": best is not None and best.fresh is not None,
        "reward_threshold": evaluator.threshold,
        "train_return_mean": last["return_mean"],
        "train_length_mean": last["length_mean"],
        "epsilon": last["epsilon"],
        "persistence": trainer.settings.persistence,
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
    if fleet is not None:
        summary |= {"actors": fleet.count, "envs_of_an_actor": fleet.num_envs, "actor_restarts": fleet.restarts}
    return summary
