"""What is measured: this package's buffer, its index alone, and other libraries, all behind the same four calls.

A subject adapts one implementation with as little code as possible around the timed calls. `sample` returns torch
tensors of all fields and of the weights, whatever the implementation itself returns, because that is the work a
learner needs done.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field, Proportional, ReplayBuffer

from .environment import installed_version
from .rows import DTYPES, Rows

ALPHA = 0.6
BETA = 0.4


@dataclass(frozen=True)
class Peer:
    """Another library: the module in `peers/` that adapts it, and the distribution to install, if it needs one."""

    module: str
    distribution: str | None


PEERS = {
    "cpprb": Peer("cpprb_buffer", "cpprb"),
    "tianshou": Peer("tianshou_buffer", "tianshou"),
    "flashbax": Peer("flashbax_buffer", "flashbax"),
    "torchrl": Peer("torchrl_buffer", "torchrl"),
    "python_sum_tree": Peer("python_sum_tree", None),
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


class MissingPeer(Exception):
    """A peer that cannot be measured here; the message says why in a few words."""


def peer_version(name: str) -> str | None:
    """Version of the library that a peer needs; None when it needs none or is not installed."""
    distribution = PEERS[name].distribution
    return installed_version(distribution) if distribution else None


def make_peer(name: str, capacity: int) -> Subject:
    """An empty buffer of another library.

    Raises MissingPeer when the library is not installed or does not work with what is.
    """
    peer = PEERS[name]
    try:
        subject: Subject = importlib.import_module(f".peers.{peer.module}", __package__).make(capacity, ALPHA, BETA)
    except ImportError as error:
        raise MissingPeer(f"{name} skipped: {error}; it needs `pip install {peer.distribution}`.") from error
    except Exception as error:
        # an installed library can fail in any way against a newer torch: that is a result, not a crash
        raise MissingPeer(f"{name} skipped: installed, but it fails here: {error}") from error
    return subject
