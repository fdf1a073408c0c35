"""Print the bytes that a buffer would take, per field, and whether that much memory is free.

With --env, also print what `gpu-replay train` would take there.

examples:
  gpu-replay estimate --capacity 1e6 --env Pendulum-v1
  gpu-replay estimate --capacity 1e6 --env pong --stack 4 --num-envs 64
  gpu-replay estimate --capacity 1e6 --num-envs 64 --field obs=84x84:uint8 --field action=int64
With --num-envs the buffer is a trajectory buffer, which stores each frame once. Without it, and with --env and --stack,
both its bytes and those of a buffer of stacks are printed.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from functools import partial

import torch

from gpu_replay import Field, TrajectoryReplayBuffer
from gpu_replay.console import sizes
from gpu_replay.console.errors import UserError
from gpu_replay.console.sizes import report, stream_bytes
from gpu_replay.training.host_envs import spaces
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.registry import CPU, EnvironmentId, identify

DESCRIPTION = __doc__
# of a frame, unless --frame-size says otherwise
SIDE = 84
add_arguments = sizes.add_arguments


def run(options: argparse.Namespace) -> int:
    """Print the sizes; returns the exit code. Raises UserError for bad input."""
    if options.env is None:
        if options.frame_size is not None:
            raise UserError("--frame-size is of Atari's frames; with --field name the shape: --field obs=84x84:uint8.")
        return report(options, None, lambda capacity, device: "")
    found = identify(options.env)
    return report(options, partial(_stored, found, options.frame_size or SIDE), partial(_of_trainer, found, options))


def _stored(found: EnvironmentId, side: int) -> dict[str, Field]:
    """The fields of a step of one environment."""
    if found.kind == "gymnasium":
        # any spaces will do here, also those that the agent cannot use
        buffer = TrajectoryReplayBuffer.from_spaces(1, 1, *spaces(found.name), autoreset="next_step", device="cpu")
        return {name: buffer.fields[name] for name in buffer.fields if name.partition(".")[0] in ("obs", "action")}
    with closing(found.make(1, found.settings(CPU, frame_size=side), CPU)) as environment:
        frame = environment.spec.observation
    return {"obs": Field(frame.shape, frame.dtype), "action": Field((), torch.int64)}


def _of_trainer(found: EnvironmentId, options: argparse.Namespace, capacity: int, device: torch.device) -> str:
    """A sentence: the bytes that the trainer would take with this capacity, or why it could not start."""
    stack = None if options.stack == 1 else options.stack
    changes = {"frame_size": options.frame_size, "num_envs": options.num_envs, "frame_stack": stack}
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        with closing(found.make(1, found.settings(device, **given), CPU)) as environment:
            spec = environment.spec
        settings = found.settings(device, **given, capacity=capacity)
    except UserError as error:
        return f"`gpu-replay train` cannot learn here: {error}"
    envs = settings.num_envs
    fields = {"obs": spec.observation, "action": Field((), torch.int64)}
    buffer = stream_bytes(capacity, envs, fields, settings.sampler, device)
    network = QNetwork(spec.stacked, spec.num_actions, settings, spec.bounds)
    # the target network, gradients and Adam's two moments beside the weights
    learned = 5 * sum(part.nbytes for part in network.parameters())
    shape = "x".join(map(str, spec.observation.shape))
    flags = "".join(f" --{name.replace('_', '-')} {value}" for name, value in given.items())
    side, other = options.frame_size or SIDE, ""
    if found.kind in ("atari", "device-pong") and settings.frame_size != side:
        other = f", with its own frames of {shape} (--frame-size {side} for those above)"
    return (
        f"`gpu-replay train {options.env} --capacity {capacity}{flags}` would take {buffer + learned:,} bytes{other}: "
        f"{buffer:,} for its buffer ({envs} environments, {shape}, each frame once, stacks of {spec.stack}), "
        f"{learned:,} for networks and optimizer"
    )
