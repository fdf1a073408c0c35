"""One interface to everything that is measured: this package's buffer, and the buffers of other libraries.

A subject adapts one implementation with as little code as possible around the timed calls. `sample` returns torch
tensors of all fields and of the weights, whatever the implementation itself returns, because that is what a learner
needs.
"""

from __future__ import annotations

import importlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field, Proportional, RankBased, ReplayBuffer, Uniform

from .environment import CannotMeasure, installed_version
from .rows import DTYPES, Dtypes, Rows, as_stepped, buffer_fields, make_rows, mismatches
from .stacks import FRAME_DTYPES, SEAM, StackStream, faults

ALPHA = 0.6
BETA = 0.4
EPS = 1e-6
CPU = torch.device("cpu")
HERE = Path(__file__).parent
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


class ReplaySubject(Subject):
    """This package's ReplayBuffer.

    stepped: single rows come as a loop over one environment has them.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device,
        sampler: Proportional | RankBased | Uniform | None = None,
        stepped: bool = False,
    ) -> None:
        self._device = device
        self._stepped = stepped
        sampler = sampler or Proportional(alpha=ALPHA, beta=BETA)
        self._buffer: Any = ReplayBuffer(capacity, buffer_fields(), sampler=sampler, device=device, seed=0)

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer reports."""
        return int(self._buffer.nbytes)

    def inputs(self, rows: Rows) -> Any:
        """NumPy arrays as they are for a CPU; tensors of the device for a GPU."""
        if self._device.type == "cpu":
            return as_stepped(rows) if self._stepped and len(rows["reward"]) == 1 else rows
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


def byte_buffer(capacity: int, device: torch.device, sampler: Proportional | RankBased) -> ReplayBuffer:
    """An empty buffer whose rows are one byte: all else is drawing and priorities."""
    return ReplayBuffer(capacity, {"row": Field((), torch.uint8)}, sampler=sampler, device=device, seed=0)


@dataclass(frozen=True)
class Task:
    """What a peer's buffer must hold.

    added:   rows of every `add`.
    stacks:  whether rows are consecutive steps of environments with stacks of frames; else independent vectors.
    device:  where it is stored.
    stepped: whether rows come from a loop over one environment: a float64 reward; flags in an array, which some need.
    """

    capacity: int
    added: int
    stacks: bool = False
    device: torch.device = CPU
    stepped: bool = False
    alpha: float = ALPHA
    beta: float = BETA

    @property
    def dtypes(self) -> Dtypes:
        """Shape and type of each field of a row."""
        return FRAME_DTYPES if self.stacks else DTYPES


# what `update` needs of a batch, and its fields and weights
Sampled = tuple[Any, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Adapter:
    """Another library's buffer.

    add:          stores rows in the form that `inputs` makes of NumPy arrays.
    sample:       draws so many transitions.
    update:       gives what was sampled (B,) new priorities.
    has_next_obs: whether `next_obs` is stored as given, not taken from the following row.
    consecutive:  it holds the steps of one environment, so rows added together are steps of that one.
    fixed_add:    every `add` must bring as many rows as the task says.
    """

    add: Callable[[Any], object]
    sample: Callable[[int], Sampled]
    update: Callable[[Any, Tensor], object]
    inputs: Callable[[Rows], Any] = lambda rows: rows
    has_next_obs: bool = True
    consecutive: bool = False
    fixed_add: bool = False


class PeerSubject(Subject):
    """Another library's buffer; a task of stacks gets the steps of environments and is checked by them."""

    def __init__(self, task: Task, adapter: Adapter) -> None:
        self._task, self._adapter = task, adapter
        self.has_next_obs = adapter.has_next_obs
        if adapter.fixed_add or task.stacks:
            self.add_size = task.added
        if task.stacks:
            self.chunk = 256
            self._steps = StackStream(1 if adapter.consecutive else task.added)

    def inputs(self, rows: Rows) -> Any:
        """See Subject."""
        if self._task.stepped:
            rows = {**rows, "reward": rows["reward"].astype(np.float64)}
        return self._adapter.inputs(rows)

    def add(self, rows: Any) -> object:
        """See Subject."""
        return self._adapter.add(rows)

    def sample(self, batch: int) -> Any:
        """See Subject."""
        return self._adapter.sample(batch)

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """See Subject."""
        return self._adapter.update(sampled[0], priorities)

    def stream(self, count: int, pool: int = POOL) -> Iterator[Any]:
        """See Subject; a stream of steps goes on where the one before it ended."""
        if not self._task.stacks:
            yield from super().stream(count, pool)
        while True:
            found = [self._steps.step() for _ in range(count if self._adapter.consecutive else 1)]
            yield self.inputs({name: torch.cat([step[name] for step in found]).numpy() for name in FRAME_DTYPES})

    def wrong(self) -> list[str]:
        """See Subject."""
        return faults(self.fields(self.sample(256)), seam=SEAM) if self._task.stacks else super().wrong()


@dataclass(frozen=True)
class Peer:
    """Another library.

    distribution: what has to be installed, if anything.
    install:      how, where `pip install DISTRIBUTION` is not enough.
    uniform:      it has no priorities and so does less.
    most:         rows of vectors that it can be filled with in a reasonable time.
    devices:      types of the devices on which it can store.

    The module of its name in `peers/` adapts it: `make(task)` gives an Adapter.
    """

    distribution: str | None
    install: str | None = None
    uniform: bool = False
    most: int | None = None
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu",)


_DOPAMINE = "pip install jax flax orbax-checkpoint gin-config python-snappy && pip install --no-deps dopamine-rl"
PEERS = {
    "cpprb": Peer("cpprb"),
    "tianshou": Peer("tianshou"),
    "flashbax": Peer("flashbax"),
    "torchrl": Peer("torchrl", devices=("cpu", "cuda")),
    "dopamine": Peer("dopamine-rl", install=_DOPAMINE, most=10_000),
    "python_sum_tree": Peer(None),
    "stable_baselines3": Peer("stable-baselines3", uniform=True),
}


def peer_version(name: str) -> str | None:
    """Version of the library that a peer needs; None when it needs none or is not installed."""
    distribution = PEERS[name].distribution
    return installed_version(distribution) if distribution else None


def make_peer(name: str, task: Task) -> Subject:
    """An empty buffer of another library.

    Raises CannotMeasure when the library is not installed, does not work with what is, or would take too long to fill;
    what goes wrong in the adapter itself is raised as it is.
    """
    peer = PEERS[name]
    if task.device.type not in peer.devices:
        raise CannotMeasure(f"{name} skipped: it stores nothing on a device of type {task.device.type!r}.")
    if peer.most is not None and not task.stacks and task.capacity > peer.most:
        raise CannotMeasure(f"{name} skipped: filling it with more than {peer.most:,} rows takes too long.")
    try:
        module = importlib.import_module(f".peers.{name}_peer", __package__)
        return PeerSubject(task, module.make(task))
    except CannotMeasure as reason:
        raise CannotMeasure(f"{name} skipped: {reason}") from reason
    except ImportError as error:
        install = peer.install or f"pip install {peer.distribution}"
        raise CannotMeasure(f"{name} skipped: {_line(error)}; it needs `{install}`.") from error
    except Exception as error:
        # an installed library can fail in any way against a newer torch: that is a result, unlike a mistake of ours
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent in (HERE, HERE / "peers"):
            raise
        raise CannotMeasure(f"{name} skipped: installed, but it fails here: {_line(error)}") from error


def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """The arrays as tensors that share their memory."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
