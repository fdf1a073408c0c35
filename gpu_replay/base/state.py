"""What a buffer is made of, and how all of it is emptied, saved, loaded and copied."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from gpu_replay.base.refusals import HALF_LOADED, Refusing, class_only, refuse_for_spawned, refuse_in_forks
from gpu_replay.checkpoint.format import write_checkpoint
from gpu_replay.checkpoint.state import (
    NO_SETTINGS,
    VERSION,
    BufferCheckpoint,
    check_described,
    checked_snapshot,
    config_of,
    describe_sampler,
)
from gpu_replay.engines.device import DeviceSampler
from gpu_replay.engines.host import HostSampler
from gpu_replay.engines.memory import (
    MakeMemory,
    StoragePath,
    check_device,
    check_placement,
    check_room,
    free_bytes,
)
from gpu_replay.engines.state import (
    META,
    SPECIFIC,
    SamplerState,
    StateLayout,
    change_kind,
    check_state,
    sizes_of,
    turned,
)
from gpu_replay.engines.storage import Storage
from gpu_replay.fields import Field
from gpu_replay.graphs import never_traced
from gpu_replay.graphs.stream_order import StreamOrder
from gpu_replay.ops._backend import choose
from gpu_replay.ops.advice import warn_of_python
from gpu_replay.ops.counters import LASTING, Counter, counter_values
from gpu_replay.ops.ring import StreamShape
from gpu_replay.samplers import Sampler, check_own, check_sampler
from gpu_replay.validation import check_int

if TYPE_CHECKING:
    from typing_extensions import Never, Self

    from gpu_replay.engines.device import DeviceEngine
    from gpu_replay.engines.device_trajectory import TrajectoryDeviceEngine
    from gpu_replay.engines.host import HostEngine
    from gpu_replay.engines.host_trajectory import TrajectoryHostEngine

    Engine: TypeAlias = HostEngine | DeviceEngine | TrajectoryHostEngine | TrajectoryDeviceEngine


@never_traced
class StatefulBuffer:
    """A ring of preallocated tensors with a sampler, an engine that works on them, and their state as a whole."""

    # made with a storage and what draws from it
    _host_engine: ClassVar[type[Any]]
    _device_engine: ClassVar[type[Any]]
    # how a ring of steps is divided, in which stored rows may be ineligible
    _shape: StreamShape | None = None

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
        self._sampler = check_sampler(sampler)
        check_described(sampler)
        self._needs = lru_cache(64)(sampler.needs)
        self._device = check_device(device)
        check_own(sampler, capacity, self._device)
        self._placement = check_placement(self._device, storage_device, storage_path)
        self._seed = check_int("seed", seed)
        self._backend = choose(self._device)
        self._on_host = self._backend == "host"
        self._lock: AbstractContextManager[Any] = threading.RLock()
        refuse_in_forks(self)
        self._stream_order = StreamOrder(self._device)
        # not needed at exit: the process frees its memory anyway
        weakref.finalize(self, self._stream_order.close).atexit = False
        sizes = sizes_of(self._make_storage(META), sampler, self._backend)
        check_room(sizes, self._placement, {*fields, "alignment"})

        # inference tensors could not be written outside of inference mode; calls on other streams come after what is
        # allocated and filled on this one
        with torch.inference_mode(False), self._stream_order:
            memory = self._placement.memory(self._stream_order.drain)
            self._storage = self._make_storage(self._device, memory)
            self._state = SamplerState(sampler, self._storage, self._backend, self._seed)
            self._counters = self._state.counters
            self._made_engine: Engine = self._make_engine()
        if self._on_host:
            warn_of_python()
        self._engine: Engine = self._made_engine
        self._sampling: HostSampler | DeviceSampler = self._made_engine.sampling

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

    def _make_storage(self, device: torch.device, memory: MakeMemory | None = None) -> Storage:
        """The ring, allocated; memory: the allocator of fields that are not on the device."""
        return Storage(self._capacity, self._fields, device, packed=self._on_host, memory=memory)

    def _make_engine(self) -> Engine:
        """The engine that stores, samples and reads on this storage and state."""
        if self._on_host:
            return self._host_engine(self._storage, HostSampler(self._state, self._storage, self._seed))
        return self._device_engine(self._storage, DeviceSampler(self._state, self._storage, self._stream_order))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude all other calls, on host and device, for operations that the engine does not order itself."""
        with self._lock, self._stream_order:
            if isinstance(self._engine, Refusing):
                # raises where the buffer is half loaded
                _ = self._engine.sampling
            yield

    def _refuse_calls(self, message: str, *allowed: str) -> None:
        """From now on calls raise RuntimeError, also those that wait for the lock, until `_accept_calls`.

        allowed: what calls may ask of the engine and its sampler.
        """
        engine, sampling = self._made_engine, self._made_engine.sampling
        refusing: Any = [Refusing(message, each, allowed) for each in (engine, sampling)]
        self._engine, self._sampling = refusing

    def _accept_calls(self) -> None:
        self._engine, self._sampling = self._made_engine, self._made_engine.sampling

    def _accepting_after(self) -> ExitStack:
        """A context whose end makes calls accepted again, in one operation without Python in it."""
        stack = ExitStack()
        stack.callback(vars(self).update, _engine=self._made_engine, _sampling=self._made_engine.sampling)
        return stack

    def clear(self) -> None:
        """Forget all transitions; keys and the counts of `stats()` continue.

        In a trajectory buffer unfinished episodes continue too, and steps whose stack would need forgotten frames are
        not eligible: if you interrupt the streams as well, call `begin_episodes`. An interrupt (KeyboardInterrupt)
        takes effect after the call.
        """
        with self._lock, self._stream_order:
            half_loaded = self._is_half_loaded()
            try:
                self._forget_all(half_loaded)
            except BaseException:
                # a clear that stops halfway would leave dead rows eligible, so it is repeated as a whole
                self._forget_all(half_loaded)
                raise

    def _is_half_loaded(self) -> bool:
        """Whether an earlier load or clear did not end. Raises RuntimeError where nothing may change the buffer."""
        _ = self._sampling.rebuild
        return self._engine is not self._made_engine

    def _forget_all(self, half_loaded: bool) -> None:
        self._refuse_calls(HALF_LOADED, "rebuild")
        self._state.clear()
        if half_loaded:
            # the counts of the host may be wrong, and what is known of the last steps
            self._storage.reset_after(0)
            self._made_engine.sampling.rebuild(self._seed)
        else:
            self._storage.times_sampled.zero_()
            self._made_engine.sampling.on_clear()
        self._accept_calls()

    # saved, loaded and copied

    def _arguments(self) -> dict[str, Any]:
        """The constructor's arguments that two buffers must share for one to load the state of the other."""
        return {"capacity": self._capacity, "fields": self._fields, "sampler": self._sampler}

    def _has(self, setting: str, value: Any) -> bool:
        """Whether a setting, by its name, is this value; a sampler by what checkpoints keep of it."""
        found = getattr(self, setting)
        if isinstance(value, Sampler):
            return describe_sampler(found) == describe_sampler(value)
        return bool(found == value)

    def _all_arguments(self) -> dict[str, Any]:
        """The constructor's arguments for a buffer like this one."""
        places = {"storage_device": self._placement.storage_device, "storage_path": self._placement.path}
        return {**self._arguments(), "device": self._device, "seed": self._seed, **places}

    def _state_tensors(self, added: int) -> dict[str, Tensor]:
        """Views of all memory in use after `added` transitions, by name."""
        written, trees = min(added, self._capacity), self._state
        if self._placement.pinned:
            # the device may still read and write memory that the host is about to use
            self._stream_order.synchronize()
        views = {f"fields.{name}": tensor[:written] for name, tensor in self._storage.tensors.items()}
        views["times_sampled"] = self._storage.times_sampled[:written]
        if trees.tree is not None:
            views["masses"] = trees.tree.masses[:written]
        views |= self._storage.stream_tensors(written)
        if trees.tree is None and trees.eligible_tree is not None:
            views["marks"] = trees.eligible_tree.masses[:written]
        return views

    def _rebuild(self, seed: int) -> None:
        """Take over what was written into `_state_tensors` and the counters, and draw from this seed."""
        self._seed = seed
        added = self._made_engine.sampling.span()[1]
        self._storage.reset_after(added)
        self._state.rebuild(min(added, self._capacity))
        self._made_engine.sampling.rebuild(seed)

    def _take_over(self, counters: dict[str, int], seed: int) -> None:
        """Take over these counters, and what was written into `_state_tensors`; draw from this seed."""
        self._counters.copy_(torch.tensor(counter_values(counters, seed), dtype=torch.int64, device="cpu"))
        self._rebuild(seed)

    def _config(self) -> dict[str, Any]:
        """The class and `_arguments` as JSON values."""
        return config_of(type(self).__name__, self._arguments())

    def _snapshot(self) -> dict[str, Any]:
        """The state as `state_dict` returns it, with views instead of copies."""
        counts = self._counters.tolist()
        counters = {name: counts[place] for name, place in LASTING.items()}
        tensors = self._state_tensors(counters["ADDED"])
        said = {"version": VERSION, "settings": self._config(), "seed": self._seed, "counters": counters}
        return {**said, "tensors": tensors}

    def state_dict(self) -> dict[str, Any]:
        """Copy the whole state in memory: transitions, priorities, counters, random state. `save` makes no copy.

        Raises MemoryError for a buffer with `storage_path` whose fields are larger than the memory that is free.
        """
        with self._alone():
            state = self._snapshot()
            views = state["tensors"]
            needed = sum(tensor.nbytes for tensor in views.values())
            free = None if self._placement.path is None else free_bytes(torch.device("cpu"))
            if free is not None and needed > free:
                raise MemoryError(
                    f"a copy of what the buffer holds needs {needed:,} bytes of memory, where {free:,} are free. Use "
                    "save(path) and load(path), which read and write in pieces, or copy.deepcopy(buffer)."
                )
            return {**state, "tensors": {name: view.clone() for name, view in views.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`: the next `sample` returns what that buffer would have returned next.

        Raises ValueError when capacity, fields or sampler differ, KeyError or TypeError for anything but such a state;
        these change nothing. An interrupt (KeyboardInterrupt) or a lack of memory later leaves the buffer empty.
        """
        with self._lock, self._stream_order:
            self._is_half_loaded()
            counters, seed, tensors = checked_snapshot(state, self._config(), self._state_tensors)
            check_state(StateLayout(self._capacity, self._sampler, self._shape), counters, tensors)
            try:
                self._refuse_calls(HALF_LOADED, "rebuild")
                for name, view in self._state_tensors(counters["ADDED"]).items():
                    # else the ring would take part in the graph of a tensor that requires gradients
                    view.copy_(tensors[name].detach())
                self._take_over(counters, seed)
                self._accept_calls()
            except BaseException:
                self._forget_all(half_loaded=True)
                raise

    def save(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint folder: no pickle, streamed, checksummed; a crash leaves the old one or the new one.

        Over an earlier checkpoint it writes only those files, of at most 64 MiB each, whose rows have changed.
        """
        with self._alone():
            state = self._snapshot()
            tensors = state.pop("tensors")
            write_checkpoint(path, state, tensors)

    @class_only
    def load(
        cls,
        path: str | PathLike[str],
        device: torch.device | str | None = None,
        *,
        sampler: Sampler | None = None,
        storage_device: torch.device | str | None = None,
        storage_path: StoragePath | None = None,
        **others: Never,
    ) -> Self:
        """Load the buffer that `save` wrote, on any device.

        sampler:  another sampler for the stored rows; None for the saved one. Priorities go on, under its rule, where
                  both samplers have them; otherwise every row has the priority of a new one (`initial`). So they do
                  where the saved sampler had `alpha=0`, which keeps none. The count of samples goes on too, and with
                  it a schedule of beta.
        storage_device, storage_path: where to put the fields, wherever the saved buffer had them.

        For another capacity make a new buffer and fill it from `old.batches(size)`.
        Raises CheckpointError, which says what is damaged, or, while another process saves to the path, that you should
        load again; TypeError for anything but a sampler.
        """
        if isinstance(device, Sampler):
            raise TypeError(f"load takes the path and a device by position; found {device!r}: did you mean sampler=?")
        if sampler is not None:
            check_described(check_sampler(sampler))
        saved = BufferCheckpoint(path, cls.__name__)
        arguments = saved.arguments()
        # errors in these are errors of this call, not of the checkpoint
        cls._check_others(path, arguments, others)
        device = check_device(device)
        check_placement(device, storage_device, storage_path)
        places = {"device": device, "storage_device": storage_device, "storage_path": storage_path}
        given = {"seed": saved.seed, "sampler": arguments["sampler"] if sampler is None else sampler}
        with saved.refusing(NO_SETTINGS):
            buffer = cls(**(arguments | others | places | given))
        with buffer._alone():
            buffer._restore(saved, arguments)
        return buffer

    @classmethod
    def _check_others(cls, path: object, saved: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Raise where a buffer with the saved arguments is not loaded with these others."""
        for name in others:
            raise TypeError(
                f"load gives the buffer that was saved, with its own settings; it takes no {name!r}. For another "
                "capacity make a new buffer and fill it from old.batches(size): see the guide, Checkpoints."
            )

    def _restore(self, saved: BufferCheckpoint, arguments: Mapping[str, Any]) -> None:
        """Stream in all of the checkpoint of a buffer with these arguments, whose rows and sampler may be others."""
        counters, shape, rows = saved.counters, self._shape, arguments.get("sequences")
        if shape is not None:
            shape = replace(shape, **({"length": 0, "strict": False, "stride": 1} if rows is None else vars(rows)))
        after = StateLayout(self._capacity, self._sampler, self._shape)
        before = StateLayout(self._capacity, arguments["sampler"], shape)
        bases = before.sampler.base, after.sampler.base
        alike = shape == self._shape and before.rule == after.rule and bases[0].prioritized == bases[1].prioritized
        views = filled = self._state_tensors(counters["ADDED"])
        if not alike:
            specific = before.specific(min(counters["ADDED"], self._capacity))
            filled = {name: view for name, view in views.items() if name not in SPECIFIC} | specific
        saved.checkpoint.fill(filled)
        with saved.refusing("what it holds is no state of a buffer"):
            check_state(before, counters, filled)
        if not alike:
            top = int(turned(before, after, torch.tensor([counters["TOP"]], device="cpu")))
            counters = {**counters, "TOP": top}
            # from which the initial mass follows
            self._counters[Counter.MAX_MASS] = top
            with torch.device("cpu"):
                change_kind(before, after, counters, filled, views, self._state.initial_mass)
        self._take_over(counters, saved.seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An independent buffer with the same state: both return the same next sample."""
        with self._alone():
            return remade(type(self), self._all_arguments(), self._snapshot())

    def __reduce__(self) -> tuple[Any, ...]:
        refuse_for_spawned()
        return remade, (type(self), self._all_arguments(), self.state_dict())


def remade(kind: type[Any], arguments: dict[str, Any], snapshot: dict[str, Any]) -> Any:
    """A buffer made with these arguments, in this state."""
    buffer = kind(**arguments)
    buffer.load_state_dict(snapshot)
    return buffer
