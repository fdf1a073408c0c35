"""Kernels as GPUs that are not here would run them: `compiled_kernels.py`, in a process in which Triton compiles."""

from __future__ import annotations

from interpreted import run_compiled


def test_compiled_kernels(full: bool) -> None:
    run_compiled("tests/helpers/compiled_kernels.py", *(("--full", "-m", "slow") if full else ()))
