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
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from gpu_replay.console.arguments import natural, pathname, positive_float, whole, widths
from gpu_replay.training.run import new, run
from gpu_replay.training.settings import PRESETS, TYPES, Settings, without_none

__all__ = ["DESCRIPTION", "add_arguments", "new", "run"]

DESCRIPTION = __doc__
FAMILIES = (
    "Defaults are listed for catch first, then, where they differ, for device-pong, Gymnasium environments with "
    "vectors or images as observations, Atari on a CPU or on CUDA, and device-pong on CUDA."
)
# the parser of a flag's values, and their placeholder in --help
READERS: dict[Any, tuple[Callable[[str], Any], str]] = {int: (whole, "N"), float: (float, "X"), tuple: (widths, "N,N")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the run, and one flag for each setting of the agent."""
    env = "catch, device-pong, pong, any ALE game or any discrete Gymnasium id; not needed with --resume or --from"
    parser.add_argument("env", metavar="ENV", nargs="?", help=env)
    run = parser.add_argument_group("the run")
    limit = "stop after this many seconds, earlier parts of a resumed run included (default: no limit)"
    run.add_argument("--max-seconds", type=positive_float, metavar="X", help=limit)
    run.add_argument("--seed", type=natural, metavar="N", help="seed of all random numbers (default: 0)")
    run.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda if available)")
    run.add_argument("--output", type=pathname, help="folder of the run (default: runs/ENV-seedSEED-TIME)")
    existing = run.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace the run in --output")
    resume = "continue the run in --output with its own settings; --steps may be raised, flags of this group given anew"
    existing.add_argument("--resume", action="store_true", help=resume)
    branch = "start from the checkpoint in DIR, with its settings except those given here; DIR is not changed"
    existing.add_argument("--from", dest="source", type=pathname, metavar="DIR", help=branch)
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
