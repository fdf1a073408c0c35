"""The environment of a run: machine, versions, and the commit of the checkout."""

from __future__ import annotations

import datetime
import os
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from gpu_replay.console.versions import cpu_cores, device_name, versions

from .record import Environment

_VERSIONS = ("python", "numpy", "torch", "triton", "numba", "gpu_replay", "cuda", "rocm")


class CannotMeasure(Exception):
    """What was asked for cannot be measured here; the message says why."""


class DeviceLost(CannotMeasure):
    """The device no longer answers; another process can measure the remaining cases."""


def current_environment(device: torch.device) -> Environment:
    """This machine, this process and this checkout."""
    found = versions()
    return Environment(
        device=device_name(device) if device.type == "cuda" else "cpu",
        cpu=device_name(torch.device("cpu")),
        cores=cpu_cores(),
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        versions={name: found.get(name) for name in _VERSIONS},
        commit=_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def checkout() -> Path | None:
    """Root of the checkout that this file belongs to; None when the package was installed elsewhere."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() and (root / "gpu_replay").is_dir() else None


def _commit() -> str | None:
    if told := os.environ.get("GPU_REPLAY_COMMIT"):
        # a copy of the checkout has no history
        return told
    root = checkout()
    if root is None:
        return None

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")[:12]
        # results of earlier runs do not change what is measured
        return f"{head}+changes" if git("status", "--porcelain", "--", ".", ":!bench/results") else head
    except (OSError, subprocess.SubprocessError):
        return None
