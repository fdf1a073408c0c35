"""`buffer.capture`: sample, learn and update as one call, which on a GPU becomes one replay of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_replay.batch import Batch
from gpu_replay.graphs.cuda_graph import CaptureError, CudaGraphCall, map_tensors
from gpu_replay.graphs.stream_order import Recorded

# takes a Batch, or nothing where none is drawn
Learn = Callable[..., Any]


class LearningStep:
    """Calls `learn` with a sampled batch and gives the buffer the priorities that it returns.

    Made by `capture` of a buffer. One thread at a time may call it; others may use the buffer meanwhile.
    """

    def __init__(
        self,
        learn: Learn,
        batch_size: int | None,
        device: torch.device,
        warm_ups: int,
        *,
        generators: Sequence[torch.Generator] = (),
        sample: Callable[[], Batch | None],
        update: Callable[[Tensor, Tensor], None],
        recording: Callable[[], AbstractContextManager[Recorded]],
        replaying: Callable[[Recorded], AbstractContextManager[None]],
    ) -> None:
        """Keep arguments that the buffer has checked.

        generators:     other generators than torch's own from which `learn` draws.
        sample, update: the buffer's calls; where `sample` gives None, the step calls `learn` alone.
        recording:      a context that counts the rows added by calls captured in it.
        replaying:      a context that orders one replay among the buffer's calls.
        """
        self._recording, self._replaying = recording, replaying
        self._recorded = Recorded()
        # a method would be a cycle, which keeps a dropped buffer and the memory of its graph until Python looks for it
        call = partial(_learn_once, learn, batch_size, device, sample, update)
        self._graphed = CudaGraphCall(call, device, warm_ups=warm_ups, generators=generators)

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
        with self._replaying(self._recorded):
            return graphed.replay()

    def _capture(self) -> None:
        with self._recording() as recorded:
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


def _learn_once(
    learn: Learn,
    batch_size: int | None,
    device: torch.device,
    sample: Callable[[], Batch | None],
    update: Callable[[Tensor, Tensor], None],
) -> Any:
    """One step, run eagerly or captured."""
    batch = sample()
    if batch is None:
        return _detached(learn())
    returned = learn(batch)
    priorities, output = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    _check(priorities, batch_size, device)
    output = _detached(output)
    if priorities is not None:
        update(batch.key, priorities)
    return output


def _detached(output: Any) -> Any:
    """The output of the step, detached. Raises TypeError if it is not made of tensors."""
    try:
        # detached, since outputs kept between calls would keep the memory of a backward pass
        return map_tensors(output, Tensor.detach)
    except TypeError as error:
        raise TypeError(
            f"every replay returns what learn returns beside the priorities, so that must be tensors; {error}"
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
