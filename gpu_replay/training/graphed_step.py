"""One learning step of the trainer as a CUDA graph, or as it is where that cannot be."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from gpu_replay.graphs.cuda_graph import WARM_UPS, CaptureError, CudaGraphCall

__all__ = ["WARM_UPS", "CapturedStep"]


class CapturedStep:
    """Calls `step` a few times, then captures it, and from then on replays what was captured.

    step:   works on tensors that stay where they are, and on the host does nothing that a replay would need.
    device: on a CPU, `step` is called every time.

    If it cannot be captured, one line says so, and it is called every time.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, *, enabled: bool = True) -> None:
        self._step = step
        self._graphed = CudaGraphCall(step, device)
        self._enabled = enabled and device.type == "cuda"

    @property
    def enabled(self) -> bool:
        """Whether calls are, or will become, replays."""
        return self._enabled

    @property
    def captured(self) -> bool:
        """Whether calls are replays."""
        return self._graphed.captured

    def __call__(self) -> None:
        """Do the step once."""
        if self._enabled:
            try:
                self._graphed()
                return
            except CaptureError as error:
                self._enabled = False
                print(
                    f"the learning step cannot be captured as a CUDA graph and runs without: {error}", file=sys.stderr
                )
        self._step()
