"""Atari frames stored once: the trajectory buffer, and a plain copy of the same bytes as its bound.

A batch of `B` transitions is `B` stacks of four 84x84 frames and as many of the frames three steps later. Both subjects
must move the same bytes; "take" copies them from given places and does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field, Proportional, TrajectoryReplayBuffer

from .cases import FRAME_ENVS, Case
from .stacks import FRAME_BYTES, FRAMES, SHAPE, STACK, StackStream, faults
from .subjects import ALPHA, BETA, POOL, ReplaySubject, Subject

N_STEP = 3
CAPACITY = 20_000
BATCHES = (32, 256, 1024)


class FrameSubject(ReplaySubject):
    """This package's TrajectoryReplayBuffer, filled with frames that encode the number of their step.

    n_step: steps until bootstrapping; other libraries are compared with one.
    envs:   environments that step together.
    """

    # a batch of 4,096 stacks with their successors is 231 MB
    chunk = 256

    def __init__(self, capacity: int, device: torch.device, *, n_step: int = N_STEP, envs: int = FRAME_ENVS) -> None:
        self.add_size = envs
        self._envs = envs
        self._device = device
        self._n_step = n_step
        # the buffer makes the stacks
        self._steps = StackStream(envs, stack=1, device=device)
        self._buffer = TrajectoryReplayBuffer(
            capacity,
            envs,
            {"obs": Field(SHAPE, torch.uint8), "action": Field((), torch.int64)},
            stack=STACK,
            n_step=n_step,
            autoreset="same_step",
            sampler=Proportional(alpha=ALPHA, beta=BETA),
            device=device,
            seed=0,
        )

    def stream(self, count: int, pool: int = POOL) -> Iterator[Any]:
        """The next steps of all environments."""
        truncated = torch.zeros(self._envs, dtype=torch.bool, device=self._device)
        while True:
            step = {**self._steps.step(), "truncated": truncated}
            step["obs"] = step["obs"][:, -1]
            yield step if self._device.type == "cuda" else {name: value.numpy() for name, value in step.items()}

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """See Subject."""
        return {name: sampled[name] for name in ("obs", "action", "reward", "next_obs", "discount", "weight")}

    def wrong(self) -> list[str]:
        """What is wrong with a sampled batch: rows that are mixed up, keys of other rows, or weights."""
        batch = self.sample(self.chunk)
        wrong = faults(self.fields(batch), ahead=self._n_step)
        number = batch.obs[:, -1, 0, 0].cpu().numpy()
        if not np.array_equal(number, batch.key.cpu().numpy() // self._envs % FRAMES):
            wrong.append("the newest frame of obs is not that of its key")
        return wrong


class TakeSubject(Subject):
    """The same bytes copied from random places: NumPy's `take` on a CPU, `index_select` on a GPU."""

    chunk = 256

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        # written, so that its memory is resident
        self._frames = torch.ones((capacity, FRAME_BYTES), dtype=torch.uint8, device=device)
        self._random = np.random.default_rng(0)
        self._places: dict[int, Any] = {}

    def sample(self, batch: int) -> Any:
        """(B * 8, 7056) frames from random places, drawn beforehand."""
        if batch not in self._places:
            drawn = [self._random.integers(len(self._frames), size=batch * 2 * STACK) for _ in range(16)]
            on_gpu = self._device.type != "cpu"
            self._places[batch] = cycle([torch.from_numpy(p).to(self._device) if on_gpu else p for p in drawn])
        places = next(self._places[batch])
        if isinstance(places, Tensor):
            return self._frames.index_select(0, places)
        return self._frames.numpy().take(places, axis=0)

    def stream(self, count: int, pool: int = POOL) -> Iterator[Any]:
        """Yields nothing to add: the subject is full from the start."""
        return repeat(None)

    def add(self, rows: Any) -> None:
        """Nothing is added."""

    def update(self, sampled: Any, priorities: Tensor) -> None:
        """Nothing has priorities."""

    def wrong(self) -> list[str]:
        """A copy cannot be wrong."""
        return []


def gather_cases(capacity: int = CAPACITY, batches: tuple[int, ...] = BATCHES) -> list[Case]:
    """Sampling, which both subjects do."""
    return [Case("frames", capacity, batch) for batch in batches]


def stream_cases(capacity: int = CAPACITY, batches: tuple[int, ...] = BATCHES, envs: int = FRAME_ENVS) -> list[Case]:
    """Adding a step, and whole cycles."""
    return [
        Case("frame-add", capacity, envs, envs),
        *[Case("frame-cycle", capacity, batch, envs) for batch in batches],
    ]
