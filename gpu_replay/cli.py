"""The command `gpu-replay`: train, play, study, bench, estimate, info.

Each command imports what it needs when it runs, so that `--help` and `info` work on a bare installation. A mistake in
what was asked ends with one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from gpu_replay.fields import STORABLE, Field, check_fields
from gpu_replay.samplers import Combined, Latest, Proportional, RankBased, Sampler, Uniform

if TYPE_CHECKING:
    from gpu_replay.ops._backend import Backend

SAMPLERS: dict[str, Sampler] = {
    "uniform": Uniform(),
    "proportional": Proportional(),
    "rank": RankBased(),
    "latest": Latest(),
    "combined": Combined(Proportional()),
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORABLE}
EPILOG = "Each command has --help. Exit codes: 0 done, 1 failed, 2 bad input, 130 ended by Ctrl-C."


class _Parser(argparse.ArgumentParser):
    """Errors in one line; usage is a matter for --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; `argv` is without the program's name. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(["gpu-replay", *arguments[:1]])
    try:
        return _run(arguments)
    except (OSError, MemoryError) as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:
        from gpu_replay.bench.main import main as bench

        return int(bench(arguments[1:]))
    from gpu_replay.console.errors import UserError

    if arguments[:2] == ["study", "cliffwalk"]:
        # a command of its own: the name of an environment in that place means the comparison of methods
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except UserError as error:
        print(f"gpu-replay {options.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    from gpu_replay import __version__
    from gpu_replay.study import cliffwalk
    from gpu_replay.study import command as study_command
    from gpu_replay.training import command, play

    parser = _Parser(prog="gpu-replay", description="A GPU-resident tensor replay buffer for PyTorch.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"gpu_replay {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train an agent: pong, CartPole-v1, catch, ...",
        description=command.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(train)
    train.set_defaults(run=command.run)

    watch = commands.add_parser(
        "play",
        help="a film of a trained agent, as GIF or MP4",
        description=play.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    play.add_arguments(watch)
    watch.set_defaults(run=play.run)

    study = commands.add_parser(
        "study",
        help="compare kinds of replay on three small environments",
        description=study_command.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    study_command.add_arguments(study)
    study.set_defaults(run=study_command.run)

    cliff = commands.add_parser(
        "study cliffwalk",
        help="the Blind Cliffwalk of the paper on prioritized replay",
        description=cliffwalk.DESCRIPTION,
    )
    cliffwalk.add_arguments(cliff)
    cliff.set_defaults(run=cliffwalk.run)

    # its own parser reads what follows; the entry is for --help
    commands.add_parser("bench", help="measure add, sample and update_priorities, and record the figures")

    estimate = commands.add_parser(
        "estimate",
        help="bytes of a buffer before it is made",
        description="Print the bytes that a buffer would take, per field, and whether they are free.",
        epilog="examples: gpu-replay estimate --capacity 1e6 --env CartPole-v1; gpu-replay estimate --capacity 1e6 "
        "--num-envs 64 --field obs=84x84:uint8 --field action=int64 for a trajectory buffer, which stores frames once",
    )
    _estimate_arguments(estimate)
    estimate.set_defaults(run=_estimate)

    info = commands.add_parser(
        "info",
        help="versions, devices, and which code would run",
        description="Print versions, devices, and for each device which code runs there.",
    )
    info.set_defaults(run=_info)
    return parser


def _estimate_arguments(parser: argparse.ArgumentParser) -> None:
    from gpu_replay.console.arguments import whole

    parser.add_argument("--capacity", type=whole, required=True, metavar="N", help="transitions, such as 1e6")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--field",
        action="append",
        type=_field,
        metavar="NAME=SHAPE:DTYPE",
        help="one field, such as obs=84x84:uint8; a scalar has no shape: action=int64. Repeat for more",
    )
    what.add_argument("--env", metavar="ENV", help="the five classic fields of an environment")
    parser.add_argument(
        "--num-envs",
        type=whole,
        metavar="E",
        help="of a trajectory buffer, which stores each observation once; without it, of a transition buffer",
    )
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


def _estimate(options: argparse.Namespace) -> int:
    from gpu_replay.console.errors import UserError
    from gpu_replay.engines.storage import check_capacity, check_device, estimate, free_bytes, size_table
    from gpu_replay.ops._backend import choose
    from gpu_replay.trajectory_buffer import stream_sizes

    try:
        device = check_device(options.device)
        capacity = check_capacity(options.capacity)
        backend: Backend = choose(device)
        sampler = SAMPLERS[options.sampler]
        if options.num_envs is not None:
            fields = _stream_fields(options.env, device) if options.env else _named(options.field)
            capacity -= capacity % options.num_envs
            sizes = stream_sizes(capacity, options.num_envs, fields, options.autoreset, sampler, backend)
        else:
            fields = _environment_fields(options.env, device) if options.env else check_fields(_named(options.field))
            sizes = estimate(capacity, fields, sampler, backend)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(str(error)) from None
    total = sum(sizes.values())
    kind = "transitions" if options.num_envs is None else f"steps of {options.num_envs} environments"
    print(f"{capacity:,} {kind}, sampler {options.sampler}, on {device}")
    print(size_table(sizes))
    print(f"{total / capacity:,.1f} bytes per transition")
    free = free_bytes(device)
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
    from gpu_replay.spaces import classic_fields
    from gpu_replay.training.registry import identify
    from gpu_replay.training.vector_envs import spaces

    found = identify(name)
    if found.kind == "gymnasium":
        return classic_fields(*spaces(found.name))
    observation = _observation(name, device)
    return {
        "obs": observation,
        "action": Field((), torch.int64),
        "reward": Field((), torch.float32),
        "next_obs": observation,
        "terminated": Field((), torch.bool),
    }


def _stream_fields(name: str, device: torch.device) -> dict[str, Field]:
    """obs and action of one step of an environment."""
    return {"obs": _observation(name, device), "action": Field((), torch.int64)}


def _observation(name: str, device: torch.device) -> Field:
    from gpu_replay.training.registry import identify, make_environment
    from gpu_replay.training.settings import Settings

    found = identify(name)
    environment = make_environment(found, 1, Settings.for_family(found.family(device)), device)
    environment.close()
    return environment.spec.observation


def _info(options: argparse.Namespace) -> int:
    from gpu_replay.console.versions import OPTIONAL, device_name, versions
    from gpu_replay.ops._backend import VARIABLE, choose, inner_loops

    found = versions()
    for name in (*found, *(name for name in OPTIONAL if name not in found)):
        print(f"{name:<12} {found.get(name, 'not installed')}")
    print(f"{VARIABLE:<12} {os.environ.get(VARIABLE) or 'not set: the code follows the device'}")
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    for device in devices:
        try:
            code: str = choose(device)
        except (ValueError, RuntimeError) as error:
            code = f"none ({error})"
        if code == "host":
            code = (
                "host, compiled by Numba"
                if inner_loops().__name__.endswith("numba_loops")
                else "host, NumPy alone (Numba makes it faster)"
            )
        print(f"{device!s:<12} {device_name(device)}, {_memory(device)}, code: {code}")
    default = devices[1] if torch.cuda.is_available() else devices[0]
    print(f"{'default':<12} {default}")
    return 0


def _memory(device: torch.device) -> str:
    from gpu_replay.engines.storage import free_bytes

    free = free_bytes(device)
    amount = "free memory unknown" if free is None else f"{free / 1e9:.1f} GB free"
    if device.type == "cpu":
        return f"{os.cpu_count()} cores, {amount}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"compute capability {major}.{minor}, {amount}"
