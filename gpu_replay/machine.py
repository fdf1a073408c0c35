"""What the machine calls itself; records of runs and measurements carry it."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()
