"""`buffer.capture`: sample, learn and update as one call, which on a GPU becomes one replay of a CUDA graph.

A graph replays some hundred kernels at the cost of one launch. Nothing in the captured call may read from the device or
depend on host numbers that change. State that must advance between replays (random draws, the schedule of beta,
priorities, the optimiser's state) is in device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from gpu_replay import validation
from gpu_replay.graphs.stream_order import side_stream
from gpu_replay.validation import record_stream

# lets libraries choose their algorithms, Triton compile and the optimiser make its state
WARM_UPS = 3


class CaptureError(RuntimeError):
    """The call cannot be captured as a CUDA graph; the message is CUDA's or torch's own, in one line."""


@contextmanager
def capture_into(
    graph: torch.cuda.CUDAGraph,
    stream: torch.cuda.Stream,
    device: torch.device,
    generators: Sequence[torch.Generator] = (),
) -> Iterator[None]:
    """A context in which work that this thread submits, on `stream`, goes into the graph.

    generators: other generators than torch's own from which the work may draw.

    If the work fails, its error is raised, CaptureError for those of CUDA, and torch is as it was before. By itself it
    would leave that stream the current one, memory of the graph set aside for good, and generators in capture mode, in
    which `torch.randn` raises.
    """
    cause: BaseException | None = None
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        pool = torch.cuda.graph_pool_handle()
        _register(graph, generators)
        try:
            # threads that capture nothing are free to allocate and to copy
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    yield
                except BaseException as error:
                    cause = error
                    raise
        except BaseException as error:
            _exit_capture_mode(pool, generators)
            # to end a capture that failed raises once more, and says less
            cause = cause or error
            if isinstance(cause, RuntimeError):
                raise CaptureError((str(cause).strip() or type(cause).__name__).splitlines()[0]) from cause
            raise cause from None
        finally:
            # its traceback holds this frame: such a cycle would keep a buffer that is dropped
            del cause


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


# takes a Batch, or nothing where none is drawn
Learn = Callable[..., Any]


class LearningStep:
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
        self._buffer, self._learn, self._device = buffer, learn, buffer.device
        self._batch_size = None if batch_size is None else validation.check_batch_size(batch_size)
        self._beta = validation.check_beta(beta)
        if not callable(learn):
            raise TypeError(f"capture needs a function that learns from a batch; found {type(learn).__name__}.")
        self._warm_ups = validation.check_int("warm_ups", warm_ups, 1)
        self._generators = validation.check_generators(generators, self._device)
        # what it captured, the rows that one replay adds, and the tensors that it returns
        self._graph: torch.cuda.CUDAGraph | None = None
        self._added, self._result = 0, None
        self.replays = 0

    @property
    def captured(self) -> bool:
        """Whether calls are replays."""
        return self._graph is not None

    def __call__(self) -> Any:
        """Make the step once: the first few as they are, the others as replays of the one that is captured then."""
        if self._device.type != "cuda":
            return self._step()
        if self._warm_ups:
            result = self._step_on_side_stream()
            self._warm_ups -= 1
            return result
        graph = self._graph or self._capture()
        with self._buffer._alone():
            if self._batch_size is not None:
                self._buffer._check_enough(self._batch_size)
            graph.replay()
            self._buffer._sampling.count_added(self._added)
        self.replays += 1
        return self._result

    def _step(self) -> Any:
        """One step, run eagerly or captured."""
        if self._batch_size is None:
            return _detached(self._learn())
        batch = self._buffer.sample(self._batch_size, beta=self._beta)
        returned = self._learn(batch)
        priorities, output = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        output = _detached(output)
        if priorities is not None:
            _check(priorities, self._batch_size, self._device)
            self._buffer.update_priorities(batch.key, priorities)
        return output

    def _step_on_side_stream(self) -> Any:
        """One step on the stream of the capture, so that gradients are accumulated where they are then."""
        side, current = side_stream(self._device, "captures"), torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = self._step()
        current.wait_stream(side)
        # allocated on the side stream, used on the current one
        _pytree.tree_map_only(Tensor, lambda tensor: record_stream(tensor, current), result)
        return result

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture the step, which makes it once on the host and not at all on the device; count what its calls add."""
        graph, side = torch.cuda.CUDAGraph(), side_stream(self._device, "captures")
        buffer, order = self._buffer, self._buffer._stream_order
        if self._batch_size is not None:
            with buffer._lock:
                buffer._check_enough(self._batch_size)
        order.recorded = 0
        try:
            with capture_into(graph, side, self._device, self._generators):
                self._result = self._step()
            self._added = order.recorded
        except CaptureError as error:
            raise CaptureError(
                f"learn cannot be captured as a CUDA graph: {error}. A graph holds work of the device alone: take out "
                "of learn what waits for the device (item, tolist, cpu, print, `if` on a tensor, indexing by a mask) "
                "or copies from the host (torch.tensor, torch.from_numpy), and return tensors instead. With what must "
                "stay, call sample, learn and update_priorities in a loop of your own."
            ) from error.__cause__
        finally:
            order.recorded = None
        self._graph = graph
        return graph


def _detached(output: Any) -> Any:
    """The output of the step, detached. Raises TypeError if it is not made of tensors."""

    def detached(part: Any) -> Tensor | None:
        if part is None:
            return None
        if not isinstance(part, Tensor):
            raise TypeError(
                "every replay returns what learn returns in addition to the priorities, so that must be tensors; found "
                f"{type(part).__name__}; allowed are tensors, and tuples, lists and dicts of them."
            )
        # outputs kept between calls would keep the memory of a backward pass
        return part.detach()

    return _pytree.tree_map(detached, output)


def _check(priorities: object, batch_size: int | None, device: torch.device) -> None:
    expected = (
        f"learn must return priorities, a tensor of shape [{batch_size}] on {device}, or None, or a tuple "
        "(priorities, output); found "
    )
    if not isinstance(priorities, Tensor):
        raise TypeError(f"{expected}{type(priorities).__name__}.")
    if priorities.shape != (batch_size,) or priorities.device != device:
        raise ValueError(f"{expected}shape {list(priorities.shape)} on {priorities.device}.")
