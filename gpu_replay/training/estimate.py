"""`gpu-replay estimate`: the bytes that a buffer would take, from its fields or from an environment."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

import torch

from gpu_replay import Combined, Field, Latest, Proportional, RankBased, Uniform
from gpu_replay.console.arguments import whole
from gpu_replay.console.errors import UserError
from gpu_replay.engines.storage import check_capacity, check_device, estimate, free_bytes, size_table
from gpu_replay.fields import STORABLE, check_fields
from gpu_replay.ops._backend import choose
from gpu_replay.spaces import classic_fields
from gpu_replay.training.registry import identify, make_environment
from gpu_replay.training.settings import Settings
from gpu_replay.training.vector_envs import spaces
from gpu_replay.trajectory_buffer import stream_sizes

SAMPLERS: dict[str, Uniform | Proportional | RankBased | Latest | Combined] = {
    "uniform": Uniform(),
    "proportional": Proportional(),
    "rank": RankBased(),
    "latest": Latest(),
    "combined": Combined(Proportional()),
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORABLE}
DESCRIPTION = """\
Print the bytes that a buffer would take, per field, and whether they are free.

examples:
  gpu-replay estimate --capacity 1e6 --env CartPole-v1
  gpu-replay estimate --capacity 1e6 --num-envs 64 --field obs=84x84:uint8 --field action=int64
The second is a trajectory buffer, which stores each frame once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--capacity", type=whole, required=True, metavar="N", help="transitions, such as 1e6")
    what = parser.add_mutually_exclusive_group(required=True)
    field = "one field, such as obs=84x84:uint8; a scalar has no shape: action=int64. Repeat for more"
    what.add_argument("--field", action="append", type=_field, metavar="NAME=SHAPE:DTYPE", help=field)
    what.add_argument("--env", metavar="ENV", help="the five classic fields of an environment")
    envs = "of a trajectory buffer, which stores each observation once; without it, of a transition buffer"
    parser.add_argument("--num-envs", type=whole, metavar="E", help=envs)
    parser.add_argument(
        "--autoreset",
        choices=("next_step", "same_step", "disabled"),
        default="next_step",
        help="of a trajectory buffer: whether it keeps final observations (default: next_step, it does not)",
    )
    parser.add_argument("--sampler", choices=SAMPLERS, default="proportional", help="default: proportional")
    parser.add_argument("--device", help="cuda or cpu (default: cuda when there is one)")


def _field(text: str) -> tuple[str, Field]:
    """`obs=84x84:uint8` as a name and a Field; `action=int64` and `action=:int64` are scalars."""
    found = re.fullmatch(r"([^=]+)=(?:(\d+(?:x\d+)*)?:)?(\w+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SHAPE:DTYPE, such as obs=84x84:uint8 or action=int64")
    name, shape, dtype = found.groups()
    if dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r}: unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    sides = tuple(int(side) for side in shape.split("x")) if shape else ()
    try:
        return name, Field(sides, DTYPES[dtype])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def run(options: argparse.Namespace) -> int:
    """Print the sizes; returns the exit code. Raises UserError for bad input."""
    sampler = SAMPLERS[options.sampler]
    try:
        device = check_device(options.device)
        capacity = check_capacity(options.capacity)
        backend = choose(device)
        if options.num_envs is not None:
            fields = _stream_fields(options.env, device) if options.env else _named(options.field)
            capacity -= capacity % options.num_envs
            sizes = stream_sizes(capacity, options.num_envs, fields, options.autoreset, sampler, backend)
        else:
            fields = _environment_fields(options.env, device) if options.env else check_fields(_named(options.field))
            sizes = estimate(capacity, fields, sampler, backend)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(str(error)) from None
    total, free = sum(sizes.values()), free_bytes(device)
    kind = "transitions" if options.num_envs is None else f"steps of {options.num_envs} environments"
    print(f"{capacity:,} {kind}, sampler {options.sampler}, on {device}")
    print(size_table(sizes))
    print(f"{total / capacity:,.1f} bytes per transition")
    if free is not None:
        print(f"{free / 1e9:.3f} GB are free on {device}: it {'fits' if total <= free else 'does not fit'}")
    return 0


def _named(pairs: Sequence[tuple[str, Field]]) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for name, field in pairs:
        if name in fields:
            raise ValueError(f"--field {name} is given twice.")
        fields[name] = field
    return fields


def _environment_fields(name: str, device: torch.device) -> dict[str, Field]:
    """obs, action, reward, next_obs, terminated of an environment, as `ReplayBuffer.from_spaces` stores them."""
    found = identify(name)
    if found.kind == "gymnasium":
        return classic_fields(*spaces(found.name))
    stream = _stream_fields(name, device)
    reward, terminated = Field((), torch.float32), Field((), torch.bool)
    return {**stream, "reward": reward, "next_obs": stream["obs"], "terminated": terminated}


def _stream_fields(name: str, device: torch.device) -> dict[str, Field]:
    """obs and action of one step of an environment."""
    found = identify(name)
    environment = make_environment(found, 1, Settings.for_family(found.family(device)), device)
    environment.close()
    return {"obs": environment.spec.observation, "action": Field((), torch.int64)}
