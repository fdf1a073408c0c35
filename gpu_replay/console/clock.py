"""A clock for programs that say what their seconds went into."""

from __future__ import annotations

import time

from gpu_replay.loops import compiling


def working_seconds() -> float:
    """Seconds of `time.perf_counter`, without those in which buffers waited for compiled loops."""
    return time.perf_counter() - compiling.waited_seconds
