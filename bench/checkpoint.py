"""Saving and loading a buffer of Atari frames, compared with a plain sequential write and read of as many bytes.

Files are dropped from the page cache before they are read, so reads come from the disk; a plain read reuses one block
of memory. Before a buffer is saved again, one frame in a hundred is replaced.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gpu_replay import Field, ReplayBuffer
from gpu_replay.console.markdown import table
from gpu_replay.console.progress import Progress
from gpu_replay.engines.memory import free_bytes

from .measure import Plan, Run
from .operations import OURS, Case
from .records import Record
from .subjects import FRAME_BYTES, Bound

BARE = "plain file"
MOST_BYTES, QUICK_BYTES = 20 * 10**9, 5 * 10**7
_CHUNK = 8 << 20


def cases(quick: bool) -> list[Case]:
    """All that is measured, for as many frames as there are memory and disk for; at most 20 GB."""
    memory, disk = free_bytes(torch.device("cpu")), shutil.disk_usage(Path.cwd()).free
    most = QUICK_BYTES if quick else min(MOST_BYTES, 0.3 * (memory or MOST_BYTES), 0.25 * disk)
    names = ("checkpoint-save", "checkpoint-load", "checkpoint-again")
    return [Case(name, int(most) // FRAME_BYTES, 0) for name in names]


def records(run: Run, cases: Sequence[Case], progress: Progress) -> Iterator[Record]:
    """Times of saving, loading and saving again, for both."""
    count, rounds = cases[0].capacity, 1 if run.quick else 3
    run = replace(run, plan=Plan(0, 0, fewest=rounds, most=rounds))
    with tempfile.TemporaryDirectory(prefix="gpu-replay-", dir=Path.cwd()) as name:
        work = _Work(Path(name), count)

        def measured(case: Case) -> Iterator[Record]:
            for record in run.timed(case, work.bound()[case.operation], progress):
                moved = work.written() if case.operation == "checkpoint-again" else case.bytes
                yield replace(record, bytes=moved, copy_share=None)

        yield from run.each(cases, progress, measured)


class _Work:
    """A buffer of random frames that was saved once."""

    def __init__(self, folder: Path, count: int) -> None:
        self._plain, self._saved = folder / "plain", folder / "saved"
        self._buffer = ReplayBuffer(count, {"obs": Field((FRAME_BYTES,), torch.uint8)}, device="cpu")
        random = np.random.default_rng(0)
        for begin in range(0, count, 1000):
            rows = min(1000, count - begin)
            self._buffer.add(obs=random.integers(0, 256, (rows, FRAME_BYTES), dtype=np.uint8))
        self._some = np.zeros((count // 100, FRAME_BYTES), dtype=np.uint8)
        self._before: set[str] = set()
        self._loaded: ReplayBuffer | None = None
        self._write()
        self._save()

    def bound(self) -> dict[str, dict[str, Bound]]:
        """Calls by operation and implementation, and what comes before each."""
        clear = partial(shutil.rmtree, self._saved)
        return {
            "checkpoint-save": {BARE: (self._write, lambda: None), OURS: (self._save, clear)},
            "checkpoint-load": {BARE: (self._read, self._forget), OURS: (self._load, self._forget)},
            "checkpoint-again": {OURS: (self._save, self._change)},
        }

    def written(self) -> int:
        """Bytes of the files that the last save wrote."""
        return sum(file.stat().st_size for file in self._saved.iterdir() if file.name not in self._before)

    def _save(self) -> None:
        self._buffer.save(self._saved)

    def _load(self) -> None:
        self._loaded = ReplayBuffer.load(self._saved, device="cpu")

    def _change(self) -> None:
        self._before = {file.name for file in self._saved.iterdir()}
        self._buffer.add(obs=self._some)

    def _write(self) -> None:
        memory = self._buffer._storage.tensors["obs"].numpy().reshape(-1).data
        with open(self._plain, "wb", buffering=0) as out:
            for begin in range(0, len(memory), _CHUNK):
                out.write(memory[begin : begin + _CHUNK])
            os.fsync(out.fileno())

    def _read(self) -> None:
        chunk = bytearray(_CHUNK)
        with open(self._plain, "rb", buffering=0) as file:
            while file.readinto(chunk):
                pass

    def _forget(self) -> None:
        """Drop the files from the page cache, and what was loaded from memory."""
        self._loaded = None
        for path in (self._plain, *self._saved.iterdir()):
            with open(path) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def checkpoint_table(found: Sequence[Record], peers: Sequence[Record] = ()) -> str:
    """One line for each way of moving the bytes: seconds, throughput, and share of the plain file's."""
    times = {(record.operation, record.implementation): record for record in found}
    names = {
        ("checkpoint-save", BARE): "plain sequential write",
        ("checkpoint-save", OURS): "`save` to a new folder",
        ("checkpoint-load", BARE): "plain sequential read",
        ("checkpoint-load", OURS): "`load`",
        ("checkpoint-again", OURS): "`save` again, 1% of the frames new",
    }
    rows = []
    for (operation, implementation), name in names.items():
        if record := times.get((operation, implementation)):
            seconds, moved, bare = record.median / 1e6, record.bytes / 1e9, times.get((operation, BARE))
            share = "" if bare is None else f"{100 * bare.median / record.median:,.0f}%"
            rows.append([name, f"{moved:,.2f}", f"{seconds:,.2f}", f"{moved / seconds:,.2f}", share])
    return table(["what is done", "GB", "s", "GB/s", "of the plain file's"], rows)
