"""Kernels on CPU tensors: Triton decides once in a process whether to interpret, so they run in one of their own.

A test file that needs them has one test that starts this process, in which all its other tests run; in the first
process those are skipped. Where everything is interpreted anyway it is the other way round.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

first_process = pytest.mark.skipif(INTERPRETED, reason="this is the process of the interpreted kernels")


def run_interpreted(file: str, backend: str = "") -> None:
    """Run a test file, but for what needs a GPU, with interpreted kernels; `backend` for all its CPU tensors."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "GPU_REPLAY_BACKEND": backend}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", file]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], name="device")
def kernel_device(request: pytest.FixtureRequest) -> str:
    """The device of a test that launches kernels; skipped where they would have to be interpreted and are not."""
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("runs in a process of its own, interpreted")
    return str(request.param)
