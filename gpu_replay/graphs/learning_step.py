"""`buffer.capture`: sample, learn and update as one call, which on a GPU becomes one replay of a CUDA graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.batch import Batch
from gpu_replay.graphs.cuda_graph import WARM_UPS, CaptureError, CudaGraphCall, map_tensors
from gpu_replay.stream_order import Recorded, StreamOrder
from gpu_replay.validation import whole

Learn = Callable[[Batch], Any]


class LearningStep:
    """Calls `learn` with a sampled batch and gives the buffer the priorities that it returns; see `Buffer.capture`.

    Made by `buffer.capture`, which has checked the arguments. One thread at a time may call it; others may use the
    buffer meanwhile.
    """

    def __init__(self, buffer: Capturable, batch_size: int, learn: Learn, beta: float | None, warm_ups: int) -> None:
        self._buffer = buffer
        self._batch_size = batch_size
        self._learn = learn
        self._beta = beta
        self._recorded = Recorded()
        self._graphed = CudaGraphCall(self._once, buffer.device, warm_ups=warm_ups)

    @property
    def captured(self) -> bool:
        """Whether calls are replays; never on a CPU."""
        return self._graphed.captured

    @property
    def replays(self) -> int:
        """Calls so far that were replays."""
        return self._graphed.replays

    def __call__(self) -> Any:
        """Sample, learn, update; returns what `learn` returned beside the priorities, or None.

        Once captured it returns the same tensors every time, and the next call writes into them: clone what is to be
        kept. Raises as `sample` and `update_priorities` do; CaptureError, a RuntimeError, where `learn`
        cannot be captured.
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

    def _once(self) -> Any:
        """The step as the device sees it."""
        batch = self._buffer.sample(self._batch_size, beta=self._beta)
        returned = self._learn(batch)
        priorities, output = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        self._check(priorities)
        try:
            # what is held from call to call must not hold the memory of a backward pass
            output = map_tensors(output, Tensor.detach)
        except TypeError as error:
            raise TypeError(
                f"what learn returns beside the priorities comes out of every replay, so it is made of tensors; {error}"
            ) from None
        if priorities is not None:
            self._buffer.update_priorities(batch.key, priorities)
        return output

    def _check(self, priorities: object) -> None:
        if priorities is None:
            return
        device, wanted = self._buffer.device, (self._batch_size,)
        expected = (
            f"learn must return priorities, a tensor of shape {list(wanted)} on {device}, or None, or a tuple "
            "(priorities, output); found "
        )
        if not isinstance(priorities, Tensor):
            raise TypeError(f"{expected}{type(priorities).__name__}.")
        if priorities.shape != wanted or priorities.device != device:
            raise ValueError(f"{expected}shape {list(priorities.shape)} on {priorities.device}.")


class _Engine(Protocol):
    def replayed(self, rows: int) -> None: ...


class Capturable(ABC):
    """The part of a buffer that makes captured steps, and keeps what the host knows of the buffer true meanwhile."""

    _engine: _Engine
    _stream_order: StreamOrder
    _lock: AbstractContextManager[Any]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the transitions are stored and sampled."""

    @abstractmethod
    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        """Draw `B` rows as a Batch on the buffer's device."""

    @abstractmethod
    def update_priorities(self, keys: Any, priorities: Any) -> None:
        """Give the rows with these keys new priorities."""

    @abstractmethod
    def _check_enough(self, call: str, batch: int, skipped: int = 0) -> None:
        """Raise unless `call` can draw a batch without the newest `skipped` slots."""

    def capture(
        self, batch_size: int, learn: Learn, *, beta: float | None = None, warm_ups: int = WARM_UPS
    ) -> LearningStep:
        """A learning step as one call: `sample`, `learn(batch)` and `update_priorities`; on a GPU one CUDA graph.

        batch_size, beta: as for `sample`.
        learn:    takes the Batch and returns the priorities of its rows, (B,) on the device, or None to leave them as
                  they are; or `(priorities, output)`, where `output`, made of tensors, is what the step returns.
        warm_ups: calls of the step, 1 or more, that run as they are before the graph is captured. They are steps like
                  all others: nothing is learned, drawn or counted that was not asked for.

        Each call draws anew, moves the schedule of beta on and, where `learn` adds, the ring, whether it is replayed or
        not. On a CPU every call runs as it is, so that one program serves both. To be captured `learn` runs once on the
        host without running on the device, and then never again: what else it does on the host is not repeated, and
        what it works on must stay where it is (optimisers made with `capturable=True`). All other calls, `clear` and
        `load_state_dict` too, may come between steps, from other threads and streams as well.

        Raises TypeError or ValueError for arguments that make no sense.
        """
        batch = validation.batch_size(batch_size)
        if beta is not None:
            beta = validation.importance(beta)
        if not callable(learn):
            raise TypeError(f"capture needs a function that learns from a batch; found {type(learn).__name__}.")
        return LearningStep(self, batch, learn, beta, whole("warm_ups", warm_ups, 1))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock and turn, for what the engine does not order itself: no other call meanwhile, here or on the device."""
        with self._lock, self._stream_order.ordered():
            yield

    @contextmanager
    def _recording(self, batch_size: int) -> Iterator[Recorded]:
        """What is captured meanwhile is written down. Raises as `sample` where there is too little to draw from."""
        with self._lock:
            self._check_enough(f"sample({batch_size})", batch_size)
        self._stream_order.recorded = recorded = Recorded()
        try:
            yield recorded
        finally:
            self._stream_order.recorded = None

    @contextmanager
    def _replaying(self, batch_size: int, recorded: Recorded) -> Iterator[None]:
        """The turn of one replay of what was recorded. Raises as `sample` where there is too little to draw from."""
        with self._alone():
            self._check_enough(f"sample({batch_size})", batch_size)
            yield
            self._engine.replayed(recorded.rows)
