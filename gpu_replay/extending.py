"""What a trajectory buffer takes: steps and final observations, checked, and `extend`, which adds many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.base_buffer import Buffer, refuse_names
from gpu_replay.fields import DICTIONARIES, Field, flattened
from gpu_replay.ops.eligibility import StreamShape
from gpu_replay.ops.many_steps import GivenFinals

if TYPE_CHECKING:
    from gpu_replay.engines.device_trajectory import TrajectoryDeviceEngine
    from gpu_replay.engines.host_trajectory import TrajectoryHostEngine
    from gpu_replay.engines.trajectory_storage import TrajectoryStorage


class Extending(Buffer):
    """A buffer of steps that checks what it is given, one step or many of them."""

    _engine: TrajectoryHostEngine | TrajectoryDeviceEngine
    _streams: TrajectoryStorage
    _num_envs: int
    _shape: StreamShape
    _relabel: Any
    # what a step holds
    _step_fields: dict[str, Field]

    @property
    def num_envs(self) -> int:
        """Environments stepped together, `E`."""
        return self._num_envs

    @property
    def stack(self) -> int:
        """Frames of an observation, `S`."""
        return self._shape.stack

    @property
    def n_step(self) -> int:
        """Steps until bootstrapping, `n`."""
        return self._shape.n_step

    def _checked_step(self, name: str, given: Any, field: Field, stream: torch.cuda.Stream | None) -> Any:
        """The value as `[E, *shape]`: a tensor, or for the host engine an array that can be stored as it is.

        stream: the one that is current on a GPU.
        """
        wanted = (self._num_envs, *field.shape)
        if type(given) is np.ndarray and given.dtype == self._plain_dtypes[name] and given.shape == wanted:
            return given
        if not self._on_host and validation.is_plain(given, field.dtype, self._device) and given.shape == wanted:
            if stream is not None:
                given.record_stream(stream)
            return given
        tensor = validation.as_tensor(name, given, self._device)
        if tuple(tensor.shape) != wanted:
            raise ValueError(
                f"field {name!r} needs shape {list(wanted)}, one step of each of the {self._num_envs} environments; "
                f"found {list(tensor.shape)}."
            )
        value = validation.as_field(name, tensor, field, None, self._device)
        return validation.numpy_view(name, value) if self._on_host else value

    def _checked_finals(self, given: dict[str, Any], terminated: Any, truncated: Any) -> dict[str, Any] | None:
        """The final observations as `[E, *shape]` of each observation field, or None where none came."""
        if not given:
            return None
        observations = self._streams.observations
        if given.keys() != set(observations):
            refuse_names({f"final_{name}": None for name in given}, {f"final_{name}": None for name in observations})
        if not self._shape.finals:
            return None
        # the rows that will be read, where the device need not be asked for them
        ended = None
        if self._on_host or (terminated.is_cpu and truncated.is_cpu):
            over = self._reads_final(terminated, truncated)
            ended = torch.from_numpy(over) if self._on_host else over
        kept: dict[str, Any] = {}
        for name in observations:
            asked, field = f"final_{name}", self._fields[name]
            kept[name] = validation.as_final(asked, given[name], field, self._num_envs, ended, self._device)
            if self._on_host:
                kept[name] = validation.numpy_view(asked, kept[name])
        return kept

    def _reads_final(self, terminated: Any, truncated: Any) -> Any:
        return truncated & ~terminated if self._relabel is None else truncated | terminated

    def extend(self, *, priority: Any = None, final_obs: Any = None, **fields: Any) -> Tensor:
        """Store T steps of all `E` environments and return their keys, (T, E) int64 on the buffer's device.

        fields:    as in `add`, each `[T, E, *shape]`, oldest first; `[T, 1, *shape]` for a stream of one environment.
                   Arrays may be larger than memory (`numpy.memmap`), and T may exceed what the buffer holds.
        priority:  (T, E), as in `add`.
        final_obs: as in `add` with T before it: `[T, E, *shape]`, an object array [T, E], a dictionary of these, or a
                   list of T entries, each None or what `add` takes.

        It leaves behind what T calls of `add` would, bit for bit: the same masses, keys and draws. On a CPU it takes
        about a microsecond for each step of an environment; on CUDA it waits for the device. With `relabel`, in rings
        hardly longer than a window, and for `initial="stored"` where priorities change it takes as long as the calls.
        Raises as `add` does, and nothing is stored by a call that raises or is interrupted: until it returns, what it
        overwrites is kept, in as much memory again as the overwritten steps take; an empty ring takes none.
        """
        wanted, observations = self._step_fields, self._streams.observations
        if fields.keys() != wanted.keys():
            fields = flattened(fields, wanted)
            named = {name: fields.pop(f"final_{name}") for name in observations if f"final_{name}" in fields}
            if named:
                final_obs = {name.removeprefix("obs."): value for name, value in named.items()}
            if fields.keys() != wanted.keys():
                refuse_names(fields, wanted)
        values: dict[str, Any] = {}
        for name, field in wanted.items():
            steps = len(next(iter(values.values()))) if values else None
            values[name] = self._checked_steps(name, fields[name], field, steps)
        terminated, truncated = (_on_host(values.pop(name)) for name in ("terminated", "truncated"))
        count = len(terminated)
        if priority is not None:
            given = validation.as_tensor("priority", priority, self._device)
            if tuple(given.shape) != (count, self._num_envs):
                raise ValueError(f"priority needs shape {[count, self._num_envs]}; found {list(given.shape)}.")
            flat = given.reshape(-1)
            priority = validation.as_priorities("priority", flat, len(flat), self._device, as_array=self._on_host)
            priority = priority.reshape(count, self._num_envs)
        finals = None
        if final_obs is not None:
            finals = self._given_finals(final_obs, self._reads_final(terminated, truncated))
        with self._lock:
            first = self._draws.span()[1]
            keys = torch.arange(first, first + count * self._num_envs, device=self._device)
            keys = keys.view(count, self._num_envs)
            return self._engine.extend(values, terminated, truncated, priority, finals, keys)

    def _checked_steps(self, name: str, given: Any, field: Field, steps: int | None) -> Any:
        """The value as `[T, E, *shape]` of the field's dtype: a tensor, or an array for the host engine."""
        wanted = (self._num_envs, *field.shape)
        plain = type(given) in (np.ndarray, np.memmap) and given.dtype == self._plain_dtypes[name]
        value = given if plain else validation.as_tensor(name, given, self._device)
        if value.ndim == 0 or tuple(value.shape[1:]) != wanted:
            alone = self._num_envs == 1 and value.ndim > 0 and tuple(value.shape[1:]) == field.shape
            hint = " Add the axis of the environments: value[:, None]." if alone else ""
            raise ValueError(
                f"field {name!r} needs shape [T, {', '.join(map(str, wanted))}]: T steps of each of the "
                f"{self._num_envs} environments; found {list(value.shape)}.{hint}"
            )
        if steps is not None and len(value) != steps:
            raise ValueError(f"field {name!r} has {len(value)} steps where the others of this extend have {steps}.")
        if len(value) == 0:
            raise ValueError("extend needs at least one step (T >= 1); found fields with 0 steps.")
        if isinstance(value, np.ndarray):
            return value
        cast = value if value.dtype == field.dtype else validation.cast(name, value, field.dtype)
        return validation.numpy_view(name, cast) if self._on_host else cast

    def _given_finals(self, given: Any, read: np.ndarray) -> GivenFinals | None:
        """The final observations that will be read, where `read`, (T, E) bool, says so; None where none are kept."""
        observations, count = self._streams.observations, len(read)
        by_step = isinstance(given, (list, tuple)) or (isinstance(given, np.ndarray) and given.dtype == object)
        if not by_step:
            given = validation.final_columns(given, observations, count)
            unlike = given.keys() ^ set(observations)
            if unlike:
                refuse_names({f"final_{n}": None for n in given}, {f"final_{n}": None for n in observations})
        if not self._shape.finals:
            return None
        if not by_step:
            return self._final_columns(given, read)
        if len(given) != count:
            raise ValueError(f"'final_obs' needs {count} steps; found {len(given)}.")
        steps = [step for step in np.flatnonzero(read.any(axis=1)).tolist() if given[step] is not None]
        with_final = np.zeros(count, dtype=bool)
        with_final[steps] = True
        rows = {name: self._no_finals(name, len(steps) * self._num_envs) for name in observations}
        place = np.zeros(count, dtype=np.int64)
        place[steps] = np.arange(len(steps))
        for number, step in enumerate(steps):
            columns = validation.final_columns(given[step], observations, self._num_envs)
            if columns.keys() != set(observations):
                refuse_names({f"final_{n}": None for n in columns}, {f"final_{n}": None for n in observations})
            part = slice(number * self._num_envs, (number + 1) * self._num_envs)
            for name, value in columns.items():
                rows[name][part] = self._final_rows(name, value, read[step])
        return GivenFinals(rows, place, with_final)

    def _final_columns(self, given: dict[str, Any], read: np.ndarray) -> GivenFinals:
        """Of whole columns `[T, E, *shape]`, or object arrays [T, E], the steps in which some are read."""
        count, steps = len(read), np.flatnonzero(read.any(axis=1))
        place = np.zeros(count, dtype=np.int64)
        place[steps] = np.arange(len(steps))
        rows = {}
        for name, value in given.items():
            if isinstance(value, DICTIONARIES):
                raise TypeError(f"'final_{name}' must be an array of {count} steps; found a dictionary.")
            whole = value if isinstance(value, (Tensor, np.ndarray)) else np.asarray(value, dtype=object)
            shape = (count, self._num_envs, *self._fields[name].shape)
            if tuple(whole.shape) != shape[: 2 if whole.dtype == object else None]:
                raise ValueError(f"'final_{name}' needs shape {list(shape)}; found {list(whole.shape)}.")
            some = whole[steps] if isinstance(whole, np.ndarray) else whole[torch.from_numpy(steps)]
            flat = some.reshape(-1, *some.shape[2:])
            rows[name] = self._final_rows(name, flat, read[steps].reshape(-1))
        return GivenFinals(rows, place, np.ones(count, dtype=bool))

    def _final_rows(self, name: str, value: Any, read: np.ndarray) -> Tensor:
        """Rows of one observation field, of the field's dtype, on the CPU or the buffer's device."""
        asked, field = f"final_{name}", self._fields[name]
        rows = validation.as_final(asked, value, field, len(read), torch.from_numpy(read), self._device)
        return validation.computed(rows)

    def _no_finals(self, name: str, rows: int) -> Tensor:
        field = self._fields[name]
        return torch.zeros((rows, *field.shape), dtype=field.dtype, device="cpu")


def _on_host(flags: Tensor | np.ndarray) -> np.ndarray:
    return flags if isinstance(flags, np.ndarray) else flags.cpu().numpy()
