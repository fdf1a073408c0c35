"""Checks the input of a trajectory buffer: one step or many, and final observations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.fields import DICTIONARIES, TORCH_OF, Field, check_names
from gpu_replay.ops.eligibility import GivenFinals, StreamShape


class StepInput:
    """Checks values and brings them into the form in which the engine of one buffer stores them.

    fields:        of a step, by name.
    observations:  names of those that observations are made of, and that have final ones.
    reads_all:     whether final observations of terminated episodes are read too, not only of truncated ones.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        observations: Iterable[str],
        shape: StreamShape,
        device: torch.device,
        *,
        on_host: bool,
        reads_all: bool,
    ) -> None:
        self._fields = fields
        self._observations = list(observations)
        self._shape = shape
        self._num_envs = shape.num_envs
        self._device = device
        self._on_host = on_host
        self._reads_all = reads_all

    def finals(self, columns: dict[str, Any], terminated: Any, truncated: Any) -> dict[str, Any] | None:
        """The final observations as `[E, *shape]` of each observation field, or None where none came."""
        if not columns:
            return None
        self._refuse_unread()
        self._check_names(columns)
        if not self._shape.finals:
            return None
        # the rows that will be read, where the device need not be asked for them
        ended = None
        if self._on_host or (terminated.is_cpu and truncated.is_cpu):
            over = self.reads_final(terminated, truncated)
            ended = torch.from_numpy(over) if self._on_host else over
        rows: dict[str, Any] = {}
        for name in self._observations:
            asked, field = f"final_{name}", self._fields[name]
            rows[name] = validation.as_final(asked, columns[name], field, self._num_envs, ended, self._device)
            if self._on_host:
                rows[name] = validation.numpy_view(asked, rows[name])
        return rows

    def _refuse_unread(self) -> None:
        """Raise ValueError where no final observation is ever read."""
        if self._shape.next_step:
            raise ValueError(
                'a buffer with autoreset="next_step" takes no final_obs: there the step after an ending brings the '
                'final observation. An environment that gives it with the ending itself is autoreset="same_step" '
                '(or "disabled"); make the buffer with that.'
            )

    def _check_names(self, columns: Mapping[str, Any]) -> None:
        """Raise KeyError unless there is one final observation for each observation field."""
        check_names(*({f"final_{name}": None for name in names} for names in (columns, self._observations)))

    def reads_final(self, terminated: Any, truncated: Any) -> Any:
        """Mask of the steps whose final observation will be read, given their flags."""
        return truncated & ~terminated if not self._reads_all else truncated | terminated

    def steps(self, name: str, raw: Any, field: Field, steps: int | None) -> Any:
        """The value as `[T, E, *shape]` of the field's dtype: an array, read piece by piece, or a tensor."""
        sides = (self._num_envs, *field.shape)
        as_array = self._on_host or not isinstance(raw, Tensor)
        value: Any = (validation.as_array if as_array else validation.as_tensor)(name, raw, self._device)
        if value.ndim == 0 or tuple(value.shape[1:]) != sides:
            alone = self._num_envs == 1 and value.ndim > 0 and tuple(value.shape[1:]) == field.shape
            hint = " Add the axis of the environments: value[:, None]." if alone else ""
            raise ValueError(
                f"field {name!r} needs shape [T, {', '.join(map(str, sides))}]: T steps of each of the "
                f"{self._num_envs} environments; found {list(value.shape)}.{hint}"
            )
        if steps is not None and len(value) != steps:
            raise ValueError(f"field {name!r} has {len(value)} steps where the others of this extend have {steps}.")
        if len(value) == 0:
            raise ValueError("extend needs at least one step (T >= 1); found fields with 0 steps.")
        if self._on_host or TORCH_OF.get(value.dtype) == field.dtype:
            return validation.as_stored(name, value, field.dtype)
        value = validation.as_tensor(name, value, self._device)
        return value if value.dtype == field.dtype else validation.cast(name, value, field.dtype)

    def many_finals(self, finals: Any, read: np.ndarray) -> GivenFinals | None:
        """The final observations that will be read, where `read`, (T, E) bool, says so; None where none are kept."""
        observations, count = self._observations, len(read)
        by_step = isinstance(finals, (list, tuple)) or (isinstance(finals, np.ndarray) and finals.dtype == object)
        if by_step and len(finals) != count:
            raise ValueError(f"'final_obs' needs {count} steps; found {len(finals)}.")
        if by_step and all(each is None for each in finals):
            return None
        self._refuse_unread()
        if not by_step:
            finals = validation.final_columns(finals, observations, count)
            self._check_names(finals)
        if not self._shape.finals:
            return None
        if not by_step:
            return self._final_columns(finals, read)
        steps = [step for step in np.flatnonzero(read.any(axis=1)).tolist() if finals[step] is not None]
        rows = {}
        for name in observations:
            field = self._fields[name]
            rows[name] = torch.zeros((len(steps) * self._num_envs, *field.shape), dtype=field.dtype, device="cpu")
        place = np.full(count, -1)
        place[steps] = np.arange(len(steps))
        for number, step in enumerate(steps):
            columns = validation.final_columns(finals[step], observations, self._num_envs)
            self._check_names(columns)
            part = slice(number * self._num_envs, (number + 1) * self._num_envs)
            for name, value in columns.items():
                rows[name][part] = self._final_rows(name, value, read[step])
        return GivenFinals(rows, place)

    def _final_columns(self, columns: dict[str, Any], read: np.ndarray) -> GivenFinals:
        """Of whole columns `[T, E, *shape]`, or object arrays [T, E], the steps in which some are read."""
        count, steps = len(read), np.flatnonzero(read.any(axis=1))
        place = np.full(count, -1)
        place[steps] = np.arange(len(steps))
        rows = {}
        for name, value in columns.items():
            if isinstance(value, DICTIONARIES):
                raise TypeError(f"'final_{name}' must be an array of {count} steps; found a dictionary.")
            column = value if isinstance(value, (Tensor, np.ndarray)) else np.asarray(value, dtype=object)
            shape = (count, self._num_envs, *self._fields[name].shape)
            if tuple(column.shape) != shape[: 2 if column.dtype == object else None]:
                raise ValueError(f"'final_{name}' needs shape {list(shape)}; found {list(column.shape)}.")
            some = column[steps] if isinstance(column, np.ndarray) else column[torch.from_numpy(steps)]
            flat = some.reshape(-1, *some.shape[2:])
            rows[name] = self._final_rows(name, flat, read[steps].reshape(-1))
        return GivenFinals(rows, place)

    def _final_rows(self, name: str, value: Any, read: np.ndarray) -> Tensor:
        """Rows of one observation field, of the field's dtype, on the CPU or the buffer's device."""
        asked, field = f"final_{name}", self._fields[name]
        rows = validation.as_final(asked, value, field, len(read), torch.from_numpy(read), self._device)
        return validation.materialized(rows)
