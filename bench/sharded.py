"""Bytes that each rank of a memory over several ranks sends in one step, a sample and an update of its rows.

Ranks are processes on gloo, and Linux counts what they send on the loopback device: headers and acknowledgements too.
The bytes of the messages themselves, which NCCL sends as well, are calculated beside them. Beside them stand the bytes
of `ShardedReplayBuffer(mode="local")` of the versions until 0.3.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gpu_replay import Field, Proportional, ReplayBuffer, ShardedReplay
from gpu_replay.console.markdown import number, table
from gpu_replay.console.progress import Progress

from .measure import Part, Run, quantiles
from .operations import Case
from .records import Record

RANKS = (2, 4, 8)
# slots of each rank, all of them stored, and rows that it samples
SLOTS, ROWS = 1024, 256
# bytes of a row, which never leaves its rank
WIDTH = 64
NOW, BEFORE = "bytes", "local, bytes"
_STEPS, _ROUNDS = 50, 5


def parts(quick: bool) -> list[Part]:
    """One case for each number of ranks: so many thousand slots in all."""
    return [([Case("sharded", ranks * SLOTS, ROWS) for ranks in (RANKS[:1] if quick else RANKS)], records)]


def sent() -> int:
    """Bytes that this machine has sent to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def _traffic(rank: int, ranks: int, store: str) -> list[float]:
    """In the process of one rank: bytes that a rank sends in a step, for each round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    priorities = torch.from_numpy(np.random.default_rng(rank).uniform(0.1, 2.0, SLOTS))
    fields = {"pixels": Field((WIDTH,), torch.uint8)}
    buffer = ReplayBuffer(SLOTS, fields, sampler=Proportional(), device="cpu", seed=rank)
    buffer.add(pixels=np.zeros((SLOTS, WIDTH), np.uint8), priority=priorities)
    shard = ShardedReplay(buffer)

    def steps(count: int) -> int:
        dist.barrier()
        before = sent()
        for _ in range(count):
            batch = shard.sample(ROWS)
            shard.update_priorities(batch.key, priorities[:ROWS])
        dist.barrier()
        return sent() - before

    steps(1)
    found = [(steps(_STEPS) - steps(0)) / _STEPS / ranks for _ in range(_ROUNDS)]
    shard.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def records(run: Run, cases: Sequence[Case], progress: Progress) -> Iterator[Record]:
    """Bytes of a step; each case starts its ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "gpu_replay"])

    def measured(case: Case) -> Iterator[Record]:
        ranks = case.capacity // SLOTS
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, context) as pool:
            # all ranks saw the same bytes go by
            found, *_ = pool.map(partial(_traffic, ranks=ranks, store=f"{folder}/store"), range(ranks))
        more: dict[str, Any] = {"fields": {"pixels": ["uint8", [WIDTH]]}, "bytes": WIDTH, "copy_share": None}
        yield run.record(case, NOW, quantiles(np.array(found)), _STEPS * _ROUNDS, unit="bytes", **more)

    return run.each(cases, progress, measured)


def sharded_table(records: Sequence[Record], peers: Sequence[Record] = ()) -> str:
    """Bytes of a step over the number of ranks, and what they were before."""
    found = {(each.capacity // SLOTS, each.implementation): number(each.median / 1000) for each in records}
    # of a step in rings, as NCCL sends them: four numbers for every other rank
    lines = [
        [str(ranks), found.get((ranks, BEFORE), ""), found[ranks, NOW], number((ranks - 1) * 4 * 8 / 1000)]
        for ranks, implementation in sorted(found)
        if implementation == NOW
    ]
    return table(["ranks", "until 0.3, kB", "now, kB", "messages alone, kB"], lines)
