"""A warm call runs few Python functions: counted, since times say nothing on a shared machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import CLASSIC, made
from launches import driver_fixture as driver_fixture
from launches import kernel_class, recorded, rows_of

from gpu_replay import Field, Proportional
from gpu_replay.engines.device_trajectory import TrajectoryDeviceEngine
from gpu_replay.ops import launch

COMPILED = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
STEPS = {"obs": Field((4, 4), torch.uint8), "action": Field((), torch.int64)}
BUFFERS = {
    "rows": (5_000, CLASSIC, Proportional()),
    "steps": (400, STEPS, Proportional(), {"stack": 4, "n_step": 3}, 4),
}
# by the code and the buffer: functions of add, of sample and of an update at most. On a GPU those of torch's streams,
# 2 a call, and of Triton's launcher, 2 or 3 a launch, come to these
MOST = {("host", "steps"): (10, 24, 10), ("triton", "rows"): (17, 18, 9), ("triton", "steps"): (17, 18, 9)}


def functions_of(call: Callable[[], object]) -> list[str]:
    """The Python functions that a call runs."""
    found: list[str] = []
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@contextmanager
def straight_to_compiled_code() -> Iterator[None]:
    """Within it what is launched a second time goes straight to what is no Python function."""
    compiled = SimpleNamespace(packed_metadata=(), function=0, run=partial(max, key=id))
    with recorded(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_class(), "run", lambda *arguments, **named: compiled)
        # launches that are not made count nothing
        patch.setattr(TrajectoryDeviceEngine, "count_at_least", partial(max, 0))
        yield


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("code, kind", MOST)
def test_a_warm_call_runs_few_functions(code: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if code == "host" and not COMPILED:
        pytest.skip("a loop in Python calls others")
    with nullcontext() if code == "host" else straight_to_compiled_code():
        # as programs allocate: see conftest.py
        monkeypatch.setitem(launch.EMPTY_STRIDED, "cpu", torch._C._dynamo.guards._empty_strided_cpu)
        buffer = made(*BUFFERS[kind])
        given, keys, priorities = rows_of(buffer, 4), torch.arange(32), torch.rand(32)
        # priorities on a CPU are looked at before
        update = buffer.update_priorities if code == "host" else partial(buffer._sampling.update, ready=True)
        for _ in range(32):
            buffer.add(**given)
        calls = (partial(buffer.add, **given), partial(buffer.sample, 32), partial(update, keys, priorities))
        for call, most in zip(calls, MOST[code, kind], strict=True):
            call()
            call()
            ran = functions_of(call)
            # at least the call itself
            assert 1 < len(ran) <= most, "\n".join(ran)
