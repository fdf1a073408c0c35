"""Versions and hardware: recorded with every result, and shown by `gpu-replay info`."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
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
    found |= {name: each for name, each in (("cuda", torch.version.cuda), ("rocm", torch.version.hip)) if each}
    for name in OPTIONAL:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
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
