"""The plan of the house, held by parsing the sources: imports point one way, kernels are leaves."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "gpu_replay"
# folders and modules of the top level, and imports between two of them
# (`sharded` lies over the buffers, engines, operations and checkpoints of a rank;
# a sampler imports the operations that it draws by, and its statistics)
MOST_NODES, MOST_ARROWS = 28, 104

# From the top down: a module imports from its own line or from one below. A folder stands for all that is in it.
LAYERS = (
    ("cli", "__main__"),
    ("study", "training", "bench", "integrations", "examples"),
    ("console",),
    ("__init__",),
    ("sharded",),
    ("buffer", "trajectory_buffer"),
    ("base",),
    ("engines",),
    ("hindsight",),
    ("graphs", "checkpoint"),
    ("samplers",),
    ("stats",),
    ("ops",),
    ("kernels", "loops"),
    ("validation", "spaces"),
    ("fields",),
    ("batch",),
)
RANK = {name: len(LAYERS) - depth for depth, names in enumerate(LAYERS) for name in names}
# the programs do not know of one another, nor does the core know of them
PROGRAMS = ("study", "training", "bench", "integrations", "examples")
# The one import that points up: a call of the core that is a program, which it imports when it is called.
UPWARD = (f"{PACKAGE}.base.buffer", f"{PACKAGE}.console.inspection")
# What is said in a loop and in a kernel: the operations of every step, and what they share. All else is written once,
# in torch or NumPy, for every device; it gets a file here with a record that says what that saves, and whom.
# (loops/ranks is the host's order; the scan of kernels/prefix_sum says there why it stays)
HOT = {
    "loops": {"compiling", "constants", "goals", "masses", "random", "ranks", "ring", "steps", "windows"},
    "kernels": {"constants", "draw", "goals", "masses", "prefix_sum", "random", "ring", "steps", "windows"},
}
LEAVES = {"kernels": {"triton", "__future__"}, "loops": {"numba", "numpy", *sys.stdlib_module_names}}


def sources(root: Path) -> dict[str, Path]:
    """Every module of the package by its name when it is installed: `kernels/` and `bench/` lie inside then."""
    found = {}
    for folder, prefix in ((root / PACKAGE, []), (root / "kernels", ["kernels"]), (root / "bench", ["bench"])):
        for path in sorted(folder.rglob("*.py")):
            parts = [PACKAGE, *prefix, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree of a source, the module first; nobody may change them."""
    return tuple(ast.walk(ast.parse(text)))


def statements(text: str) -> list[ast.stmt]:
    """Those at the top of a source."""
    return nodes(text)[0].body  # type: ignore[attr-defined]


def for_types(text: str) -> set[ast.AST]:
    """What only type checkers read."""
    found = (each for each in statements(text) if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.dump(each.test))
    return {node for each in found for node in ast.walk(each)}


def imports(
    module: str, path: Path, modules: dict[str, Path], *, typed: bool = True, at_once: bool = False
) -> set[str]:
    """The names of the modules that a file imports.

    at_once: only what it imports when it is imported itself. typed: also what it imports for type checkers alone.
    """
    text, found = path.read_text(), set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    skipped = set() if typed else for_types(text)
    for node in statements(text) if at_once else nodes(text):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            members = {f"{source}.{alias.name}" for alias in node.names}
            found |= {member if member in modules else source for member in members}
    return found


def room(name: str) -> str | None:
    """The folder or module of the top level in which a module lies; None for those of others."""
    first, _, rest = name.partition(".")
    return (rest.split(".")[0] or "__init__") if first == PACKAGE else None


def later(module: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """What `UPWARD` allows a module, if it is imported when a function is called."""
    return {name for source, name in (UPWARD,) if source == module} - imports(module, path, modules, at_once=True)


def violations(root: Path) -> list[str]:
    """Each breach of the plan in a source tree, as a sentence."""
    modules = sources(root)
    found = []
    for module, path in modules.items():
        layer = room(module)
        if layer not in RANK:
            found.append(f"{module} has no place in LAYERS")
            continue
        for source in imports(module, path, modules) - later(module, path, modules):
            target = room(source)
            if layer in LEAVES and target != layer and source.split(".")[0] not in LEAVES[layer]:
                found.append(f"{module} imports {source}, and {layer} are leaves")
            elif target is not None and target not in RANK:
                found.append(f"{module} imports {source}, which is not there")
            elif target is not None and RANK[target] > RANK[layer]:
                found.append(f"{module} imports {source}, which lies above it")
            elif layer != target and {layer, target} <= set(PROGRAMS):
                found.append(f"{module} imports {source}; the programs do not know of one another")
    return found


def arrows(root: Path) -> tuple[set[tuple[str | None, str | None]], set[tuple[str, str]]]:
    """Who imports whom, among the rooms, and among all files without what only type checkers read."""
    modules = sources(root)
    rooms, files = set(), set()
    for module, path in modules.items():
        upward = later(module, path, modules)
        rooms |= {(room(module), room(name)) for name in imports(module, path, modules) - upward if room(name)}
        files |= {(module, name) for name in imports(module, path, modules, typed=False) - upward}
    return {(a, b) for a, b in rooms if a != b}, {(a, b) for a, b in files if a != b and b in modules}


def check_acyclic(edges: set[tuple[str, str]] | set[tuple[str | None, str | None]]) -> None:
    graph: TopologicalSorter[str | None] = TopologicalSorter()
    for importer, imported in edges:
        graph.add(importer, imported)
    graph.prepare()


def test_imports_point_one_way_in_a_small_graph_without_a_cycle() -> None:
    assert violations(ROOT) == []
    modules = sources(ROOT)
    assert UPWARD[1] in imports(UPWARD[0], modules[UPWARD[0]], modules)
    rooms, files = arrows(ROOT)
    check_acyclic(rooms)
    check_acyclic(files)
    assert 20 < len({room(module) for module in modules}) <= MOST_NODES
    assert len(rooms) <= MOST_ARROWS < len(files)


def test_only_what_is_hot_has_loops_and_kernels_and_all_of_them_are_called() -> None:
    modules, found, used = sources(ROOT), {}, set()
    for name, path in modules.items():
        if room(name) in HOT:
            found.setdefault(room(name), set()).update({path.stem} - {"__init__"})
        if room(name) not in PROGRAMS:
            used |= imports(name, path, modules)
    assert found == HOT
    assert {f"{PACKAGE}.{folder}.{name}" for folder, names in HOT.items() for name in names} <= used


def test_two_variables_are_read_and_one_of_numba() -> None:
    """All that touches the environment is `os.environ.get(VARIABLE, ...)`; benchmarks may do more."""
    for module, path in sources(ROOT).items():
        if room(module) != "bench":
            others = re.sub(r"\bos\.environ\.get\(VARIABLE\b", "", path.read_text())
            assert not re.search(r"\b(environb?|getenvb?)\b", others), module
    assert importlib.import_module("gpu_replay.ops._backend").VARIABLE == "GPU_REPLAY_BACKEND"
    assert importlib.import_module("gpu_replay.ops.launch").VARIABLE == "GPU_REPLAY_PLAIN_LAUNCH"
    assert importlib.import_module("gpu_replay.loops.compiling").VARIABLE == "NUMBA_DISABLE_JIT"


def test_every_file_says_why_it_exists_and_no_assert_stands_in_for_an_error_message() -> None:
    files = [*sources(ROOT).values(), *(ROOT / "tests").rglob("*.py")]
    assert [path for path in files if ast.get_docstring(nodes(path.read_text())[0]) is None] == []  # type: ignore[arg-type]
    # in device code it is Triton's static_assert or nothing
    for module, path in sources(ROOT).items():
        assert not any(isinstance(node, ast.Assert) for node in nodes(path.read_text())), module


def test_tests_are_collected_with_torch_triton_numpy_and_pytest_alone() -> None:
    """As on a GPU machine that has nothing else; `pytest.importorskip`, above the imports, asks for more."""
    folder, modules = ROOT / "tests", sources(ROOT)
    allowed = {*sys.stdlib_module_names, "torch", "triton", "numpy", "pytest", PACKAGE}
    allowed |= {path.stem for path in folder.rglob("*.py")}
    direct = {name: imports(name, path, modules, at_once=True) for name, path in modules.items()}
    wrong = []
    # which is read by a type checker, with all that there is
    for path in set(folder.rglob("*.py")) - {folder / "typed_use.py"}:
        asked: set[str] = set()
        for node in statements(path.read_text()):
            if isinstance(node, (ast.Assign, ast.Expr)) and "importorskip" in ast.unparse(node.value):
                asked |= {str(each.value).split(".")[0] for each in ast.walk(node) if isinstance(each, ast.Constant)}
        needed, before = imports(path.stem, path, modules, at_once=True), set()
        while needed != before:
            before, needed = needed, needed.union(*(direct.get(name, ()) for name in needed))
        wrong += [f"{path.name} imports {name}" for name in needed if name.split(".")[0] not in allowed | asked]
    assert wrong == []
