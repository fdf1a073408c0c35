"""How a buffer is saved and loaded, in memory and on disk; what its state is made of, each buffer says itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from gpu_replay.checkpoint import state as checkpoint_state
from gpu_replay.checkpoint.config import describe_field, describe_sampler, field_from, sampler_from
from gpu_replay.checkpoint.joint import open_saved
from gpu_replay.engines.placement import Placement, StoragePath, check_placement
from gpu_replay.engines.saved_state import StateLayout, adapted, check_state
from gpu_replay.engines.storage import check_device, free_bytes
from gpu_replay.fields import Field
from gpu_replay.samplers import Sampler

Own = TypeVar("Own", bound="Stateful")


class Stateful(ABC):
    """What can be saved, and made again from its settings."""

    _capacity: int
    _fields: dict[str, Field]
    _sampler: Sampler
    _device: torch.device
    _placement: Placement
    _seed: int
    _counters: Tensor
    # what decides which state a buffer made with these arguments has
    _layout: ClassVar[Callable[..., StateLayout]]

    @abstractmethod
    def _alone(self) -> AbstractContextManager[None]:
        """No other call meanwhile."""

    @abstractmethod
    def _state_tensors(self, added: int) -> dict[str, Tensor]:
        """Views of all memory in use after `added` transitions, by name."""

    @abstractmethod
    def _rebuild(self, seed: int) -> None:
        """Take over what was written into `_state_tensors` and the counters, and draw from this seed."""

    def state_dict(self) -> dict[str, Any]:
        """Everything as copies in memory: transitions, priorities, counters, random state. `save` makes no copy.

        Raises MemoryError for a buffer with `storage_path` whose fields are larger than the memory that is free.
        """
        with self._alone():
            return checkpoint_state.snapshot(self._buffer_state(), check=self._check_copy)

    def _check_copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise MemoryError where copies of these are known not to fit."""
        needed, free = sum(tensor.nbytes for tensor in tensors.values()), free_bytes(torch.device("cpu"))
        if self._placement.path is not None and free is not None and needed > free:
            raise MemoryError(
                f"a copy of what the buffer holds needs {needed:,} bytes of memory, where {free:,} are free. Use "
                "save(path) and load(path), which read and write in pieces, or copy.deepcopy(buffer)."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the buffer that `state_dict` saw: the next `sample` is the one that it would have drawn.

        Raises ValueError when capacity, fields or sampler differ, KeyError or TypeError for what is no such state;
        nothing is changed then.
        """
        with self._alone():
            checkpoint_state.restore(self._buffer_state(), state)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint folder: no pickle, streamed, checksummed; a crash leaves the old one or the new one.

        Over an earlier checkpoint only those files of at most 64 MiB are written whose rows have changed since.
        """
        with self._alone():
            checkpoint_state.save(self._buffer_state(), path)

    @classmethod
    def load(
        cls: type[Own],
        path: str | PathLike[str],
        device: torch.device | str | None = None,
        *,
        sampler: Sampler | None = None,
        capacity: int | None = None,
        storage_device: torch.device | str | None = None,
        storage_path: StoragePath | None = None,
    ) -> Own:
        """The buffer that `save` wrote, on any device.

        sampler:  another one than the saved buffer's. Priorities stay as they are if it has some; if the saved buffer
                  had none, all transitions begin with the same, as `initial` says.
        capacity: another one; in a smaller buffer the newest transitions stay, with their keys.
        storage_device, storage_path: where the fields of this buffer are to be, wherever those of the saved one were.

        Raises CheckpointError that says what is damaged; while another process saves to the path, that it is to be
        opened again.
        """
        places = {"storage_device": storage_device, "storage_path": storage_path}
        return cls._load(open_saved(path, cls.__name__), device, sampler, capacity, **places)

    @classmethod
    def _load(
        cls: type[Own],
        saved: checkpoint_state.Saved,
        device: torch.device | str | None,
        sampler: Sampler | None,
        capacity: int | None,
        **more: Any,
    ) -> Own:
        asked = {"sampler": sampler, "capacity": capacity}
        changes = {name: value for name, value in asked.items() if value is not None}
        with saved.refusing(saved.NO_SETTINGS):
            arguments = cls._arguments(saved.config)
            old = cls._layout(**arguments)
        # what is wrong from here on was given to this call
        device = check_device(device)
        check_placement(device, more["storage_device"], more["storage_path"])
        new = cls._layout(**(arguments | changes))
        with saved.refusing(saved.NO_SETTINGS):
            buffer = cls(**(arguments | changes | more | {"device": device, "seed": saved.seed}))
        with buffer._alone():
            state, added = buffer._buffer_state(), saved.counters["ADDED"]
            if not changes:
                saved.fill(state)
                return buffer
            kept = saved.read(old.tensors(saved.counters, state.views(added)))
            with saved.refusing(saved.NO_STATE):
                check_state(old, saved.counters, kept)
            with torch.device("cpu"):
                changed = adapted(old, new, saved.counters, kept)
            saved.move(state, (old.slots, new.slots), *changed)
        return buffer

    def _buffer_state(self) -> checkpoint_state.BufferState:
        config = self._config()
        return checkpoint_state.BufferState(
            config,
            self._seed,
            self._counters,
            self._state_tensors,
            partial(check_state, self._layout(**self._arguments(config))),
            self._rebuild,
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
        own = {name: value for name, value in config.items() if name != "kind"}
        fields = {name: field_from(described) for name, described in config["fields"].items()}
        return {**own, "fields": fields, "sampler": sampler_from(config["sampler"])}

    def _settings(self) -> dict[str, Any]:
        """What to make a buffer like this one with, functions included."""
        places = {"storage_device": self._placement.storage_device, "storage_path": self._placement.path}
        return {**self._arguments(self._config()), "device": self._device, "seed": self._seed, **places}
