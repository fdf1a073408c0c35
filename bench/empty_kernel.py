"""A kernel that does nothing: what a launch costs, and so the least that any operation of one launch can take."""

from __future__ import annotations

import triton


@triton.jit
def empty_kernel(pointer):  # type: ignore[no-untyped-def]
    """One program, which ends."""
    return
