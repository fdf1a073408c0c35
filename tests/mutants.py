"""How many small faults the tests catch: in a copy of the checkout one operator or constant of the core is altered.

    python tests/mutants.py 300 --seed 0 --pytest "-n 2 tests/contract tests/kernels tests/durability"

Each mutant becomes a line of the table when it is decided; a second run with the same table goes on where the first
one stopped.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from planted_faults import DEFAULT, NOTHING, ROOT, Fault, load_libraries, plant

CORE = ("base", "ops", "loops", "engines", "graphs", "checkpoint", "sharded")
HEAD = "| mutant | was | became | caught by | s |\n|---|---|---|---|---:|\n"
# what each operator becomes
BECOMES = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "+", "**": "*", "@": "*", "<<": ">>", ">>": "<<"}
BECOMES |= {"&": "|", "|": "&", "^": "|", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
BECOMES |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and"}
OPERATOR = re.compile("|".join(map(re.escape, sorted(BECOMES, key=len, reverse=True))).encode())


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that decide what is computed: no types, no texts and messages."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            typed = name in ("annotation", "returns", "decorator_list")
            if isinstance(child, ast.AST) and not typed and not isinstance(child, (ast.JoinedStr, ast.Raise)):
                yield child
                yield from executed(child)


def mutants(file: str) -> Iterator[Fault]:
    """All of one file."""
    source = (ROOT / file).read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def altered(node: ast.expr, start: int, old: bytes, new: str) -> Fault:
        # the whole file, as an operator stands in it many times
        text = source[:start] + new.encode() + source[start + len(old) :]
        what = " | ".join(f"`{each}`".replace("|", "\\|") for each in (old.decode(), new))
        return Fault(f"`{file}:{node.lineno}` at {start}", "mutant", what, file, source.decode(), text.decode(), ())

    def between(left: ast.expr, right: ast.expr) -> Iterator[Fault]:
        if found := OPERATOR.search(source, last(left), first(right)):
            yield altered(left, found.start(), found[0], BECOMES[found[0].decode()])

    def first(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def last(node: ast.expr) -> int:
        return starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    for node in executed(ast.parse(source)):
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("mutants.md"), help="the table")
    parser.add_argument("--pytest", default=shlex.join(DEFAULT), metavar="ARGUMENTS", help="which tests, and how")
    options = parser.parse_args()
    load_libraries()
    folders = [ROOT / "kernels", *(ROOT / "gpu_replay" / name for name in CORE)]
    files = sorted(path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py"))
    chosen = random.Random(options.seed).sample([each for file in files for each in mutants(file)], options.count)
    table = options.output.read_text() if options.output.exists() else HEAD
    for mutant in chosen:
        if mutant.name not in table:
            _, caught_by, seconds = plant(mutant, shlex.split(options.pytest))
            table += f"| {mutant.name} | {mutant.what} | {caught_by or NOTHING} | {seconds:.0f} |\n"
            options.output.write_text(table)
    survived = table.count(NOTHING)
    print(f"{options.count - survived} of {options.count} mutants are caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
