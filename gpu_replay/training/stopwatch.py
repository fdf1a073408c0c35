"""Where the time of the learning loop goes: environment, acting, replay, learning."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

Part = Literal["env", "act", "replay", "learn"]
PARTS: tuple[Part, ...] = ("env", "act", "replay", "learn")
# on a GPU one step in so many is timed, because timing has to wait for the device
SAMPLED = 64
# calls before `mean_seconds` counts: kernels compile, graphs are captured
UNTIMED = 5


class Stopwatch:
    """Charges the time since the last lap to a part of the loop.

    On the CPU every step is timed. On CUDA one step in 64 is, with the device waited for at each lap, so that work is
    charged to what launched it; overlap between parts is not seen in such a step. The first ones, in which libraries
    load and kernels compile, are not among them.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._device = device
        self._steps = 0
        self._timing = False
        self._last = 0.0

    def begin(self) -> None:
        """A step of the loop begins."""
        self._timing = self._device.type == "cpu" or self._steps % SAMPLED == SAMPLED - 1
        self._steps += 1
        if self._timing:
            self._last = self._now()

    def skip(self) -> None:
        """The rest of this step is not timed: on CUDA something happens in it that does so only once."""
        self._timing = self._timing and self._device.type == "cpu"

    def lap(self, part: Part) -> None:
        """The time since the last lap, or the beginning, belongs to `part`."""
        if self._timing:
            now = self._now()
            self.seconds[part] += now - self._last
            self._last = now

    def shares(self) -> dict[Part, float]:
        """Share of each part in the time of the loop."""
        total = sum(self.seconds.values())
        return {part: seconds / total if total else 0.0 for part, seconds in self.seconds.items()}

    def state(self) -> dict[str, Any]:
        """What was charged so far."""
        return {"seconds": dict(self.seconds), "steps": self._steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on charging from there."""
        self.seconds = {part: state["seconds"][part] for part in PARTS}
        self._steps = state["steps"]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def mean_seconds(call: Callable[[], None], device: torch.device, times: int = 50) -> float:
    """How long a call takes when calls follow one another, the first few left out."""
    for _ in range(UNTIMED):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / times
