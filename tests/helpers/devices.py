"""Where the tests run: every device there is, and how much work they do there.

The contract tests take a `device` argument. On CPU tensors they run against the host code, or, with
`TRITON_INTERPRET=1 GPU_REPLAY_BACKEND=triton`, against the interpreted kernels, where a kernel program costs about a
millisecond and every count goes through `scale`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

Amount = TypeVar("Amount")

INTERPRETED = os.environ.get("GPU_REPLAY_BACKEND") == "triton" and os.environ.get("TRITON_INTERPRET") == "1"

statistical = pytest.mark.skipif(
    INTERPRETED, reason="thousands of samples; kernels draw what the host draws, see test_kernels_in_buffers.py"
)
host_only = pytest.mark.skipif(INTERPRETED, reason="measures the process, or has no kernel")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], name="device")
def device_fixture(request: pytest.FixtureRequest) -> str:
    """The device that holds the buffer of the test."""
    return str(request.param)


def on_device(buffer: Any) -> bool:
    """Whether the buffer's calls are kernels, so that it does not look at values."""
    return buffer.device.type != "cpu" or os.environ.get("GPU_REPLAY_BACKEND") == "triton"


@contextmanager
def loops() -> Iterator[None]:
    """Within it new buffers on a CPU run the loops, so that what a test begins with is there at once; a state or a
    checkpoint of them goes on in kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setenv("GPU_REPLAY_BACKEND", "host")
        yield


def scale(host: Amount, interpreted: Amount) -> Amount:
    """How much to do: `interpreted` where kernels are interpreted, else `host`."""
    return interpreted if INTERPRETED else host


def thinned(names: str, *axes: Iterable[Any], times: int = 1, every: int = 1) -> pytest.MarkDecorator:
    """The product of some values; all are slow but for so few that each value occurs at least `times` times.

    every: of the longest axis only every so many values need occur.
    """
    columns = [list(axis) for axis in axes]
    longest = max(map(len, columns))
    # a diagonal for each time, so that a value has other partners
    kept = {
        tuple((place + lap * column) % len(axis) for column, axis in enumerate(columns))
        for lap in range(times)
        for place in range(0, longest, every)
    }
    places = itertools.product(*(range(len(axis)) for axis in columns))
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *(axis[place] for axis, place in zip(columns, each, strict=True)),
                id="-".join(
                    str(axis[place]) if isinstance(axis[place], (str, int)) else f"{column}{place}"
                    for column, (axis, place) in enumerate(zip(columns, each, strict=True))
                ),
                marks=() if each in kept else pytest.mark.slow,
            )
            for each in places
        ],
    )
