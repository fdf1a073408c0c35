"""What the tests know of the inside of the package: public names, but for one list with a reason each. And that every
sampler is public, explained and tested."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from programs import SAMPLERS
from test_architecture import PACKAGE, nodes
from test_distributions import SAMPLED

import gpu_replay
from gpu_replay.console import sizes
from gpu_replay.samplers import Combined, Latest, Sampler

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
    "loops.compiling": "each of two workers compiles half of the loops",
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


def test_ci_collects_every_test_of_the_contract() -> None:
    command = re.search(r"-m contract (.+)\)", (ROOT / ".ci" / "run").read_text())
    assert command
    with_tests = {path.parent for path in TESTS.rglob("test_*.py") if "mark.contract" in path.read_text()}
    # this file names the mark as well
    assert with_tests - {Path(__file__).parent} == {ROOT / folder for folder in command[1].split()}


# what a new class of `samplers.py` lacks

KINDS = {name: kind for name, kind in Sampler.kinds.items() if kind.__module__ == Sampler.__module__}


def has(kind: type[Sampler]) -> dict[str, bool]:
    """What a sampler must have, and whether it has it."""
    page = (ROOT / "docs" / "choosing.md").read_text()
    explained = re.findall(r"^\| `(\w+)\(", page[page.index("## Which sampler") :], re.MULTILINE)
    played = {name: type(sampler) for name, sampler in SAMPLERS.items()}
    return {
        "a name in gpu_replay.__all__": kind.__name__ in gpu_replay.__all__,
        "a row in docs/choosing.md": kind.__name__ in explained,
        "kernel in its class": "kernel" in vars(kind) or kind in (Combined, Latest),
        # which models, checkpoints and shards go through
        "an entry in SAMPLERS of tests/helpers/programs.py": kind in played.values(),
        "its exact distribution in SAMPLED of test_distributions.py": kind in [played[name] for name in SAMPLED],
        "a choice of gpu-replay estimate": kind in map(type, sizes.SAMPLERS.values()),
    }


def test_every_sampler_is_public_explained_and_tested() -> None:
    assert len(KINDS) >= 5
    assert {(name, what) for name, kind in KINDS.items() for what, there in has(kind).items() if not there} == set()
