"""Tests before measurements: do the tests of the measured operations pass?

A fast operation that gives wrong answers is worth nothing. Before a run, the tests that its operations name are run,
once per state of the sources. Every record of the run names the failing tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from gpu_replay.console.atomic_files import write_text

from .operations import ANSWERS, OPERATIONS
from .records import CannotMeasure, checkout, device_slug

# on a GPU: every operation in small beside the host code; the others take minutes there, and come after the records
GPU_TESTS = f"gpu_smoke {ANSWERS}_on_a_gpu"
# on a CPU host code is measured, on a GPU kernels; the interpreter is neither and takes long
_WITHOUT = ("-k", "not interpreted")
_MARKS = {"cpu": "not gpu and not slow", "cuda": "gpu and not slow"}
# prefix of the failing test's name if the tests could not be run
GATE = "gate: "
# names of failing tests that a record holds
_NAMED = 20
# seconds that the tests may take on a GPU, where a lost device lets them wait for ever
_LIMIT = 90


def selection(root: Path, operations: Iterable[str], device: torch.device) -> list[str]:
    """The tests of these operations in a checkout, each once, as pytest takes them."""
    places = {path.stem: path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}
    named = [GPU_TESTS] if device.type == "cuda" else [OPERATIONS[each].tests for each in operations]
    parts = [name.partition("::") for name in dict.fromkeys(" ".join(named).split())]
    return [places.get(f"test_{file}", f"tests/test_{file}.py") + mark + test for file, mark, test in parts]


def failed_tests(operations: Iterable[str], device: torch.device) -> list[str] | None:
    """Names of the tests of these operations that fail, at most 20; None outside of a checkout, which has no tests.

    Only tests without a cached outcome are run. Raises CannotMeasure if they cannot be run. On a GPU, which may not be
    available again soon, that is reported as a failing test named "gate: ..." instead.
    """
    root = checkout()
    if root is None or not (root / "tests").is_dir():
        return None
    tests, state = selection(root, operations, device), _state(root, device)
    file = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpu-replay" / "test-outcomes.json"
    # outcomes of the last state: tests to the names of those that failed
    known: dict[str, list[str]] = {}
    with suppress(OSError, ValueError):
        known = json.loads(file.read_text()).get(state, {})
    if new := [test for test in tests if test not in known]:
        print(f"running the tests in {', '.join(new)} before measuring", file=sys.stderr, flush=True)
        try:
            failed = run(root, new, _MARKS[device.type], _LIMIT if device.type == "cuda" else None)
        except CannotMeasure as reason:
            if device.type != "cuda":
                raise
            failed = [f"{GATE}{reason}"]
        known |= {test: [name for name in failed if name.startswith((GATE, test.split("::")[0]))] for test in new}
        # where nothing can be written, the next run tests again
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps({state: known}))
    return list(dict.fromkeys(name for test in tests for name in known[test]))[:_NAMED]


def run(root: Path, tests: Sequence[str], marks: str, seconds: float | None = None) -> list[str]:
    """Run tests with such marks in a process of their own; names of those that fail or cannot be collected.

    Raises CannotMeasure where they are not run to their end, within so many seconds.
    """
    options = ("-q", "-rfE", "--tb=no", "--no-header", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    command = [sys.executable, "-m", "pytest", *options, *_WITHOUT, "-m", marks, *tests]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise CannotMeasure(f"the tests did not end within {seconds:.0f} s") from error
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode and not failed:
        last = lines[-1] if lines else "no output"
        raise CannotMeasure(f"the tests could not be run; pytest ended with {done.returncode}: {last}")
    return failed


def _state(root: Path, device: torch.device) -> str:
    """A hash of all sources, the version of torch and the device."""
    files = (file for folder in ("gpu_replay", "kernels", "bench", "tests") for file in (root / folder).rglob("*.py"))
    sources = b"".join(f"\0{file}\0".encode() + file.read_bytes() for file in sorted(files))
    return hashlib.sha256(f"{torch.__version__} {device_slug(device)}".encode() + sources).hexdigest()
