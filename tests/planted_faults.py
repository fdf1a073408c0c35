"""Whether the tests catch faults: each of `planted_faults.toml` is planted in a copy of the checkout and tested there.

    python tests/planted_faults.py [--only NAME ...]

Its likely tests run first, then, if they pass, all tests of the default command. What caught it is written to
`planted_faults.md`, beside the lines of other faults; in the end those tests must pass in a copy without a fault.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "planted_faults.toml"
# the table itself names what is there without a fault
DEFAULT = ("-n", "2", "--ignore=tests/project/test_planted_faults.py")
LIBRARIES = ("torch", "scipy.stats", "numba", "triton", "gymnasium")
# a fault can make a loop endless; that is noticed as well
MOST_SECONDS = 900
TIMEOUT, CRASH = "a timeout", "a crash"
NOTHING = "**nothing**"


class Fault(NamedTuple):
    """`old`, which stands once in `file`, becomes `new`; `tests` are tried first."""

    name: str
    area: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


# a fault, the test that caught it, or None, and the seconds that it took
Outcome = tuple[Fault, str | None, float]


def faults() -> list[Fault]:
    """All of the table."""
    entries = tomllib.loads(TABLE.read_text())
    return [Fault(name, **{**entry, "tests": tuple(entry["tests"])}) for name, entry in entries.items()]


def place(test: str) -> str:
    """A file or node id of the table with its folder."""
    file = test.split("::")[0]
    return test.replace(file, str(next((ROOT / "tests").rglob(file)).relative_to(ROOT)), 1)


def copy_to(folder: Path) -> None:
    """What the tests need of the checkout; times are kept, so that what is compiled and cached stays valid."""
    for path in ROOT.iterdir():
        if path.is_dir() and path.name in ("gpu_replay", "kernels", "bench", "tests", "docs", ".ci"):
            shutil.copytree(path, folder / path.name)
        elif path.is_file():
            shutil.copy2(path, folder)


def run_tests(folder: Path, arguments: Sequence[str], output: Path) -> None:
    """In a process of its own: run pytest in a copy, and end with its status."""
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    # workers and what tests start end with it
    os.setsid()
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    os._exit(int(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", *arguments])))


def load_libraries() -> None:
    """Import what every test imports, so that this is not done for every fault."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for library in LIBRARIES:
        if importlib.util.find_spec(library.split(".")[0]) is not None:
            importlib.import_module(library)


def first_failure(folder: Path, arguments: Sequence[str], most_seconds: float = MOST_SECONDS) -> str | None:
    """The first test that fails in a copy; "a timeout" where they do not end, "a crash" where that is how they end."""
    output = folder / "output.txt"
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, arguments, output))
    process.start()
    process.join(most_seconds)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return TIMEOUT
    if process.exitcode == 0:
        return None
    if process.exitcode is not None and process.exitcode < 0:
        return CRASH
    text = output.read_text()
    found = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pytest ended with {process.exitcode}:\n{text[-3000:]}")
    return found[1]


def plant(fault: Fault, suite: Sequence[str] = DEFAULT) -> Outcome:
    """Plant one fault and look for a test that fails: among its likely ones, then in this run of pytest."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_to(folder)
        path = folder / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise ValueError(f"{fault.name}: the old text stands {text.count(fault.old)} times in {fault.file}.")
        path.write_text(text.replace(fault.old, fault.new))
        likely = [place(test) for test in fault.tests]
        caught_by = (first_failure(folder, likely) if likely else None) or first_failure(folder, suite)
    return fault, caught_by, time.monotonic() - started


def check_without_faults(outcomes: Sequence[Outcome]) -> None:
    """Raise RuntimeError if a test that caught a fault fails without any as well."""
    tests = sorted({caught_by for _, caught_by, _ in outcomes if caught_by and caught_by not in (TIMEOUT, CRASH)})
    with tempfile.TemporaryDirectory() as name:
        copy_to(Path(name))
        if tests and (failed := first_failure(Path(name), tests)):
            raise RuntimeError(f"{failed} fails without a fault as well.")


def page(outcomes: Sequence[Outcome], commit: str, before: str) -> str:
    """The table as Markdown: what was tried now, and of the page `before` the lines of all other faults."""
    # a fault is known by what it does, wherever that stands by now
    rows = {" | ".join(line.split(" | ")[:2]): line for line in before.splitlines() if line.startswith("| ")}
    for fault, caught_by, seconds in outcomes:
        test = f"`{caught_by.removeprefix('tests/')}`" if caught_by else NOTHING
        known = f"| {fault.area} | {fault.what}"
        rows[known] = f"{known} | `{fault.file}` | {test} | {seconds:.0f} | {commit} |"
    lines = [rows[known] for fault in faults() if (known := f"| {fault.area} | {fault.what}") in rows]
    caught = sum(NOTHING not in line for line in lines)
    head = [
        "# Planted faults",
        "",
        f"{caught} of {len(lines)} are caught, {len(faults()) - len(lines)} were not tried yet. Each was planted alone "
        "in a copy of the checkout by `python tests/planted_faults.py`, at the commit in the last column; the texts "
        "are in `planted_faults.toml`, the seconds those of a busy machine. Lines without a commit are older.",
        "",
        "| area | fault | in | caught by | s | commit |",
        "|---|---|---|---|---:|---|",
    ]
    return "\n".join([*head, *lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults, or those whose area has this name")
    parser.add_argument("--output", type=Path, default=TABLE.with_suffix(".md"))
    options = parser.parse_args()
    load_libraries()
    outcomes = []
    for fault in faults():
        if not options.only or {fault.name, fault.area} & set(options.only):
            _, caught_by, seconds = outcome = plant(fault)
            outcomes.append(outcome)
            print(f"{fault.name}: {caught_by}, {seconds:.0f} s", flush=True)
    check_without_faults(outcomes)
    commit = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    before = options.output.read_text() if options.output.exists() else ""
    options.output.write_text(page(outcomes, commit.strip(), before))
    return any(caught_by is None for _, caught_by, _ in outcomes)


if __name__ == "__main__":
    sys.exit(main())
