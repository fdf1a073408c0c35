"""Where the tests run: every device there is, and how much work they do there.

The contract tests take a `device` argument. On CPU tensors they run against the host code, or, with
`TRITON_INTERPRET=1 GPU_REPLAY_BACKEND=triton`, against the interpreted kernels, where a kernel program costs about a
millisecond and every count goes through `scale`.
"""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

Amount = TypeVar("Amount")

INTERPRETED = os.environ.get("GPU_REPLAY_BACKEND") == "triton" and os.environ.get("TRITON_INTERPRET") == "1"

statistical = pytest.mark.skipif(
    INTERPRETED, reason="thousands of samples; the kernels draw what the host code draws, see test_same_everywhere.py"
)
host_only = pytest.mark.skipif(INTERPRETED, reason="measures the process, not the kernels")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], name="device")
def device_fixture(request: pytest.FixtureRequest) -> str:
    """The device that holds the buffer of the test."""
    return str(request.param)


def scale(host: Amount, interpreted: Amount) -> Amount:
    """How much to do: `interpreted` where kernels are interpreted, else `host`."""
    return interpreted if INTERPRETED else host
