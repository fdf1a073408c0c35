"""The bytes that a buffer would take, per field and place, and whether they are free, from the flags of a command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from gpu_replay import Combined, Field, Proportional
from gpu_replay.console.arguments import positive, whole
from gpu_replay.console.errors import UserError
from gpu_replay.engines.memory import check_device, check_placement, size_table, sizes_by_place
from gpu_replay.engines.state import META, sizes_of
from gpu_replay.engines.storage import (
    Autoreset,
    Storage,
    StreamSettings,
    TrajectoryStorage,
    check_capacity,
    check_stream_fields,
)
from gpu_replay.fields import STORABLE, check_fields
from gpu_replay.ops._backend import Backend, choose
from gpu_replay.samplers import Sampler, Sequences

SAMPLERS: dict[str, Sampler] = {
    name.removesuffix("Based").lower(): kind(Proportional()) if kind is Combined else kind()
    for name, kind in Sampler.kinds.items()
    if kind.__module__ == Sampler.__module__
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORABLE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--capacity", type=whole, required=True, metavar="N", help="transitions, such as 1e6")
    what = parser.add_mutually_exclusive_group(required=True)
    field = "one field, such as obs=84x84:uint8; a scalar has no shape: action=int64. Repeat for more"
    what.add_argument("--field", action="append", type=_field, metavar="NAME=SHAPE:DTYPE", help=field)
    what.add_argument("--env", metavar="ENV", help="the fields of an environment: pong, Pendulum-v1, catch, ...")
    stack = "frames of an observation; a trajectory buffer stores each once all the same (default: 1)"
    parser.add_argument("--stack", type=positive, default=1, metavar="S", help=stack)
    parser.add_argument(
        "--frame-size", type=positive, metavar="N", help="side of a frame of Atari or device-pong (default: 84)"
    )
    envs = "environments of a trajectory buffer, which stores each frame once; without it, a buffer of transitions"
    parser.add_argument("--num-envs", type=positive, metavar="E", help=envs)
    rows = "steps of a row of a trajectory buffer that samples sequences (default: single steps)"
    parser.add_argument("--sequences", type=positive, metavar="L", help=rows)
    parser.add_argument(
        "--autoreset",
        choices=("next_step", "same_step", "disabled"),
        default="next_step",
        help="of a trajectory buffer: whether it keeps final observations (default: next_step, it does not)",
    )
    parser.add_argument("--sampler", choices=SAMPLERS, default="proportional", help="default: proportional")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if available)")
    pinned = "cpu: the fields of a buffer on a GPU in pinned host memory"
    parser.add_argument("--storage-device", metavar="DEVICE", help=pinned)
    parser.add_argument("--storage-path", metavar="DIR", help="the fields of a buffer on the CPU in a file there")


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


def stream_sizes(
    capacity: int,
    num_envs: int,
    fields: Mapping[str, Field],
    autoreset: Autoreset,
    sampler: Sampler,
    backend: Backend,
    sequences: Sequences | None = None,
) -> dict[str, int]:
    """Bytes that a trajectory buffer would take, by name; raises as the buffer itself does."""
    checked = check_stream_fields(fields)
    settings = StreamSettings(capacity, num_envs, autoreset=autoreset, sequences=sequences).checked(checked)
    return sizes_of(TrajectoryStorage(settings, checked, META), sampler, backend)


def stream_bytes(capacity: int, num_envs: int, fields: Mapping[str, Field], sampler: str, device: torch.device) -> int:
    """Bytes of a trajectory buffer of about this capacity, in same-step autoreset mode."""
    kept = max(capacity - capacity % num_envs, num_envs)
    return sum(stream_sizes(kept, num_envs, fields, "same_step", SAMPLERS[sampler], _backend(device)).values())


def _planned(name: str | None) -> tuple[torch.device, bool]:
    """The device of `--device`, and whether it is a GPU for which sizes are computed where there is none."""
    absent = name is not None and re.fullmatch(r"cuda(:\d+)?", name) is not None and not torch.cuda.is_available()
    return (torch.device(name or ""), True) if absent else (check_device(name), False)


def _backend(device: torch.device) -> Backend:
    """The code of a buffer there, whether or not it could run here."""
    return "triton" if device.type == "cuda" else choose(device)


def report(
    options: argparse.Namespace,
    stored: Callable[[], Mapping[str, Field]] | None,
    more: Callable[[int, torch.device], str],
) -> int:
    """Print the sizes; returns the exit code. Raises UserError for bad input.

    stored: returns the fields of a step of the environment; None if `--field` gives the fields.
    more:   (capacity, device) -> one more line about the environment.
    """
    sampler = SAMPLERS[options.sampler]
    try:
        device, absent = _planned(options.device)
        placement = check_placement(device, options.storage_device, options.storage_path)
        capacity = check_capacity(options.capacity)
        backend = _backend(device)
        fields = check_fields(_named(options.field)) if stored is None else dict(stored())
        step, once = fields, 0
        rows = None if options.sequences is None else Sequences(options.sequences)
        if options.num_envs is not None:
            sizes = stream_sizes(capacity, options.num_envs, fields, options.autoreset, sampler, backend, rows)
            capacity -= capacity % options.num_envs
        elif rows is not None:
            raise UserError("--sequences is of a trajectory buffer: say of how many environments, --num-envs E.")
        else:
            if stored is not None and options.stack > 1:
                once = sum(stream_sizes(capacity, 1, step, options.autoreset, sampler, backend).values())
            fields = fields if stored is None else _classic(fields)
            storage = Storage(capacity, _stacked(fields, options.stack), META, packed=backend == "host")
            sizes = sizes_of(storage, sampler, backend)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(str(error)) from None
    total = sum(sizes.values())
    kind = "transitions" if options.num_envs is None else f"steps of {options.num_envs} environments together"
    if stored is not None:
        observed = [f"{name} {_described(field)}" for name, field in step.items() if _is_observation(name)]
        kind = f"{kind}, {options.env}, {', '.join(observed)}" + f", stacks of {options.stack}" * (options.stack > 1)
    print(f"{capacity:,} {kind}, sampler {options.sampler}, on {device}")
    if once:
        print(f"each frame stored once, TrajectoryReplayBuffer: {once:,} bytes, {once / capacity:,.1f} per transition")
        print("(--num-envs lists its parts); stacks stored in obs and next_obs, ReplayBuffer:")
    places = sizes_by_place(sizes, placement, {*fields, "alignment"}, absent=absent)
    for place, held, _ in places:
        print(size_table(held) if not placement.apart else f"{place}:\n{size_table(held)}")
    if options.num_envs is not None:
        print("streams: the flags of each step, its place in its episode, and unfinished windows")
    print(f"the buffer alone takes {total:,} bytes, {total / capacity:,.1f} per transition")
    if "final_obs" in sizes:
        kept = sizes["final_obs"] // sum(field.row_bytes for name, field in step.items() if _is_observation(name))
        print(
            f"final observations of {kept:,} truncated episodes are kept ({kept / capacity:.1%} of the steps): "
            "final_capacity sets another number, stats().lost_truncations counts those without a place"
        )
    if stored is not None:
        print(more(capacity, device))
    for place, held, free in places:
        if free is not None:
            part = "its part" if placement.apart else "the buffer"
            fits = "fits" if sum(held.values()) <= free else "does not fit"
            small = f"; frames stored once {'fit' if once <= free else 'do not fit'}" * bool(once)
            print(f"{free / 1e9:.3f} GB are free {place}: {part} {fits}{small if not placement.apart else ''}")
    if absent:
        print(f"not checked: whether it fits on {device}, since torch finds no CUDA device here")
    return 0


def _named(pairs: Sequence[tuple[str, Field]]) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for name, field in pairs:
        if name in fields:
            raise ValueError(f"--field {name} is given twice.")
        fields[name] = field
    return fields


def _classic(step: Mapping[str, Field]) -> dict[str, Field]:
    """The five classic fields that `ReplayBuffer.from_spaces` makes, from the fields of a step."""
    after = {f"next_{name}": field for name, field in step.items() if _is_observation(name)}
    return {**step, "reward": Field((), torch.float32), **after, "terminated": Field((), torch.bool)}


def _described(field: Field) -> str:
    return f"{'x'.join(map(str, field.shape))}:{str(field.dtype).removeprefix('torch.')}"


def _is_observation(name: str) -> bool:
    return name.removeprefix("next_").partition(".")[0] == "obs"


def _stacked(fields: dict[str, Field], stack: int) -> dict[str, Field]:
    """The fields of transitions whose observations are stacks; a trajectory buffer stores each frame once."""
    if stack == 1:
        return fields
    return {
        name: replace(field, shape=(stack, *field.shape)) if _is_observation(name) else field
        for name, field in fields.items()
    }
