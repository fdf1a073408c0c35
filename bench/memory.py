"""Resident memory of a full buffer, as the operating system counts it, in a process of its own.

Run as a module it fills one buffer and prints one line of JSON, which `measured` reads. In the same process, memory
freed by an earlier buffer would hide what the next one takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from .cases import OURS, Case
from .record import Record
from .rows import ROW_BYTES
from .runner import Run
from .subjects import ReplaySubject
from .timing import quantiles

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Bytes of this process in main memory; OSError where the system does not tell through /proc."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured(capacity: int) -> tuple[float, float]:
    """Resident bytes a stored transition in a new process, and the bytes that the buffer itself reports.

    Raises OSError where the system does not tell, RuntimeError when the process fails.
    """
    if not _STATM.is_file():
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
    spread, counted = quantiles(found[:, 0]), round(float(found[0, 1]), 2)
    more = {"unit": "bytes", "bytes": ROW_BYTES, "counted": counted, "copy_share": None}
    return run.record(Case("memory", capacity, 0), OURS, spread, repetitions, **more)


def _main() -> None:
    parser = argparse.ArgumentParser(description=f"Fill one buffer of {ROW_BYTES}-byte rows and print its memory.")
    parser.add_argument("--capacity", type=int, default=1_000_000)
    capacity = parser.parse_args().capacity
    torch.set_num_threads(1)
    # a small buffer first, kept, so that code and scratch memory of all calls are there before the reading
    small = ReplaySubject(8192, torch.device("cpu"))
    _use(small, 8192)
    before = resident_bytes()
    subject = ReplaySubject(capacity, torch.device("cpu"))
    _use(subject, capacity)
    print(json.dumps({"resident": resident_bytes() - before, "counted": subject.nbytes}))


def _use(subject: ReplaySubject, capacity: int) -> None:
    """Write every slot, then sample and update for a while."""
    for rows in islice(subject.stream(4096, pool=1), -(-capacity // 4096)):
        subject.add(rows)
    for _ in range(64):
        subject.update(subject.sample(256), torch.ones(256))
    gc.collect()


if __name__ == "__main__":
    _main()
