"""Kernels on CPU tensors. Triton decides once in a process, when it is imported, whether to interpret.

Without a GPU the tests' own processes interpret (see conftest.py); what compiles kernels runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

kernel_device = pytest.fixture(
    params=[*(["cpu"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)], name="device"
)(lambda request: request.param)


def run_compiled(file: str, *options: str) -> None:
    """Run a test file in a process in which Triton compiles kernels."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, file]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
