"""`gpu-replay train`: from flags to a finished run folder."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints

from gpu_replay.console.arguments import natural, positive_float, whole, widths
from gpu_replay.console.errors import UserError, require
from gpu_replay.training.registry import EnvironmentId, identify
from gpu_replay.training.resume import given_device, given_settings, resumed_plan
from gpu_replay.training.run_dir import RunFolder
from gpu_replay.training.session import Plan, carry_out
from gpu_replay.training.settings import PRESETS, Settings

DESCRIPTION = """\
Train a double DQN with prioritized replay. ENV is catch, an Atari game (pong, breakout, ALE/Pong-v5, ...) or a
Gymnasium id with discrete actions and Box observations (CartPole-v1, Acrobot-v1, ...).

--output receives progress.csv (a row now and then, flushed), curve.png (redrawn as it grows), network.safetensors
(the network that did best in evaluation), settings.json, summary.json, and TensorBoard events where tensorboard
is installed. Ctrl-C or SIGTERM ends the run with everything written; the exit code is then 130 or 143, and bad
input gives 2. A second Ctrl-C ends it at once.

--output also receives checkpoint/, from which `gpu-replay train --resume --output DIR` goes on where the run stopped,
also after a kill -9, from the last checkpoint then: network, target network, optimiser, schedules, random generators,
statistics, best network, rows and replay buffer are those of a run that never stopped. The games of catch go on too.
Emulators and Gymnasium environments do not give away their inner state: they are reset, on new seeds, and the episodes
that were under way are left unfinished."""
FAMILIES = (
    "The first default is that of catch; others follow for Gymnasium environments with vectors or images as "
    "observations, and for Atari on a CPU or on CUDA, where they differ."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags: those of a run, and one for each setting of the agent."""
    parser.add_argument(
        "env",
        metavar="ENV",
        nargs="?",
        help="catch, pong, any ALE game or any discrete Gymnasium id; not needed with --resume",
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--max-seconds",
        type=positive_float,
        metavar="X",
        help="stop after this many seconds, those before a --resume included (default: no limit)",
    )
    run.add_argument("--seed", type=natural, metavar="N", help="of everything that is random (default: 0)")
    run.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda when there is one)")
    run.add_argument("--output", type=Path, help="folder of the run (default: runs/ENV-seedSEED-TIME)")
    existing = run.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace the run that --output holds")
    existing.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run that --output holds, as its settings.json says; only --steps and --max-seconds may be "
        "raised",
    )
    run.add_argument(
        "--checkpoint-every",
        type=positive_float,
        default=300.0,
        metavar="X",
        help="seconds between checkpoints, more where writing one takes over a fortieth of them (default: 300); the "
        "end of a run always writes one",
    )
    run.add_argument(
        "--checkpoint-replay",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the replay buffer is part of checkpoints (default: on); without it a resumed run fills a new one before "
        "it learns on. The disk needs room for two checkpoints",
    )
    agent = parser.add_argument_group("the agent", FAMILIES)
    types = get_type_hints(Settings)
    for field in dataclasses.fields(Settings):
        flag = f"--{field.name.replace('_', '-')}"
        text = f"{field.metadata['reason']} ({_defaults(field)})".replace("%", "%%")
        kind = types[field.name]
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


def _defaults(field: dataclasses.Field[Any]) -> str:
    """The default, and the families that have another one."""
    others: dict[str, list[str]] = {}
    for family, preset in PRESETS.items():
        if preset.get(field.name, field.default) != field.default:
            others.setdefault(_show(preset[field.name]), []).append(family)
    parts = [f"default {_show(field.default)}", *(f"{', '.join(names)}: {value}" for value, names in others.items())]
    return "; ".join(parts)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"


def run(options: argparse.Namespace) -> int:
    """Train as the flags say; returns the exit code. Raises UserError for what cannot be done."""
    began = time.perf_counter()
    require("tqdm", "matplotlib", "safetensors", purpose="gpu-replay train")
    if not options.resume:
        return carry_out(_new_plan(options, began))
    plan = resumed_plan(options, began)
    if isinstance(plan, str):
        print(plan)
        return 0
    return carry_out(plan)


def _new_plan(options: argparse.Namespace, began: float) -> Plan:
    if options.env is None:
        raise UserError("the following arguments are required: ENV, such as pong, or --resume --output DIR.")
    device = given_device(options.device)
    environment = identify(options.env)
    settings = Settings.for_family(environment.family(device), **given_settings(options))
    seed = options.seed if options.seed is not None else 0
    folder = options.output or _default_output(environment, seed)
    return Plan(
        environment=environment,
        settings=settings,
        seed=seed,
        device=device,
        folder=RunFolder(folder, "replace" if options.overwrite else "refuse"),
        max_seconds=options.max_seconds,
        checkpoint_every=options.checkpoint_every,
        checkpoint_replay=options.checkpoint_replay,
        began=began,
    )


def _default_output(environment: EnvironmentId, seed: int) -> Path:
    name = environment.name.replace("/", "-")
    return Path("runs") / f"{name}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
