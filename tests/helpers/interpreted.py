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
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

kernel_device = pytest.fixture(
    params=[*(["cpu"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)], name="device"
)(lambda request: request.param)


def interpret_quickly() -> None:
    """Give Triton's language its interpreted form for the rest of this process.

    The interpreter does so anew at each launch and at each call of a function within a kernel, for a third of its time.
    A Triton whose interpreter has another form of that stays as it is.
    """
    # where there is no Triton, nothing is interpreted
    with suppress(ImportError, AttributeError):
        from triton.runtime import interpreter

        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core}))
        # a launch undoes in the end what it gets here
        interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)


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
