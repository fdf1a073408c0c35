"""Kernels without a GPU: the launches that a call would make, recorded, and each compiled as the JIT would compile it.

Tensors are on the CPU and are sent to the device code, which makes its launches for a GPU; none of them runs, so
nothing that a recorded call returns means anything. `compile_for` needs a process in which Triton does not interpret.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_replay import ReplayBuffer, TrajectoryReplayBuffer, ops
from gpu_replay.ops import launch

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel with all that it was given."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def specialised(self) -> list[str]:
        """Integers for whose values Triton would compile the kernel anew."""
        general = getattr(self.kernel, "do_not_specialize", None)
        if general is None:
            # interpreted; before triton 3.6 another object has the arguments of the decorator
            settings = vars(self.kernel).get("kwargs") or self.kernel.rewriter.kwargs
            general = settings.get("do_not_specialize", ())
        named = zip(self.kernel.arg_names, self.arguments, strict=False)
        return [name for name, argument in named if isinstance(argument, int) and name not in general]

    @property
    def variant(self) -> str:
        """The constants and the dtypes, the same for launches that share compiled code."""
        constants = ", ".join(f"{name}={value}" for name, value in sorted(self.constants.items()))
        return f"{self.name}({', '.join(map(_kind, self.arguments))}; {constants})"


def _kind(argument: Any) -> str:
    if isinstance(argument, tuple):
        return f"({', '.join(map(_kind, argument))})"
    if isinstance(argument, int):
        return "i32" if abs(argument) < 2**31 else "i64"
    return str(getattr(argument, "dtype", type(argument).__name__)).removeprefix("torch.")


def every_kernel() -> set[str]:
    """The names of all kernels that are launched."""
    files = (Path(__file__).parents[2] / "kernels").glob("*.py")
    return {name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)}


def kernel_class() -> Any:
    """The class of all kernels of this process, whose method `run` launches."""
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    if not knobs.runtime.interpret:
        return JITFunction
    if not hasattr(InterpretedFunction, "run"):
        _give_run(InterpretedFunction)
    return InterpretedFunction


def _give_run(kernels: Any) -> None:
    """Let interpreted kernels launch through a method of their class, as compiled ones do: before triton 3.6 they have
    none."""
    launch = kernels.__getitem__

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        return launch(kernel, grid)(*arguments, **constants)

    def launcher(kernel: Any, grid: Any) -> Any:
        return functools.partial(kernels.run, kernel, grid=grid, warmup=False)

    kernels.run, kernels.__getitem__ = run, launcher


@contextmanager
def active_driver(**functions: Callable[..., Any]) -> Iterator[None]:
    """Within it these stand for Triton's driver of a GPU; to ask for the one that is active would make one, which needs
    a GPU."""
    from triton.runtime import driver

    before = dict(vars(driver))
    driver.set_active(SimpleNamespace(**functions))
    try:
        yield
    finally:
        vars(driver).update(before)


@pytest.fixture(name="driver")
def driver_fixture() -> Iterator[None]:
    """A driver that says which device and stream are current."""
    with active_driver(get_current_device=lambda: 2, get_current_stream=lambda device: 40 + device):
        yield


EMPTY = torch.empty


def zeroed(*shape: Any, device: Any = None, **settings: Any) -> Tensor:
    """What stands for `torch.empty`: zeros, except on the meta device, where zeros themselves are made by it."""
    make = EMPTY if device is not None and torch.device(device).type == "meta" else torch.zeros
    return make(*shape, device=device, **settings)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within it buffers use the device code, and every launch is appended to the list instead of made."""

    from gpu_replay.ops import _backend

    launches: list[Launch] = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        launches.append(Launch(self, tuple(grid), arguments, constants))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_class(), "run", record)
        patch.setattr(_backend, "_require_triton", lambda device: None)
        patch.setenv(_backend.VARIABLE, "triton")
        # nothing is filled, and what launches would have filled is looked at by operations of torch
        patch.setattr(launch, "EMPTY_STRIDED", {})
        patch.setattr(torch, "empty", zeroed)
        use_sizes_of_a_gpu(patch)
        yield launches


def rows_of(buffer: ReplayBuffer | TrajectoryReplayBuffer, rows: int, *, final: bool = False) -> dict[str, Tensor]:
    """Zeros for an `add`; final: with final observations, where the buffer has any."""
    given = {name: torch.zeros((rows, *field.shape), dtype=field.dtype) for name, field in buffer.fields.items()}
    if isinstance(buffer, TrajectoryReplayBuffer):
        taken = final and buffer.autoreset != "next_step"
        given |= {f"final_{name}": given[name] for name in buffer._streams.observations if taken}
        given["reward"] = torch.zeros(rows)
        given["terminated"] = given["truncated"] = torch.zeros(rows, dtype=torch.bool)
    return given


def use_sizes_of_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let the launchers give every program as much to do as on a GPU, wherever the tensors are."""
    choose_sizes(patch.setattr, interpreted=False)


def choose_sizes(put: Callable[[Any, str, Any], object], *, interpreted: bool) -> None:
    """Replace all functions that choose how much one program does by such as take no notice of where that is."""
    for found in pkgutil.iter_modules(ops.__path__):
        module = importlib.import_module(f"{ops.__name__}.{found.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if "interpreted" in inspect.signature(function).parameters:
                put(module, name, _told(function, interpreted))


def _told(function: Any, interpreted: bool) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def chosen(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.arguments["interpreted"] = interpreted
        return function(*bound.args, **bound.kwargs)

    return chosen


def compile_for(launch: Launch, target: str) -> Any:
    """The launch's kernel compiled for a target: signature and specialisation are those that the JIT finds."""
    from triton.backends.compiler import GPUTarget

    named = GPUTarget(*TARGETS[target])
    # Triton keeps its compiled kernels by device
    functions = {"get_current_target": lambda: named, "get_current_device": lambda: str(named)}
    with active_driver(**functions, get_current_stream=lambda device: 0):
        return launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)


@dataclass(frozen=True)
class Resources:
    """What one thread or block takes; spilled registers are kept in slow memory."""

    registers: int
    spilled: int
    shared: int


def resources(compiled: Any, target: str) -> Resources:
    """What the assembler reports for compiled code."""
    shared = int(compiled.metadata.shared)
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        numbers = {name: int(value) for name, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
        # scalar registers are spilled to lanes of vector registers; where those do not do, the segment grows
        spilled = numbers["vgpr_spill_count"] + numbers["private_segment_fixed_size"]
        return Resources(numbers["vgpr_count"], spilled, shared)
    report = _assembled(compiled.asm["ptx"], target)
    used = re.search(r"Used (\d+) registers", report)
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert used, report
    assert stack, report
    return Resources(int(used[1]), sum(map(int, stack.groups())), shared)


def _assembled(ptx: str, target: str) -> str:
    """What Triton's own assembler says about PTX code."""
    from triton.backends.nvidia.compiler import get_ptxas

    # older versions have one assembler for all
    arch = (TARGETS[target][1],) if inspect.signature(get_ptxas).parameters else ()
    named = re.search(r"^\.target (\S+)", ptx, re.MULTILINE)
    assert named, ptx[:200]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            get_ptxas(*arch).path,
            "-v",
            f"--gpu-name={named[1].rstrip(',')}",
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
