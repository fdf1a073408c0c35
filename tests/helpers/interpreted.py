"""Kernels on CPU tensors. Triton decides once in a process, when it is imported, whether to interpret.

Without a GPU the tests' own processes interpret (see conftest.py); what compiles kernels runs in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

kernel_device = pytest.fixture(
    params=[*(["cpu"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)], name="device"
)(lambda request: request.param)


def interpret_quickly() -> None:
    """Let the interpreter replace Triton's language once for a launch, and not again in every function that the kernel
    calls: that is a quarter of the time of most launches."""
    # where there is no Triton, nothing is interpreted
    with suppress(ImportError):
        from triton.runtime import interpreter

        replaced = set()

        def call(function: Any, *given: Any, **named: Any) -> Any:
            # of one module all see the same language; what a launch has replaced it puts back itself
            module = id(function.fn.__globals__)
            if module not in replaced:
                replaced.add(module)
                interpreter._patch_lang(function.fn)
            return function.rewrite()(*given, **named)

        interpreter.InterpretedFunction.__call__ = call


def run_apart(*arguments: str, before: Sequence[str] = (), **environment: str) -> int:
    """Run tests in a process of their own, by pytest alone or by a module that runs it; how many passed."""
    command = [sys.executable, "-m", *before, "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return int(re.findall(r"(\d+) passed", done.stdout)[0])


def run_rehearsed(tests: str, chosen: str) -> int:
    """Run tests of a GPU without one; how many passed."""
    folders = ("", "tests/helpers", "tests/contract", "tests/programs")
    places = [*(str(ROOT / folder) for folder in folders), os.environ.get("PYTHONPATH", "")]
    return run_apart(tests, "-k", chosen, before=["rehearsal"], PYTHONPATH=os.pathsep.join(places))
