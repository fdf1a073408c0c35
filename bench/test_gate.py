"""Tests before measurements: which tests belong to which operation, and whether they pass.

A fast operation that gives wrong answers is worth nothing. Before a run the tests of its operations are run, each once
for a state of the sources: the outcome is cached by a hash of all that it depends on. Failing tests are named in every
record of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from gpu_replay.console.atomic_files import write_text

from .environment import checkout, installed_version
from .results import device_slug

_RING = ("tests/test_buffer_ring.py", "tests/test_buffer_add_inputs.py")
_DRAW = ("tests/test_proportional.py",)
_UPDATE = ("tests/test_priorities.py",)
_RANK = ("tests/test_rank_based.py",)
_FRAMES = ("tests/test_trajectory_oracle.py",)
_UNIFORM = ("tests/test_uniform.py",)
_THREADS = ("tests/test_gather_threads.py",)
_LOOPS = ("tests/test_numba_loops.py",)
_STORAGE = ("tests/test_bench_storage.py",)
_CHECKPOINT = (
    "tests/test_checkpoint.py",
    "tests/test_checkpoint_incremental.py",
    "tests/test_checkpoint_direct.py",
)
_ANSWERS = ("tests/test_bench_kernels.py::test_every_implementation_gives_right_answers",)

# operation: its tests, as pytest takes them
TESTS: dict[str, tuple[str, ...]] = {
    "add": _RING,
    "sample": _DRAW,
    "update": _UPDATE,
    "cycle": (*_RING, *_DRAW, *_UPDATE),
    "index": (*_DRAW, *_UPDATE),
    "memory": ("tests/test_memory.py::test_nbytes_holds_the_payload_and_little_more",),
    "frames": _FRAMES,
    "frame-add": _FRAMES,
    "frame-cycle": (*_FRAMES, *_UPDATE),
    "step-add": _RING,
    "step-exact": _RING,
    "step-cycle": (*_RING, *_DRAW, *_UPDATE),
    "step-uniform": (*_RING, *_UNIFORM),
    "ratio-rank": (*_RANK, *_DRAW),
    "ratio-replacement": _UNIFORM,
    "ratio-loops": _LOOPS,
    "ratio-hindsight": ("tests/test_hindsight.py",),
    "ratio-threads": (*_FRAMES, *_THREADS),
    "ratio-threads-stacks": (*_DRAW, *_THREADS),
    "storage-one": _STORAGE,
    "storage-blocks": _STORAGE,
    "storage-batches": _STORAGE,
    "checkpoint-save": _CHECKPOINT,
    "checkpoint-load": _CHECKPOINT,
    "checkpoint-again": _CHECKPOINT,
    "checkpoint-memory": _CHECKPOINT,
    "empty": _ANSWERS,
    "prefix-sum": ("tests/test_prefix_sum.py",),
    "tree-build": ("tests/test_prefix_sum.py", *_DRAW),
    "draw": _DRAW,
    "draw-update": (*_DRAW, *_UPDATE),
    "rank-draw": _RANK,
    "row-gather": _RING,
    "frame-gather": _FRAMES,
    "frame-gather-bf16": _FRAMES,
    "frame-gather-f16": _FRAMES,
}
# on a GPU: every operation in small beside the host code; the others take minutes there, and come after the records
GPU_TESTS = ("tests/test_gpu_smoke.py", f"{_ANSWERS[0]}_on_a_gpu")
# on a CPU host code is measured, on a GPU kernels; the interpreter is neither and takes long
_WITHOUT = ("-k", "not interpreted")
_MARKS = {"cpu": "not gpu and not slow", "cuda": "gpu and not slow"}
# outcomes that are cached, and names of failing tests that a record holds
_KEPT, _NAMED = 200, 20


class CannotTest(Exception):
    """The tests of what is to be measured cannot be run."""


def selection(operations: Iterable[str], device: torch.device) -> list[str]:
    """The tests of these operations, each once.

    Raises KeyError for an operation that names none.
    """
    chosen: list[str] = []
    for operation in operations:
        if operation not in TESTS:
            raise KeyError(f"no tests are named for {operation!r}; add them to TESTS in {Path(__file__).name}.")
        chosen += GPU_TESTS if device.type == "cuda" else TESTS[operation]
    return list(dict.fromkeys(chosen))


def failed_tests(operations: Iterable[str], device: torch.device) -> list[str] | None:
    """Names of the tests of these operations that fail, at most 20; None outside of a checkout, which has no tests.

    Runs those whose outcome is not cached. Raises CannotTest where pytest is missing or finds no tests.
    """
    root = checkout()
    tests = selection(operations, device)
    if root is None or not (root / "tests").is_dir():
        return None
    states = states_of(root, tests, device)
    known = _cached()
    new = [test for test in tests if states[test] not in known]
    if new:
        print(f"running the tests in {', '.join(new)} before measuring", file=sys.stderr, flush=True)
        failed = run(root, new, _MARKS[device.type])
        known |= {states[test]: [name for name in failed if name.startswith(test.split("::")[0])] for test in new}
        _store(known)
    return list(dict.fromkeys(name for test in tests for name in known[states[test]]))[:_NAMED]


def run(root: Path, tests: Sequence[str], marks: str) -> list[str]:
    """Run tests with such marks in a process of their own; names of those that fail or cannot be collected."""
    options = ("-q", "-rfE", "--tb=no", "--no-header", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    command = [sys.executable, "-m", "pytest", *options, *_WITHOUT, "-m", marks, *tests]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode == 0 or failed:
        return failed
    if any("No module named pytest" in line for line in lines):
        raise CannotTest(
            "pytest is missing, so nothing can be recorded: pip install 'gpu-replay[tests]', or try --quick."
        )
    last = lines[-1] if lines else "no output"
    raise CannotTest(f"the tests could not be run, so nothing is recorded; pytest ended with {done.returncode}: {last}")


def states_of(root: Path, tests: Sequence[str], device: torch.device) -> dict[str, str]:
    """For each test a hash of what its outcome depends on: sources, its file, versions and device."""
    shared = [file for file in (root / "tests").glob("*.py") if not file.name.startswith("test_")]
    sources = [file for name in ("gpu_replay", "kernels", "bench") for file in (root / name).rglob("*.py")]
    common = hashlib.sha256()
    for file in sorted({*shared, *sources, root / "pyproject.toml"}):
        common.update(str(file.relative_to(root)).encode() + b"\0" + _hash(file))
    versions = (platform.python_version(), torch.__version__, installed_version("triton"), np.__version__)
    common.update(repr((*versions, device_slug(device))).encode())
    states = {}
    for test in tests:
        own = common.copy()
        own.update(test.encode() + b"\0" + _hash(root / test.split("::")[0]))
        states[test] = own.hexdigest()
    return states


def _hash(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest()


def _cache() -> Path:
    """The file of outcomes: state to the names of failing tests. RuntimeError where there is no home folder."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "gpu-replay" / "test-outcomes.json"


def _cached() -> dict[str, list[str]]:
    try:
        found: dict[str, list[str]] = json.loads(_cache().read_text())
    except (OSError, RuntimeError, ValueError):
        return {}
    return found


def _store(known: dict[str, list[str]]) -> None:
    """Write the newest outcomes; where nothing can be written, the next run tests again."""
    with suppress(OSError, RuntimeError):
        _cache().parent.mkdir(parents=True, exist_ok=True)
        write_text(_cache(), json.dumps(dict(list(known.items())[-_KEPT:])))
