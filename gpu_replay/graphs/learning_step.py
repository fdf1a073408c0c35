"""`buffer.capture`: sample, learn and update as one call, which on a GPU becomes one replay of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.batch import Batch
from gpu_replay.graphs.cuda_graph import CaptureError, CudaGraphCall, map_tensors
from gpu_replay.graphs.stream_order import Recorded

# takes a Batch, or nothing where none is drawn
Learn = Callable[..., Any]


class CapturedBuffer(Protocol):
    """The calls of a buffer that a step makes."""

    @property
    def device(self) -> torch.device: ...

    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch: ...

    def update_priorities(self, keys: Any, priorities: Any) -> None: ...

    # counts the rows that captured calls add
    def _recording(self, batch: int | None) -> AbstractContextManager[Recorded]: ...

    # orders one replay among the buffer's calls
    def _replaying(self, batch: int | None, recorded: Recorded) -> AbstractContextManager[None]: ...


class LearningStep:
    """Calls `learn` with a sampled batch and gives the buffer the priorities that it returns.

    Made by `capture` of a buffer. One thread at a time may call it; others may use the buffer meanwhile.
    """

    def __init__(
        self,
        buffer: CapturedBuffer,
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
        self._graphed = CudaGraphCall(call, buffer.device, warm_ups=count, generators=checked)

    @property
    def captured(self) -> bool:
        """Whether calls are replays; never on a CPU."""
        return self._graphed.captured

    @property
    def replays(self) -> int:
        """Calls so far that were replays."""
        return self._graphed.replays

    def __call__(self) -> Any:
        """Sample, learn, update; returns the output of `learn` without the priorities, or None.

        Once captured it returns the same tensors every time, and the next call overwrites them: clone those to keep.
        Raises as `sample` and `update_priorities` do, and CaptureError, a RuntimeError, where `learn` cannot be
        captured.
        """
        graphed = self._graphed
        if not graphed.warm:
            return graphed()
        if not graphed.captured:
            self._capture()
        with self._buffer._replaying(self._batch_size, self._recorded):
            return graphed.replay()

    def _capture(self) -> None:
        with self._buffer._recording(self._batch_size) as recorded:
            try:
                self._graphed.capture()
            except CaptureError as error:
                raise CaptureError(
                    f"learn cannot be captured as a CUDA graph: {error}. A graph holds work of the device alone: take "
                    "out of learn what waits for the device (item, tolist, cpu, print, `if` on a tensor, indexing by a "
                    "mask) or copies from the host (torch.tensor, torch.from_numpy), and return tensors instead. With "
                    "what must stay, call sample, learn and update_priorities in a loop of your own."
                ) from error.__cause__
        self._recorded = recorded


def _learn_once(buffer: CapturedBuffer, learn: Learn, batch_size: int | None, beta: float | None) -> Any:
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
