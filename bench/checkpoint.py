"""Saving and loading a buffer of Atari frames, compared with a plain sequential write and read of as many bytes.

Each round writes and reads plainly, saves to a new folder, loads, replaces one frame in a hundred and saves again.
Files are dropped from the page cache before they are read, so reads come from the disk. A plain read reuses one block
of memory.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_replay import Field, ReplayBuffer
from gpu_replay.console.markdown import table
from gpu_replay.console.progress import Progress
from gpu_replay.engines.storage import free_bytes

from .cases import OURS, Case
from .measure import Run, quantiles
from .records import Record
from .rows import FRAME_BYTES

BARE = "plain file"
MOST_BYTES, QUICK_BYTES = 20 * 10**9, 5 * 10**7
_CHUNK = 8 << 20


def cases(quick: bool) -> list[Case]:
    """All that one round measures, for as many frames as there are memory and disk for; at most 20 GB."""
    memory, disk = free_bytes(torch.device("cpu")), shutil.disk_usage(Path.cwd()).free
    most = QUICK_BYTES if quick else min(MOST_BYTES, 0.3 * (memory or MOST_BYTES), 0.25 * disk)
    names = ("checkpoint-save", "checkpoint-load", "checkpoint-again", "checkpoint-memory")
    return [Case(name, int(most) // FRAME_BYTES, 0) for name in names]


def records(run: Run, cases: Sequence[Case], progress: Progress) -> Iterator[Record]:
    """Times of saving, loading and saving again, for both; and what both take of memory beyond the buffer's."""
    count, rounds = cases[0].capacity, 1 if run.quick else 3
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-replay-", dir=Path.cwd()) as name:
        for number in range(rounds):
            progress.show(f"round {number + 1} of {rounds}, {count * FRAME_BYTES / 1e9:,.1f} GB")
            for key, value in _round(Path(name), count):
                found.setdefault(key, []).append(value)
    written = int(found.pop(("written", OURS))[-1])
    wanted = {case.operation: case for case in cases}
    for (operation, implementation), values in found.items():
        more: dict[str, Any] = {"unit": "bytes", "copy_share": None}
        if operation != "checkpoint-memory":
            moved = written if operation == "checkpoint-again" else count * FRAME_BYTES
            more = {"bytes": moved, "seconds": sum(values), "timing": "host"}
        if operation in wanted:
            spread = quantiles(np.array(values) * (1e6 if "seconds" in more else 1))
            yield run.record(wanted[operation], implementation, spread, rounds, **more)
    progress.advance(len(cases))


def _round(folder: Path, count: int) -> Iterator[tuple[tuple[str, str], float]]:
    """(operation, implementation) and seconds, or bytes of memory, or of files under "written"."""
    plain, saved = folder / "plain", folder / "saved"
    yield from _saves(plain, saved, count)
    gc.collect()
    _forget([plain, *saved.iterdir()])
    yield ("checkpoint-load", BARE), _timed(lambda: _read(plain))
    taken = _status("VmRSS")
    loaded: list[ReplayBuffer] = []
    yield ("checkpoint-load", OURS), _timed(lambda: loaded.append(ReplayBuffer.load(saved, device="cpu")))
    yield ("checkpoint-memory", "load"), _status("VmHWM") - taken - loaded[0].nbytes
    plain.unlink()
    shutil.rmtree(saved)


def _saves(plain: Path, saved: Path, count: int) -> Iterator[tuple[tuple[str, str], float]]:
    buffer = ReplayBuffer(count, {"obs": Field((FRAME_BYTES,), torch.uint8)}, device="cpu")
    random = np.random.default_rng(0)
    for begin in range(0, count, 1000):
        rows = min(1000, count - begin)
        buffer.add(obs=random.integers(0, 256, (rows, FRAME_BYTES), dtype=np.uint8))
    memory = buffer._storage.tensors["obs"].numpy().reshape(-1).data
    yield ("checkpoint-save", BARE), _timed(lambda: _write(plain, memory))
    taken = _status("VmRSS")
    yield ("checkpoint-save", OURS), _timed(lambda: buffer.save(saved))
    yield ("checkpoint-memory", "save"), _status("VmHWM") - taken
    before = {file.name for file in saved.iterdir()}
    buffer.add(obs=np.zeros((count // 100, FRAME_BYTES), dtype=np.uint8))
    yield ("checkpoint-again", OURS), _timed(lambda: buffer.save(saved))
    yield ("written", OURS), sum(file.stat().st_size for file in saved.iterdir() if file.name not in before)


def _timed(call: Callable[[], object]) -> float:
    # reset the peak of this process's memory
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _write(path: Path, memory: memoryview) -> None:
    with open(path, "wb", buffering=0) as out:
        for begin in range(0, len(memory), _CHUNK):
            out.write(memory[begin : begin + _CHUNK])
        os.fsync(out.fileno())


def _read(path: Path) -> None:
    chunk = bytearray(_CHUNK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(chunk):
            pass


def _forget(files: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status does not tell {name}.")


def checkpoint_table(found: Sequence[Record], peers: Sequence[Record] = ()) -> str:
    """One line for each way of moving the bytes: seconds, throughput, and share of the plain file's."""
    times = {(record.operation, record.implementation): record for record in found if record.unit == "us"}
    names = {
        ("checkpoint-save", BARE): "plain sequential write",
        ("checkpoint-save", OURS): "`save` to a new folder",
        ("checkpoint-load", BARE): "plain sequential read",
        ("checkpoint-load", OURS): "`load`",
        ("checkpoint-again", OURS): "`save` again, 1% of the frames new",
    }
    rows = []
    for (operation, implementation), name in names.items():
        if (operation, implementation) not in times:
            continue
        record, bare = times[operation, implementation], times.get((operation, BARE))
        seconds, share = record.median / 1e6, "" if bare is None else f"{100 * bare.median / record.median:,.0f}%"
        moved = record.bytes / 1e9
        rows.append([name, f"{moved:,.2f}", f"{seconds:,.2f}", f"{moved / seconds:,.2f}", share])
    memory = {record.implementation: record.median / 2**20 for record in found if record.unit == "bytes"}
    header = ["what is done", "GB", "s", "GB/s", "of the plain file's"]
    resident = ", ".join(f"`{name}` {size:,.0f} MiB" for name, size in memory.items())
    return f"{table(header, rows)}\n\nPeak of resident memory beyond the buffer's own: {resident}."
