"""Machine code of loops belongs to their sources by content, and a cache that fails costs time, never a call."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from children import in_a_child, needs_fork
from test_interrupts import interrupt_everywhere

from gpu_replay import Field, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.loops import compiling
from gpu_replay.loops.compiling import compiler
from gpu_replay.ops import advice

LOOPS = Path(__file__).resolve().parents[2] / "gpu_replay" / "loops"
# the mass before a slot depends on a number that the loop takes from another file
LOWEST = """
import numpy as np, sys
from gpu_replay.loops import masses
sums, starts = np.arange(64), np.array([0, 32, 64])
"""
PRINT = "loop = masses.mass_before.compiled()\nprint(loop(sums, starts, 20))\n"
# with nodes of 16 children, and as if of 32
BEFORE, AFTER = str(16 + 17 + 18 + 19 + 32), str(sum(range(20)))
HITS = "print(sum(loop.stats.cache_hits.values()))\n"

needs_numba = pytest.mark.skipif(compiler() is None, reason="Numba is not installed, or told not to compile")


@pytest.fixture(name="package")
def package_fixture(tmp_path: Path) -> Path:
    """A package with the loops alone, which imports in a fraction of the time."""
    shutil.copytree(LOOPS, tmp_path / "gpu_replay" / "loops", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "gpu_replay" / "__init__.py").touch()
    return tmp_path


def started(package: Path, program: str, **environment: str) -> subprocess.Popen[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")}
    known |= {"PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", LOWEST + program], text=True, env=known, cwd=package, **pipes)


def printed(package: Path, program: str, **environment: str) -> list[str]:
    process = started(package, program, **environment)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return out.split()


def change(package: Path) -> None:
    """Another number in a file of the same length and times."""
    file = package / "gpu_replay" / "loops" / "constants.py"
    before, times = file.read_text(), file.stat()
    file.write_text(before.replace("\nSHIFT = 4\n", "\nSHIFT = 5\n"))
    assert file.read_text() != before
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == times.st_size


@needs_numba
def test_machine_code_of_other_sources_is_never_run(package: Path) -> None:
    """Neither where a copy keeps times, nor where a process that loaded the old sources compiles after a pull. Damaged
    code is made anew."""
    waiting = started(package, "print('loaded', flush=True)\nsys.stdin.readline()\n" + PRINT)
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "loaded\n"
    change(package)
    out, _ = waiting.communicate("\n", timeout=120)
    assert out.split() == [BEFORE]
    assert printed(package, PRINT + HITS) == [AFTER, "0"]
    kept = list(package.rglob("*.nbi"))
    assert kept
    for index in kept:
        # as a power cut leaves it
        index.write_bytes(b"")
    # without a cache, then for the cache, then from it
    assert printed(package, PRINT) == [AFTER]
    for hits in "01":
        assert printed(package, PRINT + HITS) == [AFTER, hits]


@needs_numba
@pytest.mark.skipif(sys.platform == "win32", reason="limits of the size of files")
def test_a_cache_that_cannot_be_written_costs_no_call(package: Path) -> None:
    full = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    pipe = "sys.stdout.flush()\n"
    assert printed(package, full + PRINT + pipe) == [BEFORE]
    (package / "file").touch()
    assert printed(package, PRINT, NUMBA_CACHE_DIR=str(package / "file")) == [BEFORE]


@needs_numba
@pytest.mark.skipif(not hasattr(__import__("signal"), "setitimer"), reason="timers that interrupt")
def test_an_interrupt_while_code_is_compiled_leaves_it_usable(package: Path) -> None:
    program = """
import signal
from gpu_replay.loops.compiling import compiler
compiler()
interrupts = 0
# a callback of the compiler may swallow it, and compilation goes on
def interrupt(*_):
    global interrupts
    interrupts += 1
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
for delay in (0.02, 0.2, 1.0):
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        masses.update.compiled()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
print(interrupts > 0)
"""
    assert printed(package, program + PRINT) == ["True", BEFORE]


@pytest.mark.parametrize("way", ["told", "missing"])
def test_loops_run_as_they_are_where_nothing_compiles(package: Path, way: str) -> None:
    environment = {"NUMBA_DISABLE_JIT": "1"} if way == "told" else {}
    missing = "sys.modules['numba'] = None\n" if way == "missing" else ""
    assert printed(package, missing + PRINT + "print(loop is masses.mass_before.function)\n", **environment) == [
        BEFORE,
        "True",
    ]


@needs_fork
def test_an_interrupt_leaves_no_lock_held() -> None:
    def work() -> int:
        def nothing() -> None:
            """A mock would be interrupted itself."""

        def ready() -> None:
            compiling.Loop(lambda: None, (), {}).compiled()

        # what takes no time is compiled as often as there are places
        with mock.patch.object(compiling, "compiler", nothing):
            return interrupt_everywhere(ready, [ready], range)

    assert in_a_child(work) > 20


MAKERS = (partial(ReplayBuffer, 4), partial(TrajectoryReplayBuffer, 4, 2)) * 2
FIELDS = {"obs": Field((2,), torch.float32), "action": Field((), torch.int64)}


@needs_fork
@pytest.mark.parametrize("way", ["always", "error", "told not to compile"])
def test_a_process_without_numba_is_told_once_what_it_costs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_REPLAY_BACKEND", raising=False)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1" if way == "told not to compile" else "0")

    def work() -> list[str]:
        """What buffers say that are made where Numba is missing, with the file that it is said of."""
        sys.modules["numba"], advice._told_of_python, said = None, False, []  # type: ignore[assignment]
        compiling.compiler.cache_clear()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always" if way == "always" else "error")
            for make in MAKERS:
                try:
                    make(FIELDS, device="cpu")
                except UserWarning as warning:
                    said.append(f"{__file__}: {warning}")
        return said + [f"{each.filename}: {each.message}" for each in heard]

    said = in_a_child(work)
    assert len(said) == (way != "told not to compile")
    for text in said:
        assert text.startswith(f"{__file__}: Numba is not installed")
        assert re.search(r"20 to 300 times slower\. Run: pip install .*\[cpu\]", text)
