"""Calls of one buffer from several streams: on the device each comes after those before it, and after nothing else.

There is no GPU here: what must have happened before what is remembered by fake_cuda.py. That every call of a buffer
takes its turn is seen by watching who touches the buffer's memory.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from fake_cuda import cuda_fixture as cuda_fixture
from kernel_cases import GOALS, made
from launches import kernel_class, recorded, rows_of, zeroed
from places import pinned_on_the_cpu
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_replay import Combined, Field, Hindsight, Proportional, RankBased
from gpu_replay.engines.device import DeviceEngine
from gpu_replay.engines.device_trajectory import TrajectoryDeviceEngine
from gpu_replay.graphs.stream_order import StreamOrder, record_stream

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def take(order: StreamOrder, cuda: FakeCuda, name: str, stream: Any = None) -> None:
    """One call of the buffer that does one work, on a stream or the current one."""
    with cuda.stream(stream or cuda.current), order:
        cuda.work(name)


@pytest.mark.parametrize("seed", range(5))
def test_a_call_comes_after_all_earlier_calls_and_no_other_work(cuda: FakeCuda, seed: int) -> None:
    draw = random.Random(seed)
    order, streams = StreamOrder(CUDA), [cuda.Stream() for _ in range(4)]
    calls: list[str] = []
    # what the stream of the last call did since, for somebody else
    for number in range(200):
        stream = draw.choice(streams)
        before = set(stream.seen)
        if draw.random() < 0.5:
            with cuda.stream(stream):
                cuda.work(f"other {number}")
            continue
        take(order, cuda, f"call {number}", stream)
        came_after = cuda.before(f"call {number}")
        assert set(calls) <= came_after
        # beside its own stream it waited for what came before the last call alone
        if calls:
            assert came_after == before | cuda.before(calls[-1]) | {calls[-1]}
        calls.append(f"call {number}")


def test_turns_within_a_turn_are_part_of_it_though_it_raises(cuda: FakeCuda) -> None:
    order, side = StreamOrder(CUDA), cuda.Stream()

    def half() -> None:
        with order:
            with order:
                take(order, cuda, "inner")
            cuda.work("rest")
            raise KeyError

    with pytest.raises(KeyError):
        half()
    take(order, cuda, "next", side)
    assert cuda.before("next") == {"inner", "rest"}


def test_captured_calls_wait_for_nothing_and_nothing_waits_for_them(cuda: FakeCuda) -> None:
    """An event from outside would end the capture, and one from inside could not be waited for."""
    order, side, graph = StreamOrder(CUDA), cuda.Stream(), cuda.CUDAGraph()
    take(order, cuda, "first")
    assert not order.capturing()
    with cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        assert order.capturing()
        with order:
            assert order.capturing()
            cuda.work("captured")
    assert [name for name, _ in cuda.done] == ["first"]
    other = cuda.Stream()
    take(order, cuda, "second", other)
    assert cuda.before("second") == {"first"}
    # a replay that takes a turn is ordered as a whole
    with cuda.stream(side), order:
        graph.replay()
    assert cuda.before("captured replayed") == {"first", "second"}
    take(order, cuda, "third")
    assert "captured replayed" in cuda.before("third")


def test_pinned_memory_is_copied_ahead_of_what_is_queued(cuda: FakeCuda) -> None:
    order, readers = StreamOrder(CUDA), []

    def copy(device: torch.device, *, non_blocking: bool) -> Any:
        assert non_blocking
        cuda.work("copy")
        return SimpleNamespace(is_cuda=True, record_stream=readers.append)

    cuda.work("queued")
    for _ in range(2):
        with order:
            order.copied(SimpleNamespace(to=copy))
            cuda.work("store")
            # one wait for all copies of the call
            assert cuda.waited <= {"copy"}
        # before the call returns, for the copy alone
        assert cuda.waited == {"copy"}
        assert "queued" not in cuda.before("copy")
        assert {"queued", "copy"} <= cuda.before("store")
    assert readers == [cuda.default] * 2
    cuda.waited.clear()
    take(order, cuda, "next")
    assert cuda.waited == set()


def test_memory_goes_back_to_its_stream_after_the_last_call(cuda: FakeCuda) -> None:
    order, side = StreamOrder(CUDA), cuda.Stream()
    order.close()
    take(order, cuda, "made")
    take(order, cuda, "elsewhere", side)
    order.close()
    cuda.work("new owner")
    assert cuda.before("new owner") == {"made", "elsewhere"}
    # a stream under capture cannot wait
    take(order, cuda, "once more", side)
    with cuda.graph(cuda.CUDAGraph(), stream=cuda.default, capture_error_mode="thread_local"):
        order.close()


def test_a_buffer_that_nobody_holds_hands_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it does: in between somebody else could get it. And at once, not when a cycle is looked for."""
    held: list[bool] = []
    monkeypatch.setattr(StreamOrder, "close", lambda self: held.append(memory() is not None))
    with recorded():
        buffer = made(*BUFFERS["transitions"])
        buffer.add(**rows_of(buffer, 9))
        buffer.update_priorities(buffer.sample(5).key, torch.ones(5))
    memory = weakref.ref(buffer._storage.times_sampled)
    gc.collect()
    assert held == []
    gc.disable()
    try:
        del buffer
        assert (held, memory()) == ([True], None)
    finally:
        gc.enable()


def test_values_of_other_streams_are_held_until_they_are_read(cuda: FakeCuda) -> None:
    """A tensor's own stream would take its memory back as soon as its owner lets go of it."""
    readers: list[Any] = []
    value: Any = SimpleNamespace(is_cuda=True, device=CUDA, record_stream=readers.append)
    side = cuda.Stream()
    with cuda.stream(side):
        assert record_stream(value) is value
    record_stream(value, cuda.default)
    assert readers == [side, cuda.default]


def test_every_value_of_an_add_is_noted_for_the_stream_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags too: their memory may be another stream's."""
    noted: set[int] = set()
    monkeypatch.setattr(StreamOrder, "reads", lambda order, values: noted.update(each.data_ptr() for each in values))
    step = {"obs": torch.zeros(8, 2), "action": torch.zeros(8, dtype=torch.int64), "reward": torch.zeros(8)}
    step |= {name: torch.zeros(8, dtype=torch.bool) for name in ("terminated", "truncated")}
    with recorded():
        made(64, OBSERVED, Proportional(), {"autoreset": "same_step"}, 8).add(**step)
    assert [name for name, value in step.items() if value.data_ptr() not in noted] == []


# every call takes its turn

OBSERVED = {"obs": Field((2,), torch.float32), "action": Field((), torch.int64)}
# what gives another view of the same memory, and touches none
VIEWS = {"slice", "select", "view", "detach", "alias", "unsqueeze", "squeeze", "expand", "as_strided", "t", "transpose"}
READ = {"tolist", "numpy", "item", "__int__", "__bool__", "__float__", "__array__"}


class Watch:
    """Notes every operation and launch that touches a buffer's memory while nobody has the turn."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.depth, self.touched = buffer, 0, 0
        self.astray: list[str] = []
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(buffer)}
        assert len(self._memory) > 3

    def look(self, name: str, arguments: Any) -> None:
        if any(tensor.untyped_storage().data_ptr() in self._memory for tensor in tensors_of(arguments)):
            self.touched += 1
            if not self.depth:
                self.astray.append(name)

    def move(self, by: int) -> None:
        """Somebody takes the turn, or leaves."""
        self.depth += by


class Mode:
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch


class Operations(Mode, TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function.overloadpacket.__name__ not in VIEWS:
            self._watch.look(str(function), (arguments, named))
        return function(*arguments, **(named or {}))


class Reads(Mode, TorchFunctionMode):
    """What reads without an operation, where memory is the host's."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if getattr(function, "__name__", "") in READ:
            self._watch.look(function.__name__, arguments)
        return function(*arguments, **(named or {}))


def tensors_of(value: Any, met: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors in an object, its attributes and its members."""
    met = set() if met is None else met
    if id(value) in met:
        return
    met.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(each, met)
    elif type(value).__module__.startswith("gpu_replay") and not isinstance(value, type):
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        for name in names:
            yield from tensors_of(getattr(value, name, None), met)


@contextmanager
def watched(buffer: Any, launches: list[Any]) -> Iterator[Watch]:
    """Within it the watch sees who has the turn, and all that is done to the buffer's memory."""
    watch = Watch(buffer)
    launch = kernel_class().run

    def launched(self: Any, *arguments: Any, **named: Any) -> None:
        watch.look(self.__name__, arguments)
        launch(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch, seen_by(watch):
        patch.setattr(kernel_class(), "run", launched)
        patch.setattr(StreamOrder, "__enter__", lambda order: watch.move(1))
        patch.setattr(StreamOrder, "__exit__", lambda order, *error: watch.move(-1))
        yield watch


@contextmanager
def seen_by(watch: Watch) -> Iterator[None]:
    """Within it the watch sees what torch does, with a buffer that takes itself for filled."""
    with pytest.MonkeyPatch.context() as patch, Operations(watch), Reads(watch):
        # launches that are not made count nothing
        for engine in (TrajectoryDeviceEngine, DeviceEngine):
            patch.setattr(engine, "count_at_least", lambda self, wanted: wanted)
        # nor do they fill anything
        patch.setattr(torch, "empty", zeroed)
        yield


def read_keys(buffer: Any) -> None:
    with pytest.raises(KeyError):
        buffer[[1]]


CALLS: dict[str, Any] = {
    "add": lambda buffer: buffer.add(**rows_of(buffer, 3, final=True), priority=torch.ones(3)),
    "sample": lambda buffer: buffer.sample(5),
    "update_priorities": lambda buffer: buffer.update_priorities(torch.arange(3), torch.ones(3)),
    "write": lambda buffer: buffer.write(torch.arange(3), action=torch.zeros(3, dtype=torch.int64)),
    "capture": lambda buffer: buffer.capture(4, lambda batch: batch.weight)(),
    "read": read_keys,
    "added": lambda buffer: buffer.added,
    "len": len,
    "repr": repr,
    **{name: methodcaller(name) for name in ("clear", "stats", "masses", "total_mass", "begin_episodes")},
    "state": lambda buffer: buffer.load_state_dict(buffer.state_dict()),
}
STACKS = {"autoreset": "same_step", "stack": 2}
RELABEL = {"relabel": Hindsight(reward_fn=lambda achieved, desired: achieved.sum(-1), ratio=0.5)}
BUFFERS: dict[str, tuple[Any, ...]] = {
    "transitions": (30, OBSERVED, Combined(Proportional(initial="stored"))),
    "by rank": (30, OBSERVED, RankBased()),
    "steps": (30, OBSERVED, Proportional(normalize="buffer"), STACKS, 3),
    "goals": (30, GOALS, Proportional(), RELABEL, 3),
}
OF_STEPS, OF_MASS = ["begin_episodes"], ["masses", "total_mass"]
MISSING = {"transitions": OF_STEPS, "by rank": OF_STEPS + OF_MASS, "steps": [], "goals": []}


def calls_for(kind: str, folder: Path) -> dict[str, Any]:
    """The calls that such a buffer has."""
    calls = {**CALLS, "save": lambda buffer: buffer.save(folder / "saved")}
    return {name: call for name, call in calls.items() if name not in MISSING[kind]}


@pytest.mark.parametrize("kind", BUFFERS)
def test_every_call_takes_its_turn(kind: str, tmp_path: Path) -> None:
    with recorded() as launches:
        buffer = made(*BUFFERS[kind])
        buffer.add(**rows_of(buffer, 3, final=True))
        with watched(buffer, launches) as watch:
            for name, call in calls_for(kind, tmp_path).items():
                watch.touched = 0
                call(buffer)
                assert watch.astray == [], name
                assert watch.touched, name


@pytest.mark.parametrize("kind", ["transitions", "steps"])
def test_the_host_touches_pinned_fields_only_after_it_waited(kind: str, tmp_path: Path, cuda: FakeCuda) -> None:
    """Kernels read and write them in their turn; where the host does, work of earlier calls may be under way."""
    with recorded(), pinned_on_the_cpu():
        buffer = made(*BUFFERS[kind])
        rows = rows_of(buffer, 3, final=True)
        buffer.add(**rows)
        (pinned,) = cuda.pinned
        watch = Watch(buffer)
        watch._memory = {pinned}
        buffer._stream_order.synchronize = lambda: setattr(watch, "depth", 1)
        calls = {**calls_for(kind, tmp_path), "copy": copy.deepcopy, "batches": lambda each: list(each.batches(2))}
        if kind == "steps":
            many = {name: value[None].repeat(3, *[1] * value.dim()) for name, value in rows.items()}
            calls["extend"] = lambda buffer: buffer.extend(**many)
        waited = set()
        with seen_by(watch):
            for name, call in calls.items():
                watch.depth = watch.touched = 0
                call(buffer)
                assert watch.astray == [], name
                if watch.depth:
                    waited.add(name)
        # and only then: a wait costs
        assert waited == {"state", "save", "copy"} & set(calls)
