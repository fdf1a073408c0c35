"""What calls of the buffers cost the host: the time of the calling thread, which never waits for the device.

A GPU works while the host goes on, so this time bounds a loop whose kernels are short. Blocks of all calls take turns;
between them the device is drained, outside the measured time, so that no launch waits for a place in its queue. On a
GPU the same calls are also made by Triton's own launcher.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gpu_replay import Field, Proportional, TrajectoryReplayBuffer
from gpu_replay.console.markdown import number, table
from gpu_replay.console.progress import Progress
from gpu_replay.ops import launch

from .measure import Run, quantiles
from .operations import ADDED, Case
from .records import Record
from .subjects import Call, replay_buffer

# blocks of each call, and calls of a block
BLOCKS, CALLS = 40, 100
# the call of torch that others are compared with
UNIT = "add_(1)"


def cases(quick: bool) -> list[Case]:
    """The one case: adds of a few rows, samples and updates of a batch."""
    return [Case("host", 1_000, 8, ADDED) if quick else Case("host", 100_000, 256, ADDED)]


def buffer_calls(case: Case, device: torch.device) -> dict[str, Call]:
    """Calls of a buffer of transitions and of one of trajectories, by name."""
    flat = replay_buffer(case.capacity, device)
    fields = {"obs": Field((16,), torch.float32), "action": Field((), torch.int64)}
    # capacity is a multiple of the environments
    known: dict[str, Any] = {"sampler": Proportional(), "device": device, "seed": 0}
    steps = TrajectoryReplayBuffer(case.capacity, case.added, fields, n_step=3, autoreset="next_step", **known)

    def zeros(all_fields: Any) -> dict[str, torch.Tensor]:
        return {
            name: torch.zeros((case.added, *each.shape), dtype=each.dtype, device=device)
            for name, each in all_fields.items()
        }

    rows, step = zeros(flat.fields), zeros(steps.fields)
    zero = torch.zeros(case.added, device=device)
    step |= {"reward": zero, "terminated": zero.bool(), "truncated": zero.bool()}
    for _ in range(-(-case.batch // case.added) + steps.n_step):
        flat.add(**rows)
        steps.add(**step)
    keys, priorities = flat.sample(case.batch).key, torch.rand(case.batch, device=device)
    return {
        "add": lambda: flat.add(**rows),
        "sample": lambda: flat.sample(case.batch),
        "update_priorities": lambda: flat.update_priorities(keys, priorities),
        "add, trajectories": lambda: steps.add(**step),
        "sample, trajectories": lambda: steps.sample(case.batch),
    }


def records(run: Run, cases: Sequence[Case], progress: Progress) -> Iterator[Record]:
    """One record a call, of the means of its blocks."""
    blocks, calls = (1, 1) if run.quick else (BLOCKS, CALLS)
    on_gpu = run.device.type == "cuda"

    def measured(case: Case) -> Iterator[Record]:
        one = torch.zeros(1, device=run.device)
        direct = {UNIT: lambda: one.add_(1), **buffer_calls(case, run.device)}
        plain = buffer_calls(case, run.device) if on_gpu else {}
        ways = [(name, call, True) for name, call in direct.items()]
        ways += [(f"{name}, Triton's launcher", call, False) for name, call in plain.items()]
        found: dict[str, list[float]] = {name: [] for name, *_ in ways}
        before = launch.DIRECT
        try:
            # the first block compiles and loads what it calls
            for _ in range(1 + blocks):
                for name, call, straight in ways:
                    # a launch that has gone straight once does so for good
                    launch.DIRECT = before and straight
                    if on_gpu:
                        torch.cuda.synchronize(run.device)
                    began = time.thread_time_ns()
                    for _ in range(calls):
                        call()
                    found[name].append((time.thread_time_ns() - began) / calls / 1000)
        finally:
            launch.DIRECT = before
        for name, times in found.items():
            more: dict[str, Any] = {"warmup": calls, "copy_share": None, "timing": "host"}
            yield run.record(case, name, quantiles(np.array(times[1:])), blocks * calls, **more)

    return run.each(cases, progress, measured)


def host_table(records: Sequence[Record], peers: Sequence[Record] = ()) -> str:
    """The time of every call, and over that of torch's simplest one."""
    unit = next((record.median for record in records if record.implementation == UNIT), 0.0)
    rows = [[r.implementation, number(r.median), f"{r.median / unit:.1f}x" if unit else ""] for r in records]
    return table(["call", "host µs", f"over {UNIT}"], rows)
