"""Where the time of the learning loop goes: environment, acting, replay, learning."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import torch

Part = Literal["env", "act", "replay", "learn"]
PARTS: tuple[Part, ...] = ("env", "act", "replay", "learn")
# on a GPU one step in so many is timed, because timing has to wait for the device
SAMPLED = 64


class Stopwatch:
    """Charges the time since the last lap to a part of the loop.

    On the CPU every step is timed. On CUDA one step in 64 is, with the device waited for at each lap, so that work is
    charged to what launched it; overlap between parts is not seen in such a step.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._device = device
        self._steps = 0
        self._timing = False
        self._last = 0.0

    def begin(self) -> None:
        """A step of the loop begins."""
        self._timing = self._device.type == "cpu" or self._steps % SAMPLED == 0
        self._steps += 1
        if self._timing:
            self._last = self._now()

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
