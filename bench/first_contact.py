"""The first minutes on a GPU: which parts of this package work there, each tried in a process of its own.

A crash, a hang or a lost device then costs one feature and not the whole round. A feature comes before those that need
it. Each ends with a verdict that is printed and recorded at once; if it can be worked around, its record holds the
options for the programs that run afterwards (`on_gpu.py` passes them on).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_replay import (
    Batch,
    Field,
    Proportional,
    RankBased,
    ReplayBuffer,
    TrajectoryReplayBuffer,
    Uniform,
)
from gpu_replay.console.versions import versions
from gpu_replay.engines import memory
from gpu_replay.graphs.capture import CaptureError
from gpu_replay.graphs.stream_order import StreamOrder
from gpu_replay.ops import launch as launches

from . import kernels, ours
from .operations import Case
from .records import now

GPU = torch.device("cuda")
# the exit status if not even one kernel can be launched, so that nothing else is worth trying
NO_LAUNCH = 3
# sizes of adds and samples; odd, so that the last program of every launch is partly idle
SIZES = {"slots": 100_003, "batch": 4_097, "many": 70_001, "turns": 4, "calls": 40}
# powers of two give masses that no library rounds differently
EXACT = Proportional(alpha=1.0, eps=0.0)
FIELDS = {"x": Field((4,), torch.float32), "n": Field((), torch.int64)}
STEPS = {"obs": Field((84, 84), torch.uint8), "action": Field((), torch.int64)}


class Wrong(Exception):
    """The answer is not the one of the host code."""


@dataclass(frozen=True)
class Feature:
    """One thing to try.

    check:    runs the feature and returns a message; raises Wrong, or the error that occurs.
    fallback: options for later programs if the feature is not ok, by kind: "environment", "timing" and "skip" (for
              `bench`), "train", and "pytest".
    limit:    seconds that the check may take.
    """

    check: Callable[[], str]
    fallback: Mapping[str, list[str]] = field(default_factory=dict)
    limit: float = 25.0


def machine() -> str:
    """Launch one kernel, and say where."""
    ours.empty(kernels.inputs(Case("empty", 0, 0), GPU)).call()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["nvidia-smi"], timeout=10, check=False)
    found = versions()
    about = ", ".join(f"{name} {found.get(name)}" for name in ("torch", "triton", "python"))
    return f"{torch.cuda.get_device_name()}, {about}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"


def _powers(keys: Tensor) -> Tensor:
    """A priority for each key, a power of two."""
    return torch.bitwise_left_shift(torch.ones_like(keys), (keys * 7919) % 16).double() / 16


def _rows(buffer: Any, first: int, count: int) -> dict[str, Tensor]:
    keys = torch.arange(first, first + count, device=buffer.device)
    return {"x": keys[:, None].float().repeat(1, 4), "n": keys}


def _transitions(device: Any, sampler: Any = EXACT, **more: Any) -> ReplayBuffer:
    return ReplayBuffer(SIZES["slots"], FIELDS, sampler=sampler, device=device, seed=1, **more)


def _life(buffer: Any) -> list[Any]:
    """Batches of a buffer of transitions whose ring is written past its end, with updates between them."""
    found = []
    for turn in range(SIZES["turns"]):
        buffer.add(**_rows(buffer, turn * SIZES["many"], SIZES["many"]))
        for batch in (1, SIZES["batch"] // 16, SIZES["batch"]):
            found.append(buffer.sample(batch))
            buffer.update_priorities(found[-1].key, _powers(found[-1].key))
    return found


def _steps(device: Any, **settings: Any) -> TrajectoryReplayBuffer:
    more: dict[str, Any] = {"fields": STEPS, "sampler": EXACT, "stack": 4, "n_step": 3, **settings}
    return TrajectoryReplayBuffer(SIZES["slots"], 33, device=device, seed=1, autoreset="next_step", **more)


def _steps_of_life(buffer: TrajectoryReplayBuffer) -> list[Any]:
    envs = torch.arange(33, device=buffer.device)
    found = []
    for step in range(SIZES["calls"]):
        ended = (envs * 7 + step) % 13 == 0
        given = {
            name: ((step * 31 + envs) % 251).view(33, *[1] * len(each.shape)).expand(33, *each.shape).to(each.dtype)
            for name, each in buffer.fields.items()
            if name not in ("reward", "terminated", "truncated")
        }
        buffer.add(**given, reward=envs.float(), terminated=ended, truncated=torch.zeros_like(ended))
        if step >= 6:
            found.append(buffer.sample(65))
            buffer.update_priorities(found[-1].key, _powers(found[-1].key))
    return found


def _same(mine: Any, expected: Any) -> None:
    """Batches, or lists of them, of the device and of the host."""
    for number, (one, other) in enumerate(zip(mine, expected, strict=True)):
        for name in other:
            if not torch.equal(one[name].cpu(), other[name]):
                raise Wrong(f"{name!r} of batch {number} is not that of the host")


def beside_the_host(make: Callable[[Any], Any], life: Callable[[Any], list[Any]] = _life) -> Callable[[], str]:
    """Make a check that a buffer gives the same batches on the device as on the host."""

    def check() -> str:
        found = life(make(GPU))
        _same(found, life(make("cpu")))
        return f"{len(found)} batches are those of the host"

    return check


def launch() -> str:
    """Launches that bypass Triton's own launcher: the same answers."""
    found = []
    # a launch that has gone past it once does so for good
    for direct in (False, True):
        launches.DIRECT = direct
        found.append(_life(_transitions(GPU)))
    _same(found[1], [{name: each[name].cpu() for name in each} for each in found[0]])
    return f"{len(found[0])} batches are those of Triton's launcher"


def captured_step(sampler: Any = EXACT, adds: bool = False) -> Callable[[], str]:
    """Make a check that steps of two sizes, replayed from graphs, give the same batches as on the host."""

    def life(buffer: Any) -> list[Any]:
        more = _rows(buffer, 0, 64)

        def learn(batch: Batch) -> tuple[Tensor, Tensor]:
            if adds:
                buffer.add(**more)
            return _powers(batch.key), batch.key

        buffer.add(**_rows(buffer, 0, SIZES["many"]))
        steps = [buffer.capture(size, learn, warm_ups=1) for size in (256, 64)]
        return [{"key": step().clone()} for _ in range(SIZES["turns"]) for step in steps]

    return beside_the_host(lambda device: _transitions(device, sampler), life)


def capture_that_fails() -> str:
    """A synchronisation inside a capture raises CaptureError, and the buffer works afterwards."""
    call = _transitions(GPU).capture(None, lambda: torch.ones(3, device=GPU).nonzero(), warm_ups=1)
    call()
    try:
        call()
    except CaptureError as error:
        beside_the_host(_transitions)()
        torch.randn(3, device=GPU)
        return str(error)
    raise Wrong("a wait was captured")


def pinned() -> str:
    """Fields in pinned memory of the host: the same answers, and a pin that fails."""
    told = beside_the_host(lambda device: _transitions(device, storage_device="cpu"))()
    block = memory.pinned_block(2**20, GPU, StreamOrder(GPU).drain)
    # pinned already
    refused = int(torch.cuda.cudart().cudaHostRegister(block.ctypes.data, block.nbytes, 0))
    memory._forget_error()
    torch.zeros(1, device=GPU).add_(1).item()
    return f"{told}; to pin twice gives {refused}, and harms nothing"


_NO_GRAPH = {"timing": ["--timing", "events"], "train": ["--no-graph"]}
_RANKS = {"skip": ["rank-draw*"]}
FEATURES: dict[str, Feature] = {
    "machine": Feature(machine),
    "transitions": Feature(beside_the_host(_transitions)),
    "uniform": Feature(beside_the_host(lambda device: _transitions(device, Uniform()))),
    "ranks": Feature(beside_the_host(lambda device: _transitions(device, RankBased())), _RANKS),
    "steps": Feature(beside_the_host(_steps, _steps_of_life), {"skip": ["frame*"]}),
    "launch": Feature(launch, {"environment": ["GPU_REPLAY_PLAIN_LAUNCH=1"]}),
    "capture": Feature(captured_step(), _NO_GRAPH),
    "capture-add": Feature(captured_step(adds=True), _NO_GRAPH),
    "capture-ranks": Feature(captured_step(RankBased()), _RANKS),
    "capture-fails": Feature(capture_that_fails, _NO_GRAPH),
    "pinned": Feature(pinned, {"pytest": ["--ignore=tests/durability/test_places.py"]}),
}


def run(output: Path | None, seconds: float = 180.0) -> int:
    """Try all features for at most `seconds`; returns the exit status: 0 all ok, 1 some not, 3 no launch.

    output: a file of JSON lines, replaced.
    """
    until, status = time.monotonic() + seconds, 0
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("")
    for name, feature in FEATURES.items():
        began = time.monotonic()
        verdict, message = _tried(feature, min(feature.limit, until - began))
        line: dict[str, Any] = {"feature": name, "verdict": verdict, "message": message}
        line |= {"seconds": round(time.monotonic() - began, 2), "date": now()}
        print(f"VERDICT {name} {verdict} {line['seconds']:.1f}s {message}", flush=True)
        if verdict != "ok":
            line["fallback"], status = dict(feature.fallback), 1
        if output:
            with output.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if status and name == next(iter(FEATURES)):
            status = NO_LAUNCH
            break
    return status


def _tried(feature: Feature, limit: float) -> tuple[str, str]:
    """The verdict and what to tell; the feature runs in a fork of this process, which must not have used the GPU."""
    if limit <= 0:
        return "SKIPPED", "no time was left for it"
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(feature.check, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(limit) else ("HANG", f"still running after {limit:.0f} s")
    except EOFError:
        process.join(5)
        return ("CRASH", f"the process ended with status {process.exitcode}")
    finally:
        process.join(0.2)
        # kill its whole process group, including what it started
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        # a process that waits for a lost device may never end; the other features do not wait for it
        process.join(5)


def _in_child(check: Callable[[], str], told: Connection) -> None:
    os.setpgid(0, 0)
    try:
        found = ("ok", check())
    except Wrong as error:
        found = ("WRONG", str(error))
    except BaseException as error:
        found = ("CRASH", " ".join(f"{type(error).__name__}: {error}".split())[:400])
    told.send(found)
    sys.stdout.flush()
    # no clean-up: on a lost device it could hang
    os._exit(0)
