"""Kernels on CPU tensors. Triton decides once in a process, when it is imported, whether to interpret.

Without a GPU the tests' own processes interpret (see conftest.py); what compiles kernels runs in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

kernel_device = pytest.fixture(
    params=[*(["cpu"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)], name="device"
)(lambda request: request.param)


def patch_language_once() -> None:
    """Give Triton's language its interpreted form for the rest of this process.

    The interpreter does so anew at each launch and at each call of a function within a kernel, for a third of its time.
    """
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core}))
    # a launch undoes in the end what it gets here
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)


def run_apart(*arguments: str, before: Sequence[str] = (), **environment: str) -> int:
    """Run tests in a process of their own, by pytest alone or by a module that runs it; how many passed."""
    command = [sys.executable, "-m", *before, "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env={**os.environ, **environment}, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return int(re.findall(r"(\d+) passed", done.stdout)[0])
