"""The base class of both buffers: settings, priorities, statistics, state. Subclasses add storage and sampling.

Public methods check what users pass in; the work is done by an engine, on CPU tensors or through Triton kernels.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from gpu_replay import validation
from gpu_replay.base import inspection, state
from gpu_replay.base.refusals import class_only, refuse_for_spawned, refuse_in_forks
from gpu_replay.batch import Batch
from gpu_replay.checkpoint import state as checkpoint_state
from gpu_replay.checkpoint.joint import open_saved
from gpu_replay.engines.draw_state import DrawState
from gpu_replay.engines.host_sampler import HostSampler
from gpu_replay.engines.placement import MakeMemory, StoragePath, check_placement
from gpu_replay.engines.sampler_plan import plan_of
from gpu_replay.engines.saved_state import StateLayout, check_state
from gpu_replay.engines.storage import Storage, check_device, check_live, check_room
from gpu_replay.fields import Field
from gpu_replay.graphs.cuda_graph import WARM_UPS
from gpu_replay.graphs.custom_ops import BatchKind, Operators
from gpu_replay.graphs.learning_step import Learn, LearningStep
from gpu_replay.graphs.stream_order import Recorded, StreamOrder
from gpu_replay.ops._backend import choose
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.samplers import Sampler
from gpu_replay.stats import Distribution, Stats, mass_distribution, rank_distribution, uniform_distribution

if TYPE_CHECKING:
    from gpu_replay.engines.device import DeviceEngine
    from gpu_replay.engines.device_sampler import DeviceSampler
    from gpu_replay.engines.device_trajectory import TrajectoryDeviceEngine
    from gpu_replay.engines.host import HostEngine
    from gpu_replay.engines.host_trajectory import TrajectoryHostEngine

    Engine = HostEngine | DeviceEngine | TrajectoryHostEngine | TrajectoryDeviceEngine

Own = TypeVar("Own", bound="Buffer")


class Buffer(ABC):
    """A ring of preallocated tensors with a sampler."""

    # the tensors that `sample` returns, declared for compiled code
    _batch_kind: BatchKind
    # the unit that is sampled, for messages, and whether stored rows may be ineligible
    _units: ClassVar[str]
    _tracks_eligibility: ClassVar[bool]
    # the expected names, dtypes and shapes of the values of an `add`
    _checks: validation.Checks
    # the settings that determine the layout of the state
    _layout: ClassVar[Callable[..., StateLayout]]
    # slots of all shards, in the shard of a larger buffer
    _total_slots: int | None = None

    def __init__(
        self,
        capacity: int,
        fields: dict[str, Field],
        sampler: Sampler,
        device: torch.device | str | None,
        seed: int,
        storage_device: torch.device | str | None,
        storage_path: StoragePath | None,
    ) -> None:
        self._capacity = capacity
        self._fields = fields
        self._sampler = sampler
        self._plan = plan_of(sampler)
        self._device = check_device(device)
        self._placement = check_placement(self._device, storage_device, storage_path)
        self._seed = validation.check_int("seed", seed)
        self._backend = choose(self._device)
        self._on_host = self._backend == "host"
        self._lock: AbstractContextManager[Any] = threading.RLock()
        refuse_in_forks(self)
        self._stream_order = StreamOrder(self._device)
        # not needed at exit: the process frees its memory anyway
        weakref.finalize(self, self._stream_order.close).atexit = False
        check_room(self._sizes(), self._placement, {*fields, "alignment"})

        # inference tensors could not be written outside of inference mode; calls on other streams come after what is
        # allocated and filled on this one
        with torch.inference_mode(False), self._stream_order.ordered():
            self._storage = self._make_storage()
            self._state = DrawState(
                *(self._plan, capacity, self._device, self._backend, self._seed),
                tracks_eligibility=self._tracks_eligibility,
                total_slots=self._total_slots,
            )
            self._counters = self._state.counters
            self._engine: Engine = self._make_engine()
        self._draws: HostSampler | DeviceSampler = self._engine.draws
        self._operators = Operators(self, self._device)

    @abstractmethod
    def _make_engine(self) -> Engine:
        """Make the engine that stores, samples and reads on this storage and state."""

    @abstractmethod
    def _sizes(self) -> dict[str, int]:
        """Bytes of everything that will be allocated, by name."""

    def _make_storage(self) -> Storage:
        """The ring, allocated."""
        return Storage(self._capacity, self._fields, self._device, packed=self._on_host, memory=self._memory())

    def _memory(self) -> MakeMemory | None:
        """The allocator of the fields, or None if they are on the device."""
        return self._placement.memory(self._stream_order.drain)

    # attributes

    @property
    def capacity(self) -> int:
        """Transitions that fit, `N`."""
        return self._capacity

    @property
    def device(self) -> torch.device:
        """Where priorities are kept and batches come out; the transitions too, but for `storage_device` and
        `storage_path`.
        """
        return self._device

    @property
    def storage_device(self) -> torch.device:
        """Where the fields are: the buffer's device, or the CPU for pinned host memory and files."""
        return self._placement.storage_device

    @property
    def storage_path(self) -> Path | None:
        """The folder of the file that holds the fields; None where they are in memory."""
        return self._placement.path

    @property
    def fields(self) -> dict[str, Field]:
        """The fields by name, as a copy."""
        return dict(self._fields)

    @property
    def sampler(self) -> Sampler:
        """The sampler's settings."""
        return self._sampler

    @property
    def seed(self) -> int:
        """The seed of its draws."""
        return self._seed

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: fields, priorities and counters, wherever they are."""
        scratch = self._draws.scratch_bytes + self._engine.scratch_bytes
        return self._storage.nbytes + self._state.nbytes + scratch

    @property
    def added(self) -> int:
        """Transitions added so far, which is also the key of the next one; on CUDA this waits for the device."""
        with self._lock:
            return self._draws.span()[1]

    def __len__(self) -> int:
        """Transitions stored, at most `capacity`; on CUDA this waits for the device."""
        with self._lock:
            first, added = self._draws.span()
            return added - first

    def __repr__(self) -> str:
        """Size, fields, settings and memory in one line; on CUDA this waits for the device."""
        names = ", ".join(self._fields)
        return (
            f"{type(self).__name__}({len(self):,} of {self._capacity:,} transitions of {names}; {self._described()}; "
            f"{self.nbytes / 1e6:,.1f} MB on {self._device}"
            f"{f', fields {self._placement.where}' if self._placement.apart else ''})"
        )

    def _described(self) -> str:
        """The settings that `repr` names."""
        return str(self._sampler)

    # what is stored, by key and in order; on CUDA each of these calls waits for the device

    def __getitem__(self, keys: Any) -> Batch:
        """The stored transitions of these live keys, in their order: `buffer[keys]`.

        keys: (m,) int64, a list of ints, or one int for a batch of one.

        Raises KeyError naming the first key that is not live, TypeError for keys that are not integers.
        """
        with self._alone():
            key = validation.as_keys(keys, self._device).to(self._device).clone()
            return Batch({**self._engine.read(key), "key": key})

    def keys(self) -> Tensor:
        """(size,) int64 on the buffer's device, the live keys, oldest first."""
        with self._alone():
            return torch.arange(*self._draws.span(), device=self._device)

    def __contains__(self, key: object) -> bool:
        """Whether a key, an int, is live: `key in buffer`."""
        number = validation.check_key(key)
        with self._alone():
            first, added = self._draws.span()
        return first <= number < added

    def __iter__(self) -> Iterator[Any]:
        """Raises TypeError: `batches` walks over what is stored."""
        raise TypeError(
            f"a {type(self).__name__} is not iterable: `for batch in buffer.batches(size)` walks over all that is "
            "stored, `buffer.sample(B)` samples."
        )

    def batches(self, size: int) -> Iterator[Batch]:
        """Walk over all that is stored, in the order of keys, by `size` rows at a time; the last batch may be smaller.

        A batch holds what `buffer[keys]` does. In a trajectory buffer its rows are single steps: their own `obs`
        without a stack, every other field, `reward`, `terminated`, `truncated` and `key`, also of steps that cannot be
        drawn. What is added meanwhile is left out, and so is what it overwrites.
        """
        rows = validation.check_int("size", size, 1)
        with self._alone():
            first, added = self._draws.span()
        return self._walk(first, added, rows)

    def _walk(self, start: int, end: int, rows: int) -> Iterator[Batch]:
        while True:
            with self._alone():
                start = max(start, self._draws.span()[0])
                if start >= end:
                    return
                keys = torch.arange(start, min(start + rows, end), device=self._device)
                batch = Batch({**self._engine.stored(keys), "key": keys})
            yield batch
            start += rows

    def priorities(self, keys: Any) -> Tensor:
        """The priorities of these live keys, (m,) float64 on the buffer's device.

        keys: as for `buffer[keys]`.

        With `RankBased` exactly what was given; with `Proportional` what the mass says, after `eps`, `clip` and
        rounding: `(mass / 2**20) ** (1 / alpha) - eps`, not below 0. Steps of a trajectory buffer that cannot be drawn
        have 0. Raises KeyError naming the first key that is not live, RuntimeError for a sampler without priorities and
        for `alpha=0`, with which priorities leave no trace.
        """
        if not self._plan.prioritized or self._plan.alpha == 0:
            raise RuntimeError(
                f"{self._sampler} keeps no priorities that could be read; use Proportional or RankBased with alpha > 0."
            )
        with self._alone():
            array = validation.as_keys(keys, self._device).cpu().numpy()
            check_live(array, *self._draws.span())
            slots = torch.from_numpy(array % self._state.slots).to(self._device)
            masses = self._state.masses.masses[slots].cpu().numpy()
        numbers = np.where(masses > 0, self._state.rule.priorities(np.maximum(masses, 1)), 0.0)
        return torch.from_numpy(numbers).to(self._device)

    # calls

    def _rows_of(self, fields: Mapping[str, Any], envs: int | None) -> tuple[dict[str, Any], int]:
        """Check the values of all fields; return them and the number of rows: of the first field, or `envs`."""
        if self._on_host:
            return validation.host_rows(fields, self._checks, envs, self._device)
        return validation.device_rows(fields, self._checks, envs, self._device, self._stream_order.current())

    def _check_enough(self, batch: int, skipped: int = 0, call: str = "", available: int | None = None) -> None:
        """Raise unless `call`, by default `sample`, can draw a batch without the newest `skipped` slots.

        available: how many it can draw from, where that is known.
        """
        newest, distinct = self._plan.newest, self._plan.distinct(batch)
        count = 0
        if newest <= batch:
            count = self._engine.count_at_least(max(distinct, 1), skipped) if available is None else available
            if count and count >= distinct:
                return
        call = call or f"sample({batch})"
        if newest > batch:
            raise ValueError(
                f"{call} from Combined(newest={newest}) needs a batch of at least {newest}. "
                "Raise the batch size or lower newest."
            )
        if count == 0:
            raise RuntimeError(f"{call}: the buffer holds no {self._units}. Add more first.")
        kind = "of the newest" if distinct in (newest, self._plan.newest_of(batch)) else "without replacement"
        remedy = "." if kind == "of the newest" else ", or draw with Uniform(replacement=True)."
        raise ValueError(
            f"{call} {kind} needs {distinct} {self._units}; the buffer holds {count}. "
            f"Add more or lower the batch size{remedy}"
        )

    def _take_back(self, mark: Any) -> None:
        """Undo a sample that raised, so that the next one is not affected by it."""
        with self._lock:
            self._draws.take_back(mark)

    def update_priorities(self, keys: Any, priorities: Any) -> None:
        """Give the transitions with these keys new priorities.

        keys:       (m,) int64 as `batch.key`; those no longer live are ignored and counted in `stats().stale_updates`.
        priorities: (m,) absolute TD errors or other non-negative numbers; the sign is dropped.

        A mass is never below one unit, 2^-20: a priority of 0 with `eps=0` counts as that, and so do TD errors below
        1e-6 with `alpha=1` (with `alpha=0.6` below 1e-10). A key that appears twice: the last one wins. With a sampler
        that has no priorities the arguments are checked, keys that are not live are counted and nothing else happens,
        so that one training loop serves every sampler.

        Raises ValueError for a wrong shape and, on the CPU, for priorities that are not finite (on CUDA such an entry
        keeps its priority and is counted); TypeError for keys that are not integers.
        """
        if is_dynamo_compiling():
            self._operators.update(keys, priorities)
            return
        keys, priorities = validation.as_update(keys, priorities, self._device, as_array=self._on_host)
        with self._lock:
            self._draws.update(keys, priorities)

    def clear(self) -> None:
        """Forget all transitions; keys go on counting, and so do the counts of `stats()`.

        An interrupt (KeyboardInterrupt) takes effect after the call.
        """
        with self._lock, self._stream_order.mending(), self._alone():
            try:
                self._forget_all()
            except BaseException:
                # a clear that stops halfway would leave dead rows eligible, so it is repeated as a whole
                self._forget_all()
                raise

    def _forget_all(self) -> None:
        # a sample that another thread is still making has nothing to take back
        self._draws.mark()
        self._state.clear()
        if self._stream_order.interrupted:
            # the counts of the host may be wrong, and what is known of the last steps
            self._storage.reset_from(0)
            self._engine.rebuild(self._seed)
            self._stream_order.interrupted = False
        else:
            self._storage.times_sampled.zero_()
            self._engine.on_clear()

    def stats(self) -> Stats:
        """Diagnostics of this moment; on CUDA this waits for the device and reads all priorities once."""
        with self._alone():
            first, added = self._draws.span()
            size = added - first
            counts = self._counters.tolist()
            eligible = counts[Counter.ELIGIBLE] if self._tracks_eligibility else size
            # slots that are not live have been sampled 0 times
            sampled = self._storage.times_sampled
            return Stats(
                size=size,
                added=added,
                eligible=eligible,
                **vars(self._distribution(eligible)),
                mean_age=(size - 1) / 2 if size else 0.0,
                max_age=max(size - 1, 0),
                mean_times_sampled=int(sampled.sum()) / size if size else 0.0,
                max_times_sampled=int(sampled.max()) if size else 0,
                stale_updates=counts[Counter.STALE],
                rejected_priorities=counts[Counter.REJECTED],
                saturated_priorities=counts[Counter.SATURATED],
            )

    def _distribution(self, eligible: int) -> Distribution:
        tree, rule = self._state.tree, self._state.rule
        if tree is None:
            return uniform_distribution(eligible)
        if self._plan.kind == "rank":
            return rank_distribution(tree.masses, rule, self._plan.alpha)
        return mass_distribution(tree.masses, rule)

    def masses(self) -> Tensor:
        """(capacity,) int64 masses in slot order, a copy; sampling is proportional to them.

        Raises RuntimeError for a sampler other than Proportional.
        """
        with self._alone():
            return self._summed_tree().masses.clone()

    def total_mass(self) -> int:
        """The exact sum of the masses. Raises RuntimeError for a sampler other than Proportional."""
        with self._alone():
            return self._summed_tree().total()

    def _summed_tree(self) -> MassTree:
        if self._plan.kind != "mass":
            kept = "the order of priorities, not masses" if self._plan.prioritized else "no priorities"
            raise RuntimeError(f"{self._sampler} keeps {kept}; masses exist with Proportional.")
        return self._state.masses

    def plot(self, path: str | PathLike[str]) -> None:
        """Plot the stored data, the sampling distribution and how often rows were sampled: .png, .pdf or .svg.

        `gpu-replay inspect DIR` plots a checkpoint. Raises ImportError without matplotlib.
        """
        with self._alone():
            inspection.draw(inspection.of_buffer(self._buffer_state()), path)

    # captured steps

    @abstractmethod
    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        """Sample `B` rows as a Batch on the buffer's device; subclasses say which errors it raises."""

    def capture(
        self,
        batch_size: int | None,
        learn: Learn,
        *,
        beta: float | None = None,
        warm_ups: int = WARM_UPS,
        generators: Sequence[torch.Generator] = (),
    ) -> LearningStep:
        """A learning step as one call: `sample`, `learn(batch)` and `update_priorities`; on a GPU one CUDA graph.

        batch_size, beta: as for `sample`. With None nothing is sampled: `learn()` may add, but not sample, and returns
                  the output alone.
        learn:    takes the Batch and returns the priorities of its rows, (B,) on the device, or None to leave them as
                  they are; or `(priorities, output)`, where `output`, made of tensors, is what the step returns.
        warm_ups: calls of the step, at least 1, that run eagerly before the graph is captured. They are ordinary steps,
                  not extra ones.
        generators: of the buffer's device, from which `learn` draws beside torch's own, as for exploration: replays
                  move them on as calls do.

        Each call, replayed or not, samples anew and advances the beta schedule and, where `learn` adds, the ring. On a
        CPU every call runs eagerly, so that one program serves both. During the capture `learn` runs once on the host,
        and then never again: its other effects on the host are not repeated, and the tensors it uses must keep their
        memory (optimisers need `capturable=True`). Between steps you may make any other call, also `clear` and
        `load_state_dict`, from any thread and stream.

        Raises TypeError or ValueError for invalid arguments.
        """
        batch = None if batch_size is None else validation.check_batch_size(batch_size)
        exponent = validation.check_beta(beta)
        if not callable(learn):
            raise TypeError(f"capture needs a function that learns from a batch; found {type(learn).__name__}.")

        def sample() -> Batch | None:
            return None if batch is None else self.sample(batch, beta=exponent)

        return LearningStep(
            learn,
            batch,
            self.device,
            validation.check_int("warm_ups", warm_ups, 1),
            generators=validation.check_generators(generators, self.device),
            sample=sample,
            update=self.update_priorities,
            recording=lambda: self._recording(batch),
            replaying=lambda recorded: self._replaying(batch, recorded),
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude all other calls, on host and device, for operations that the engine does not order itself."""
        with self._lock, self._stream_order.ordered():
            yield

    @contextmanager
    def _recording(self, batch: int | None) -> Iterator[Recorded]:
        """Count what is captured meanwhile. Raises as `sample` where there is too little to draw from."""
        if batch is not None:
            with self._lock:
                self._check_enough(batch)
        self._stream_order.recorded = recorded = Recorded()
        try:
            yield recorded
        finally:
            self._stream_order.recorded = None

    @contextmanager
    def _replaying(self, batch: int | None, recorded: Recorded) -> Iterator[None]:
        """Order one replay of what was recorded. Raises as `sample` where there is too little to draw from."""
        with self._alone():
            if batch is not None:
                self._check_enough(batch)
            yield
            self._engine.on_replay(recorded.rows)

    # state

    def _state_tensors(self, added: int) -> dict[str, Tensor]:
        """Views of all memory in use after `added` transitions, by name."""
        written, draws = min(added, self._capacity), self._state
        if self._placement.pinned:
            # the device may still read and write memory that the host is about to use
            self._stream_order.settle()
        views = {f"fields.{name}": tensor[:written] for name, tensor in self._storage.tensors.items()}
        views["times_sampled"] = self._storage.times_sampled[:written]
        if draws.tree is not None:
            views["masses"] = draws.tree.masses[:written]
        views |= self._storage.stream_tensors(written)
        if draws.tree is None and draws.eligible_tree is not None:
            views["marks"] = draws.eligible_tree.masses[:written]
        return views

    def _rebuild(self, seed: int) -> None:
        """Take over what was written into `_state_tensors` and the counters, and draw from this seed."""
        self._seed = seed
        written = min(self._draws.span()[1], self._capacity)
        self._storage.reset_from(written)
        self._state.rebuild(written)
        self._engine.rebuild(seed)

    def _buffer_state(self) -> checkpoint_state.BufferState:
        config = self._config()
        return checkpoint_state.BufferState(
            config,
            self._seed,
            self._counters,
            self._state_tensors,
            partial(check_state, self._layout(**state.arguments_of(config))),
            self._rebuild,
        )

    def _config(self) -> dict[str, Any]:
        """Class and settings as JSON values."""
        return state.config_of(type(self).__name__, self._capacity, self._fields, self._sampler)

    def _settings(self) -> dict[str, Any]:
        """Constructor arguments for a buffer like this one, functions included."""
        places = {"storage_device": self._placement.storage_device, "storage_path": self._placement.path}
        return {**state.arguments_of(self._config()), "device": self._device, "seed": self._seed, **places}

    def state_dict(self) -> dict[str, Any]:
        """Copy the whole state in memory: transitions, priorities, counters, random state. `save` makes no copy.

        Raises MemoryError for a buffer with `storage_path` whose fields are larger than the memory that is free.
        """
        with self._alone():
            return checkpoint_state.snapshot(self._buffer_state(), check=self._check_copy)

    def _check_copy(self, tensors: Mapping[str, Tensor]) -> None:
        if self._placement.path is not None:
            state.check_copy(tensors)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`: the next `sample` returns what that buffer would have returned next.

        Raises ValueError when capacity, fields or sampler differ, KeyError or TypeError for what is no such state;
        nothing is changed then. An interrupt (KeyboardInterrupt) or a lack of memory later on leaves the buffer empty.
        """
        with self._lock, self._stream_order.mending(), self._alone():
            checkpoint_state.restore(self._buffer_state(), state, self._changing())

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Within it everything is replaced; if that raises, the buffer is emptied, or refuses all calls."""
        try:
            self._stream_order.interrupted = True
            yield
        except BaseException:
            self._forget_all()
            raise
        self._draws.mark()
        self._stream_order.interrupted = False

    def save(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint folder: no pickle, streamed, checksummed; a crash leaves the old one or the new one.

        Over an earlier checkpoint only those files of at most 64 MiB are written whose rows have changed since.
        """
        with self._alone():
            checkpoint_state.save(self._buffer_state(), path)

    @class_only
    def load(
        cls: type[Own],
        path: str | PathLike[str],
        device: torch.device | str | None = None,
        *,
        storage_device: torch.device | str | None = None,
        storage_path: StoragePath | None = None,
    ) -> Own:
        """The buffer that `save` wrote, on any device.

        storage_device, storage_path: where the fields of this buffer are to be, wherever those of the saved one were.

        For another capacity or sampler make a new buffer and fill it from `old.batches(size)`.
        Raises CheckpointError that says what is damaged; while another process saves to the path, that it is to be
        opened again.
        """
        places = {"storage_device": storage_device, "storage_path": storage_path}
        return state.loaded(cls, open_saved(path, cls.__name__), device, **places)

    def __deepcopy__(self: Own, memo: dict[int, Any]) -> Own:
        """An independent buffer with the same state: both return the same next sample.

        Fields at a `storage_path` are copied to the first free folder of `PATH-2`, `PATH-3`, ... beside it.
        """
        with self._alone():
            return state.remade(
                type(self), self._settings(), checkpoint_state.snapshot(self._buffer_state(), copied=False)
            )

    def __reduce__(self) -> tuple[Any, ...]:
        refuse_for_spawned()
        with self._alone():
            snapshot = checkpoint_state.snapshot(self._buffer_state(), check=self._check_copy)
            return state.remade, (type(self), self._settings(), snapshot)
