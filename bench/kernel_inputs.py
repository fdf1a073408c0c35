"""Inputs of kernel microbenchmarks: the same numbers for this package and for the baselines, made before any timing.

Each kind of input is made on first use, so that a case allocates only what it needs.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from gpu_replay import ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.ops.masses import UNIT
from gpu_replay.ops.ranks import cumulative_masses

from . import subjects
from .subjects import ALPHA, EPS, SHAPE, STACK, buffer_fields, make_rows

# as long as a stack, so that no frame of a batch is counted twice
N_STEP = 4
STEPS = 1_000
# different frames, a prime number; they are repeated
PATTERN = 1021
# different inputs, so that no two consecutive calls touch the same slots
POOL = 8


class Inputs:
    """The inputs of one case: `capacity` slots and `batch` transitions on a device.

    dtype: of gathered frames.
    """

    def __init__(self, capacity: int, batch: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> None:
        self.capacity = capacity
        self.batch = batch
        self.device = device
        self.dtype = dtype
        self._random = torch.Generator(device).manual_seed(capacity + batch)

    @cached_property
    def priorities(self) -> Tensor:
        """(N,) float32 absolute TD errors."""
        return torch.randn(self.capacity, generator=self._random, device=self.device).abs_()

    @cached_property
    def masses(self) -> Tensor:
        """(N,) int64 masses of the priorities."""
        powers = self.priorities.double().add_(EPS).pow_(ALPHA)
        return powers.mul_(UNIT).add_(0.5).long().clamp_(min=1)

    @cached_property
    def rank_masses(self) -> Tensor:
        """(N,) int64: entry `r` is the sum of the masses of the ranks from 1 to r + 1."""
        return _rank_masses(self.capacity, self.device)

    @cached_property
    def keys(self) -> list[Tensor]:
        """(B,) int64 distinct slots each, ascending as stratified draws are."""
        width = self.capacity // self.batch
        start = torch.arange(self.batch, device=self.device) * self.capacity // self.batch
        return [start + self._integers(width) for _ in range(POOL)]

    @cached_property
    def errors(self) -> list[Tensor]:
        """(B,) float32 absolute TD errors each."""
        return [torch.randn(self.batch, generator=self._random, device=self.device).abs_() for _ in range(POOL)]

    @cached_property
    def slots(self) -> list[Tensor]:
        """(B,) int64 slots each, unordered."""
        return [self._integers(self.capacity) for _ in range(POOL)]

    def _integers(self, end: int) -> Tensor:
        return torch.randint(end, (self.batch,), generator=self._random, device=self.device)

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """(N, *shape) of the five small fields."""
        made = make_rows(self.capacity, np.random.default_rng(0))
        return {name: torch.from_numpy(values).to(self.device) for name, values in made.items()}

    @cached_property
    def row_buffer(self) -> ReplayBuffer:
        """A buffer that holds these rows, row `i` in slot `i`."""
        buffer = ReplayBuffer(self.capacity, buffer_fields(), sampler=Uniform(), device=self.device, seed=0)
        for start in range(0, self.capacity, 2**16):
            buffer.add(**{name: values[start : start + 2**16] for name, values in self.rows.items()})
        return buffer

    @property
    def envs(self) -> int:
        """Environments of the frames: the ring holds `STEPS` steps of each, or fewer where it is small."""
        return max(1, self.capacity // STEPS)

    @property
    def frame_buffer(self) -> TrajectoryReplayBuffer:
        """A full buffer of single frames, random bytes in episodes that never end."""
        return _frame_buffer(self.capacity, self.envs, self.device, self.dtype)

    @property
    def frames(self) -> Tensor:
        """(N, 84, 84) uint8 frames as that buffer stores them, in slot order."""
        return _frames_of(self.frame_buffer)

    @cached_property
    def starts(self) -> list[Tensor]:
        """(B,) int64 slots each whose stacks and windows are complete: none of the first or last steps of the ring."""
        first = (STACK - 1) * self.envs
        count = self.capacity - first - N_STEP * self.envs
        return [first + self._integers(count) for _ in range(POOL)]

    @cached_property
    def stacked(self) -> list[Tensor]:
        """(2 * B * STACK,) int64 each: slots of all frames of `starts`, stacks of obs, then of next_obs."""
        back = torch.arange(1 - STACK, 1, device=self.device) * self.envs
        return [
            torch.cat([(slots[:, None] + back).reshape(-1), (slots[:, None] + back + N_STEP * self.envs).reshape(-1)])
            for slots in self.starts
        ]


@lru_cache(maxsize=1)
def _rank_masses(slots: int, device: torch.device) -> Tensor:
    return torch.from_numpy(cumulative_masses(slots, ALPHA)).to(device)


def _frames_of(buffer: TrajectoryReplayBuffer) -> Tensor:
    return buffer._state_tensors(buffer.capacity)["fields.obs"]


@lru_cache(maxsize=1)
def _frame_buffer(capacity: int, envs: int, device: torch.device, dtype: torch.dtype) -> TrajectoryReplayBuffer:
    """Make a full buffer of frames. The last one is cached: gigabytes take longer to fill than to measure."""
    sampled = None if dtype == torch.uint8 else dtype
    buffer = subjects.frame_buffer(capacity, envs, device, N_STEP, sampler=Uniform(), dtype=sampled)
    action = torch.zeros(envs, dtype=torch.int64, device=device)
    step = {"action": action, "reward": action.float(), "terminated": action.bool(), "truncated": action.bool()}
    step["obs"] = action.to(torch.uint8).view(-1, 1, 1).expand(-1, *SHAPE)
    for _ in range(capacity // envs):
        buffer.add(**step)
    # no number of steps or environments divides the pattern's length, so neighbours differ in both directions
    random = torch.Generator(device).manual_seed(0)
    pattern = torch.randint(256, (PATTERN, *SHAPE), dtype=torch.uint8, generator=random, device=device)
    frames = _frames_of(buffer)
    for start in range(0, capacity, PATTERN):
        part = frames[start : start + PATTERN]
        part.copy_(pattern[: len(part)])
    return buffer
