"""Resident memory of a full buffer, as the operating system counts it, in a process of its own.

Run as a module it fills one buffer and prints one line of JSON; `measured` runs it so and reads the line. A process of
its own, because what an earlier buffer freed would otherwise hide what the next one takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from .cases import short
from .record import Record
from .rows import ROW_BYTES, Rows, described, make_rows
from .runner import Run
from .subjects import ReplaySubject
from .timing import quantiles


def resident_bytes() -> int:
    """Bytes of this process in main memory; OSError where the system does not tell through /proc."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measured(capacity: int) -> tuple[float, float]:
    """Resident bytes a stored transition in a new process, and the bytes that the buffer itself counts.

    Raises OSError where the system does not tell, RuntimeError when the process fails.
    """
    if not Path("/proc/self/statm").is_file():
        raise OSError("resident memory is read from /proc, which this system does not have.")
    # the package may have been found through a path that only this process knows
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", __name__, "--capacity", str(capacity)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring memory failed: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout)
    return found["resident"] / capacity, found["counted"] / capacity


def record(run: Run, capacity: int, *, repetitions: int) -> Record:
    """Resident bytes a transition of a full buffer, beside the bytes of its fields; errors as of `measured`."""
    found = np.array([measured(capacity) for _ in range(repetitions)])
    return Record(
        suite=run.suite,
        case=f"memory/N={short(capacity)}",
        operation="memory",
        implementation="gpu_replay",
        capacity=capacity,
        batch=0,
        added=0,
        fields=described(),
        unit="bytes",
        quantiles={name: round(value, 2) for name, value in quantiles(found[:, 0]).items()},
        repetitions=repetitions,
        warmup=0,
        bytes=ROW_BYTES,
        counted=round(float(found[0, 1]), 2),
        copy_bandwidth=round(run.copy_bandwidth),
        copy_share=None,
        quick=run.quick,
        environment=run.environment,
        tests=run.tests,
    )


def _main() -> None:
    parser = argparse.ArgumentParser(description=f"Fill one buffer of {ROW_BYTES}-byte rows and say what it takes.")
    parser.add_argument("--capacity", type=int, default=1_000_000)
    capacity = parser.parse_args().capacity
    torch.set_num_threads(1)
    device = torch.device("cpu")
    rows = make_rows(4096, np.random.default_rng(0))
    # a small buffer first, kept, so that code and scratch memory of all calls are there before the reading
    small = ReplaySubject(8192, device)
    _use(small, 8192, rows)
    before = resident_bytes()
    subject = ReplaySubject(capacity, device)
    _use(subject, capacity, rows)
    print(json.dumps({"resident": resident_bytes() - before, "counted": subject.nbytes}))


def _use(subject: ReplaySubject, capacity: int, rows: Rows) -> None:
    """Write every slot, then sample and update for a while."""
    for _ in range(-(-capacity // len(rows["obs"]))):
        subject.add(rows)
    for _ in range(64):
        sampled = subject.sample(256)
        subject.update(sampled, torch.ones(256))
    gc.collect()


if __name__ == "__main__":
    _main()
