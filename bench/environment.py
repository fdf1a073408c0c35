"""Where and with what a run is made: machine, versions, and the commit of the checkout."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from gpu_replay import __version__
from gpu_replay.console.versions import cpu_model

from .record import Environment


def current_environment(device: torch.device) -> Environment:
    """Look at this machine, this process and this checkout."""
    cuda = device.type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        versions={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "triton": installed_version("triton"),
            "numba": None if cuda else installed_version("numba"),
            "gpu_replay": __version__,
            "cuda": torch.version.cuda if cuda else None,
        },
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
    root = checkout()
    if root is None:
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        # results of earlier runs are no change of what is measured
        changes = _git(root, "status", "--porcelain", "--", ".", ":!bench/results")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head[:12]}+changes" if changes else head[:12]


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()
