"""Addresses have 64 bits: kernels on rings of 2^31 - 1 slots, whose bytes pass 2^31 and 2^32, interpreted on memory
that exists only where it is touched.

Also that these tests can fail: on a machine whose offsets have 32 bits, and with kernels that compute in 32 bits.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import address_cases
import address_stream_cases
import pytest
from interpreted import INTERPRETED, first_process, run_interpreted
from sparse_memory import sparse
from triton.runtime.errors import InterpreterError

KERNELS = Path(__file__).parents[1] / "kernels"
CASES = {
    name: case
    for module in (address_cases, address_stream_cases)
    for name, case in vars(module).items()
    if name.endswith("_kernel")
}
here = pytest.mark.skipif(not INTERPRETED or sys.platform != "linux", reason="interpreted, on Linux's memory maps")


@pytest.mark.slow
@first_process
def test_the_interpreted_kernels_in_a_process_of_their_own() -> None:
    run_interpreted(__file__)


def test_every_kernel_has_its_case() -> None:
    written = {
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert len(written) >= 18
    assert set(CASES) == written


@here
@pytest.mark.parametrize("kernel", CASES)
def test_a_kernel_reaches_all_of_the_largest_ring(kernel: str) -> None:
    with sparse() as memory:
        CASES[kernel](memory)


@here
@pytest.mark.parametrize("kernel", CASES)
def test_offsets_of_32_bits_would_be_seen(kernel: str) -> None:
    with sparse(offset_bits=32) as memory, pytest.raises((AssertionError, InterpreterError)):
        CASES[kernel](memory)


# a kernel, what it computes in 64 bits, and what it would be in 32
NARROWED = {
    "gather_kernel": ("ring", "slot[:, None] * WIDTH", "slot[:, None].to(tl.int32) * WIDTH"),
    "write_kernel": ("ring", "place = slot[:, None]", "place = slot[:, None].to(tl.int32)"),
    "arrange_kernel": ("rank_draw", "% capacity + age\n", "% capacity + age\n    slot = slot.to(tl.int32)\n"),
    "insert_kernel": ("mass_tree", "stop = start + (rows - skipped)", "stop = (start + rows - skipped).to(tl.int32)"),
    "add_step_kernel": ("eligibility", "later = head + ahead * envs", "later = (head + ahead * envs).to(tl.int32)"),
    "keep_finals_kernel": ("eligibility", "mask=kept, other=0).to(tl.int64)", "mask=kept, other=0)"),
    "gather_windows_kernel": (
        "frames",
        "inside = column[None, :]\n",
        "slot = slot.to(tl.int32)\n{}inside = column[None, :]\n",
    ),
    "choose_goals_kernel": ("hindsight", "line = line.to(tl.int64) + chosen", "line = line + chosen"),
}


@here
@pytest.mark.parametrize("kernel", NARROWED)
def test_a_kernel_that_computes_in_32_bits_is_seen(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, wide, narrow = NARROWED[kernel]
    source = (KERNELS / f"{name}.py").read_text()
    assert wide in source
    copy = tmp_path / "narrowed.py"
    copy.write_text(source.replace(wide, narrow.replace("{}", " " * 12)))
    # in the same package, so that it finds what it imports
    spec = importlib.util.spec_from_file_location("gpu_replay.kernels.narrowed", copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(f"gpu_replay.kernels.{name}.{kernel}", getattr(module, kernel))
    with sparse() as memory, pytest.raises((AssertionError, InterpreterError)):
        CASES[kernel](memory)


@here
def test_it_took_little_memory() -> None:
    """After all tests of the process."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("the system does not say what a process took at most")
    # not `getrusage`, which counts the process that started this one as well
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())
    # Python, torch and Triton alone take 300 MB
    assert int(kilobytes) < 600_000
