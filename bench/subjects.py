"""What is measured: this package's buffer, its index alone, and other libraries, all behind the same four calls.

A subject adapts one implementation with as little code as possible around the timed calls. `sample` returns torch
tensors of all fields and of the weights, whatever the implementation itself returns, because that is the work a
learner needs done.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field, Proportional, ReplayBuffer

from .environment import installed_version
from .rows import DTYPES, Rows, make_priorities
from .stacks import FRAME_DTYPES, SEAM, StackStream, faults

ALPHA = 0.6
BETA = 0.4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """What a buffer is to hold.

    added:  rows of every `add`.
    stacks: whether rows are steps of environments with stacks of frames; else they are vectors that do not follow on
            each other.
    device: where it is to be stored.
    """

    capacity: int
    added: int
    stacks: bool = False
    device: torch.device = CPU
    alpha: float = ALPHA
    beta: float = BETA

    @property
    def dtypes(self) -> Mapping[str, tuple[tuple[int, ...], type[np.generic]]]:
        """Shape and type of each field of a row."""
        return FRAME_DTYPES if self.stacks else DTYPES


@dataclass(frozen=True)
class Peer:
    """Another library.

    module:       in `peers/`, which adapts it.
    distribution: what is installed, if it needs something.
    install:      how, when `pip install DISTRIBUTION` is not all.
    uniform:      it has no priorities and so does less.
    index:        its tree can be used alone.
    consecutive:  it holds the steps of one environment: several rows at once are steps of that one.
    most:         rows of vectors that it can be filled with in a reasonable time.
    devices:      types of the devices on which it can be stored.
    """

    module: str
    distribution: str | None
    install: str | None = None
    uniform: bool = False
    index: bool = False
    consecutive: bool = False
    most: int | None = None
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu",)


PEERS = {
    "cpprb": Peer("cpprb_buffer", "cpprb"),
    "tianshou": Peer("tianshou_buffer", "tianshou", index=True),
    "flashbax": Peer("flashbax_buffer", "flashbax"),
    "torchrl": Peer("torchrl_buffer", "torchrl", index=True, devices=("cpu", "cuda")),
    "dopamine": Peer(
        "dopamine_buffer",
        "dopamine-rl",
        install="pip install jax flax orbax-checkpoint gin-config python-snappy && pip install --no-deps dopamine-rl",
        index=True,
        consecutive=True,
        most=10_000,
    ),
    "python_sum_tree": Peer("python_sum_tree", None),
    "stable_baselines3": Peer("stable_baselines3_buffer", "stable-baselines3", uniform=True),
}


class Subject(Protocol):
    """A prioritized replay buffer under measurement.

    add_size:     rows that every `add` must bring; None for any number.
    has_next_obs: whether `next_obs` is stored as given.
    """

    add_size: int | None
    has_next_obs: bool

    def add(self, rows: Any) -> object:
        """Store rows that `inputs` made."""

    def inputs(self, rows: Rows) -> Any:
        """Rows in the form that `add` takes, made outside the measured time."""

    def sample(self, batch: int) -> Any:
        """Draw a batch: something that `update` and `fields` understand."""

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """Give the sampled transitions (B,) new priorities."""

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """The fields of the batch and `weight`, by the names of rows.DTYPES."""


@runtime_checkable
class SelfFilling(Protocol):
    """A subject whose contents are not rows of vectors."""

    def fill(self, rounds: int) -> None:
        """Become full, with priorities spread by up to so many rounds of updates."""

    def wrong(self) -> list[str]:
        """What is wrong with what it samples, in words."""


class ReplaySubject:
    """This package's ReplayBuffer."""

    add_size: int | None = None
    has_next_obs = True

    def __init__(self, capacity: int, device: torch.device) -> None:
        fields = {
            name: Field(shape, torch.from_numpy(np.empty(0, dtype)).dtype) for name, (shape, dtype) in DTYPES.items()
        }
        self._device = device
        self._buffer = ReplayBuffer(
            capacity, fields, sampler=Proportional(alpha=ALPHA, beta=BETA), device=device, seed=0
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer says it takes."""
        return self._buffer.nbytes

    def inputs(self, rows: Rows) -> Any:
        """NumPy arrays as they are for a CPU; tensors of the device for a GPU."""
        if self._device.type == "cpu":
            return rows
        return {name: torch.from_numpy(values).to(self._device) for name, values in rows.items()}

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
        return {name: sampled[name] for name in (*DTYPES, "weight")}


class StackedRows:
    """A subject of rows that gets the steps of environments with stacks of frames, and is checked by them.

    consecutive: rows added together are steps of one environment, not one step of several.
    """

    has_next_obs = True

    def __init__(self, rows: Subject, task: Task, *, consecutive: bool) -> None:
        self._rows = rows
        self._capacity = task.capacity
        self._device = task.device
        self._stream = StackStream(1 if consecutive else task.added)
        self._steps = task.added if consecutive else 1
        self.add_size: int | None = task.added

    def inputs(self, rows: Rows) -> Any:
        """The next steps of the stream; `rows` are those of vectors and not used."""
        steps = [self._stream.step().rows() for _ in range(self._steps)]
        return self._rows.inputs({name: np.concatenate([step[name] for step in steps]) for name in FRAME_DTYPES})

    def fill(self, rounds: int) -> None:
        """Fill the ring past its end, then spread the priorities."""
        added, batch = self.add_size or 1, 256
        for _ in range(self._capacity // added + 8):
            self.add(self.inputs({}))
        random = np.random.default_rng(0)
        for _ in range(min(rounds, -(-self._capacity // batch))):
            self.update(self.sample(batch), make_priorities(batch, random).to(self._device))

    def add(self, rows: Any) -> object:
        """See Subject."""
        return self._rows.add(rows)

    def sample(self, batch: int) -> Any:
        """See Subject."""
        return self._rows.sample(batch)

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """See Subject."""
        return self._rows.update(sampled, priorities)

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """See Subject."""
        return self._rows.fields(sampled)

    def wrong(self) -> list[str]:
        """What is wrong with a sampled batch."""
        return faults(self.fields(self.sample(256)), seam=SEAM)


class MissingPeer(Exception):
    """A peer that cannot be measured here; the message says why in a few words."""


def peer_version(name: str) -> str | None:
    """Version of the library that a peer needs; None when it needs none or is not installed."""
    distribution = PEERS[name].distribution
    return installed_version(distribution) if distribution else None


def make_peer(name: str, task: Task, *, index: bool = False) -> Subject:
    """An empty buffer of another library, or its index alone, which is full.

    Raises MissingPeer when the library is not installed or does not work with what is.
    """
    peer = PEERS[name]
    if task.device.type not in peer.devices:
        raise MissingPeer(f"{name} skipped: it stores nothing on a device of type {task.device.type!r}.")
    try:
        module = importlib.import_module(f".peers.{peer.module}", __package__)
        subject: Subject = module.make_index(task) if index else module.make(task)
    except MissingPeer as reason:
        raise MissingPeer(f"{name} skipped: {reason}") from reason
    except ImportError as error:
        install = peer.install or f"pip install {peer.distribution}"
        raise MissingPeer(f"{name} skipped: {_line(error)}; it needs `{install}`.") from error
    except Exception as error:
        # an installed library can fail in any way against a newer torch: that is a result, not a crash
        raise MissingPeer(f"{name} skipped: installed, but it fails here: {_line(error)}") from error
    if task.stacks and not index:
        return StackedRows(subject, task, consecutive=peer.consecutive)
    return subject


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
