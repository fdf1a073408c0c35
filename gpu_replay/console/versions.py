"""Versions and hardware: recorded with every result, and shown by `gpu-replay info`."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch

import gpu_replay

# distribution names, in the order in which they are shown
OPTIONAL = ("triton", "numba", "gymnasium", "ale-py", "safetensors", "tqdm", "matplotlib", "tensorboard")


def versions() -> dict[str, str]:
    """Name to version of installed packages; CUDA or ROCm is the one that torch was built for."""
    found = {
        "gpu_replay": gpu_replay.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.version.hip is not None:
        found["rocm"] = torch.version.hip
    for name in OPTIONAL:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    """The name of the hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_model()


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def cpu_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
