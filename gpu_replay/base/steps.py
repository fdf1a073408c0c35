"""Checks the input of a trajectory buffer: one step or many, and final observations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.fields import DICTIONARIES, TORCH_OF, Field, check_names, flattened, has_items
from gpu_replay.ops.ring import StreamShape
from gpu_replay.ops.steps import GivenFinals


def is_objects(value: Any) -> bool:
    """Whether a value is an array of Python objects."""
    return isinstance(value, np.ndarray) and value.dtype == object


def objects(values: list[Any]) -> np.ndarray:
    """(n,) array of Python objects, whatever they are."""
    return np.fromiter(values, dtype=object, count=len(values))


@dataclass(frozen=True)
class StepInput:
    """Checks values and brings them into the form in which the engine of one buffer stores them.

    fields:        of a step, by name.
    observations:  names of those that observations are made of, and that have final ones.
    """

    fields: Mapping[str, Field]
    observations: list[str]
    shape: StreamShape
    device: torch.device
    on_host: bool

    def split(self, values: Mapping[str, Any], final_obs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values by the names of the fields, and final observations, `final_obs` as "obs" and others as "obs.NAME".

        Raises KeyError for names that are missing or unknown.
        """
        fields = flattened(values, self.fields)
        finals = {name: fields.pop(f"final_{name}") for name in self.observations if f"final_{name}" in fields}
        if fields.keys() != self.fields.keys():
            if any(name == "next_obs" or name.startswith("next_obs.") for name in fields):
                raise KeyError(
                    "a trajectory buffer takes no next_obs: observations are stored once, and the next step brings it; "
                    "give final_obs= where an episode ended and the next step is of another one."
                )
            check_names(fields, self.fields)
        if final_obs is not None:
            finals["obs"] = final_obs
        return fields, finals

    def steps(self, name: str, raw: Any, field: Field, steps: int | None) -> Any:
        """The value as `[T, E, *shape]` of the field's dtype: an array, read piece by piece, or a tensor."""
        sides = (self.shape.num_envs, *field.shape)
        as_array = self.on_host or not isinstance(raw, Tensor)
        value: Any = (validation.as_array if as_array else validation.as_tensor)(name, raw, self.device)
        if not field.shape and value.ndim == 3 and value.shape[2] == 1:
            value = value.reshape(value.shape[:2])
        if value.ndim == 0 or tuple(value.shape[1:]) != sides:
            alone = self.shape.num_envs == 1 and value.ndim > 0 and tuple(value.shape[1:]) == field.shape
            hint = " Add the axis of the environments: value[:, None]." if alone else ""
            raise ValueError(
                f"field {name!r} needs shape [T, {', '.join(map(str, sides))}]: T steps of each of the "
                f"{self.shape.num_envs} environments; found {list(value.shape)}.{hint}"
            )
        if steps is not None and len(value) != steps:
            raise ValueError(f"field {name!r} has {len(value)} steps where the others of this extend have {steps}.")
        if len(value) == 0:
            raise ValueError("extend needs at least one step (T >= 1); found fields with 0 steps.")
        if self.on_host or TORCH_OF.get(value.dtype) == field.dtype:
            return validation.as_stored(name, value, field.dtype)
        value = validation.as_tensor(name, value, self.device)
        return value if value.dtype == field.dtype else validation.cast(name, value, field.dtype)

    def _reads_final(self, terminated: Any, truncated: Any) -> Any:
        """Mask of the steps whose final observation will be read, given their flags."""
        return truncated | terminated if self.shape.terminal else truncated & ~terminated

    def finals(self, given: dict[str, Any], terminated: Any, truncated: Any) -> dict[str, Any] | None:
        """The final observations of a step as `[E, *shape]` of each observation field, or None where none are kept.

        given: by `split`.
        """
        columns = self._by_field(given)
        if not self.shape.finals:
            return None
        # the rows that will be read, where the device need not be asked for them
        known = isinstance(terminated, np.ndarray) or (terminated.is_cpu and truncated.is_cpu)
        read = np.asarray(self._reads_final(terminated, truncated)) if known else None
        rows: dict[str, Any] = {}
        for name, value in columns.items():
            asked, field = f"final_{name}", self.fields[name]
            rows[name] = self._final_rows(asked, value, field, len(terminated), read)
            if self.on_host:
                rows[name] = validation.numpy_view(asked, rows[name])
        return rows

    def many_finals(self, given: dict[str, Any], terminated: np.ndarray, truncated: np.ndarray) -> GivenFinals | None:
        """The final observations of (T, E) steps, or None where none are kept.

        given: by `split`: what `finals` takes, with T before it.
        """
        read = self._reads_final(terminated, truncated)
        steps = np.flatnonzero(read.any(axis=1)).tolist()
        entries = given["obs"] if given.keys() == {"obs"} else None
        if isinstance(entries, list):
            if len(entries) != len(read):
                raise ValueError(f"'final_obs' needs {len(read)} steps; found {len(entries)}.")
            if any(entry is not None for entry in entries):
                self._refuse_unread()
            steps = [step for step in steps if entries[step] is not None]
            parts = [({"obs": entries[step]}, [step]) for step in steps]
        else:
            flat: dict[str, Any] = {}
            for name, value in (given if is_objects(entries) else self._by_field(given)).items():
                column = value if isinstance(value, np.ndarray) else self._as_tensor(f"final_{name}", value)
                shape = (*read.shape, *(() if column.dtype == object else self.fields[name].shape))
                if tuple(column.shape) != shape:
                    raise ValueError(f"'final_{name}' needs shape {list(shape)}; found {list(column.shape)}.")
                flat[name] = column[steps].reshape(-1, *shape[2:])
            parts = [(flat, steps)]
        if not steps or not self.shape.finals:
            return None
        found = [self.finals(part, terminated[some].ravel(), truncated[some].ravel()) or {} for part, some in parts]
        place = np.full(len(read), -1)
        place[steps] = np.arange(len(steps))
        # on the CPU: there may be more than fit the device
        rows = {name: torch.cat([torch.as_tensor(each[name]).cpu() for each in found]) for name in found[0]}
        return GivenFinals(rows, place)

    def _refuse_unread(self) -> None:
        """Raise ValueError where no final observation is ever read."""
        if self.shape.next_step:
            raise ValueError(
                'a buffer with autoreset="next_step" takes no final_obs: there the step after an ending brings the '
                'final observation. An environment that gives it with the ending itself is autoreset="same_step" '
                '(or "disabled"); make the buffer with that.'
            )

    def _by_field(self, given: dict[str, Any]) -> dict[str, Any]:
        """Final observations of a step by their field: arrays, or object arrays with None where nothing ended.

        Raises TypeError or KeyError unless there is one for each observation field, ValueError where none is ever read.
        """
        self._refuse_unread()
        names = self.observations
        if list(given) == names:
            return given
        if given.keys() == {"obs"}:
            rows = given["obs"]
            if is_objects(rows):
                parts = [{} if row is None else flattened({"obs": row}, names) for row in rows]
                for env, part in enumerate(parts):
                    if part.keys() != set(names) and rows[env] is not None:
                        raise KeyError(
                            f"'final_obs' of environment {env} must hold {', '.join(map(repr, names))}; found "
                            f"{', '.join(map(repr, part))}."
                        )
                return {name: objects([part.get(name) for part in parts]) for name in names}
            # the observation of a Tuple space is a tuple
            if not isinstance(rows, DICTIONARIES) and not (isinstance(rows, tuple) and has_items("obs", names)):
                raise TypeError(
                    f"'final_obs' of {len(names)} observation fields must be a dictionary of them, or an object array "
                    f"of one for each environment; found {type(rows).__name__}."
                )
        columns = flattened(given, names)
        # Gymnasium puts a mask `_NAME` of the environments next to each NAME
        named = [name for name in columns if name in names or not name.rpartition(".")[2].startswith("_")]
        check_names(dict.fromkeys(f"final_{name}" for name in named), dict.fromkeys(f"final_{name}" for name in names))
        return {name: columns[name] for name in names}

    def _as_tensor(self, name: str, value: Any) -> Tensor:
        """Final observations that are no object array as a tensor; raises TypeError."""
        try:
            return validation.as_tensor(name, value, self.device)
        except TypeError:
            if not isinstance(value, (list, tuple)):
                raise
        raise TypeError(
            f"{name!r} must be an array [E, ...] (in extend [T, E, ...], or a list of T entries), or an object array "
            f"of one for each environment, with None where nothing ended; found {type(value).__name__}."
        )

    def _final_rows(self, name: str, value: Any, field: Field, rows: int, read: np.ndarray | None) -> Tensor:
        """Final observations of one field as `[rows, *shape]` of its dtype; those that are not read may be anything.

        read: (rows,) bool, or None where only the device knows.
        """
        shape = (rows,) if is_objects(value) else (rows, *field.shape)
        value = value if is_objects(value) else self._as_tensor(name, value)
        if tuple(value.shape) != shape:
            raise ValueError(f"{name!r} needs shape {list(shape)}; found {list(value.shape)}.")
        if isinstance(value, Tensor):
            if value.dtype == field.dtype:
                return value
            if read is not None and value.is_cpu:
                value = value.clone()
                value[~read] = 0
            return validation.cast(name, value, field.dtype)
        result = torch.zeros((rows, *field.shape), dtype=field.dtype, device="cpu")
        for row in range(rows) if read is None else np.flatnonzero(read).tolist():
            if value[row] is not None:
                one = validation.as_tensor(name, value[row], self.device)[None]
                result[row] = validation.as_field(name, one, field, None, self.device, on_host=False)[0]
            elif read is not None:
                env = row % self.shape.num_envs
                raise ValueError(f"{name!r} has None for environment {env}, whose episode ended in this step.")
        return result
