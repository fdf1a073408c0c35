"""No call on the device path makes the host wait for the device: the sources are searched for what would.

A GPU shows a stall only where a test happens to pass (see test_gpu.py); this finds it in every branch. Functions that
wait say so in their docstring, in the words "waits for the device", and are not called from `add`, `sample` and
`update_priorities`, but for the exceptions listed here, and after an exception.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "gpu_replay"
MODULES = (
    *("buffer", "trajectory_buffer", "base/buffer", "base/steps", "validation", "batch", "hindsight"),
    *("engines/device", "engines/device_sampler", "engines/device_trajectory"),
    *("graphs/custom_ops", "graphs/learning_step", "graphs/cuda_graph", "graphs/stream_order"),
    *("ops/priorities", "ops/eligibility", "ops/frames", "ops/hindsight", "ops/prefix_sum"),
    *("ops/launch", "ops/rank_draw", "ops/ring", "ops/draw", "ops/weights", "ops/mass_tree"),
)
# what a step of games on the device does besides, in one graph
TRAINING = ("agent", "device_games", "environments", "networks", "train")
ROOTS = ("add", "sample", "sample_sequences", "update_priorities", "begin_episodes", "_add", "_sample", "_update")
# a captured step: its calls, what it does in them, and what a buffer does around a replay
STEPS = ("capture", "__call__", "_once", "replay", "_replaying", "_recording", "on_replay", "ordered", "close")
# `ordered` and what is planned for launches: plans are made in calls, and called under names of their callers
BLOCKS = ("__enter__", "__exit__", "__missing__")
PLANS = ("plan_draw", "plan_write", "plan_insert", "plan_gather", "plan_update", "plan_add_step", "plan_keep_finals")
ALL_ROOTS = (*ROOTS, *STEPS, *BLOCKS, *PLANS, "plan_gather_windows", "plan_gather_sequences", "plan_choose_goals")
WAITS = "waits for the device"
# each reads from the device, or needs to know how many elements there will be
REFUSED = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"),
    *("bincount", "equal", "allclose", "synchronize", "is_nonzero"),
    *("tensor", "as_tensor", "from_numpy", "asarray", "pin_memory"),
}
CONVERSIONS = {"bool", "int", "float", "complex", "print"}
# what makes a mask, besides comparisons
MASKS = {"isnan", "isinf", "isfinite", "isin", "eq", "ne", "lt", "le", "gt", "ge", "bool", "any", "all"}
# conversions of numbers that are on the host, and of tensors that stay where they are
HARMLESS = {
    "int(source)",  # a position among the counters
    "int(value)",  # a batch size
    "float(value)",
    "float(exponent)",
    "bool(ended[row])",  # flags on the CPU
    "beta.item()",  # of compiled code, on the CPU
    "bool(strict)",
    "torch.as_tensor(value, device='cpu')",  # arrays in compiled code
    "torch.as_tensor(terminated)",
    "torch.as_tensor(truncated)",
    "np.asarray(value)",  # arrays that are on the host and stay there until they are moved, which no graph does
    "torch.from_numpy(array)",
    "torch.from_numpy(over)",  # flags on the host
    "torch.from_numpy(_storable(name, array))",
    "copying.synchronize()",  # of pinned memory on a stream of their own
    "value.pin_memory()",  # of steps of emulators, which are on the host
    "torch.cuda.synchronize(self._cuda)",  # of a clock, in one step of many
}
# positions among the counters, bits of flags, and functions that are searched themselves
PLAIN = ("int(Counter.", "int(Flag.", "validation.")
# on the way to the host, or of a length that only the device knows unless it is told
TO_HOST = ("'cpu'", "device='cpu'", "torch.device('cpu')")
OUTPUT_SIZE = "output_size"
# waits only when a replayed graph may have added what the host has not seen, or when the host does not know of enough;
# `among` counts for sequences that are strict or have a stride
MAY_WAIT = {"count_at_least", "span_of_steps", "among"}
# of dictionaries; a buffer's own waits, and none of these calls it
OF_DICTIONARIES = {"keys"}
# of values on the CPU: a tensor elsewhere has no `numpy()`, which raises at once
HOST_ONLY = {"host_rows", "plain_array", "as_stored", "numpy_view", "as_sampled"}

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
    """The node and all below it, without branches that only tensors on the CPU take, or calls that were interrupted."""
    if isinstance(node, ast.ExceptHandler) and node.type is not None and ast.unparse(node.type) == "BaseException":
        return
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
    elsewhere = test == "not self._on_cpu" or test.endswith("device.type != 'cpu'")
    return elsewhere and isinstance(branch.body[-1], ast.Return | ast.Raise)


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _refused(call: ast.Call) -> bool:
    """Whether a call waits for the device by its name, or by the way it is called."""
    name, method = _name(call), isinstance(call.func, ast.Attribute)
    if name in REFUSED:
        # an attribute only: `tensor` alone is a name that anything may have
        return method
    if name == "to":
        return any(ast.unparse(argument) in TO_HOST for argument in (*call.args, *call.keywords))
    if name == "where":
        # with a condition alone it is nonzero
        return method and len(call.args) + len(call.keywords) == 1
    if name == "repeat_interleave":
        return OUTPUT_SIZE not in {keyword.arg for keyword in call.keywords}
    converts = name in CONVERSIONS and isinstance(call.func, ast.Name)
    return converts and not all(isinstance(argument, ast.Constant) for argument in call.args)


def _decides(node: ast.AST) -> list[ast.expr]:
    """What must be true or false for the host to go on."""
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    return []


def _is_mask(node: ast.expr) -> bool:
    """Whether an expression is a comparison of tensors, or made of such."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        return name in MASKS or name.startswith("logical_")
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
            if _refused(node):
                yield text
        elif isinstance(node, ast.Subscript):
            index = node.slice
            if _is_mask(index) or (isinstance(index, ast.Name) and index.id in masks):
                yield text
        for test in _decides(node):
            if isinstance(test, ast.Call) and _is_mask(test):
                yield ast.unparse(test)


def search(sources: Mapping[str, str], roots: tuple[str, ...] = ALL_ROOTS) -> tuple[set[str], list[str]]:
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
            if name in MAY_WAIT | OF_DICTIONARIES | HOST_ONLY:
                continue
            if WAITS in (ast.get_docstring(function) or "").lower():
                found.append(f"{where} {WAITS}, and is called from {' or '.join(roots)}")
                continue
            found.extend(f"{where}: {text}" for text in stalls(function))
            waiting.extend(_name(node) for node in on_the_device(function) if isinstance(node, ast.Call))
    return reached, found


def check_reached(reached: set[str], sources: Mapping[str, str]) -> None:
    """Fail unless the search went into every module."""
    for module, source in sources.items():
        # sums that a buffer makes when it is made, and again when its state is loaded
        assert module == "ops/prefix_sum" or reached & functions({module: source}).keys(), module


def package() -> dict[str, str]:
    return {name: (ROOT / f"{name}.py").read_text() for name in MODULES}


def test_nothing_on_the_device_path_waits_for_the_device() -> None:
    reached, found = search(package())
    assert found == []
    check_reached(reached, package())


def test_no_step_of_games_on_the_device_waits_for_it() -> None:
    sources = {name: (ROOT / "training" / f"{name}.py").read_text() for name in TRAINING}
    reached, found = search(sources, ("send", "recv", "_answer", "_learn_from", "follow"))
    assert found == []
    check_reached(reached, sources)


def test_functions_that_wait_say_so() -> None:
    known = functions(package())
    for name in ("span", "total", "read", "count_at_least", "span_of_steps"):
        assert any(WAITS in (ast.get_docstring(function) or "").lower() for _, function in known[name]), name


CALLER = "class B:\n    def sample(self, n):\n        return self._engine.draw(n)\n"
DRAW = "def draw(x):\n    '''Draw.'''\n    "


@pytest.mark.parametrize(
    "body",
    [
        "return x.item()",
        "return x.numpy()",
        "return (x > 0).nonzero()",
        "return x[x > 0]",
        "return x[~x]",
        "live = (x > 0) & (x < 3)\n    return x[live]",
        "return int(x)",
        "return float(x.max())",
        "if bool((x > 0).any()):\n        return x",
        "torch.cuda.synchronize()",
        "return torch.tensor([1], device='cuda')",
        "return torch.from_numpy(x).to('cuda')",
        "return bool(x)",
        "return torch.where(x)",
        "return x.repeat_interleave(x)",
        "return x.to('cpu')",
        "return x.to(device='cpu', non_blocking=True)",
        "x[x == 3] = 0",
        "if x.any():\n        return x",
        "while not x.all():\n        x = x + 1",
        "return x if torch.isnan(x) else None",
        "print(x)",
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
        "return torch.where(x, 1, 0)",
        "return x.repeat_interleave(3, output_size=9)",
        "return x.to('cuda')",
        "return x.logical_not()",
    ],
)
def test_what_does_not_wait_is_let_through(body: str) -> None:
    assert search({"buffer": CALLER, "device": DRAW + body})[1] == []
