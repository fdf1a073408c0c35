"""Nothing is recorded while the tests of what is measured are red: which tests hold which operation, and running them.

A figure of code that gives wrong answers is worth nothing, however fast. So before a run the tests of its operations
are run, each once for a state of the sources: that it passed is remembered by a hash of all that it depends on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from .environment import checkout, installed_version

_RING = ("tests/test_buffer_ring.py", "tests/test_buffer_add_inputs.py")
_DRAW = ("tests/test_proportional.py",)
_UPDATE = ("tests/test_priorities.py",)
_RANK = ("tests/test_rank_based.py",)
_FRAMES = ("tests/test_trajectory_oracle.py",)
_STORAGE = ("tests/test_bench_storage.py",)
_ANSWERS = ("tests/test_bench_kernels.py::test_every_implementation_gives_right_answers",)

# operation: the tests that hold it, as pytest takes them; those marked gpu run where there is one
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
    "storage-one": _STORAGE,
    "storage-blocks": _STORAGE,
    "storage-batches": _STORAGE,
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
# operation: tests that hold it on a GPU, beside those marked gpu in the files above
GPU_TESTS: dict[str, tuple[str, ...]] = {
    "empty": (f"{_ANSWERS[0]}_on_a_gpu",),
    **dict.fromkeys(("add", "sample", "update", "cycle", "draw", "draw-update"), ("tests/test_gpu.py",)),
    **dict.fromkeys(("frames", "frame-add", "frame-cycle"), ("tests/test_trajectory_gpu.py",)),
    "rank-draw": ("tests/test_rank_gpu.py",),
}
# what is measured is the host's code on a CPU and the kernels on a GPU; the interpreter is neither, and takes long
_WITHOUT = ("-k", "not interpreted")
_MARKS = {"cpu": "not gpu and not slow", "cuda": "gpu and not slow"}


# states that are remembered beside new ones
_KEPT = 200


class TestsFailed(Exception):
    """Tests of what is to be measured fail; the message names the first."""


def selection(operations: Iterable[str], device: torch.device) -> list[str]:
    """The tests of these operations, each once.

    Raises KeyError for an operation that names none.
    """
    chosen: list[str] = []
    for operation in operations:
        if operation not in TESTS:
            raise KeyError(f"no tests are named for {operation!r}; add them to TESTS in {Path(__file__).name}.")
        chosen += TESTS[operation]
        if device.type == "cuda":
            chosen += GPU_TESTS.get(operation, ())
    return list(dict.fromkeys(chosen))


def require_passing_tests(operations: Iterable[str], device: torch.device) -> Literal["passed"] | None:
    """Run the tests of these operations, unless they passed before; None outside of a checkout, which has no tests.

    Raises TestsFailed when they fail or cannot be run.
    """
    root = checkout()
    tests = selection(operations, device)
    if root is None or not (root / "tests").is_dir():
        return None
    states = states_of(root, tests, device)
    known = _remembered()
    new = [test for test in tests if states[test] not in known]
    if new:
        print(f"running the tests in {', '.join(new)} before anything is recorded", file=sys.stderr, flush=True)
        run(root, new, _MARKS[device.type])
        _remember([states[test] for test in new])
    return "passed"


def run(root: Path, tests: Sequence[str], marks: str) -> None:
    """Run tests with such marks in a process of their own; raises TestsFailed when one fails or none is found."""
    options = ("-q", "-x", "-rfE", "--tb=no", "--no-header", "-p", "no:cacheprovider", *_WITHOUT, "-m", marks)
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if any("No module named pytest" in line for line in lines):
        raise TestsFailed(
            "pytest is missing, so nothing can be recorded: pip install 'gpu-replay[tests]', or try --quick."
        )
    failed = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), None)
    if failed is None:
        failed = f"pytest ended with {done.returncode}: {lines[-1] if lines else 'no output'}"
        raise TestsFailed(f"the tests could not be run, so nothing is recorded; {failed}")
    name = failed.split(" - ")[0].split(" ", 1)[1]
    raise TestsFailed(f"{name} fails, so nothing is recorded. Mend it, or use --quick for a trial.")


def states_of(root: Path, tests: Sequence[str], device: torch.device) -> dict[str, str]:
    """For each test a hash of what its outcome depends on: sources, its file, versions and device."""
    shared = [file for file in (root / "tests").glob("*.py") if not file.name.startswith("test_")]
    sources = [file for name in ("gpu_replay", "kernels", "bench") for file in (root / name).rglob("*.py")]
    common = hashlib.sha256()
    for file in sorted({*shared, *sources, root / "pyproject.toml"}):
        common.update(str(file.relative_to(root)).encode() + b"\0" + _hash(file))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    versions = (platform.python_version(), torch.__version__, installed_version("triton"), np.__version__, name)
    common.update(repr(versions).encode())
    states = {}
    for test in tests:
        own = common.copy()
        own.update(test.encode() + b"\0" + _hash(root / test.split("::")[0]))
        states[test] = own.hexdigest()
    return states


def _hash(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest()


def _cache() -> Path | None:
    """The file that remembers; None where there is no place for it."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "gpu-replay" / "tests-passed.txt"
    except RuntimeError:
        return None


def _remembered() -> set[str]:
    file = _cache()
    try:
        return set() if file is None else set(file.read_text().split())
    except (OSError, UnicodeDecodeError):
        return set()


def _remember(states: list[str]) -> None:
    """Add the states; without a place to write, the next run tests again."""
    file = _cache()
    if file is None:
        return
    try:
        known = file.read_text().split() if file.is_file() else []
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([*known[-_KEPT:], *states]) + "\n")
    except (OSError, UnicodeDecodeError):
        return
