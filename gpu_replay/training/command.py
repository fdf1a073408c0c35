"""Train a double DQN with prioritized replay.

ENV is an Atari game (pong, breakout, ALE/Pong-v5, ...), a Gymnasium id with discrete actions and Box observations
(CartPole-v1, Acrobot-v1, ...), or one of two games whose every step runs on the device of the buffer: catch and
device-pong.

Written to --output: progress.csv (a row every --log-every steps, flushed), curve.png (redrawn during the run),
buffer.png (contents and sampling distribution of the replay buffer at the end, as `gpu-replay inspect` plots them),
network.safetensors (the network with the best evaluation), settings.json, summary.json, and, if tensorboard is
installed, TensorBoard events, with the replay buffer's under replay/. Training episodes explore (column epsilon);
evaluations are greedy except for --eval-epsilon. On Ctrl-C or SIGTERM the run writes all its files and exits with code
130 or 143; bad input exits with code 2. A second Ctrl-C ends the run at once.

--output also holds checkpoint/, written at intervals and at the end, from which `gpu-replay train --resume --output
DIR` continues an interrupted run, even after kill -9: network, target network, optimiser, schedules, random
generators, statistics, best network, rows and replay buffer are the same as in an uninterrupted run. Running games of
catch, device-pong and Gymnasium's classic control continue. Other environments, such as Atari, do not expose their
state: they are reset with new seeds, and their running episodes are dropped.

`--from DIR` branches a new run with other settings off the checkpoint in DIR, to compare them from a common start.

`torchrun --nproc-per-node=2 -m gpu_replay train ENV` trains data-parallel: environments, batches, capacity and warm-up
are divided among the ranks, gradients are averaged, and rank 0 evaluates and writes. Each rank writes its part of a
checkpoint, which counts when all parts are there. With `--max-restarts=3` a run that lost a rank goes on from its last
checkpoint by itself; ranks on several machines need one `--rdzv-id`, and --output in a file system that they share.
Another number of ranks may resume: the replay buffers are divided anew, and all environments begin new episodes.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch

from gpu_replay import CheckpointError, Field, ReplayBuffer
from gpu_replay.console.arguments import natural, positive_float, whole, widths
from gpu_replay.console.errors import UserError, require
from gpu_replay.training.actors import check_actors
from gpu_replay.training.checkpoints import latest, newest
from gpu_replay.training.records import CHECKPOINT, SETTINGS, SUMMARY, RunDir, read_json, read_rows
from gpu_replay.training.registry import identify
from gpu_replay.training.run import Plan, carry_out
from gpu_replay.training.settings import PRESETS, TYPES, Settings, without_none
from gpu_replay.training.team import Team, is_first, join, launch, launched_together

DESCRIPTION = __doc__
FAMILIES = (
    "Defaults are listed for catch first, then, where they differ, for device-pong, Gymnasium environments with "
    "vectors or images as observations, Atari on a CPU or on CUDA, and device-pong on CUDA."
)
# the parser of a flag's values, and their placeholder in --help
READERS: dict[Any, tuple[Callable[[str], Any], str]] = {int: (whole, "N"), float: (float, "X"), tuple: (widths, "N,N")}
# saved networks, statistics and environments depend on these settings: a branch cannot change them
SHAPES = ("network", "hidden", "layer_norm", "whiten", "num_envs", "return_window", "frame_size", "frame_stack")
# the saved replay buffer depends on these settings: with another value a new buffer is filled
BUFFER = ("capacity", "n_step", "gamma", "sampler", "alpha", "beta_start", "beta_end", "clip_reward")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the run, and one flag for each setting of the agent."""
    env = "catch, device-pong, pong, any ALE game or any discrete Gymnasium id; not needed with --resume or --from"
    parser.add_argument("env", metavar="ENV", nargs="?", help=env)
    run = parser.add_argument_group("the run")
    limit = "stop after this many seconds, earlier parts of a resumed run included (default: no limit)"
    run.add_argument("--max-seconds", type=positive_float, metavar="X", help=limit)
    run.add_argument("--seed", type=natural, metavar="N", help="seed of all random numbers (default: 0)")
    run.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda if available)")
    run.add_argument("--output", type=Path, help="folder of the run (default: runs/ENV-seedSEED-TIME)")
    existing = run.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace the run in --output")
    resume = "continue the run in --output with its own settings; --steps may be raised, flags of this group given anew"
    existing.add_argument("--resume", action="store_true", help=resume)
    branch = "start from the checkpoint in DIR, with its settings except those given here; DIR is not changed"
    existing.add_argument("--from", dest="source", type=Path, metavar="DIR", help=branch)
    interval = "seconds between checkpoints, longer if writing takes over a fortieth of the time (default: 300)"
    run.add_argument("--checkpoint-every", type=positive_float, metavar="X", help=interval)
    replay = "include the replay buffer in checkpoints, for two of which the disk needs room (default: on); without it "
    replay += "a resumed run fills a new one before it continues to learn"
    run.add_argument("--checkpoint-replay", action=argparse.BooleanOptionalAction, help=replay)
    actors = "step the environments in Ray actors, which share --num-envs and are replaced when they die: their number "
    actors += "on a local Ray, or ray://HOST:PORT of a cluster (one for each CPU); needs the extra ray"
    run.add_argument("--actors", metavar="N", help=actors)
    agent = parser.add_argument_group("the agent", FAMILIES)
    for field in dataclasses.fields(Settings):
        kind = without_none(TYPES[field.name])
        options: dict[str, Any] = {"help": f"{field.metadata['reason']} ({_defaults(field)})".replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options["type"], options["metavar"] = READERS[get_origin(kind) or kind]
        agent.add_argument(f"--{field.name.replace('_', '-')}", **options)


def _defaults(field: dataclasses.Field[Any]) -> str:
    """The default of a setting, and the defaults of the families that differ from it."""
    others: dict[str, list[str]] = {}
    for family, preset in PRESETS.items():
        if preset.get(field.name, field.default) != field.default:
            others.setdefault(_show(preset[field.name]), []).append(family)
    parts = [f"default {_show(field.default)}", *(f"{', '.join(names)}: {value}" for value, names in others.items())]
    return "; ".join(parts)


def _show(value: Any) -> str:
    words = {True: "on", False: "off", None: "auto"}
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return words[value] if value is None or isinstance(value, bool) else str(value)


def run(options: argparse.Namespace) -> int:
    """Train as the flags say; returns the exit code. Raises UserError for bad input."""
    began = time.perf_counter()
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
        return carry_out(plan, run_dir, team, options.max_seconds, began)


def _default_output(options: argparse.Namespace) -> Path:
    """A folder whose name says what is run; ranks that torchrun starts again find it."""
    name = options.source.name if options.source is not None else identify(options.env).name.replace("/", "-")
    return Path("runs") / f"{name}-seed{options.seed or 0}-{launch() or time.strftime('%Y%m%d-%H%M%S')}"


def new(options: argparse.Namespace) -> Plan:
    """The plan of a new run."""
    device, environment = given_device(options.device), identify(options.env)
    settings = environment.settings(device, **given_settings(options))
    if settings.bfloat16 is None:
        half = settings.convolutional and (device.type == "cuda" or cpu_computes_in_bfloat16())
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
    if options.resume:
        fixed = asked.keys() - {"actors" if "actors" in identity else "", "steps"}
    else:
        fixed = {*SHAPES, "ENV"}
    wrong = [
        f"{'' if name == 'ENV' else '--'}{name.replace('_', '-')} {value} (it has {found[name]})"
        for name, value in asked.items()
        if name in fixed and value not in (None, found[name])
    ]
    if options.resume and given.get("steps", before.steps) < before.steps:
        wrong.append(f"--steps {given['steps']} (it has {before.steps}, which can only be raised)")
    if wrong:
        raise UserError(
            f"{flag} goes on from the run in {source}; these flags contradict it: {', '.join(wrong)}. Leave them "
            "out, or start another run."
        )
    settings = dataclasses.replace(before, **given)
    if options.source is not None and settings.steps <= progress["step"]:
        raise UserError(f"--steps {settings.steps} are done: {source} is at step {progress['step']}. Raise it.")
    if options.max_seconds is not None and options.max_seconds <= progress["seconds"]:
        raise UserError(
            f"--max-seconds {options.max_seconds:g} is used up: the run has taken {progress['seconds']:.1f} s so far, "
            "all its parts together. Raise it, or leave it out."
        )
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
    return Plan(identify(identity["env"]), settings, seed, *where, saved, read_rows(source, progress["logged"]))


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
        return ReplayBuffer(1, {"x": Field((), torch.bool)}, device=name).device
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--device: {error}") from None


def cpu_computes_in_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16; others only emulate it, at half the speed of float32."""
    # new in torch 2.11
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
