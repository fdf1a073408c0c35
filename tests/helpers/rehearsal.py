"""Runs a module as on a machine with a GPU, without one: `PYTHONPATH=tests python -m rehearsal MODULE [ARGUMENT ...]`.

Tensors that are asked for on "cuda" lie in the memory of the host and say that they do not; kernels are interpreted;
streams do at once what they are given, events read the clock, and graphs repeat what was done while they were captured.
It shows that a program for a GPU runs to its end, so that no typing mistake waits for one. Nothing that it measures
means anything.
"""

from __future__ import annotations

import ctypes
import functools
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from interpreted import interpret_quickly
from launches import Launch, choose_sizes
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves

from gpu_replay import Field
from gpu_replay.bench import field, first_contact, kernel_inputs, main, measure, peers_suite, subjects
from gpu_replay.ops.launch import EMPTY_STRIDED

GPU = torch.device("cuda", 0)
NAME = "No GPU, a rehearsal"
MEMORY = 2**34
REFUSED = "operation not permitted when stream is capturing"
UNREGISTERED = "Attempt to increase offset for a CUDA generator not in capture mode."
COPIED = "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."
WAITS = "called a synchronizing CUDA operation"
# waits for the device, which no graph can
_WAITING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
# so do these, which torch tells where it is asked to
_WAITING_TOO = {"equal", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive"}
_GETTERS: dict[Any, Callable[[bool], Any]] = {
    Tensor.device.__get__: lambda on_gpu: GPU if on_gpu else torch.device("cpu"),
    vars(torch._C.TensorBase)["is_cuda"].__get__: lambda on_gpu: on_gpu,
    vars(torch._C.TensorBase)["is_cpu"].__get__: lambda on_gpu: not on_gpu,
    Tensor.get_device: lambda on_gpu: 0 if on_gpu else -1,
}
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__


def _on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and getattr(value, "_on_gpu", False)


def _named(value: object) -> str | None:
    """The kind of device that an argument names, None for another argument."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu")):
        return torch.device(value).type
    return None


class Rehearsal(TorchFunctionMode):
    """Keeps account of which tensors would be on the GPU; one for each thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch on the host; its results are where they would be."""
        kwargs = kwargs or {}
        if func is torch.device:
            return torch.device(*args, **kwargs)
        if func in _GETTERS:
            return _GETTERS[func](_on_gpu(args[0]))
        if func is Tensor.is_pinned:
            return getattr(args[0], "_pinned", False) or Driver.has(args[0])
        if func is torch.as_tensor and hasattr(args[0], "__cuda_array_interface__"):
            found = Driver.seen(args[0].__cuda_array_interface__)
            vars(found).update(_on_gpu=True)
            return found
        if func in (Tensor.numpy, Tensor.__array__) and _on_gpu(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        given, structure = tree_flatten((args, kwargs))
        places = [place for place in map(_named, given) if place]
        if func in (Tensor.cpu, Tensor.cuda):
            places = ["cpu" if func is Tensor.cpu else "cuda"]
            func, args, kwargs = Tensor.to, (args[0], places[0]), {}
            given, structure = tree_flatten((args, kwargs))
        here = places[0] == "cuda" if places else any(map(_on_gpu, given))
        args, kwargs = structure.unflatten(["cpu" if _named(value) else value for value in given])
        if _Strict.mode is not None and (func is Tensor.tolist or places == ["cpu"]) and any(map(_on_gpu, given)):
            raise RuntimeError(WAITS)
        pinned = kwargs.pop("pin_memory", False) or func is Tensor.pin_memory
        found = args[0].clone() if func is Tensor.pin_memory else func(*args, **kwargs)
        if func is Tensor.to and found is args[0] and here != _on_gpu(found):
            # to another device it is always a copy
            found = found.clone()
        written = args[:1] if func is _SET_DATA and here else ()
        for tensor in tree_leaves((found, written)):
            if isinstance(tensor, Tensor):
                vars(tensor).update(_on_gpu=here, _pinned=pinned)
        return found


class _Recorder(TorchDispatchMode):
    """Makes calls, and keeps them for a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        # numbers that the host made tensors of
        self._lifted: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITING:
            raise RuntimeError(REFUSED)
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and not self._graph.has(generator):
            raise RuntimeError(UNREGISTERED)
        if func is torch.ops.aten.index_put_.default and any(args[2] is each for each in self._lifted):
            raise RuntimeError(COPIED)
        with self._graph.undoing((args, kwargs)) if func._schema.is_mutable else nullcontext():
            found = func(*args, **kwargs)
        self._graph.calls.append(functools.partial(_again, func, args, kwargs, found))
        if func is torch.ops.aten.lift_fresh.default:
            self._lifted.append(found)
        return found


class _Strict(TorchDispatchMode):
    """Refuses what waits for the device, while torch is asked to."""

    mode: ClassVar[_Strict | None] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, leaves = func.overloadpacket.__name__, tree_leaves(args)
        masked = name.startswith("index") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1:])
        )
        waits = func in _WAITING or name in _WAITING_TOO or (masked and name in ("index", "index_put_"))
        if waits and any(map(_on_gpu, leaves)):
            raise RuntimeError(WAITS)
        return func(*args, **(kwargs or {}))


def _set_sync_debug_mode(mode: str) -> None:
    if _Strict.mode is not None:
        _Strict.mode.__exit__(None, None, None)
        _Strict.mode = None
    if mode == "error":
        _Strict.mode = _Strict().__enter__()


def _synchronize(*_: object) -> None:
    if _Strict.mode is not None:
        raise RuntimeError(WAITS)


def _again(func: Any, args: Any, kwargs: Any, found: Any) -> None:
    """Make a call once more, into the tensors that it returned the first time."""
    for old, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, Tensor) and old is not new and old.data_ptr() != new.data_ptr():
            old.copy_(new)


@contextmanager
def _plain() -> Iterator[None]:
    """Calls of torch are what they are on the host, and are not recorded."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class Graph:
    """What was done during a capture, which is undone at its end."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[Callable[[], object]] = []
        # bytes of memory that each call changed, where, and what they were before
        self._changed: list[tuple[Tensor, Tensor, Tensor]] = []
        # with their states, as they were before
        self._generators: list[tuple[torch.Generator, Tensor]] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        """See torch."""
        self._generators.append((generator, generator.get_state()))

    def has(self, generator: torch.Generator) -> bool:
        """Whether calls that are captured may draw from it."""
        # the same one may come as another object
        return any(_identity(each) == _identity(generator) for each, _ in self._generators)

    @contextmanager
    def undoing(self, given: object) -> Iterator[None]:
        """Remember what a call changes in these tensors; no kernel of another thread runs meanwhile."""
        with _interpreting:
            with _plain():
                tensors = [tensor for tensor in tree_leaves(given) if isinstance(tensor, Tensor)]
                storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
                memory = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]
                before = [each.clone() for each in memory]
            try:
                yield
            finally:
                with _plain():
                    for now, old in zip(memory, before, strict=True):
                        places = (now != old).nonzero()[:, 0]
                        self._changed.append((now, places, old[places]))

    def undo(self) -> None:
        """At the end of the capture: nothing of it was done on the device."""
        with _interpreting, _plain():
            for memory, places, old in reversed(self._changed):
                memory[places] = old
            for generator, state in self._generators:
                generator.set_state(state)
        self._changed.clear()

    def replay(self) -> None:
        """Do it again."""
        with torch.no_grad(), _plain():
            for call in self.calls:
                call()

    def pool(self) -> tuple[int, int]:
        """See torch."""
        return (0, 1)

    def reset(self) -> None:
        """See torch."""
        self.calls.clear()


def _identity(generator: Any) -> int:
    return int(generator._cdata)


class Generator(torch.Generator):
    """On the host, wherever it is asked for."""

    def __new__(cls, device: object = None) -> Generator:
        """See torch."""
        return super().__new__(cls)

    def __init__(self, device: object = None) -> None:
        self._place = GPU if _named(device) == "cuda" else torch.device("cpu")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """See torch."""
        return self._place


def _done(*_: object) -> bool:
    """Nothing is ever under way."""
    return True


class Stream:
    """Does at once what it is given."""

    wait_stream = wait_event = synchronize = query = _done

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device, self.cuda_stream = GPU, 0


class Event:
    """A moment."""

    synchronize = wait = query = _done

    def __init__(self, enable_timing: bool = False, **more: object) -> None:
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Read the clock."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return 1000 * (end._time - self._time)


class Driver:
    """Pins memory that it is given, by address."""

    _pinned: ClassVar[dict[int, int]] = {}

    @classmethod
    def cudaHostRegister(cls, address: int, nbytes: int, flags: int) -> int:
        """See CUDA."""
        cls._pinned[address] = nbytes
        return 0

    @classmethod
    def cudaHostUnregister(cls, address: int) -> int:
        """See CUDA."""
        del cls._pinned[address]
        return 0

    @classmethod
    def has(cls, tensor: Tensor) -> bool:
        """Whether a tensor lies in such memory."""
        with _plain():
            place = tensor.data_ptr()
        return cls._holds(place)

    @classmethod
    def seen(cls, interface: dict[str, Any]) -> Tensor:
        """Bytes of such memory, as torch sees them on the device."""
        place, _ = interface["data"]
        if not cls._holds(place):
            raise RuntimeError("The specified pointer resides on host memory and is not registered")
        return torch.frombuffer((ctypes.c_uint8 * interface["shape"][0]).from_address(place), dtype=torch.uint8)

    @classmethod
    def _holds(cls, place: int) -> bool:
        return any(address <= place < address + nbytes for address, nbytes in cls._pinned.items())


class _Here(threading.local):
    stream = DEFAULT = Stream()
    graph: Graph | None = None


_here = _Here()
# the interpreter keeps the number of the running program in one place for all threads
_interpreting = threading.RLock()


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    before, _here.stream = _here.stream, stream or _here.stream
    try:
        yield
    finally:
        _here.stream = before


@contextmanager
def _graph(
    graph: Graph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    _here.graph = graph
    with _stream(stream or Stream()):
        try:
            with _Recorder(graph):
                yield
        finally:
            _here.graph = None
            graph.undo()


# launches that need different compiled code, as far as there were any
_loaded: set[str] = set()


STANDS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: SimpleNamespace(
        name=NAME, L2_cache_size=2**20, total_memory=MEMORY, multi_processor_count=1, major=9, minor=0
    ),
    "mem_get_info": lambda device=None: (MEMORY // 2, MEMORY),
    **{name: lambda device=None: 0 for name in ("memory_allocated", "memory_reserved", "max_memory_allocated")},
    **{
        # each a function of its own, as torch's compiler wants them
        name: lambda *_, **__: None
        for name in ("empty_cache", "reset_peak_memory_stats", "set_device")
    },
    "synchronize": _synchronize,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "_sleep": lambda cycles: None,
    "cudart": lambda: Driver,
    "check_error": lambda answer: None,
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": Graph,
    "current_stream": lambda device=None: _here.stream,
    "default_stream": lambda device=None: _Here.DEFAULT,
    "stream": _stream,
    "device": nullcontext,
    "device_of": nullcontext,
    "graph": _graph,
    "graph_pool_handle": lambda: (0, 1),
    "is_current_stream_capturing": lambda: _here.graph is not None,
}


def pretend() -> None:
    """From here on this process, and every thread that it starts, has a GPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction

    knobs.runtime.interpret = True
    interpret_quickly()
    # tests take the variable for a sign that there is no GPU
    del os.environ["TRITON_INTERPRET"]

    for name, stand in STANDS.items():
        setattr(torch.cuda, name, stand)
    # modes do not see these
    EMPTY_STRIDED.clear()
    # torch looks at the type of its argument before it asks a mode
    Tensor.record_stream = lambda tensor, stream: None  # type: ignore[assignment]
    torch.Generator = Generator  # type: ignore[misc]
    interpret, run = InterpretedFunction.run, threading.Thread.run

    def launch(kernel: Any, *given: Any, **named: Any) -> None:
        constants = {name: value for name, value in named.items() if name not in ("grid", "warmup")}
        variant = Launch(kernel, (), given, constants).variant
        if _here.graph is not None and variant not in _loaded:
            # the driver loads no code then; that of a kernel is loaded when it is first launched
            raise RuntimeError(f"{REFUSED}: {variant} was never launched before")
        _loaded.add(variant)

        def call() -> None:
            with _interpreting, _plain():
                interpret(kernel, *given, **named)

        if _here.graph is None:
            call()
            return
        _here.graph.calls.append(call)
        with _here.graph.undoing((given, named)):
            call()

    def run_with_a_gpu(thread: threading.Thread) -> None:
        with Rehearsal():
            run(thread)

    InterpretedFunction.run = launch
    setattr(threading.Thread, "run", run_with_a_gpu)  # noqa: B010
    # in the interpreter a program takes a millisecond
    choose_sizes(setattr, interpreted=True)
    # what is tried at all is tried once
    main.QUICK, measure.WARM_UPS, kernel_inputs.STEPS = measure.Plan(0, 0, 1, 1), 1, 10
    main.QUICK_CAPACITIES = (1_000,)
    setattr(main, "QUICK_BATCHES", (8,))  # noqa: B010
    measure.CALLS_PER_GRAPH, subjects.CHECKED = 1, 8
    main.ATARI_ENVS, main.ATARI_BATCH, main.QUICK_STEPS = 40, 8, 12
    peers_suite.QUICK = peers_suite.Sizes((320,), 96, (8,), many=(16,))
    field.QUICK = (16, 16, (64,))
    first_contact.SIZES.update(slots=330, batch=17, many=67, turns=2, calls=8)
    first_contact.STEPS["obs"] = Field((8, 8), torch.uint8)
    for name, feature in first_contact.FEATURES.items():
        first_contact.FEATURES[name] = replace(feature, limit=240.0)


if __name__ == "__main__":
    pretend()
    sys.argv = sys.argv[1:]
    with Rehearsal():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
