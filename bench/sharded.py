"""Rows and bytes that each rank of a sharded buffer sends in one step, a sample and an update of its rows.

Ranks are processes on gloo, and Linux counts what they send on the loopback device: headers and acknowledgements too.
The bytes of the messages themselves, which NCCL sends as well, are calculated beside them.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from gpu_replay import Field, Proportional, ShardedReplayBuffer
from gpu_replay.console.markdown import number, table
from gpu_replay.console.progress import Progress

from .measure import Part, Run, quantiles
from .operations import Case
from .records import Record

RANKS = (2, 4, 8, 16, 32, 64)
# slots of each rank, all of them stored, and rows that it samples
SLOTS, ROWS = 1024, 256
# bytes of a row: a stack of four frames of 84x84 before and after
WIDTH = 2 * 4 * 84 * 84
MODES: dict[str, tuple[Literal["local", "global"], bool]] = {
    "local": ("local", True),
    "global": ("global", True),
    "global, independent": ("global", False),
}
# bytes a second of a link between machines, 400 Gb/s
LINK = 50e9
_STEPS, _ROUNDS = 4, 5


def parts(quick: bool) -> list[Part]:
    """One case for each number of ranks: so many thousand slots in all."""
    return [([Case("sharded", ranks * SLOTS, ROWS) for ranks in (RANKS[:1] if quick else RANKS)], records)]


def sent() -> int:
    """Bytes that this machine has sent to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def _traffic(rank: int, ranks: int, store: str, width: int) -> dict[str, list[tuple[float, float]]]:
    """In the process of one rank: rows that it gets of others and bytes that a rank sends in a step, for each mode."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found: dict[str, list[tuple[float, float]]] = {}
    priorities = torch.from_numpy(np.random.default_rng(rank).uniform(0.1, 2.0, SLOTS))
    for name, (mode, stratified) in MODES.items():
        sampler = Proportional(stratified=stratified)
        fields = {"pixels": Field((width,), torch.uint8)}
        buffer = ShardedReplayBuffer(ranks * SLOTS, fields, sampler=sampler, mode=mode)
        buffer.add(pixels=np.zeros((SLOTS, width), np.uint8), priority=priorities)

        def steps(count: int, buffer: ShardedReplayBuffer = buffer) -> tuple[int, int]:
            rows = 0
            dist.barrier()
            before = sent()
            for _ in range(count):
                batch = buffer.sample(ROWS)
                buffer.update_priorities(batch.key, priorities[:ROWS])
                rows += int((batch.key % ranks != rank).sum())
            # the last message of an update arrives before the next call begins
            len(buffer)
            dist.barrier()
            return rows, sent() - before

        steps(1)
        pairs = [(steps(_STEPS), steps(0)) for _ in range(_ROUNDS)]
        found[name] = [(some[0] / _STEPS, (some[1] - none[1]) / _STEPS / ranks) for some, none in pairs]
        buffer.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def records(run: Run, cases: Sequence[Case], progress: Progress) -> Iterator[Record]:
    """Rows and bytes of every mode; each case starts its ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "gpu_replay"])

    def measured(case: Case) -> Iterator[Record]:
        ranks, width = case.capacity // SLOTS, 64 if run.quick else WIDTH
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, context) as pool:
            traffic = partial(_traffic, ranks=ranks, store=f"{folder}/store", width=width)
            all_ranks = list(pool.map(traffic, range(ranks)))
        more: dict[str, Any] = {"fields": {"pixels": ["uint8", [width]]}, "bytes": width, "copy_share": None}
        for name in MODES:
            # all ranks saw the same bytes go by, and each its own rows
            rows = np.array([[rows for rows, _ in each[name]] for each in all_ranks]).mean(0)
            for unit, values in (("rows", rows), ("bytes", np.array([each for _, each in all_ranks[0][name]]))):
                yield run.record(case, f"{name}, {unit}", quantiles(values), _STEPS * _ROUNDS, unit=unit, **more)

    return run.each(cases, progress, measured)


def payload(ranks: int, mode: str, rows: float, width: int) -> float:
    """Bytes of the messages that a rank sends in a step, in rings as NCCL sends them.

    A sample and an update begin with a row of numbers for every other rank, and an update ends with the largest mass;
    each row sampled elsewhere comes with its key and its mass, and its new priority goes back with its key.
    """
    numbers = (ranks - 1) * 2 * 8 * (1 + max(20, ranks)) + 2 * 8 * (ranks - 1) / ranks
    return numbers + (0 if mode == "local" else 8 * (ranks - 1) + rows * (width + 16 + 16))


def sharded_table(records: Sequence[Record], peers: Sequence[Record] = ()) -> str:
    """Rows and bytes of a step over the number of ranks, for every mode."""
    found = {(each.capacity // SLOTS, each.implementation): each for each in records}
    lines = []
    for ranks in sorted({ranks for ranks, _ in found}):
        for name, (mode, _) in MODES.items():
            rows, counted = found[ranks, f"{name}, rows"], found[ranks, f"{name}, bytes"]
            message = payload(ranks, mode, rows.median, rows.bytes)
            cells = [number(each) for each in (rows.median, counted.median / 1000, message / 1000)]
            lines.append([str(ranks), name, *cells, number(message / LINK * 1e6)])
    heads = ["ranks", "mode", "rows from others", "sent on gloo, kB", "messages alone, kB", "at 50 GB/s, µs"]
    return table(heads, lines)
