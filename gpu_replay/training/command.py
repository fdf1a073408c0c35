"""`gpu-replay train`: the flags of a run, and the plan they describe."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from gpu_replay.console.arguments import natural, positive_float, whole, widths
from gpu_replay.console.errors import UserError, require
from gpu_replay.training.branch import branched_plan
from gpu_replay.training.ray_actors import check_actors
from gpu_replay.training.registry import identify
from gpu_replay.training.resume import given_device, given_settings, resumed_plan
from gpu_replay.training.run_dir import RunDir
from gpu_replay.training.session import Plan, run_plan
from gpu_replay.training.settings import GAMES, PRESETS, Settings
from gpu_replay.training.team import Team, join, launched_together

DESCRIPTION = """\
Train a double DQN with prioritized replay. ENV is an Atari game (pong, breakout, ALE/Pong-v5, ...), a Gymnasium id with
discrete actions and Box observations (CartPole-v1, Acrobot-v1, ...), or one of two games whose every step runs on the
device of the buffer: catch and device-pong.

Written to --output: progress.csv (a row every --log-every steps, flushed), curve.png (redrawn during the run),
buffer.png (what the replay buffer holds at the end and how it is drawn from, as `gpu-replay inspect` shows it),
network.safetensors (the network with the best evaluation), settings.json, summary.json, and TensorBoard events, those
of the replay buffer under replay/, if tensorboard is installed. Training episodes explore (column epsilon);
evaluations are greedy but for --eval-epsilon. Ctrl-C or SIGTERM ends the run with everything written; the exit code is
then 130 or 143, and bad input gives 2. A second Ctrl-C ends it at once.

--output also holds checkpoint/, written at intervals and at the end, from which `gpu-replay train --resume --output
DIR` continues an interrupted run, even after kill -9: network, target network, optimiser, schedules, random
generators, statistics, best network, rows and replay buffer are the same as in an uninterrupted run. Running games of
catch and device-pong continue. The state of emulators and Gymnasium environments is not checkpointed: they are reset
with new seeds, and their running episodes are dropped.

`--from DIR` branches a new run with other settings off the checkpoint in DIR, to compare them from a common start.

`torchrun --nproc-per-node=2 -m gpu_replay train ENV` trains data-parallel: environments, batches, capacity and warm-up
are divided among the ranks, gradients are averaged, and rank 0 evaluates and writes. Such a run has no checkpoints."""
FAMILIES = (
    "Defaults are listed for catch first, then, where they differ, for device-pong, Gymnasium environments with "
    "vectors or images as observations, Atari on a CPU or on CUDA, and device-pong on CUDA."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the run, and one flag for each setting of the agent."""
    env = "catch, device-pong, pong, any ALE game or any discrete Gymnasium id; not needed with --resume or --from"
    parser.add_argument("env", metavar="ENV", nargs="?", help=env)
    run = parser.add_argument_group("the run")
    limit = "stop after this many seconds, earlier parts of a resumed run included (default: no limit)"
    run.add_argument("--max-seconds", type=positive_float, metavar="X", help=limit)
    run.add_argument("--seed", type=natural, metavar="N", help="seed of all random numbers (default: 0)")
    run.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda when there is one)")
    run.add_argument("--output", type=Path, help="folder of the run (default: runs/ENV-seedSEED-TIME)")
    existing = run.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace the run in --output")
    resume = "continue the run in --output with its own settings; only --steps and --max-seconds may be raised"
    existing.add_argument("--resume", action="store_true", help=resume)
    branch = "begin where the checkpoint in DIR is, with its settings but for those given here; DIR stays as it is"
    existing.add_argument("--from", dest="source", type=Path, metavar="DIR", help=branch)
    interval = "seconds between checkpoints, longer if writing takes over a fortieth of the time (default: 300)"
    run.add_argument("--checkpoint-every", type=positive_float, default=300.0, metavar="X", help=interval)
    run.add_argument(
        "--checkpoint-replay",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="include the replay buffer in checkpoints (default: on); without it a resumed run fills a new one before "
        "it continues to learn. The disk needs room for two checkpoints",
    )
    actors = "number of actors of a local Ray, or ray://HOST:PORT of a cluster (one for each CPU): they step the "
    actors += "environments in processes of their own, which share --num-envs, and are replaced when they die; needs "
    actors += "the extra ray (default: environments in this process)"
    run.add_argument("--actors", metavar="N", help=actors)
    agent = parser.add_argument_group("the agent", FAMILIES)
    types = get_type_hints(Settings)
    for field in dataclasses.fields(Settings):
        flag = f"--{field.name.replace('_', '-')}"
        text = f"{field.metadata['reason']} ({_defaults(field)})".replace("%", "%%")
        kind = _given(types[field.name])
        options: dict[str, Any] = {"default": None, "help": text, "dest": field.name}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif kind is int:
            options |= {"type": whole, "metavar": "N"}
        elif kind is float:
            options |= {"type": float, "metavar": "X"}
        elif field.name == "hidden":
            options |= {"type": widths, "metavar": "N,N"}
        else:
            options["choices"] = get_args(kind)
        agent.add_argument(flag, **options)


def _given(kind: Any) -> Any:
    """The type of values that a flag gives: `bool` of `bool | None`."""
    return next(each for each in get_args(kind) if each is not NoneType) if NoneType in get_args(kind) else kind


def _defaults(field: dataclasses.Field[Any]) -> str:
    """The default, and those of families that differ."""
    others: dict[str, list[str]] = {}
    for family, preset in PRESETS.items():
        if preset.get(field.name, field.default) != field.default:
            others.setdefault(_show(preset[field.name]), []).append(family)
    parts = [f"default {_show(field.default)}", *(f"{', '.join(names)}: {value}" for value, names in others.items())]
    return "; ".join(parts)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "auto"
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"


def run(options: argparse.Namespace) -> int:
    """Train as the flags say; returns the exit code. Raises UserError for bad input."""
    began = time.perf_counter()
    require("tqdm", "matplotlib", "safetensors", purpose="gpu-replay train")
    if options.actors is not None:
        if options.source is not None:
            raise UserError("--from does not go with --actors, whose games have no common start.")
        if (options.groups or 1) > 1:
            raise UserError("--groups does not go with --actors, whose processes each step their own environments.")
        check_actors(options.actors)
    if launched_together() and (options.resume or options.source is not None or options.actors is not None):
        raise UserError("--resume, --from and --actors cannot be used under torchrun: its runs have no checkpoints.")
    plan = resumed_plan(options, began) if options.resume else _new_plan(options, began)
    if isinstance(plan, str):
        print(plan)
        return 0
    if launched_together():
        plan = dataclasses.replace(plan, device=join(plan.device))
        team = Team(plan.settings)
        if team.size > 1:
            plan = dataclasses.replace(plan, settings=team.share(), team=team)
    return run_plan(plan)


def _new_plan(options: argparse.Namespace, began: float) -> Plan:
    if options.source is not None:
        suffix = "" if options.seed is None else f"-seed{options.seed}"
        folder = options.output or Path("runs") / f"{options.source.name}{suffix}-{time.strftime('%Y%m%d-%H%M%S')}"
        return branched_plan(options, RunDir(folder, "refuse"), began)
    if options.env is None:
        raise UserError("the following arguments are required: ENV, such as pong, or --resume --output DIR.")
    device = given_device(options.device)
    environment = identify(options.env)
    seed = options.seed if options.seed is not None else 0
    default = f"{environment.name.replace('/', '-')}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    game = GAMES.get(environment.name, {}) if environment.kind == "atari" else {}
    if options.actors is not None:
        game = {**game, "groups": 1}
    return Plan(
        environment=environment,
        settings=Settings.for_family(environment.family(device), **{**game, **given_settings(options)}),
        seed=seed,
        device=device,
        run_dir=RunDir(options.output or Path("runs") / default, "replace" if options.overwrite else "refuse"),
        max_seconds=options.max_seconds,
        checkpoint_every=options.checkpoint_every,
        checkpoint_replay=options.checkpoint_replay,
        began=began,
        actors=options.actors,
    )
