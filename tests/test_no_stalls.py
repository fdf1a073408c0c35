"""No call on the device path makes the host wait for the device: the sources are searched for what would.

A GPU shows a stall only where a test happens to pass (see test_gpu.py); this finds it in every branch. Functions that
wait say so in their docstring, in the words "waits for the device", and are not called from `add`, `sample` and
`update_priorities`, but for the exceptions listed here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "gpu_replay"
MODULES = (
    "buffer",
    "trajectory",
    "base",
    "device",
    "device_trajectory",
    "inputs",
    "batch",
    "hindsight",
    "ops/admission",
    "ops/eligibility_launch",
    "ops/eligible_draw",
    "ops/frames",
    "ops/hindsight",
    "ops/prefix_sum",
    "ops/rank_draw",
    "ops/ring",
    "ops/stratified_draw",
    "ops/uniform_draw",
    "ops/mass_tree",
)
ROOTS = ("add", "sample", "sample_sequences", "update_priorities")
WAITS = "waits for the device"
# each reads from the device, or needs to know how many elements there will be
REFUSED = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "equal",
    "allclose",
    "synchronize",
    "is_nonzero",
    "tensor",
    "as_tensor",
}
CONVERSIONS = {"bool", "int", "float"}
# conversions of numbers that are on the host, and of tensors that stay where they are
HARMLESS = {
    "int(source)",  # a position among the counters
    "int(value)",  # a batch size
    "float(beta)",
    "float(exponent)",
    "float(np.float32(beta))",
    "bool(ended[row])",  # flags on the CPU
    "torch.as_tensor(terminated)",
    "torch.as_tensor(truncated)",
}
# positions among the counters, bits of flags, and functions that are searched themselves
PLAIN = ("int(Counter.", "int(Flag.", "inputs.")
# waits only when a replayed graph may have added what the host has not seen, or when the host does not know of enough
MAY_WAIT = {"size_at_least", "count_at_least", "span_of_steps"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(sources: Mapping[str, str]) -> dict[str, list[tuple[str, Function]]]:
    """All functions and methods by their bare names, with their modules: a call may mean any of them."""
    found: dict[str, list[tuple[str, Function]]] = {}
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Function):
                found.setdefault(node.name, []).append((module, node))
    return found


def on_the_device(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it, without the branches that only tensors on the CPU take."""
    if isinstance(node, ast.If | ast.IfExp) and ast.unparse(node.test) == "self._on_cpu":
        for part in node.orelse if isinstance(node, ast.If) else [node.orelse]:
            yield from on_the_device(part)
        return
    yield node
    for _, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from on_the_device(child)
            if isinstance(child, ast.If) and _leaves_the_cpu_behind(child):
                break


def _leaves_the_cpu_behind(branch: ast.If) -> bool:
    """Whether what follows is for tensors on the CPU alone."""
    test = ast.unparse(branch.test)
    elsewhere = test == "not self._on_cpu" or test.endswith(".device.type != 'cpu'")
    return elsewhere and isinstance(branch.body[-1], ast.Return | ast.Raise)


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _is_mask(node: ast.expr) -> bool:
    """Whether an expression is a comparison of tensors, or made of such."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitAnd | ast.BitOr)
    ordered = ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.Eq | ast.NotEq
    return isinstance(node, ast.Compare) and any(isinstance(operator, ordered) for operator in node.ops)


def stalls(function: Function) -> Iterator[str]:
    """What in a function waits for the device, as source text."""
    nodes = list(on_the_device(function))
    masks = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _is_mask(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        text = ast.unparse(node) if isinstance(node, ast.Call | ast.Subscript) else ""
        if isinstance(node, ast.Call):
            if text in HARMLESS or text.startswith(PLAIN):
                continue
            name = _name(node)
            # an attribute only: `tensor` alone is a name that anything may have
            refused = name in REFUSED and isinstance(node.func, ast.Attribute)
            converts = name in CONVERSIONS and isinstance(node.func, ast.Name)
            constant = all(isinstance(argument, ast.Constant) for argument in node.args)
            if refused or (converts and not constant):
                yield text
        elif isinstance(node, ast.Subscript):
            index = node.slice
            if _is_mask(index) or (isinstance(index, ast.Name) and index.id in masks):
                yield text


def search(sources: Mapping[str, str], roots: tuple[str, ...] = ROOTS) -> tuple[set[str], list[str]]:
    """The functions that the roots reach, and what in them waits for the device."""
    known = functions(sources)
    reached: set[str] = set()
    found = []
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        for module, function in known.get(name, []):
            where = f"{module}.{name}"
            if name in MAY_WAIT:
                continue
            if WAITS in (ast.get_docstring(function) or "").lower():
                found.append(f"{where} {WAITS}, and is called from {' or '.join(roots)}")
                continue
            found.extend(f"{where}: {text}" for text in stalls(function))
            waiting.extend(_name(node) for node in on_the_device(function) if isinstance(node, ast.Call))
    return reached, found


def package() -> dict[str, str]:
    return {name: (ROOT / f"{name}.py").read_text() for name in MODULES}


def test_nothing_on_the_device_path_waits_for_the_device() -> None:
    reached, found = search(package())
    assert found == []
    # the search went where the work is done
    assert {"append", "_moved", "cast", "as_keys", "_drawn"} <= reached
    assert {"launch_write", "launch_admit", "launch_gather", "launch_update", "tile_for"} <= reached
    assert {"launch_stratified_draw", "launch_weigh", "launch_uniform_draw", "size_at_least"} <= reached
    assert {"follow", "_starts", "launch_follow", "launch_keep_finals", "count_at_least", "span_of_steps"} <= reached
    assert {"launch_rank_draw", "current", "exact", "passed", "_make_list"} <= reached
    assert {"launch_eligible_draw", "launch_gather_windows", "launch_gather_sequences"} <= reached


def test_functions_that_wait_say_so() -> None:
    known = functions(package())
    for name in ("span", "total", "read", "size_at_least", "count_at_least", "span_of_steps"):
        assert any(WAITS in (ast.get_docstring(function) or "").lower() for _, function in known[name]), name


CALLER = "class B:\n    def sample(self, n):\n        return self._engine.draw(n)\n"
DRAW = "def draw(x):\n    '''Draw.'''\n    "


@pytest.mark.parametrize(
    "body",
    [
        "return x.item()",
        "return x.sum().tolist()",
        "return x.cpu()",
        "return x.numpy()",
        "return (x > 0).nonzero()",
        "return x[x > 0]",
        "return x[~x]",
        "live = (x > 0) & (x < 3)\n    return x[live]",
        "return int(x)",
        "return float(x.max())",
        "if bool((x > 0).any()):\n        return x",
        "return torch.equal(x, x)",
        "torch.cuda.synchronize()",
        "return torch.tensor([1], device='cuda')",
        "return helper(x)\ndef helper(x):\n    return [y.item() for y in x]",
        "return late(x)\ndef late(x):\n    '''Look at x; waits for the device.'''\n    return x.item()",
        "if x.device.type != 'cpu':\n        return x.item()\n    return x",
        "if x.device.type != 'cuda':\n        return x\n    return x.item()",
        "if x.device.type != 'cpu':\n        x = x + 1\n    return x.item()",
        "return 1 if x.y else x.item()",
    ],
)
def test_a_stall_is_found(body: str) -> None:
    assert len(search({"buffer": CALLER, "device": DRAW + body})[1]) == 1


@pytest.mark.parametrize(
    "body",
    [
        "return x[1:]",
        "return x[x.names]",
        "return x[0] if x is None else x",
        "return {'a': x}['a' in x]",
        "if x.device.type != 'cpu':\n        return x\n    return x.item()",
        "return look(x) if self._on_cpu else x\ndef look(x):\n    return x.item()",
        "if not self._on_cpu:\n        return x\n    return x.numpy()",
        "return x\ndef unrelated(x):\n    return x.item()",
        "return int(Counter.ADDED)",
    ],
)
def test_what_does_not_wait_is_let_through(body: str) -> None:
    assert search({"buffer": CALLER, "device": DRAW + body})[1] == []
