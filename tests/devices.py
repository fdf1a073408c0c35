"""Where the tests run: every device there is, and how much work they do there.

The contract tests take a `device` argument. On CPU tensors they run against the host code, or, with
`TRITON_INTERPRET=1 GPU_REPLAY_BACKEND=triton`, against the interpreted kernels, where a kernel program costs about a
millisecond and every count goes through `scale`.
"""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("GPU_REPLAY_BACKEND") == "triton" and os.environ.get("TRITON_INTERPRET") == "1"

host_only = pytest.mark.skipif(INTERPRETED, reason="measures the process, not the kernels")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], name="device")
def device_fixture(request: pytest.FixtureRequest) -> str:
    """The device that holds the buffer of the test."""
    return str(request.param)


def scale(host: int, interpreted: int) -> int:
    """How often to do something: `interpreted` times where kernels are interpreted, else `host` times."""
    return interpreted if INTERPRETED else host
