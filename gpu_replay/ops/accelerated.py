"""Whether the compiled loops are there: with Numba they are used, without it NumPy does the same."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType


@lru_cache(maxsize=1)
def loops() -> ModuleType | None:
    """`gpu_replay.ops.loops`, or None where Numba is not installed or does not work with the NumPy that is."""
    try:
        from gpu_replay.ops import loops
    except ImportError:
        return None
    return loops
