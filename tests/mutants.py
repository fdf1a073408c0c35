"""How many small faults the tests catch: in a copy of the checkout one operator or constant of the core is altered.

    pip install coverage
    python tests/mutants.py 300 --seed 0

Runs without a fault note which tests execute which lines; a mutant meets those of its line. Loops run as Python, so the
few tests that need them compiled are left out. Each mutant becomes a line of the table when it is decided; a second run
with the same table goes on where the first one stopped, and tries those again that nothing caught.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from planted_faults import NOTHING, ROOT, copy_to, first_failure, load_libraries

# what is tested with which environment, one after the other
RUNS: tuple[tuple[dict[str, str], str], ...] = (
    ({}, "tests/contract tests/kernels tests/durability tests/programs/test_cli.py tests/programs/test_inspection.py"),
    ({"GPU_REPLAY_BACKEND": "triton"}, "-m contract tests/contract tests/durability"),
)
# what the second of them can see more of than the first one
OF_DEVICES = ("kernels/", "gpu_replay/ops/", "gpu_replay/engines/", "gpu_replay/base/", "gpu_replay/graphs/")
# what they start executes lines that are not noted
OF_PROCESSES = ("test_sharded.py", "test_kills.py")
CORE = ("base", "ops", "loops", "engines", "graphs", "checkpoint", "sharded")
HEAD = "| mutant | was | became | caught by | tests of its line | s |\n|---|---|---|---|---:|---:|\n"
# what each operator becomes
BECOMES = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "+", "**": "*", "@": "*", "<<": ">>", ">>": "<<"}
BECOMES |= {"&": "|", "|": "&", "^": "|", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
BECOMES |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and"}
OPERATOR = re.compile("|".join(map(re.escape, sorted(BECOMES, key=len, reverse=True))).encode())


class Mutant(NamedTuple):
    """One altered file; the statement up to what is altered stands in the lines from `first` to `last`."""

    name: str
    what: str
    file: str
    source: str
    first: int
    last: int


class Noted(NamedTuple):
    """A run without a fault: the seconds of tests that passed, and those that execute the line of each mutant."""

    seconds: dict[str, float]
    of_mutant: dict[str, list[str]]


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that decide what is computed: no types, no texts and messages."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            typed = name in ("annotation", "returns", "decorator_list")
            if isinstance(child, ast.AST) and not typed and not isinstance(child, (ast.JoinedStr, ast.Raise)):
                yield child
                yield from executed(child)


def mutants(file: str) -> Iterator[Mutant]:
    """All of one file."""
    source = (ROOT / file).read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    tree = ast.parse(source)
    # the innermost, as it comes last
    begins = {
        id(child): statement.lineno
        for statement in ast.walk(tree)
        if isinstance(statement, ast.stmt)
        for child in executed(statement)
    }

    def altered(node: ast.expr, start: int, old: bytes, new: str) -> Mutant:
        text = source[:start] + new.encode() + source[start + len(old) :]
        what = " | ".join(f"`{each}`".replace("|", "\\|") for each in (old.decode(), new))
        name = f"`{file}:{node.lineno}` at {start}"
        return Mutant(
            name, what, file, text.decode(), begins.get(id(node), node.lineno), node.end_lineno or node.lineno
        )

    def between(left: ast.expr, right: ast.expr) -> Iterator[Mutant]:
        if found := OPERATOR.search(source, last(left), first(right)):
            yield altered(left, found.start(), found[0], BECOMES[found[0].decode()])

    def first(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def last(node: ast.expr) -> int:
        return starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    for node in executed(tree):
        if isinstance(node, ast.BinOp):
            yield from between(node.left, node.right)
        elif isinstance(node, ast.AugAssign):
            yield from between(node.target, node.value)
        elif isinstance(node, (ast.Compare, ast.BoolOp)):
            parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else node.values
            yield from between(*parts[:2])
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Invert):
            yield altered(node, first(node), b"not" if isinstance(node.op, ast.Not) else b"-", " ")
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            new = not node.value if isinstance(node.value, bool) else node.value + 1
            yield altered(node, first(node), source[first(node) : last(node)], str(new))


class Recorder:
    """A plugin of pytest that notes the lines of the core that tests execute, and the seconds of those that pass."""

    def __init__(self, folder: Path) -> None:
        from coverage import Coverage

        self.coverage = Coverage(data_file=None, include=[f"{folder}/gpu_replay/*", f"{folder}/kernels/*"])
        self.coverage.set_option("run:disable_warnings", ["trace-changed", "no-data-collected"])
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # begun anew for each, as tests that trace calls themselves end it
        self.coverage.stop()
        self.coverage.start()
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration


def run_and_note(folder: Path, arguments: Sequence[str], chosen: Sequence[Mutant], output: Path) -> None:
    """In a process of its own: run tests in a copy without a fault, and write what was noted."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    recorder = Recorder(folder)
    recorder.coverage.start()
    pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *arguments], plugins=[recorder])
    recorder.coverage.stop()
    data = recorder.coverage.get_data()
    of_mutant = {}
    for mutant in chosen:
        tests = data.contexts_by_lineno(str(folder / mutant.file))
        found = set().union(*(tests.get(line, ()) for line in range(mutant.first, mutant.last + 1)))
        # lines that are executed when they are imported count for every test
        of_mutant[mutant.name] = sorted(recorder.seconds if "" in found else found & recorder.seconds.keys())
    output.write_text(json.dumps(Noted(recorder.seconds, of_mutant)))


def noted(run: tuple[dict[str, str], str], chosen: Sequence[Mutant]) -> Noted:
    """What tests show without a fault."""
    environment, arguments = run
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ, environment):
        copy, output = Path(name) / "copy", Path(name) / "noted"
        copy.mkdir()
        copy_to(copy)
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=run_and_note, args=(copy, arguments.split(), chosen, output))
        process.start()
        process.join()
        return Noted(*json.loads(output.read_text()))


def in_order(tests: Sequence[str], seconds: dict[str, float]) -> list[str]:
    """The quick ones first, file by file, so that what a file prepares is prepared once."""
    files = defaultdict(float)
    for test in tests:
        files[test.split("::")[0]] += seconds[test]
    return sorted(tests, key=lambda test: (files[test.split("::")[0]], test.split("::")[0], seconds[test]))


def decide(mutant: Mutant, runs: Sequence[Noted]) -> tuple[Mutant, str | None, int, float]:
    """Plant one mutant: the test that fails, how many execute its line, and the seconds that it took."""
    started = time.monotonic()
    count, caught_by = 0, None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_to(folder)
        (folder / mutant.file).write_text(mutant.source)
        for (environment, _), run in zip(RUNS, runs, strict=True):
            if environment and not mutant.file.startswith(OF_DEVICES):
                continue
            tests = set(run.of_mutant[mutant.name])
            count += len(tests)
            if not environment and (not tests or "/sharded/" in mutant.file):
                tests |= {test for test in run.seconds if any(file in test for file in OF_PROCESSES)}
            if tests and not caught_by:
                most = 60 + 4 * sum(run.seconds[test] for test in tests)
                with mock.patch.dict(os.environ, environment):
                    caught_by = first_failure(folder, in_order([*tests], run.seconds), most)
    return mutant, caught_by, count, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "mutants.md", help="the table")
    options = parser.parse_args()
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    load_libraries()
    folders = [ROOT / "kernels", *(ROOT / "gpu_replay" / name for name in CORE)]
    files = sorted(path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py"))
    chosen = random.Random(options.seed).sample([each for file in files for each in mutants(file)], options.count)
    lines = options.output.read_text().splitlines(keepends=True) if options.output.exists() else [HEAD]
    table = "".join(line for line in lines if NOTHING not in line)
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("fork")) as pool:
        runs = [*pool.map(noted, RUNS, itertools.repeat(chosen))]
        print(f"{[len(run.seconds) for run in runs]} tests pass with loops as Python", flush=True)
        waiting = [pool.submit(decide, mutant, runs) for mutant in chosen if mutant.name not in table]
        for each in as_completed(waiting):
            mutant, caught_by, tests, seconds = each.result()
            table += f"| {mutant.name} | {mutant.what} | {caught_by or NOTHING} | {tests} | {seconds:.0f} |\n"
            options.output.write_text(table)
    print(f"{options.count - table.count(NOTHING)} of {options.count} mutants are caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
