"""A warm call enters few Python frames of the package: counted, since times say nothing on a shared machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import pytest
import torch
from interpreted import INTERPRETED

import gpu_replay
from gpu_replay import Field, Proportional, TrajectoryReplayBuffer
from gpu_replay.ops.launch import EMPTY_STRIDED

PACKAGE, ENVS = Path(gpu_replay.__file__).parent, 4
COMPILED = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
# by the backend: frames of add, of sample and of update_priorities at most
MOST = {"host": (10, 24, 10), "triton": (16, 17, 16)}


def frames_of(call: Callable[[], object]) -> list[str]:
    """The functions of the package, but for its kernels, that a call enters."""
    found = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "kernels"):
            found.append(f"{path.relative_to(PACKAGE)}: {frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("host", marks=pytest.mark.skipif(not COMPILED, reason="a loop in Python calls others")),
        pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")),
    ],
)
def test_a_warm_call_enters_few_functions(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_REPLAY_BACKEND", backend)
    # as programs allocate: see conftest.py
    monkeypatch.setitem(EMPTY_STRIDED, "cpu", torch._C._dynamo.guards._empty_strided_cpu)
    fields = {"obs": Field((4, 4), torch.uint8), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(400, ENVS, fields, stack=4, n_step=3, sampler=Proportional(), device="cpu")
    no, zero = torch.zeros(ENVS, dtype=torch.bool), torch.zeros(ENVS)
    step = {"obs": torch.zeros(ENVS, 4, 4, dtype=torch.uint8), "action": zero.long(), "reward": zero}
    step |= {"terminated": no, "truncated": no}
    for _ in range(12):
        buffer.add(**step)
    keys, errors = buffer.sample(32).key, torch.rand(32)
    calls = (lambda: buffer.add(**step), lambda: buffer.sample(32), lambda: buffer.update_priorities(keys, errors))
    for call, most in zip(calls, MOST[backend], strict=True):
        call()
        frames = frames_of(call)
        # at least the call itself
        assert 1 < len(frames) <= most, "\n".join(frames)
