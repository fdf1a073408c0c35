"""Kernels as GPUs that are not here would run them: `compiled_kernels.py`, in a process in which Triton compiles."""

from __future__ import annotations

from interpreted import run_apart


def test_compiled_kernels(full: bool) -> None:
    options = ("--full", "-m", "slow") if full else ()
    assert run_apart("tests/helpers/compiled_kernels.py", *options, TRITON_INTERPRET="0") > 5
