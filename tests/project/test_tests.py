"""What the tests know of the inside of the package: public names, but for one list with a reason each."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from test_architecture import PACKAGE, nodes

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
# a module or name of one underscore
PRIVATE = re.compile(r"\._(?!_)")
# parts that users are not promised
INSIDE = ("base", "engines", "graphs", "kernels", "loops", "ops", "checkpoint", "validation")
# the rooms of it and the private modules that tests other than those of kernels know, and why
KNOWN = {
    "base": "the numbers behind the picture of `inspect`; an interrupt between two parts of a state",
    "checkpoint": "files are edited, cut off, written in small pieces and on disks that fail",
    "engines": "places of fields that a machine lacks, and mapped files that count what is read",
    "graphs": "graphs and streams without a GPU",
    "ops._backend": "which code a call is made of",
    "ops": "counters past 2^31 and their names, the sums above masses",
}


def inner_names(source: str) -> set[str]:
    """The inner modules and private names that a test imports or patches by name."""
    names = set(re.findall(r'setattr\(\s*"([\w.]+)"', source))
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = {name for name in names if name.startswith(f"{PACKAGE}.")}
    return {name for name in ours if name.split(".")[1] in INSIDE or PRIVATE.search(name)}


def known(name: str) -> bool:
    """Whether the list has the room of an inner module, or a private one itself."""
    parts = name.split(".")
    return ".".join(parts[1:3]) in KNOWN or (parts[1] in KNOWN and not PRIVATE.search(name))


def test_no_test_knows_the_inside_without_a_reason() -> None:
    files = [path for path in TESTS.rglob("*.py") if path.parent.name != "kernels"]
    assert len(files) > 50
    found = {(path.name, name) for path in files for name in inner_names(path.read_text())}
    assert {(file, name) for file, name in found if not known(name)} == set()
    # no reason outlives what it was given for
    assert [each for each in KNOWN if not any(f".{each}." in f"{name}." for _, name in found)] == []
