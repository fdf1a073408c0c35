"""How the time of the learning loop is divided among environment, acting, replay and learning."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

Part = Literal["env", "act", "replay", "learn"]
PARTS: tuple[Part, ...] = ("env", "act", "replay", "learn")
# on a GPU one step in so many is timed, since timing synchronises with the device
SAMPLED = 64
# warm-up calls of `mean_seconds`: kernels compile, graphs are captured
UNTIMED = 5


class Stopwatch:
    """Attributes the time since the last lap to a part of the loop.

    On the CPU every step is timed. On CUDA one step in 64 is, synchronised at each lap so that work is attributed to
    the part that launched it; overlap between parts is lost in such a step. The first steps, in which libraries load
    and kernels compile, are not timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._device = device
        self._steps = 0
        self._timing = False
        self._last = 0.0

    def begin(self) -> None:
        """Start a step of the loop."""
        self._timing = self._device.type == "cpu" or self._steps % SAMPLED == SAMPLED - 1
        self._steps += 1
        if self._timing:
            self._last = self.now()

    def skip(self) -> None:
        """Do not time the rest of this step on CUDA: it includes one-time work such as a graph capture."""
        self._timing = self._timing and self._device.type == "cpu"

    def lap(self, part: Part) -> None:
        """Attribute the time since the last lap, or the start of the step, to `part`."""
        if self._timing:
            now = self.now()
            self.seconds[part] += now - self._last
            self._last = now

    def shares(self) -> dict[Part, float]:
        """Share of each part in the loop's time."""
        total = sum(self.seconds.values())
        return {part: seconds / total if total else 0.0 for part, seconds in self.seconds.items()}

    def state(self) -> dict[str, Any]:
        """Seconds so far."""
        return {"seconds": dict(self.seconds), "steps": self._steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.seconds = {part: state["seconds"][part] for part in PARTS}
        self._steps = state["steps"]

    def now(self) -> float:
        """The time in seconds, once the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def mean_seconds(call: Callable[[], object], device: torch.device, times: int = 50) -> float:
    """Mean time of a call over `times` consecutive ones, after a few warm-up calls."""
    watch = Stopwatch(device)
    for _ in range(UNTIMED):
        call()
    began = watch.now()
    for _ in range(times):
        call()
    return (watch.now() - began) / times
