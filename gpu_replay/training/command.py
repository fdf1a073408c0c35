"""Train a double DQN with prioritized replay.

ENV is an Atari game (pong, breakout, ALE/Pong-v5, ...), a Gymnasium id with discrete actions and Box observations
(CartPole-v1, Acrobot-v1, ..., or MODULE:ID of your own module that registers it), or one of two games whose every step
runs on the device of the buffer: catch and device-pong.

examples:
  gpu-replay train catch                            seconds on a CPU
  gpu-replay train pong --print-settings            every setting with its value there, and why
  gpu-replay train CartPole-v1 --seed 1 --steps 1e5
  gpu-replay train --resume --output DIR            go on, even after kill -9
  torchrun --nproc-per-node=2 -m gpu_replay train CartPole-v1

--output receives progress.csv, curve.png, buffer.png, network.safetensors (the network with the best evaluation),
settings.json, summary.json, TensorBoard events if tensorboard is installed, and checkpoint/, from which --resume
continues exactly; games that do not expose their state, such as Atari, begin new episodes. Ctrl-C or SIGTERM ends a run
with all its files written and exit code 130 or 143; a second Ctrl-C ends it at once.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from gpu_replay.console.arguments import natural, pathname, positive_float, whole, widths
from gpu_replay.training.run import new, run
from gpu_replay.training.settings import TYPES, without_none

__all__ = ["DESCRIPTION", "add_arguments", "new", "run"]

DESCRIPTION = __doc__
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
    run.add_argument("--print-settings", action="store_true", help="print the settings of this run, and do not run")
    kinds = {name.replace("_", "-"): without_none(kind) for name, kind in TYPES.items()}
    flags = ", ".join(f"--{name}" + f"/--no-{name}" * (kind is bool) for name, kind in kinds.items())
    told = f"`gpu-replay train ENV --print-settings` tells what each flag sets, and its value for ENV. {flags}"
    agent = parser.add_argument_group("the agent", textwrap.fill(told, 110, break_on_hyphens=False))
    for name, kind in kinds.items():
        # the group's description names them
        options: dict[str, Any] = {"help": argparse.SUPPRESS}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options["type"], options["metavar"] = READERS[get_origin(kind) or kind]
        agent.add_argument(f"--{name}", **options)
