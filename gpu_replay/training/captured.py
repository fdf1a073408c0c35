"""One learning step as a CUDA graph: some hundred kernels for the price of one launch.

Nothing in the step may look at the device or depend on numbers of the host that change; what must move on between
replays (random draws, the schedule of beta, priorities, the optimiser's state) is in device memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

# lets libraries choose their algorithms, Triton compile and the optimiser make its state
WARM_UPS = 3


class CapturedStep:
    """Calls `step` a few times, then captures it, and from then on replays what was captured.

    step:   works on tensors that stay where they are, and on the host does nothing that a replay would need.
    device: on a CPU, `step` is called every time.

    If it cannot be captured, one line says so, and it is called every time.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, *, enabled: bool = True) -> None:
        self._step = step
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm_ups = WARM_UPS
        self._enabled = enabled and device.type == "cuda"

    @property
    def enabled(self) -> bool:
        """Whether calls are, or will become, replays."""
        return self._enabled

    @property
    def captured(self) -> bool:
        """Whether calls are replays."""
        return self._graph is not None

    def __call__(self) -> None:
        """Do the step once."""
        if self._graph is not None:
            self._graph.replay()
        elif not self._enabled:
            self._step()
        elif self._warm_ups:
            self._warm_ups -= 1
            self._aside()
        else:
            self._capture()
            self()

    def _aside(self) -> None:
        """On a stream of its own, where gradients are then accumulated as during the capture."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self._device), torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            self._enabled = False
            reason = str(error).strip().splitlines()[0]
            print(f"the learning step cannot be captured as a CUDA graph and runs without: {reason}", file=sys.stderr)
        else:
            self._graph = graph
