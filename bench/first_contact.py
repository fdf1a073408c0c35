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
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import (
    Batch,
    Field,
    Hindsight,
    Proportional,
    RankBased,
    ReplayBuffer,
    ShardedReplay,
    TrajectoryReplayBuffer,
    Uniform,
)
from gpu_replay.console.markdown import table
from gpu_replay.console.versions import versions
from gpu_replay.engines import memory
from gpu_replay.graphs.capture import CaptureError, CudaGraphCall
from gpu_replay.graphs.stream_order import StreamOrder
from gpu_replay.ops import launch as launches
from gpu_replay.ops.ranks import inclusive_prefix_sum

from . import kernels, ours
from .measure import Plan, cuda_clock, measure
from .operations import Case
from .records import now

GPU = torch.device("cuda")
# the exit status if not even one kernel can be launched, so that nothing else is worth trying
NO_LAUNCH = 3
# sizes of adds, samples and scans; odd, so that the last program of every launch is partly idle
SIZES = {"slots": 100_003, "batch": 4_097, "many": 70_001, "scanned": 10_000_019, "turns": 4, "calls": 40}
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
    long:     whether it takes half a minute on a GPU: not part of the short form.
    """

    check: Callable[[], str]
    fallback: Mapping[str, list[str]] = field(default_factory=dict)
    limit: float = 25.0
    long: bool = False


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


def _goals(device: Any) -> TrajectoryReplayBuffer:
    goal = Field((3,), torch.float32)
    fields = {"obs.observation": Field((4,), torch.float32), "obs.achieved_goal": goal, "obs.desired_goal": goal}
    fields["action"] = Field((), torch.int64)
    return _steps(device, fields=fields, sampler=Uniform(), stack=1, n_step=1, relabel=Hindsight(reward_fn=_reward))


def _reward(achieved: Tensor, desired: Tensor) -> Tensor:
    return -(achieved != desired).any(1).float()


def launch() -> str:
    """Launches that bypass Triton's own launcher: the same answers in less time."""
    found, microseconds = [], []
    # each twice, as clocks change; a launch that has gone past it once does so for good
    for direct in (False, True, False, True):
        launches.DIRECT = direct
        buffer = _transitions(GPU)
        found.append(_life(buffer))
        plan = Plan(0.0, 0.0, fewest=SIZES["calls"])
        timing = measure(lambda b=buffer: b.sample(64), prepare=lambda: None, plan=plan, device=GPU)  # type: ignore[misc]
        microseconds.append(float(np.median(timing.nanoseconds)) / 1e3)
    for batches in found[1:]:
        _same(batches, [{name: each[name].cpu() for name in each} for each in found[0]])
    return f"{min(microseconds[::2]):.1f} µs a sample through Triton, {min(microseconds[1::2]):.1f} µs direct"


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


def capture_of_adds() -> str:
    """`capture(None, ...)`, which samples nothing."""
    buffer = _transitions(GPU)
    rows = _rows(buffer, 0, 64)
    step = buffer.capture(None, lambda: buffer.add(**rows), warm_ups=1)
    for _ in range(5):
        step()
    if len(buffer) != 5 * 64:
        raise Wrong(f"{len(buffer)} rows are stored, not {5 * 64}")
    return "5 adds, 4 of them replayed"


def capture_that_fails() -> str:
    """A synchronisation inside a capture raises CaptureError, and the buffer works afterwards."""
    call = CudaGraphCall(lambda: torch.ones(3, device=GPU).nonzero(), GPU, warm_ups=1)
    call()
    try:
        call()
    except CaptureError as error:
        beside_the_host(_transitions)()
        torch.randn(3, device=GPU)
        return str(error)
    raise Wrong("a wait was captured")


def streams() -> str:
    """One stream samples whole rows while another adds, and one thread adds while another captures."""
    buffer, side = _transitions(GPU, Uniform(replacement=True)), torch.cuda.Stream()
    for turn in range(SIZES["calls"]):
        with torch.cuda.stream(side if turn % 2 else torch.cuda.default_stream()):
            buffer.add(**_rows(buffer, turn * 640, 640 % SIZES["slots"]))
        batch = buffer.sample(SIZES["batch"])
        if not torch.equal(batch.n.float(), batch.x[:, 0]):
            raise Wrong("a row was read before it was whole")
    adding = threading.Thread(target=lambda: [buffer.add(**_rows(buffer, n * 64, 64)) for n in range(SIZES["calls"])])
    step = buffer.capture(64, lambda batch: (None, (batch.n.float() - batch.x[:, 0]).abs().sum()), warm_ups=1)
    adding.start()
    torn = sum(float(step()) for _ in range(SIZES["calls"]))
    adding.join()
    if torn:
        raise Wrong("a row of another thread was torn")
    return f"{SIZES['calls']} turns of two streams, as many replays beside a thread"


def pinned() -> str:
    """Fields in pinned memory of the host: the same answers, the speed of a gather, and a pin that fails."""
    beside_the_host(lambda device: _transitions(device, storage_device="cpu"))()
    ring = ReplayBuffer(SIZES["slots"], {"obs": Field((7056,), torch.uint8)}, device=GPU, storage_device="cpu")
    ring.add(obs=torch.zeros((SIZES["slots"], 7056), dtype=torch.uint8))
    nanoseconds = cuda_clock(lambda: ring.sample(SIZES["batch"]), lambda: None, SIZES["calls"])
    block = memory.pinned_block(2**20, GPU, StreamOrder(GPU).drain)
    # pinned already
    refused = int(torch.cuda.cudart().cudaHostRegister(block.ctypes.data, block.nbytes, 0))
    memory._forget_error()
    torch.zeros(1, device=GPU).add_(1).item()
    speed = SIZES["batch"] * 7056 / np.median(nanoseconds)
    return f"{speed:.1f} GB/s of rows; to pin twice gives {refused}, and harms nothing"


def scan() -> str:
    """Prefix sums of many blocks, beside torch's."""
    values = torch.randint(2**40, (SIZES["scanned"],), device=GPU)
    expected = torch.cumsum(values, 0)
    for turn in range(SIZES["calls"]):
        if not torch.equal(inclusive_prefix_sum(values), expected):
            raise Wrong(f"turn {turn} is not what cumsum gives")
    return f"{SIZES['calls']} times {len(values):,} sums"


def contended() -> str:
    """A million updates contend for 62 slots."""
    buffer = ReplayBuffer(62, FIELDS, sampler=EXACT, device=GPU)
    buffer.add(**_rows(buffer, 0, 62))
    keys = torch.arange(SIZES["scanned"] // 10, device=GPU) % 62
    buffer.update_priorities(keys, _powers(keys + 1))
    if int(buffer.total_mass()) != int(buffer.masses().sum()):
        raise Wrong("the total is not the sum of the masses")
    return f"{len(keys):,} updates"


def trained(env: str, *options: str) -> Callable[[], str]:
    """Make a check that trains on a device-resident game for some seconds."""

    def check() -> str:
        with tempfile.TemporaryDirectory() as folder:
            words = [*PROGRAM, "train", env, "--device", "cuda", "--seed", "0", "--max-seconds", "10"]
            words += ["--no-checkpoint-replay", "--overwrite", "--output", folder, *options, *TINY]
            done = subprocess.run([sys.executable, *words], stderr=subprocess.PIPE, text=True)
            print(done.stderr, file=sys.stderr, flush=True)
            done.check_returncode()
            if refused := [line for line in done.stderr.splitlines() if "cannot be captured" in line]:
                raise Wrong(refused[0])
            summary = json.loads((Path(folder) / "summary.json").read_text())
        return f"{summary['steps_per_second']:,.0f} steps/s, {summary['updates_per_second']:,.0f} updates/s"

    return check


# how the command is run, and further options of `train`
PROGRAM = ["-m", "gpu_replay"]
TINY: list[str] = []


def nccl() -> str:
    """A group of one rank: every message of a shard, in the types that NCCL must take."""
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    dist.init_process_group("nccl", rank=0, world_size=1)
    buffer = ReplayBuffer(SIZES["slots"], FIELDS, sampler=EXACT, device=GPU, seed=1)
    for batch in _life(ShardedReplay(buffer)):
        if not torch.equal(batch.n.float(), batch.x[:, 0]):
            raise Wrong("a row is not whole")
    dist.destroy_process_group()
    return "batches of a rank are whole"


_NO_GRAPH = {"timing": ["--timing", "events"], "train": ["--no-graph"]}
_RANKS = {"skip": ["rank-draw*"]}
FEATURES: dict[str, Feature] = {
    "machine": Feature(machine),
    "transitions": Feature(beside_the_host(_transitions)),
    "uniform": Feature(beside_the_host(lambda device: _transitions(device, Uniform()))),
    "ranks": Feature(beside_the_host(lambda device: _transitions(device, RankBased())), _RANKS),
    "steps": Feature(beside_the_host(_steps, _steps_of_life), {"skip": ["frame*"]}),
    "goals": Feature(beside_the_host(_goals, _steps_of_life)),
    "launch": Feature(launch, {"environment": ["GPU_REPLAY_PLAIN_LAUNCH=1"]}),
    "capture": Feature(captured_step(), _NO_GRAPH),
    "capture-add": Feature(captured_step(adds=True), _NO_GRAPH),
    "capture-ranks": Feature(captured_step(RankBased()), _RANKS),
    "capture-none": Feature(capture_of_adds, _NO_GRAPH),
    "capture-fails": Feature(capture_that_fails, _NO_GRAPH),
    "streams": Feature(streams),
    "pinned": Feature(pinned, {"pytest": ["--ignore=tests/durability/test_places.py"]}),
    "scan": Feature(scan, {"skip": ["prefix-sum*"]}),
    "contended": Feature(contended),
    "catch": Feature(trained("catch"), limit=40.0, long=True),
    "device-pong": Feature(trained("device-pong", "--eval-every", "1000000000"), limit=40.0, long=True),
    "nccl": Feature(nccl),
}


def run(output: Path | None, seconds: float = 180.0, *, short: bool = False) -> int:
    """Try all features for at most `seconds`; returns the exit status: 0 all ok, 1 some not, 3 no launch.

    output: a file of JSON lines, replaced.
    short:  without what takes long.
    """
    until, status, rows = time.monotonic() + seconds, 0, []
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("")
    for name, feature in FEATURES.items():
        if short and feature.long:
            continue
        began = time.monotonic()
        verdict, message = _tried(feature, min(feature.limit, until - began))
        line: dict[str, Any] = {"feature": name, "verdict": verdict, "message": message}
        line |= {"seconds": round(time.monotonic() - began, 2), "date": now()}
        print(f"VERDICT {name} {verdict} {line['seconds']:.1f}s {message}", flush=True)
        rows.append([name, verdict, f"{line['seconds']:.1f}", message[:100]])
        if verdict != "ok":
            line["fallback"], status = dict(feature.fallback), 1
        if output:
            with output.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if status and name == next(iter(FEATURES)):
            status = NO_LAUNCH
            break
    print(table(["feature", "verdict", "s", "message"], rows), flush=True)
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
