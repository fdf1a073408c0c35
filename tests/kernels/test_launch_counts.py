"""A call makes few launches, whatever the fields, windows, sampler and size of the tree: counted in one table.

Launches are planned once, and what goes straight to compiled code is of one kind. That no call waits is what
`test_capture_graphs.py` and, on a GPU, `test_gpu.py` hold.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from kernel_cases import CASES, CLASSIC, GOALS, MORE_CASES, SAME_STEP, TWENTY, calls_of, distances, launches_of, made
from launches import TARGETS, kernel_class, recorded, rows_of
from launches import driver_fixture as driver_fixture
from programs import SAMPLERS
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_replay import Field, Hindsight, Proportional, RankBased, Sequences, validation
from gpu_replay.engines.device_trajectory import TrajectoryDeviceEngine
from gpu_replay.ops import launch as launching
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.launch import Launch, addresses

# the most launches of a call, besides operations of PyTorch: an order by rank and extremes of all masses are those
ADDS = ("add", "add with priority", "step", "step with priority", "step with final observation")
SAMPLES = ("sample", "sample with beta", "starts")
UPDATES = ("update", "update of starts", "update of hundreds", "update of a thousand")
LAUNCHES = dict.fromkeys((*ADDS, *UPDATES), 1) | dict.fromkeys(SAMPLES, 2)
# which rows get other goals, those goals, and the end of the sample
RELABELED = {"starts": 3}
SETTLED = {"update of thousands": 2}
ORDERED = ("sample", "starts")
WINDOWS = {"stack": 8, "n_step": 40, **SAME_STEP}
ROWS = WINDOWS | {"sequences": Sequences(9, strict=True, stride=3)}
PICTURES = {"obs": Field((6, 6), torch.uint8), "action": Field((), torch.int64)}
BUFFERS = {
    **CASES,
    # trees of two to five levels, of one and of many fields, all samplers
    **{name: case for name, case in MORE_CASES.items() if "by rank, all" not in name},
    **{f"rows, {name}": (5_000, TWENTY, sampler) for name, sampler in SAMPLERS.items()},
    **{f"steps, {name}": (5_000, PICTURES, sampler, WINDOWS) for name, sampler in SAMPLERS.items()},
    **{f"sequences, {name}": (5_000, PICTURES, sampler, ROWS) for name, sampler in SAMPLERS.items()},
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_call_makes_few_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, sorts = BUFFERS[name], []
    sort = torch.sort
    monkeypatch.setattr(torch, "sort", lambda *given, **named: (sorts.append(1), sort(*given, **named))[1])
    base = getattr(case[2], "base", case[2])
    by_rank, prioritized = isinstance(base, RankBased), isinstance(base, RankBased | Proportional)
    wanted = LAUNCHES | (SETTLED if prioritized else {"update of thousands": 1})
    if len(case) == 4 and "relabel" in case[3]:
        wanted["starts"] += RELABELED["starts"]
    found = {call: len(launches) for call, launches in launches_of(case, updates=True).items()}
    assert found == {call: wanted[call] for call in found}
    # of one sample, and of one sequence, which has an order of its own
    assert len(sorts) == by_rank * len(set(ORDERED) & found.keys())


class Operations(TorchDispatchMode):
    """Notes what torch does besides making memory and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        name = function.overloadpacket.__name__
        # what stands for fresh memory here is zeros
        if not function.is_view and not name.startswith(("empty", "zeros", "new_empty")):
            self.names.append(name)
        return function(*given, **(named or {}))


# but for the smallest of all masses
@pytest.mark.parametrize("name", [name for name in SAMPLERS if "rank" not in name and name != "annealed"])
def test_sequences_run_no_kernels_of_torch(name: str) -> None:
    with recorded():
        buffer = made(5_000, PICTURES, SAMPLERS[name], ROWS)
        calls = calls_of(buffer)
        for _ in range(3):
            calls["step"]()
        calls["starts"]()
        with Operations() as found:
            calls["starts"]()
        assert found.names == []


def test_an_update_of_nothing_launches_nothing() -> None:
    with recorded() as launches:
        made(100, TWENTY, SAMPLERS["proportional"]).update_priorities(torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert launches == []


def check_variants(launches: list[Any], kernels: int, more: dict[str, int] | None = None) -> None:
    """Fail unless each kernel was compiled once, or as often as `more` says, and for no number alone."""
    variants: dict[str, set[str]] = {}
    for launch in launches:
        variants.setdefault(launch.name, set()).add(launch.variant)
        assert launch.specialised == [], launch.name
    assert {name: len(found) for name, found in variants.items()} == dict.fromkeys(variants, 1) | (more or {})
    assert len(variants) == kernels


@pytest.mark.parametrize("name, kernels", [("annealed", 3), ("combined-rank", 3)])
def test_the_same_call_with_other_numbers_is_the_same_compiled_code(name: str, kernels: int) -> None:
    """Compiling takes a second, in which training stands: sizes and counts must not ask for it again, but for updates,
    of which 256, 512 and 1024 keys, and more than one program takes, are different code."""
    updates, others = set(), []
    with recorded() as launches:
        buffer = made(5_000, TWENTY, SAMPLERS[name])
        for rows in (4, 6, 16, 31, 128, 300, 1000, 6_000):
            launches.clear()
            buffer.add(**rows_of(buffer, rows), priority=torch.ones(rows))
            buffer.sample(rows)
            others += launches
            launches.clear()
            buffer.update_priorities(torch.arange(rows), torch.ones(rows))
            updates.add(tuple(launch.variant for launch in launches))
            assert all(launch.specialised == [] for launch in launches)
    check_variants(others, kernels)
    assert len(updates) == 4


def test_the_same_call_of_streams_of_other_sizes_is_the_same_compiled_code() -> None:
    sampler, settings = SAMPLERS["combined-proportional"], {**SAME_STEP, "relabel": Hindsight(reward_fn=distances)}
    with recorded() as launches:
        for num_envs, steps in ((1, 4_000), (16, 250), (50, 81), (300, 15)):
            buffer = made(num_envs * steps, GOALS, sampler, settings, num_envs)
            for batch in (4, 16, 31, 250):
                buffer._counters[Counter.ELIGIBLE] = 300
                buffer.add(**rows_of(buffer, num_envs, final=True), priority=torch.ones(num_envs))
                buffer._engine.sample(batch, None)
                buffer.update_priorities(torch.arange(batch), torch.ones(batch))
    # a gather of goals, and one that ends the sample alone
    check_variants(launches, 6, {"gather_kernel": 2})


# plans


def specialisation(kernel: Any, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    """What Triton looks compiled code up by."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    given = getattr(kernel, "kwargs", {})
    compiled = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **given)
    backend = make_backend(GPUTarget(*TARGETS["sm_90"]))
    bind = create_function_from_signature(compiled.signature, compiled.params, backend)
    _, found, options = bind(*arguments, **settings)
    return repr(found), repr(options)


@pytest.fixture(name="planned")
def planned_fixture(monkeypatch: pytest.MonkeyPatch) -> dict[Launch, list[tuple[Any, ...]]]:
    """All launches of a test that may go straight to compiled code, by what planned them."""
    found: dict[Launch, list[tuple[Any, ...]]] = {}
    call = Launch.__call__

    def noted(self: Launch, *arguments: Any, aligned: bool = True) -> None:
        if aligned:
            found.setdefault(self, []).append(arguments)
        call(self, *arguments, aligned=aligned)

    monkeypatch.setattr(Launch, "__call__", noted)
    return found


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in memory that begins anywhere."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return moved.copy_(tensor)


def calls_of_all_kinds(buffer: Any) -> list[Callable[[], object]]:
    """Calls in every form that makes other launches."""
    # what no launch has counted
    buffer._counters[Counter.ADDED] = 80
    rows = getattr(buffer, "num_envs", 8)
    given, priority = rows_of(buffer, rows, final=True), torch.ones(rows)
    keys, priorities = torch.arange(6), torch.rand(6)
    return [
        *calls_of(buffer, rows).values(),
        lambda: buffer.add(**{name: shifted(value) for name, value in given.items()}),
        lambda: buffer.add(**given, priority=priority.double()),
        lambda: buffer.add(**given, priority=shifted(priority)),
        lambda: buffer._engine.sample(6, 1e40),
        lambda: buffer.update_priorities(keys, priorities.double()),
        lambda: buffer.update_priorities(keys, priorities.half()),
        lambda: buffer.update_priorities(shifted(keys), priorities),
        lambda: buffer.update_priorities(keys, shifted(priorities)),
        lambda: buffer._engine.stored(torch.arange(7)),
    ]


@pytest.mark.parametrize("name", ["classic, 3 levels, all options", "by rank", "atari to float", "goals"])
def test_what_one_plan_launches_is_the_same_code_to_triton(
    name: str, planned: dict[Launch, list[tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a GPU priorities keep their dtype
    monkeypatch.setattr(validation, "as_priorities", lambda name, value, rows, device, *, as_array: value)
    with recorded():
        buffer = made(*CASES[name])
        for call in calls_of_all_kinds(buffer) * 2:
            call()
    again = {launch: calls for launch, calls in planned.items() if len(calls) > 1}
    # adds with priorities of two dtypes and without, draws and gathers of two sizes, rows that are read, updates of
    # three dtypes
    assert len(again) >= 12
    for launch, calls in again.items():
        kernel, settings, before, after = launch._kernel, launch._settings, launch._before, launch._after
        assert {name for name in kernel.arg_names if name.isupper()} <= settings.keys()
        kinds = {specialisation(kernel, (*before, *arguments, *after), settings) for arguments in calls}
        assert len(kinds) == 1, kernel.__name__


STORES, COUNT = (torch.ones(3), torch.ones(4)), 9
SETTINGS = {"BLOCK": 64, "WIDE": True, "num_warps": 8}
GRID = (3, 1, 1)


def launch_of(compiled: Any) -> tuple[Launch, mock.MagicMock]:
    """A launch, and what stands for a kernel for which Triton looks up this compiled code."""
    kernel = mock.MagicMock(arg_names=("stores", "count", "x_ptr", "y_ptr", "limit", "WIDE", "BLOCK"))
    kernel[GRID].return_value = compiled
    return Launch(kernel, 3, stores=STORES, count=COUNT, limit=7, **SETTINGS), kernel[GRID]


@pytest.mark.usefixtures("driver")
def test_all_launches_but_the_first_go_straight_to_compiled_code() -> None:
    launch, looked_up = launch_of(compiled := mock.Mock(packed_metadata="metadata", function="code"))
    launch("anywhere", 1, aligned=False)
    launch("x", 1)
    launch("y", 2)
    launch("anywhere", 3, aligned=False)
    launch("z", 4)
    triton_s = [
        mock.call(STORES, COUNT, *given, 7, **SETTINGS) for given in (("anywhere", 1), ("x", 1), ("anywhere", 3))
    ]
    assert looked_up.call_args_list == triton_s
    # on the stream of the device that was current, without hooks; what is shared by its address; constants in the order
    # of the kernel's parameters, options of the compiler left out
    before = (*GRID, 42, "code", "metadata", None, None, None, tuple(store.data_ptr() for store in STORES), COUNT)
    assert compiled.run.call_args_list == [mock.call(*before, *given, 7, True, 64) for given in (("y", 2), ("z", 4))]


@pytest.mark.usefixtures("driver")
def test_launches_go_triton_s_own_way_while_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    launch, looked_up = launch_of(compiled := mock.Mock())
    launch("x", 1)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, name, lambda metadata: None)
            launch("x", 1)
    assert (looked_up.call_count, compiled.run.call_count) == (3, 0)
    launch("x", 1)
    assert (looked_up.call_count, compiled.run.call_count) == (3, 1)


def test_what_is_no_compiled_code_is_launched_by_triton() -> None:
    launch, looked_up = launch_of(None)
    for _ in range(3):
        launch("x", 1)
    assert looked_up.call_count == 3


def test_fields_in_pinned_memory_stay_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks the driver for the address that the device has for them."""

    here, pinned = torch.ones(3), torch.ones(2)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor is pinned)
    given = addresses((here, (pinned, 5)))
    assert given[0] == here.data_ptr()
    assert given[1][0] is pinned
    assert given[1][1] == 5


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (2, 3, 4)])
@pytest.mark.parametrize("direct", [True, False])
def test_allocators_make_what_torch_makes(
    shape: tuple[int, ...], direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = torch._C._dynamo.guards
    monkeypatch.setattr(launching, "EMPTY_STRIDED", {"cpu": guards._empty_strided_cpu} if direct else {})
    for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
        made, expected = launching.allocator(shape, dtype, torch.device("cpu"))(), torch.empty(shape, dtype=dtype)
        assert (made.dtype, made.shape, made.stride()) == (dtype, expected.shape, expected.stride())


# a warm call runs few Python functions: counted, since times say nothing on a shared machine

COMPILED = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
SMALL_FRAMES = {"obs": Field((4, 4), torch.uint8), "action": Field((), torch.int64)}
SHORT = {
    "rows": (5_000, CLASSIC, Proportional()),
    "steps": (400, SMALL_FRAMES, Proportional(), {"stack": 4, "n_step": 3}, 4),
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
        monkeypatch.setitem(launching.EMPTY_STRIDED, "cpu", torch._C._dynamo.guards._empty_strided_cpu)
        buffer = made(*SHORT[kind])
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
