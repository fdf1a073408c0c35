"""Stacks of Atari frames that are stored once: the trajectory buffer, and the bare copy that it cannot be faster than.

A batch of `B` transitions is `B` stacks of four 84x84 frames and as many of the frames three steps later. What must
move is the same for both subjects; "take" moves it from given places and does nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field, Proportional, TrajectoryReplayBuffer

from .cases import OPERATIONS, Case, Kind
from .rows import Rows, make_priorities
from .stacks import FRAMES, SHAPE, STACK, StackStream, faults
from .subjects import ALPHA, BETA, Subject
from .timing import Call

ENVS = 8
N_STEP = 3
FRAME_BYTES = SHAPE[0] * SHAPE[1]
CAPACITY = 20_000
BATCHES = (32, 256, 1024)
FIELDS: dict[str, list[Any]] = {"obs": ["uint8", list(SHAPE)], "action": ["int64", []]}


def frame_bytes(batch: int, added: int) -> int:
    """Bytes of a batch's stacks, read and written."""
    return 2 * batch * 2 * STACK * FRAME_BYTES


def _step_bytes(batch: int, added: int) -> int:
    return 2 * added * FRAME_BYTES


def _cycle_bytes(batch: int, added: int) -> int:
    return frame_bytes(batch, added) + _step_bytes(batch, added)


class FrameSubject:
    """This package's TrajectoryReplayBuffer, filled with frames that carry the number of their step.

    n_step: steps until bootstrapping; other libraries are compared with one.
    envs:   environments that step together.
    """

    has_next_obs = True

    def __init__(self, capacity: int, device: torch.device, *, n_step: int = N_STEP, envs: int = ENVS) -> None:
        self.add_size: int | None = envs
        self._device = device
        self._capacity = capacity
        self._n_step = n_step
        self._stream = StackStream(envs)
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
        self._truncated = np.zeros(envs, dtype=bool)

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer says it takes."""
        return self._buffer.nbytes

    def inputs(self, rows: Rows) -> Any:
        """One step of all environments; `rows` are those of vectors and not used."""
        step = self._stream.step()
        values = {
            "obs": step.frames,
            "action": step.action,
            "reward": step.reward,
            "terminated": step.terminated,
            "truncated": self._truncated,
        }
        if self._device.type == "cpu":
            return values
        return {name: torch.from_numpy(value).to(self._device) for name, value in values.items()}

    def fill(self, rounds: int) -> None:
        """Fill the ring past its end, then spread the priorities."""
        for _ in range(self._capacity // (self.add_size or 1) + 8):
            self.add(self.inputs({}))
        random = np.random.default_rng(0)
        for _ in range(rounds):
            self.update(self.sample(256), make_priorities(256, random).to(self._device))

    def add(self, rows: Any) -> object:
        """See Subject."""
        return self._buffer.add(**rows)

    def sample(self, batch: int) -> Any:
        """See Subject."""
        return self._buffer.sample(batch)

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """See Subject."""
        self._buffer.update_priorities(sampled.key, priorities)
        return None

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """See Subject."""
        return {name: sampled[name] for name in ("obs", "action", "reward", "next_obs", "discount", "weight")}

    def wrong(self) -> list[str]:
        """What is wrong with a sampled batch: rows that are mixed up, keys of other rows, or weights."""
        batch = self.sample(256)
        wrong = faults(self.fields(batch), ahead=self._n_step)
        number = batch.obs[:, -1, 0, 0].cpu().numpy()
        if not np.array_equal(number, batch.key.cpu().numpy() // (self.add_size or 1) % FRAMES):
            wrong.append("the newest frame of obs is not that of its key")
        return wrong


class TakeSubject:
    """The same bytes copied from random places: NumPy's `take` on a CPU, `index_select` on a GPU."""

    add_size: int | None = ENVS
    has_next_obs = True

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        self._frames = torch.zeros((capacity, FRAME_BYTES), dtype=torch.uint8, device=device)
        self._random = np.random.default_rng(0)
        self._places: dict[int, Any] = {}

    def fill(self, rounds: int) -> None:
        """Write every frame, so that its memory is there."""
        self._frames.fill_(1)

    def inputs(self, rows: Rows) -> Any:
        """Nothing is added."""
        return None

    def add(self, rows: Any) -> object:
        """Nothing is added."""
        return None

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

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """Nothing has priorities."""
        return None

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """Frames have no names."""
        return {}

    def wrong(self) -> list[str]:
        """A copy cannot be wrong."""
        return []


def _bind_sample(case: Case, subject: Subject, device: torch.device) -> tuple[Call, Call]:
    return lambda: subject.sample(case.batch), lambda: None


def _bind_add(case: Case, subject: Subject, device: torch.device) -> tuple[Call, Call]:
    turn: list[Any] = [None]

    def prepare() -> None:
        turn[0] = subject.inputs({})

    return lambda: subject.add(turn[0]), prepare


def _bind_cycle(case: Case, subject: Subject, device: torch.device) -> tuple[Call, Call]:
    random = np.random.default_rng(1)
    priorities = cycle([make_priorities(case.batch, random).to(device) for _ in range(16)])
    turn: list[Any] = [None, None]

    def prepare() -> None:
        turn[:] = subject.inputs({}), next(priorities)

    def call() -> None:
        subject.add(turn[0])
        subject.update(subject.sample(case.batch), turn[1])

    return call, prepare


OPERATIONS.update(
    {
        "frames": Kind(
            f"draw B transitions with stacks of {STACK} frames of 84x84 before and after",
            frame_bytes,
            _bind_sample,
            FIELDS,
        ),
        "frame-add": Kind(f"add one step of {ENVS} environments", _step_bytes, _bind_add, FIELDS),
        "frame-cycle": Kind(f"add a step of {ENVS}, sample B, update B", _cycle_bytes, _bind_cycle, FIELDS),
    }
)


def gather_cases(capacity: int = CAPACITY, batches: tuple[int, ...] = BATCHES) -> list[Case]:
    """Sampling, as both subjects do it."""
    return [Case("frames", capacity, batch, 0) for batch in batches]


def stream_cases(capacity: int = CAPACITY, batches: tuple[int, ...] = BATCHES) -> list[Case]:
    """What only the buffer does."""
    cycles = [Case("frame-cycle", capacity, batch, ENVS) for batch in batches]
    return [Case("frame-add", capacity, ENVS, ENVS), *cycles]
