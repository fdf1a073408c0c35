"""Machine code of loops belongs to their sources by content, and a cache that fails costs time, never a call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from children import in_a_child, needs_fork
from test_interrupts import interrupt_everywhere

from gpu_replay.loops import compiling, tree
from gpu_replay.loops.compiling import compiler
from gpu_replay.loops.constants import Counter

LOOPS = Path(__file__).resolve().parents[2] / "gpu_replay" / "loops"
# the lowest mass of nothing is a number that the loop takes from another file
LOWEST = """
import numpy as np, sys
from gpu_replay.loops import tree
nothing = np.zeros(0, dtype=np.int64)
"""
PRINT = "loop = tree.lowest.compiled()\nprint(loop(nothing, nothing))\n"
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
    file.write_text(before.replace("NO_MASS = 2**63 - 1", "NO_MASS = 2**62 - 1"))
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
    assert out.split() == [str(2**63 - 1)]
    assert printed(package, PRINT + HITS) == [str(2**62 - 1), "0"]
    assert printed(package, PRINT + HITS) == [str(2**62 - 1), "1"]
    kept = list(package.rglob("*.nbi"))
    assert kept
    for index in kept:
        # as a power cut leaves it
        index.write_bytes(b"")
    assert printed(package, PRINT) == [str(2**62 - 1)]
    printed(package, PRINT)
    assert printed(package, PRINT + HITS) == [str(2**62 - 1), "1"]


@needs_numba
@pytest.mark.skipif(sys.platform == "win32", reason="limits of the size of files")
def test_a_cache_that_cannot_be_written_costs_no_call(package: Path) -> None:
    full = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    pipe = "sys.stdout.flush()\n"
    assert printed(package, full + PRINT + pipe) == [str(2**63 - 1)]
    (package / "file").touch()
    assert printed(package, PRINT, NUMBA_CACHE_DIR=str(package / "file")) == [str(2**63 - 1)]


@needs_numba
@pytest.mark.skipif(not hasattr(__import__("signal"), "setitimer"), reason="timers that interrupt")
def test_an_interrupt_while_code_is_compiled_leaves_it_usable(package: Path) -> None:
    program = """
import signal
from gpu_replay.loops.compiling import compiler
compiler()
def interrupt(*_): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
raised = 0
for delay in (0.02, 0.2, 1.0):
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        tree.update.compiled()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        raised += 1
print(raised > 0)
"""
    assert printed(package, program + PRINT) == ["True", str(2**63 - 1)]


@pytest.mark.parametrize("way", ["told", "missing"])
def test_loops_run_as_they_are_where_nothing_compiles(package: Path, way: str) -> None:
    environment = {"NUMBA_DISABLE_JIT": "1"} if way == "told" else {}
    missing = "sys.modules['numba'] = None\n" if way == "missing" else ""
    assert printed(package, missing + PRINT + "print(loop is tree.lowest.function)\n", **environment) == [
        str(2**63 - 1),
        "True",
    ]


def test_loops_as_python_do_what_compiled_ones_do() -> None:
    """Drawing and changing, to the bit; the others are compared through buffers."""
    random = np.random.default_rng(0)
    starts = np.array([0, 320, 352], dtype=np.int64)
    both = []
    masses = random.integers(0, 2**40, 300) * (random.random(300) < 0.7)
    # where masses wait until their step can be drawn: nowhere
    nowhere = [np.zeros(0, each) for each in (np.int64, np.uint8, np.int32, np.int64)]
    doubles, keys, powers = random.random(40), random.integers(280, 700, 60), np.exp2(random.uniform(-25, 21, 60))
    for ready in (lambda each: each.compiled(), lambda each: each.function):
        flat, low, high = np.zeros(352, np.int64), np.zeros(20, np.int64), np.zeros(20, np.int64)
        changed_slots, counters = np.zeros(31, np.int64), np.zeros(17, np.int64)
        flat[:300] = masses
        counters[Counter.FIRST], counters[Counter.ADDED] = 300, 600
        ready(tree.build)(flat, starts, low, high)
        slots, probability, ratio = np.zeros(40, np.int64), np.zeros(40, np.float32), np.zeros(40)
        known = flat, starts, low, doubles, True, True, 7, int(masses.sum()) - 9, int(masses.sum())
        ready(tree.draw)(*known, slots, probability, ratio)
        for ordered in (True, False):
            settings = ordered, 2**40, 300, counters, flat, starts, low, high, changed_slots, *nowhere
            ready(tree.update)(keys, powers.copy(), *settings)
        found = (
            ready(tree.lowest)(flat, low),
            ready(tree.mass_before)(flat, starts, 77),
        )
        both.append(
            [each.tolist() for each in (flat, low, high, changed_slots, counters, slots, probability, ratio)] + [*found]
        )
    assert both[0] == both[1]


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
