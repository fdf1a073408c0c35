"""What is measured, behind one interface: this package's buffer, indexes alone, and the buffers of other libraries.

A subject adapts one implementation with as little code as possible around the timed calls. `sample` returns torch
tensors of all fields and of the weights, whatever the implementation itself returns, because that is what a learner
needs.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, repeat
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Proportional, RankBased, ReplayBuffer, Uniform
from gpu_replay.ops.counters import HostWords, new_counters
from gpu_replay.ops.mass import MassRule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.stratified_draw import draw_slots

from .environment import installed_version
from .rows import DTYPES, Rows, buffer_fields, make_rows, mismatches
from .stacks import FRAME_DTYPES, SEAM, StackStream, faults

ALPHA = 0.6
BETA = 0.4
EPS = 1e-6
CPU = torch.device("cpu")
# different inputs, made before anything is timed
POOL = 64


class Subject(ABC):
    """A prioritized replay buffer under measurement.

    add_size:     rows that every `add` must bring; None for any number.
    has_next_obs: whether `next_obs` is stored as given, not taken from the following row.
    chunk:        rows of an add and transitions of an update while it is being filled.
    filled:       whether it was, and its answers are right.
    """

    add_size: int | None = None
    filled = False
    has_next_obs = True
    chunk = 4096

    def inputs(self, rows: Rows) -> Any:
        """Rows in the form that `add` takes, made outside the measured time."""
        return rows

    def stream(self, count: int, pool: int = POOL) -> Iterator[Any]:
        """Endless inputs of `add`, `count` rows each; where rows are independent of each other, a pool that repeats."""
        random = np.random.default_rng(1)
        return cycle([self.inputs(make_rows(count, random)) for _ in range(pool)])

    @abstractmethod
    def add(self, rows: Any) -> object:
        """Store rows in the form that `inputs` makes."""

    @abstractmethod
    def sample(self, batch: int) -> Any:
        """Draw a batch: something that `update` and `fields` understand."""

    @abstractmethod
    def update(self, sampled: Any, priorities: Tensor) -> object:
        """Give the sampled transitions (B,) new priorities."""

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """The fields of the batch by the names of rows.DTYPES, and `weight`."""
        found: Mapping[str, Tensor] = sampled[1]
        return found

    def wrong(self) -> list[str]:
        """What is wrong with a sampled batch, in words."""
        batch = 256
        fields = self.fields(self.sample(batch))
        wrong = [
            f"sampled {name!r} does not belong to the sampled observation"
            for name in mismatches(fields, has_next_obs=self.has_next_obs)
        ]
        weight = fields["weight"].cpu().numpy().reshape(-1)
        if weight.shape != (batch,) or not np.all(np.isfinite(weight)) or weight.min() <= 0:
            wrong.append(f"the weights are not {batch} positive numbers")
        return wrong


class FullSubject(Subject):
    """A subject without stored fields that is full from the start: an index alone."""

    def stream(self, count: int, pool: int = POOL) -> Iterator[Any]:
        """Nothing is added."""
        return repeat(None)

    def add(self, rows: Any) -> object:
        """Nothing is added."""
        return None


class ReplaySubject(Subject):
    """This package's ReplayBuffer."""

    def __init__(
        self, capacity: int, device: torch.device, sampler: Proportional | RankBased | Uniform | None = None
    ) -> None:
        self._device = device
        sampler = sampler or Proportional(alpha=ALPHA, beta=BETA)
        self._buffer: Any = ReplayBuffer(capacity, buffer_fields(), sampler=sampler, device=device, seed=0)

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer reports."""
        return int(self._buffer.nbytes)

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
        return self._buffer.update_priorities(sampled.key, priorities)

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        """See Subject."""
        return {name: sampled[name] for name in (*DTYPES, "weight")}


class IndexSubject(FullSubject):
    """The host's mass tree as the buffer uses it: draws slots by mass and changes masses."""

    def __init__(self, capacity: int) -> None:
        self._rule = MassRule.for_slots(capacity, ALPHA, EPS, None)
        self.tree = MassTree(capacity, CPU, "host")
        self.tree.set_masses(0, capacity, self._rule.mass(1.0))
        self._words = HostWords(seed=0)
        self._counters = new_counters(torch.device("cpu"), 0).numpy()
        self._block = 0

    def sample(self, batch: int) -> Any:
        """(batch,) int64 slots, drawn by mass, and their masses."""
        doubles = self._words.doubles(self._block, batch)
        self._block += -(-batch // 4)
        slots, masses, _ = draw_slots(self.tree, doubles, stratified=True)
        return slots, masses

    def update(self, sampled: Any, priorities: Tensor) -> None:
        """Masses of these priorities at the sampled slots, a repeated slot once."""
        slots, _ = sampled
        numbers = priorities.numpy().astype(np.float64)
        # slots are the keys of a ring in its first lap
        self.tree.update(slots, numbers, self._rule, 0, self.tree.slots, self._counters)

    def wrong(self) -> list[str]:
        """What is wrong with the index: a total that is not the sum of its leaves."""
        total, leaves = self.tree.total(), int(self.tree.masses.sum())
        return [] if total == leaves else [f"the total mass is {total}, its leaves sum to {leaves}"]


@dataclass(frozen=True)
class Task:
    """What a peer's buffer is to hold.

    added:  rows of every `add`.
    stacks: whether rows are consecutive steps of environments with stacks of frames; else independent vectors.
    device: where it is stored.
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


class PeerSubject(Subject):
    """Another library's buffer; a task of stacks gets the steps of environments and is checked by them.

    consecutive: it holds the steps of one environment, so rows added together are steps of that one.
    """

    consecutive = False

    def __init__(self, task: Task, *, fixed_add: bool = False) -> None:
        self.task = task
        if fixed_add or task.stacks:
            self.add_size = task.added
        if task.stacks:
            self.chunk = 256
            self._steps = StackStream(1 if self.consecutive else task.added)

    def stream(self, count: int, pool: int = POOL) -> Iterator[Any]:
        """See Subject; a stream of steps goes on where the one before it ended."""
        return self._stacks(count if self.consecutive else 1) if self.task.stacks else super().stream(count, pool)

    def _stacks(self, steps: int) -> Iterator[Any]:
        while True:
            found = [self._steps.step() for _ in range(steps)]
            yield self.inputs({name: torch.cat([step[name] for step in found]).numpy() for name in FRAME_DTYPES})

    def wrong(self) -> list[str]:
        """See Subject."""
        return faults(self.fields(self.sample(256)), seam=SEAM) if self.task.stacks else super().wrong()


@dataclass(frozen=True)
class Peer:
    """Another library.

    module:       in `peers/`, which adapts it.
    distribution: what has to be installed, if anything.
    install:      how, where `pip install DISTRIBUTION` is not enough.
    uniform:      it has no priorities and so does less.
    index:        its tree can be used without its buffer.
    most:         rows of vectors that it can be filled with in a reasonable time.
    devices:      types of the devices on which it can store.
    """

    module: str
    distribution: str | None
    install: str | None = None
    uniform: bool = False
    index: bool = False
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
        most=10_000,
    ),
    "python_sum_tree": Peer("python_sum_tree", None),
    "stable_baselines3": Peer("stable_baselines3_buffer", "stable-baselines3", uniform=True),
}


class MissingPeer(Exception):
    """A peer that cannot be measured here; the message says why."""


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
    return subject


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
