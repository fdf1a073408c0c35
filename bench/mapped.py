"""A ring in a mapped file beside one in memory and a plain read: `python -m gpu_replay.bench.mapped --folder DIR`.

The ring is larger than what the process may have in memory of its own (RLIMIT_DATA). That does not limit the system's
page cache, so batches are read twice: from the cache, and after it was told to drop the file.
"""

from __future__ import annotations

import argparse
import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gpu_replay import Field, Proportional, ReplayBuffer
from gpu_replay.engines.mapped_file import FILE_NAME

FIELDS = {
    "obs": Field((4, 84, 84), torch.uint8),
    "action": Field((), torch.int64),
    "reward": Field((), torch.float32),
}
ROW = 4 * 84 * 84 + 16
ADDED, BATCH = 64, 256
SPARE = 2**28


def main(argv: Sequence[str] | None = None) -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description="Times a ring in a mapped file; Linux only.")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--gb", type=float, default=6.0, help="of the ring (default: 6)")
    parser.add_argument("--batches", type=int, default=40, help="read in each way (default: 40)")
    options = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        print(*measured(options.folder, options.gb, options.batches), sep="\n")
    finally:
        torch.set_num_threads(threads)


def measured(folder: Path, gigabytes: float, batches: int) -> list[str]:
    """Lines of times; medians, per call."""
    import resource

    capacity = max(4 * ADDED, int(gigabytes * 1e9) // ROW)
    small = capacity // 10
    before = resource.getrlimit(resource.RLIMIT_DATA)
    rows = {
        "obs": np.random.default_rng(0).integers(0, 256, (ADDED, 4, 84, 84), dtype=np.uint8),
        "action": np.zeros(ADDED, dtype=np.int64),
        "reward": np.zeros(ADDED, dtype=np.float32),
    }
    memory = ReplayBuffer(small, FIELDS, sampler=Proportional(), device="cpu")
    for _ in range(-(-small // ADDED)):
        memory.add(**rows)
    _cycle(memory)
    # for libraries and batches; the smaller ring and all code are there already
    limit = _data_bytes() + SPARE
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        mapped = ReplayBuffer(capacity, FIELDS, sampler=Proportional(), device="cpu", storage_path=folder)
        first = [_timed(lambda: mapped.add(**rows)) for _ in range(-(-capacity // ADDED))]
        descriptor = os.open(folder / FILE_NAME, os.O_RDONLY)
        _cache(descriptor)
        again: dict[str, list[float]] = {"memory": [], "mapped": []}
        warm: dict[str, list[float]] = {"memory": [], "mapped": []}
        for _ in range(batches):
            for name, buffer in (("memory", memory), ("mapped", mapped)):
                again[name].append(_timed(partial(buffer.add, **rows)))
                warm[name].append(_timed(partial(_cycle, buffer)))
        try:
            cold = _cold(mapped, descriptor, lambda: _cycle(mapped), batches)
            plain = _cold(mapped, descriptor, lambda: _plain(descriptor, capacity), batches)
        finally:
            os.close(descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    lines = [f"ring of {capacity:,} rows, {capacity * ROW / 1e9:.2f} GB; own memory limited to {limit / 1e9:.2f} GB"]
    lines.append(
        f"add of {ADDED}, first lap: {_median(first)}, {ADDED * ROW / np.mean(first) / 1e9:.2f} GB/s on average"
    )
    for what, found in ((f"add of {ADDED}, later", again), (f"sample of {BATCH} and update, cached", warm)):
        times = [float(np.median(found[name])) for name in ("mapped", "memory")]
        lines.append(
            f"{what}: mapped {_median(found['mapped'])}, memory {_median(found['memory'])}, {times[0] / times[1]:.2f}x"
        )
    lines.append(f"sample of {BATCH} and update, not cached: {_median(cold)}")
    lines.append(f"plain reads of {BATCH} rows one after the other, not cached: {_median(plain)}")
    return lines


def _cache(descriptor: int) -> None:
    """Let nothing wait to be written, and all of it be in the page cache."""
    os.fsync(descriptor)
    piece, place = bytearray(2**24), 0
    while read := os.preadv(descriptor, [piece], place):
        place += read


def _cycle(buffer: ReplayBuffer) -> None:
    batch = buffer.sample(BATCH)
    buffer.update_priorities(batch.key, batch.weight)


def _plain(descriptor: int, capacity: int) -> None:
    out = bytearray(ROW)
    for slot in np.sort(np.random.default_rng().integers(0, capacity - 1, BATCH)).tolist():
        os.preadv(descriptor, [out], slot * ROW)


def _cold(buffer: ReplayBuffer, descriptor: int, call: Callable[[], object], times: int) -> list[float]:
    """Seconds of calls after the file has left the page cache, but for what earlier calls read again."""
    file = buffer._storage._memory._file if buffer._storage._memory else None
    if file is None:
        raise RuntimeError("the buffer has no mapped file.")
    os.fsync(descriptor)
    # pages that a process has mapped stay in the cache
    file.mapping.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return [_timed(call) for _ in range(times)]


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _median(seconds: Sequence[float]) -> str:
    return f"{1e6 * float(np.median(seconds)):,.0f} µs"


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


if __name__ == "__main__":
    main()
