"""What the two buffers share: settings, priorities, statistics, state. Each adds what it stores and how it samples.

Public methods check what users pass in; the work is done by an engine, on CPU tensors or through Triton kernels.
"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from gpu_replay import validation
from gpu_replay.batch import Batch
from gpu_replay.checkpoint import state as checkpoint_state
from gpu_replay.checkpoint.config import describe_field, describe_sampler, field_from, sampler_from
from gpu_replay.engines.storage import Storage, base_sampler, check_device, check_memory
from gpu_replay.fields import Field
from gpu_replay.graphs.custom_ops import Drawn, Operators
from gpu_replay.graphs.learning_step import Capturable
from gpu_replay.ops._backend import choose
from gpu_replay.ops.counters import Counter, new_counters
from gpu_replay.ops.mass import MassRule, OrderRule, Rule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.samplers import Combined, Latest, Proportional, RankBased, Sampler, Uniform
from gpu_replay.stats import Distribution, Stats, mass_distribution, rank_distribution, uniform_distribution
from gpu_replay.stream_order import StreamOrder

UNIFORM = Uniform()
# the dtype of no array that anybody passes in
NO_DTYPE = np.dtype([("nothing", "V1")])
Own = TypeVar("Own", bound="Buffer")


class Engine(Protocol):
    """What this file asks of the engines; storing and sampling differ from buffer to buffer."""

    @property
    def scratch_bytes(self) -> int: ...

    @property
    def ranked(self) -> Tensor | None: ...

    def span(self) -> tuple[int, int]: ...

    def update(self, keys: Tensor, numbers: Any) -> None: ...

    def read(self, keys: Tensor) -> dict[str, Tensor]: ...

    def forget(self) -> None: ...

    def reseed(self, seed: int) -> None: ...

    def replayed(self, rows: int) -> None: ...


class Buffer(Capturable):
    """A ring of preallocated tensors with a sampler."""

    _engine: Engine
    # what `sample` gives, for compiled code
    _drawn: Drawn
    # what it is that can be drawn, in words
    _units: ClassVar[str]

    def __init__(
        self,
        capacity: int,
        fields: dict[str, Field],
        sampler: Sampler,
        device: torch.device | str | None,
        seed: int,
    ) -> None:
        self._capacity = capacity
        self._fields = fields
        self._sampler = sampler
        if not isinstance(self._sampler, (Uniform, Proportional, RankBased, Latest, Combined)):
            raise TypeError(
                f"sampler must be Uniform(), Proportional(), RankBased(), Latest() or Combined(); found {sampler!r}."
            )
        self._device = check_device(device)
        self._seed = _check_seed(seed)
        self._on_cpu = self._device.type == "cpu"
        self._backend = choose(self._device)
        self._lock = threading.RLock()
        self._stream_order = StreamOrder(self._device)
        # nothing of it is left to do when the process ends
        weakref.finalize(self, self._stream_order.close).atexit = False
        check_memory(self._sizes(), self._device)

        self._storage = self._make_storage()
        self._base = base_sampler(self._sampler)
        self._tree: MassTree | None = None
        self._rule: Rule = MassRule.for_slots(self._capacity, 0.0, 0.0, None)
        if isinstance(self._base, Proportional):
            base = self._base
            self._rule = MassRule.for_slots(self._capacity, base.alpha, base.eps, base.clip)
            low, high = base.normalize == "buffer", base.initial == "stored"
            self._tree = MassTree(self._capacity, self._device, self._backend, low=low, high=high)
        elif isinstance(self._base, RankBased):
            self._rule = OrderRule()
            high = self._base.initial == "stored"
            self._tree = MassTree(self._capacity, self._device, self._backend, high=high, summed=False)
        self._counters = new_counters(self._device, self._seed)
        self._operators = Operators(self, self._device)
        # the NumPy dtype that each field takes as it is, one that no input has where there is none
        host = self._backend == "host"
        self._plain_dtypes: dict[str, np.dtype[Any]] = {
            name: tensor.numpy().dtype if host and tensor.dtype != torch.bfloat16 else NO_DTYPE
            for name, tensor in self._storage.tensors.items()
        }

    @abstractmethod
    def _sizes(self) -> dict[str, int]:
        """Bytes of everything that will be allocated, by name."""

    def _make_storage(self) -> Storage:
        """The ring, allocated."""
        return Storage(self._capacity, self._fields, self._device, packed=self._backend == "host")

    # what it is

    @property
    def capacity(self) -> int:
        """Transitions that fit."""
        return self._capacity

    @property
    def device(self) -> torch.device:
        """Where the transitions are stored and sampled."""
        return self._device

    @property
    def fields(self) -> dict[str, Field]:
        """Name to Field, a copy."""
        return dict(self._fields)

    @property
    def sampler(self) -> Sampler:
        """The settings it draws with."""
        return self._sampler

    @property
    def seed(self) -> int:
        """The seed of its draws."""
        return self._seed

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: fields, priorities and counters."""
        tree = 0 if self._tree is None else self._tree.nbytes
        return self._storage.nbytes + tree + self._engine.scratch_bytes + self._counters.nbytes

    @property
    def added(self) -> int:
        """Transitions ever added; the next one's key."""
        with self._lock:
            return self._engine.span()[1]

    def __len__(self) -> int:
        with self._lock:
            first, added = self._engine.span()
            return added - first

    def __repr__(self) -> str:
        names = ", ".join(self._fields)
        return (
            f"{type(self).__name__}({len(self):,} of {self._capacity:,} transitions of {names}; {self._sampler}; "
            f"{self.nbytes / 1e6:,.1f} MB on {self._device})"
        )

    # what it does

    @abstractmethod
    def _count_at_least(self, wanted: int, skipped: int) -> int:
        """What can be drawn without the newest `skipped` slots, exact only below `wanted`."""

    def _check_enough(self, call: str, batch: int, skipped: int = 0) -> None:
        """Raise unless `call` can draw a batch without the newest `skipped` slots."""
        newest = self._sampler.newest if isinstance(self._sampler, Combined) else 0
        if newest > batch:
            raise ValueError(
                f"{call} from Combined(newest={newest}) needs a batch of at least {newest}. "
                "Raise the batch size or lower newest."
            )
        distinct = newest
        if isinstance(self._base, Latest):
            distinct = batch
        elif isinstance(self._base, Uniform) and not self._base.replacement:
            distinct = max(newest, batch - newest)
        found = self._count_at_least(max(distinct, 1), skipped)
        if found == 0:
            raise RuntimeError(f"{call}: the buffer holds no {self._units}. Add more first.")
        if found < distinct:
            kind = "of the newest" if distinct == newest or isinstance(self._base, Latest) else "without replacement"
            raise ValueError(
                f"{call} {kind} needs {distinct} {self._units}; the buffer holds {found}. "
                "Add more or lower the batch size."
            )

    def _checked_priorities(self, name: str, given: Any, rows: int) -> Any:
        """The priorities as (rows,) numbers, a float64 array for the host engine; on the CPU all are finite."""
        priorities = validation.as_priorities(name, given, rows, self._device)
        if not self._on_cpu:
            return priorities
        numbers = validation.finite_numbers(name, priorities)
        return numbers if self._backend == "host" else torch.from_numpy(numbers)

    def update_priorities(self, keys: Any, priorities: Any) -> None:
        """Give the transitions with these keys new priorities.

        keys:       (m,) int64 as `batch.key`; those no longer live are ignored and counted in `stats().stale_updates`.
        priorities: (m,) absolute TD errors or other non-negative numbers; the sign is dropped.

        A key that appears twice: the last one wins. With a sampler that has no priorities the arguments are checked
        and nothing else happens, so that one training loop serves every sampler. Raises ValueError for a wrong shape
        and, on the CPU, for priorities that are not finite (on CUDA such an entry keeps its priority and is counted);
        TypeError for keys that are not integers.
        """
        if is_dynamo_compiling():
            self._operators.update(keys, priorities)
            return
        found = validation.as_keys(keys, self._device)
        numbers = self._checked_priorities("priorities", priorities, found.shape[0])
        with self._lock:
            self._engine.update(found, numbers)

    def __getitem__(self, keys: Any) -> Batch:
        """The stored transitions of these live keys, in their order: `buffer[keys]`.

        keys: (m,) int64, a list of ints, or one int for a batch of one. Raises KeyError naming the first key that is
        not live, TypeError for keys that are not integers.
        """
        with self._alone():
            found = validation.as_keys(keys, self._device).to(self._device)
            tensors = self._engine.read(found)
            return Batch({**tensors, "key": found.clone()})

    def clear(self) -> None:
        """Forget all transitions; keys go on counting, and so do the counts of `stats()`."""
        with self._alone():
            self._counters[Counter.FIRST] = self._counters[Counter.ADDED]
            self._counters[Counter.RANKED] = 0
            self._storage.times_sampled.zero_()
            if self._tree is not None:
                self._tree.clear()
            self._engine.forget()

    def stats(self) -> Stats:
        """Diagnostics of this moment; on CUDA this waits for the device and reads all priorities once."""
        with self._alone():
            first, added = self._engine.span()
            size = added - first
            counts = self._counters.tolist()
            eligible = self._eligible(counts, size)
            spread = self._spread(eligible)
            # slots that are not live have been sampled 0 times
            sampled = self._storage.times_sampled
            return Stats(
                size=size,
                added=added,
                eligible=eligible,
                min_priority=spread.min_priority,
                mean_priority=spread.mean_priority,
                max_priority=spread.max_priority,
                entropy=spread.entropy,
                effective_sample_size=spread.effective_sample_size,
                mean_age=(size - 1) / 2 if size else 0.0,
                max_age=max(size - 1, 0),
                mean_times_sampled=int(sampled.sum()) / size if size else 0.0,
                max_times_sampled=int(sampled.max()) if size else 0,
                stale_updates=counts[Counter.STALE],
                rejected_priorities=counts[Counter.REJECTED],
                saturated_priorities=counts[Counter.SATURATED],
            )

    def _spread(self, eligible: int) -> Distribution:
        if self._tree is None:
            return uniform_distribution(eligible)
        if isinstance(self._base, RankBased):
            return rank_distribution(self._tree.masses, self._rule, self._base.alpha)
        return mass_distribution(self._tree.masses, self._rule)

    def _eligible(self, counts: list[int], size: int) -> int:
        """How many of the `size` stored transitions can be drawn, given the counters."""
        return size

    def masses(self) -> Tensor:
        """(capacity,) int64 masses in slot order, a copy: what the draws are proportional to.

        Raises RuntimeError for a sampler other than Proportional.
        """
        with self._alone():
            return self._with_masses().masses.clone()

    def total_mass(self) -> int:
        """The exact sum of the masses. Raises RuntimeError for a sampler other than Proportional."""
        with self._alone():
            return self._with_masses().total()

    def _with_masses(self) -> MassTree:
        if self._tree is None or not isinstance(self._base, Proportional):
            kept = "no priorities" if self._tree is None else "the order of priorities, not masses"
            raise RuntimeError(f"{self._sampler} keeps {kept}; masses exist with Proportional.")
        return self._tree

    # state

    def state_dict(self) -> dict[str, Any]:
        """Everything as copies: transitions, priorities, counters, random state. `save` makes no copy."""
        with self._alone():
            return checkpoint_state.snapshot(self._buffer_state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the buffer that `state_dict` saw: the next `sample` is the one that it would have drawn.

        Raises ValueError when capacity, fields or sampler differ, KeyError or TypeError for what is no such state;
        nothing is changed then.
        """
        with self._alone():
            checkpoint_state.restore(self._buffer_state(), state)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint folder: no pickle, streamed, checksummed; a crash leaves the old one or the new one."""
        with self._alone():
            checkpoint_state.save(self._buffer_state(), path)

    @classmethod
    def load(cls: type[Own], path: str | PathLike[str], device: torch.device | str | None = None) -> Own:
        """The buffer that `save` wrote, on any device. Raises CheckpointError that says what is damaged."""
        return cls._load(checkpoint_state.Saved(path, cls.__name__), device)

    @classmethod
    def _load(cls: type[Own], saved: checkpoint_state.Saved, device: torch.device | str | None, **more: Any) -> Own:
        buffer = cls(**cls._arguments(saved.config), device=device, seed=saved.seed, **more)
        with buffer._alone():
            saved.fill(buffer._buffer_state())
        return buffer

    def _buffer_state(self) -> checkpoint_state.BufferState:
        return checkpoint_state.BufferState(
            self._config(), self._seed, self._counters, self._state_tensors, self._rebuild
        )

    def _config(self) -> dict[str, Any]:
        """Class, capacity, fields and sampler as JSON values."""
        return {
            "kind": type(self).__name__,
            "capacity": self._capacity,
            "fields": {name: describe_field(field) for name, field in self._fields.items()},
            "sampler": describe_sampler(self._sampler),
        }

    @classmethod
    def _arguments(cls, config: dict[str, Any]) -> dict[str, Any]:
        """What to make a buffer with, given its `_config`."""
        return {
            "capacity": config["capacity"],
            "fields": {name: field_from(described) for name, described in config["fields"].items()},
            "sampler": sampler_from(config["sampler"]),
        }

    def _state_tensors(self, added: int) -> dict[str, Tensor]:
        """Views of all memory in use after `added` transitions, by name."""
        written = min(added, self._capacity)
        views = {f"fields.{name}": tensor[:written] for name, tensor in self._storage.tensors.items()}
        views["times_sampled"] = self._storage.times_sampled[:written]
        if self._tree is not None:
            views["masses"] = self._tree.masses[:written]
        if self._engine.ranked is not None:
            views["ranked"] = self._engine.ranked[:written]
        return views

    def _rebuild(self, seed: int) -> None:
        """Take over what was written into `_state_tensors` and the counters, and draw from this seed."""
        self._seed = seed
        _, added = self._engine.span()
        written = min(added, self._capacity)
        self._storage.times_sampled[written:].zero_()
        if self._tree is not None:
            self._tree.masses[written:].zero_()
            self._tree.build()
        self._engine.reseed(seed)


def refuse_names(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise KeyError for an `add` whose names are not the wanted ones."""
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    parts = []
    if missing:
        parts.append(f"is missing {', '.join(map(repr, missing))}")
    if unknown:
        parts.append(f"has unknown {', '.join(map(repr, unknown))}")
    raise KeyError(f"add {' and '.join(parts)}; the buffer's fields are {', '.join(wanted)}.")


def _check_seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an int; found {seed!r}.")
    return int(seed)
