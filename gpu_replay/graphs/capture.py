"""`buffer.capture`: sample, learn and update as one call, which on a GPU becomes one replay of a CUDA graph.

A graph replays some hundred kernels at the cost of one launch. Nothing in the captured call may read from the device or
depend on host numbers that change. State that must advance between replays (random draws, the schedule of beta,
priorities, the optimiser's state) is in device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.batch import Batch
from gpu_replay.graphs.stream_order import Recorded, side_stream
from gpu_replay.validation import record_stream

# lets libraries choose their algorithms, Triton compile and the optimiser make its state
WARM_UPS = 3
Result = TypeVar("Result")


class CaptureError(RuntimeError):
    """The call cannot be captured as a CUDA graph; the message is CUDA's or torch's own, in one line."""


class CudaGraphCall(Generic[Result]):
    """Makes `call` a few times, then captures it, and from then on replays the capture.

    call:     works on tensors that stay where they are, and on the host does nothing that a replay would need. What it
              returns is made of tensors (alone, or in tuples, lists, mappings and batches); replays write into those of
              the capture.
    device:   on a CPU, `call` is made every time.
    warm_ups: calls before the capture, at least 1.
    generators: on the device, from which `call` draws in addition to torch's own; replays move them on as calls do.

    Calls and capture are on another stream than the current one, so that gradients are accumulated where they are
    during the capture; a replay is on the current one. Other threads may use the device while one captures.

    Raises CaptureError if the capture fails for reasons of CUDA; errors of `call` pass through.
    """

    def __init__(
        self,
        call: Callable[[], Result],
        device: torch.device,
        *,
        warm_ups: int = WARM_UPS,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._call = call
        self._generators = generators
        self._device = device
        self._warm_ups = warm_ups
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result
        self.replays = 0

    @property
    def captured(self) -> bool:
        """Whether calls are replays."""
        return self._graph is not None

    @property
    def warm(self) -> bool:
        """Whether the next call is a replay, or captures first."""
        return self._warm_ups == 0 and self._device.type == "cuda"

    def __call__(self) -> Result:
        """Make the call once."""
        if self._device.type != "cuda":
            return self._call()
        if not self.warm:
            result = self._call_on_side_stream()
            self._warm_ups -= 1
            return result
        if self._graph is None:
            self.capture()
        return self.replay()

    def capture(self) -> None:
        """Capture the call, which makes it once on the host and not at all on the device."""
        graph = torch.cuda.CUDAGraph()
        cause: BaseException | None = None
        try:
            with capture_into(graph, side_stream(self._device, "captures"), self._device, self._generators):
                try:
                    self._result = self._call()
                except BaseException as error:
                    cause = error
                    raise
        except BaseException as error:
            # to end a capture that failed raises once more, and says less
            cause = cause or error
            if isinstance(cause, RuntimeError):
                raise CaptureError((str(cause).strip() or type(cause).__name__).splitlines()[0]) from cause
            raise cause from None
        finally:
            # its traceback holds this frame: such a cycle would keep a buffer that is dropped
            del cause
        self._graph = graph

    def replay(self) -> Result:
        """Make the captured call once, on the current stream."""
        if self._graph is None:
            raise RuntimeError("there is nothing to replay before the capture.")
        self._graph.replay()
        self.replays += 1
        return self._result

    def _call_on_side_stream(self) -> Result:
        side, current = side_stream(self._device, "captures"), torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = self._call()
        current.wait_stream(side)
        # allocated on the side stream, used on the current one
        map_tensors(result, lambda tensor: record_stream(tensor, current))
        return result


@contextmanager
def capture_into(
    graph: torch.cuda.CUDAGraph,
    stream: torch.cuda.Stream,
    device: torch.device,
    generators: Sequence[torch.Generator] = (),
) -> Iterator[None]:
    """A context in which work that this thread submits, on `stream`, goes into the graph.

    generators: other generators than torch's own from which the work may draw.

    If the capture fails, the error is raised and torch is as it was before. By itself it would leave that stream the
    current one, memory of the graph set aside for good, and generators in capture mode, in which `torch.randn` raises.
    """
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        pool = torch.cuda.graph_pool_handle()
        _register(graph, generators)
        try:
            # threads that capture nothing are free to allocate and to copy
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            _exit_capture_mode(pool, generators)
            raise


def _register(graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
    for generator in generators:
        graph.register_generator_state(generator)


def _exit_capture_mode(pool: tuple[int, int], generators: Sequence[torch.Generator]) -> None:
    """Leave capture mode, after a capture into this pool that raised."""
    device = torch.cuda.current_device()
    # it raises where the capture was ended, and the graph then releases the pool
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    # at the end of a capture that succeeds generators are as before; nothing helps a device that is lost
    graph = torch.cuda.CUDAGraph()
    with suppress(RuntimeError):
        _register(graph, generators)
    with suppress(RuntimeError), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.cuda._sleep(1)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tuples, lists, mappings and batches with each tensor changed; None stays.

    Raises TypeError for anything else in them.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Batch):
        return Batch({name: change(tensor) for name, tensor in value.items()})
    if isinstance(value, Mapping):
        return {name: map_tensors(each, change) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(each, change) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    raise TypeError(f"found {type(value).__name__}; allowed are tensors, and tuples, lists and dicts of them.")


# takes a Batch, or nothing where none is drawn
Learn = Callable[..., Any]


class LearningStep(CudaGraphCall[Any]):
    """Calls `learn` with a sampled batch and gives the buffer the priorities that it returns.

    Made by `capture` of a buffer. A call returns the output of `learn` without the priorities, or None; once captured
    the same tensors every time, which the next call overwrites: clone those to keep. It raises as `sample` and
    `update_priorities` do, and CaptureError, a RuntimeError, where `learn` cannot be captured. One thread at a time may
    call it; others may use the buffer meanwhile.
    """

    def __init__(
        self,
        buffer: Any,
        learn: Learn,
        batch_size: int | None,
        beta: float | None,
        warm_ups: int,
        generators: Iterable[torch.Generator],
    ) -> None:
        """Check the arguments of `capture`. Raises TypeError or ValueError for invalid ones."""
        self._buffer = buffer
        self._batch_size = None if batch_size is None else validation.check_batch_size(batch_size)
        exponent = validation.check_beta(beta)
        if not callable(learn):
            raise TypeError(f"capture needs a function that learns from a batch; found {type(learn).__name__}.")
        count = validation.check_int("warm_ups", warm_ups, 1)
        checked = validation.check_generators(generators, buffer.device)
        self._recorded = Recorded()
        # a method would be a cycle, which keeps a dropped buffer and the memory of its graph until Python looks for it
        call = partial(_learn_once, buffer, learn, self._batch_size, exponent)
        super().__init__(call, buffer.device, warm_ups=count, generators=checked)

    def capture(self) -> None:
        """Capture the step, and count what its calls add."""
        with self._buffer._recording(self._batch_size) as recorded:
            try:
                super().capture()
            except CaptureError as error:
                raise CaptureError(
                    f"learn cannot be captured as a CUDA graph: {error}. A graph holds work of the device alone: take "
                    "out of learn what waits for the device (item, tolist, cpu, print, `if` on a tensor, indexing by a "
                    "mask) or copies from the host (torch.tensor, torch.from_numpy), and return tensors instead. With "
                    "what must stay, call sample, learn and update_priorities in a loop of your own."
                ) from error.__cause__
        self._recorded = recorded

    def replay(self) -> Any:
        """Make the captured step once, in the order of the buffer's calls."""
        with self._buffer._replaying(self._batch_size, self._recorded):
            return super().replay()


def _learn_once(buffer: Any, learn: Learn, batch_size: int | None, beta: float | None) -> Any:
    """One step, run eagerly or captured."""
    if batch_size is None:
        return _detached(learn())
    batch = buffer.sample(batch_size, beta=beta)
    returned = learn(batch)
    priorities, output = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    _check(priorities, batch_size, buffer.device)
    output = _detached(output)
    if priorities is not None:
        buffer.update_priorities(batch.key, priorities)
    return output


def _detached(output: Any) -> Any:
    """The output of the step, detached. Raises TypeError if it is not made of tensors."""
    try:
        # detached, since outputs kept between calls would keep the memory of a backward pass
        return map_tensors(output, Tensor.detach)
    except TypeError as error:
        raise TypeError(
            f"every replay returns what learn returns in addition to the priorities, so that must be tensors; {error}"
        ) from None


def _check(priorities: object, batch_size: int | None, device: torch.device) -> None:
    if priorities is None:
        return
    expected = (
        f"learn must return priorities, a tensor of shape [{batch_size}] on {device}, or None, or a tuple "
        "(priorities, output); found "
    )
    if not isinstance(priorities, Tensor):
        raise TypeError(f"{expected}{type(priorities).__name__}.")
    if priorities.shape != (batch_size,) or priorities.device != device:
        raise ValueError(f"{expected}shape {list(priorities.shape)} on {priorities.device}.")
