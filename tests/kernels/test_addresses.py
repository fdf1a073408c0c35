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
from interpreted import INTERPRETED
from sparse_memory import sparse
from triton.runtime.errors import InterpreterError

KERNELS = Path(__file__).parents[2] / "kernels"
CASES = {
    name: case
    for module in (address_cases, address_stream_cases)
    for name, case in vars(module).items()
    if "_kernel" in name
}
here = pytest.mark.skipif(not INTERPRETED or sys.platform != "linux", reason="interpreted, on Linux's memory maps")


def resident_bytes() -> int:
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def test_every_kernel_has_its_case() -> None:
    written = {
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert len(written) >= 12
    # one that works in several ways has several cases
    assert {name.partition("_kernel")[0] + "_kernel" for name in CASES} == written


@here
@pytest.mark.parametrize("kernel", CASES)
def test_a_kernel_reaches_all_of_the_largest_ring(kernel: str) -> None:
    with sparse() as memory:
        before = resident_bytes()
        CASES[kernel](memory)
        # of rings of up to 2^33 bytes only what was touched
        assert resident_bytes() - before < 300e6


@here
@pytest.mark.parametrize("kernel", CASES)
def test_offsets_of_32_bits_would_be_seen(kernel: str) -> None:
    with sparse(offset_bits=32) as memory, pytest.raises((AssertionError, InterpreterError)):
        CASES[kernel](memory)


# a kernel, what it computes in 64 bits, and what it would be in 32
NARROWED = {
    "gather_kernel": ("ring", "slot[:, None] * LAYOUT", "slot[:, None].to(tl.int32) * LAYOUT"),
    "write_kernel": ("ring", "place = slot[:, None]", "place = slot[:, None].to(tl.int32)"),
    "arrange_kernel": ("ranks", "% capacity + age\n", "% capacity + age\n    slot = slot.to(tl.int32)\n"),
    "insert_kernel": ("priorities", "stop = start + (rows - skipped)", "stop = (start + rows - skipped).to(tl.int32)"),
    "add_step_kernel": ("steps", "later = head + ahead * envs", "later = (head + ahead * envs).to(tl.int32)"),
    "keep_finals_kernel": ("steps", "mask=kept, other=0).to(tl.int64)", "mask=kept, other=0)"),
    "gather_windows_kernel": (
        "windows",
        "tl.minimum(age, depth), num_envs, steps)",
        "tl.minimum(age, depth), num_envs, steps).to(tl.int32)",
    ),
    "choose_goals_kernel": ("goals", "line = line.to(tl.int64) + chosen", "line = line + chosen"),
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
    copy.write_text(source.replace(wide, narrow))
    # in the same package, so that it finds what it imports
    spec = importlib.util.spec_from_file_location("gpu_replay.kernels.narrowed", copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(f"gpu_replay.kernels.{name}.{kernel}", getattr(module, kernel))
    with sparse() as memory, pytest.raises((AssertionError, InterpreterError)):
        CASES[kernel](memory)
