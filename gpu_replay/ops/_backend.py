"""Chooses the backend of all operations: loops on the host, or Triton kernels."""

from __future__ import annotations

import os
from typing import Literal

import torch

VARIABLE = "GPU_REPLAY_BACKEND"
Backend = Literal["host", "triton"]


def choose(device: torch.device) -> Backend:
    """Host code for CPU tensors, Triton kernels for CUDA and ROCm tensors, unless the variable overrides it.

    Raises ValueError for an unknown value, RuntimeError where the chosen code cannot run on the device.
    """
    forced = os.environ.get(VARIABLE, "")
    if forced not in ("", "host", "triton"):
        raise ValueError(f"{VARIABLE}={forced!r}: use 'host', 'triton' or leave it unset.")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not supported; use 'cpu' or 'cuda'.")
    if forced == "host" and device.type != "cpu":
        raise RuntimeError(f"{VARIABLE}=host needs device='cpu'; found {str(device)!r}. Unset it to run on the GPU.")
    backend: Backend = "triton" if forced == "triton" or (device.type == "cuda" and forced == "") else "host"
    if backend == "triton":
        _require_triton(device)
    return backend


def _require_triton(device: torch.device) -> None:
    try:
        from triton import knobs
    except ImportError as error:
        raise RuntimeError(
            f"device {str(device)!r} needs Triton, which is not installed ({error}). "
            'Install it (pip install triton) or use device="cpu".'
        ) from None
    if device.type == "cpu" and not knobs.runtime.interpret:
        raise RuntimeError(
            f"{VARIABLE}=triton on CPU tensors needs the interpreter: set TRITON_INTERPRET=1 before starting Python."
        )
