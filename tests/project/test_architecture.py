"""The plan of the house, held by parsing the sources: imports point one way, kernels are leaves."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "gpu_replay"
# folders and modules of the top level, and imports between two of them
# (issue 18 asks for `sharded`, which lies over the buffers, engines, operations and checkpoints that it divides)
MOST_NODES, MOST_ARROWS = 28, 100

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
    ("hindsight", "stats"),
    ("graphs", "checkpoint"),
    ("samplers",),
    ("ops",),
    ("kernels", "loops"),
    ("validation",),
    ("fields",),
    ("batch", "errors"),
)
RANK = {name: len(LAYERS) - depth for depth, names in enumerate(LAYERS) for name in names}
# the programs do not know of one another, nor does the core know of them
PROGRAMS = ("study", "training", "bench", "integrations", "examples")
ALLOWED = {"kernels": "triton", "loops": "numba and numpy"}
LEAVES = {"kernels": {"triton", "__future__"}, "loops": {"numba", "numpy", *sys.stdlib_module_names}}
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb")
HEAVY = (
    "triton",
    "numba",
    "gymnasium",
    "ale_py",
    "matplotlib",
    "tqdm",
    "safetensors",
    "tensorboard",
    "hypothesis",
    "pandas",
    "scipy",
)


def sources(root: Path) -> dict[str, Path]:
    """Every module of the package by its installed name: `ops.gather`, `kernels.gather`, `bench.timing`."""
    found = {}
    for folder, prefix in ((root / PACKAGE, ""), (root / "kernels", "kernels."), (root / "bench", "bench.")):
        for path in sorted(folder.rglob("*.py")):
            name = prefix + ".".join(path.relative_to(folder).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@functools.cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a source, made once; nobody may change it."""
    return ast.parse(text)


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All nodes of that tree."""
    return tuple(ast.walk(parsed(text)))


@functools.cache
def _import_nodes(text: str, everywhere: bool, typed: bool) -> tuple[ast.Import | ast.ImportFrom, ...]:
    found: Iterable[ast.AST] = nodes(text) if everywhere else parsed(text).body
    if not typed:
        guarded = [
            each for each in parsed(text).body if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.dump(each.test)
        ]
        left_out = {id(node) for each in guarded for node in ast.walk(each)}
        found = [node for node in found if id(node) not in left_out]
    return tuple(node for node in found if isinstance(node, (ast.Import, ast.ImportFrom)))


def imports(
    module: str, path: Path, modules: dict[str, Path], *, everywhere: bool = True, typed: bool = True
) -> Iterator[str]:
    """What a file imports, or what it imports when it is imported: modules of the package without its name.

    typed: whether what it imports for type checkers alone counts.
    """
    inside = module.split(".")[:-1]
    if path.name == "__init__.py" and module != "__init__":
        inside = module.split(".")
    for node in _import_nodes(path.read_text(), everywhere, typed):
        if isinstance(node, ast.Import):
            yield from (_own(alias.name) for alias in node.names)
        else:
            if node.level:
                base = [*inside[: len(inside) - node.level + 1], *(node.module or "").split(".")]
                source = ".".join(part for part in base if part) or "__init__"
            else:
                source = _own(node.module or "")
            for alias in node.names:
                member = alias.name if source == "__init__" else f"{source}.{alias.name}"
                yield member if member in modules else source


def _own(name: str) -> str:
    """The name within the package, `__init__` for the package itself, or a marked foreign name."""
    if name == PACKAGE:
        return "__init__"
    return name.removeprefix(f"{PACKAGE}.") if name.startswith(f"{PACKAGE}.") else f"foreign {name}"


def loaded(modules: dict[str, Path]) -> dict[str, set[str]]:
    """For each module of the package the distributions that importing it needs."""
    direct = {name: set(imports(name, path, modules, everywhere=False)) for name, path in modules.items()}
    found = {}
    for module in modules:
        known, waiting = {module}, [module]
        while waiting:
            more = direct.get(waiting.pop(), set()) - known
            known |= more
            waiting += more
        found[module] = {name.removeprefix("foreign ").split(".")[0] for name in known if name.startswith("foreign ")}
    return found


def violations(root: Path) -> list[str]:
    """Each breach of the plan in a source tree, as a sentence."""
    modules = sources(root)
    found = []
    for module, path in modules.items():
        layer = module.split(".")[0]
        if layer not in RANK:
            found.append(f"{module} has no place in LAYERS")
            continue
        for source in imports(module, path, modules):
            if source.startswith("foreign "):
                name = source.removeprefix("foreign ")
                if layer in LEAVES and name.split(".")[0] not in LEAVES[layer]:
                    found.append(f"{module} imports {name}; {layer} import {ALLOWED[layer]} and nothing else")
                continue
            target = source.split(".")[0]
            if target not in RANK:
                found.append(f"{module} imports {source}, which is not there")
            elif RANK[target] > RANK[layer]:
                found.append(f"{module} imports {source}, which lies above it")
            elif layer in LEAVES and target != layer:
                found.append(f"{module} imports {source}; {layer} import {ALLOWED[layer]} and nothing else")
            elif layer != target and {layer, target} <= set(PROGRAMS):
                found.append(f"{module} imports {source}; the programs do not know of one another")
    return found


def arrows(root: Path) -> set[tuple[str, str]]:
    """Who imports whom, among the folders and modules of the top level."""
    modules = sources(root)
    pairs = {
        (module.split(".")[0], source.split(".")[0])
        for module, path in modules.items()
        for source in imports(module, path, modules)
        if not source.startswith("foreign ")
    }
    return {(importer, imported) for importer, imported in pairs if importer != imported}


def arrows_of_files(root: Path) -> set[tuple[str, str]]:
    """Who imports whom, among all files; imports for type checkers alone are left out."""
    modules = sources(root)
    return {
        (module, source)
        for module, path in modules.items()
        for source in imports(module, path, modules, typed=False)
        if source in modules and source != module
    }


def check_acyclic(edges: set[tuple[str, str]]) -> None:
    graph: TopologicalSorter[str] = TopologicalSorter()
    for importer, imported in edges:
        graph.add(importer, imported)
    graph.prepare()


def test_the_import_graph_is_small_and_has_no_cycle() -> None:
    edges = arrows(ROOT)
    check_acyclic(edges)
    check_acyclic(arrows_of_files(ROOT))
    assert len({module.split(".")[0] for module in sources(ROOT)}) <= MOST_NODES
    assert len(edges) <= MOST_ARROWS


def test_a_cycle_is_seen(tmp_path: Path) -> None:
    # of one layer, so that no import points upwards
    for name, line in (
        ("graphs", "from gpu_replay.checkpoint.b import c"),
        ("checkpoint", "import gpu_replay.graphs.b"),
    ):
        (tmp_path / "gpu_replay" / name).mkdir(parents=True)
        (tmp_path / "gpu_replay" / name / "b.py").write_text(line)
    assert violations(tmp_path) == []
    with pytest.raises(CycleError):
        check_acyclic(arrows(tmp_path))
    with pytest.raises(CycleError):
        check_acyclic(arrows_of_files(tmp_path))


def test_imports_point_one_way() -> None:
    assert len(sources(ROOT)) > 20
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("gpu_replay/ops/gather.py", "from gpu_replay.buffer import ReplayBuffer", "ops.gather imports buffer"),
        ("gpu_replay/ops/gather.py", "from gpu_replay import ReplayBuffer", "ops.gather imports __init__"),
        ("gpu_replay/ops/gather.py", "from gpu_replay import buffer", "ops.gather imports buffer"),
        ("gpu_replay/ops/gather.py", "from .. import buffer", "ops.gather imports buffer"),
        ("gpu_replay/ops/gather.py", "from ..buffer import ReplayBuffer", "ops.gather imports buffer"),
        ("gpu_replay/fields.py", "import gpu_replay.ops.gather", "fields imports ops.gather"),
        ("gpu_replay/buffer.py", "def f():\n    from gpu_replay.training import agent", "buffer imports training"),
        ("gpu_replay/buffer.py", "from gpu_replay.bench.timing import Plan", "buffer imports bench.timing"),
        ("gpu_replay/training/agent.py", "from gpu_replay.bench import timing", "the programs do not know"),
        ("gpu_replay/study/run.py", "from gpu_replay.training.agent import Agent", "the programs do not know"),
        ("gpu_replay/training/agent.py", "from gpu_replay.cli import main", "training.agent imports cli"),
        ("kernels/gather.py", "import torch", "kernels import triton and nothing else"),
        ("gpu_replay/loops/gather.py", "import torch", "loops import numba and numpy and nothing else"),
        ("kernels/gather.py", "from gpu_replay.fields import Field", "kernels import triton and nothing else"),
        ("gpu_replay/helpers.py", "", "helpers has no place in LAYERS"),
        ("gpu_replay/buffer.py", "from gpu_replay.gone import nothing", "which is not there"),
    ],
)
def test_a_breach_is_seen(tmp_path: Path, file: str, line: str, message: str) -> None:
    for name in ("gpu_replay/buffer.py", "bench/timing.py", "gpu_replay/ops/gather.py", "gpu_replay/training/agent.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("from gpu_replay.fields import Field\n")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "gather.py").write_text("import triton.language as tl\nfrom .philox import words\n")
    (tmp_path / "kernels" / "philox.py").write_text("import triton\n")
    assert violations(tmp_path) == []
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line)
    (breach,) = violations(tmp_path)
    assert message in breach


def test_importing_the_package_loads_nothing_heavy() -> None:
    # torch brings some of them along where they are installed
    program = f"""
import sys, torch
before = set(sys.modules)
import gpu_replay
print(*(set({HEAVY}) & (set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def other_variables(source: str) -> list[int]:
    """Lines that touch the environment in any other way than `os.environ.get(VARIABLE, ...)`."""
    touched = [node for node in nodes(source) if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT]
    named = [node for node in nodes(source) if isinstance(node, ast.alias) and node.name in ENVIRONMENT]
    allowed = {
        id(node.func.value)
        for node in nodes(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
        if node.args and isinstance(node.args[0], ast.Name) and node.args[0].id == "VARIABLE"
    }
    return [node.lineno for node in (*touched, *named) if id(node) not in allowed]


def test_two_variables_are_read() -> None:
    found = {
        module: lines
        for module, path in sources(ROOT).items()
        if not module.startswith("bench.") and (lines := other_variables(path.read_text()))
    }
    assert found == {}
    assert importlib.import_module("gpu_replay.ops._backend").VARIABLE == "GPU_REPLAY_BACKEND"
    assert importlib.import_module("gpu_replay.ops.launch").VARIABLE == "GPU_REPLAY_PLAIN_LAUNCH"
    assert other_variables("os.environ.get(VARIABLE)") == []
    for line in ('os.environ.get("HOME")', "os.getenv(VARIABLE)", "from os import environ", "os.environ[VARIABLE]"):
        assert other_variables(line) == [1]


def test_every_file_says_why_it_exists() -> None:
    files = [*sources(ROOT).values(), *(ROOT / "tests").rglob("*.py")]
    silent = [str(path.relative_to(ROOT)) for path in files if ast.get_docstring(parsed(path.read_text())) is None]
    assert silent == []


def test_no_assert_stands_in_for_an_error_message() -> None:
    found = []
    for module, path in sources(ROOT).items():
        # in device code it is Triton's static_assert or nothing
        found.extend(f"{module}:{node.lineno}" for node in nodes(path.read_text()) if isinstance(node, ast.Assert))
    assert found == []


# written with other libraries; what imports them asks for those first
PROGRAMS_OF_TESTS = ("api_reference.py", "typed_use.py")


def test_tests_are_collected_with_torch_triton_numpy_and_pytest_alone() -> None:
    """As on a GPU machine that has nothing else; `pytest.importorskip`, above the imports, asks for more."""
    folder = ROOT / "tests"
    allowed = {*sys.stdlib_module_names, "torch", "triton", "numpy", "pytest", "gpu_replay"}
    allowed |= {path.stem for path in folder.rglob("*.py")}
    modules, wrong = sources(ROOT), []
    needed = loaded(modules)
    for path in folder.rglob("*.py"):
        asked = set()
        for node in parsed(path.read_text()).body if path.name not in PROGRAMS_OF_TESTS else ():
            if isinstance(node, (ast.Assign, ast.Expr)) and "importorskip" in ast.unparse(node.value):
                asked |= {each.value.split(".")[0] for each in ast.walk(node) if isinstance(each, ast.Constant)}
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{path.name} imports {name}" for name in names if name.split(".")[0] not in allowed | asked]
        for module in imports(path.stem, path, modules, everywhere=False) if path.name not in PROGRAMS_OF_TESTS else ():
            wrong += [f"{path.name} imports {name}" for name in needed.get(module, set()) - allowed - asked]
    assert wrong == []
