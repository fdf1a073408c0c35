"""`Field`: one tensor of a transition; dotted names for nested dictionaries."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.batch import Batch

# bfloat16 is the one that NumPy lacks
TORCH_OF: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(name): getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}
STORABLE = (*TORCH_OF.values(), torch.bfloat16)
# memory that torch allocates begins at multiples of it; Triton compiles code that moves whole words for them
ALIGNMENT = 16
# arguments that stand for several fields at once
DICTIONARIES = (Mapping, Batch)
_RESERVED_ARGS = ("key", "weight", "probability", "priority", "self")
# a field named as an attribute of a batch could not be reached as one
RESERVED = frozenset((*_RESERVED_ARGS, *dir(Batch)))
# of one transition; no memory holds more
_MOST_ELEMENTS = 2**48


def as_numpy(tensor: Tensor | np.ndarray) -> np.ndarray:
    """A NumPy view of a CPU tensor's memory; bfloat16, which NumPy lacks, is seen as int16. An array is its own."""
    if isinstance(tensor, np.ndarray):
        return tensor
    return tensor.view(torch.int16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


@dataclass(frozen=True)
class Field:
    """One stored tensor per transition.

    shape:        of one transition, without batch or capacity dimension; `()` is a scalar.
    dtype:        dtype in the buffer.
    sample_dtype: dtype in samples; default `dtype`, or float32 when an integer field has a `scale`.
    scale:        factor of values in samples, applied in float32 (float64 when either dtype is float64); finite there
                  and in `sample_dtype`.

    `Field((84, 84), torch.uint8, torch.float16, 1 / 255)` stores bytes and samples scaled half floats.
    Raises TypeError or ValueError for values that cannot be stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sample_dtype: torch.dtype | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        # an iterator can be read only once
        shape = tuple(self.shape) if isinstance(self.shape, Iterable) else (None,)
        if not all(isinstance(side, (int, np.integer)) and not isinstance(side, bool) for side in shape):
            raise TypeError(f"Field shape must be a tuple of ints such as (84, 84) or (); found {self.shape!r}.")
        object.__setattr__(self, "shape", tuple(map(int, shape)))
        if any(side < 1 for side in self.shape) or self.elements > _MOST_ELEMENTS:
            most = f"at most {_MOST_ELEMENTS:,} elements"
            raise ValueError(f"Field shape must have sides of at least 1 and {most}; found {self.shape}.")
        sampled = self.dtype if self.sample_dtype is None else self.sample_dtype
        for name, dtype in (("dtype", self.dtype), ("sample_dtype", sampled)):
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"Field {name} must be a torch.dtype such as torch.float32; found {dtype!r}.")
            if dtype not in STORABLE:
                allowed = ", ".join(str(each).removeprefix("torch.") for each in STORABLE)
                raise ValueError(f"Field {name} {dtype} cannot be stored; use one of {allowed}.")
        if self.scale is not None:
            if isinstance(self.scale, bool) or not isinstance(self.scale, (int, float, np.integer, np.floating)):
                raise TypeError(f"Field scale must be a number; found {self.scale!r}.")
            if self.sample_dtype is not None and not self.sample_dtype.is_floating_point:
                raise ValueError(
                    f"Field scale needs a floating sample_dtype; found {self.sample_dtype}. "
                    "Use torch.float32, float16 or bfloat16, or leave scale out."
                )
            # an int may exceed the range of floats
            scale = self.scale.item() if isinstance(self.scale, np.generic) else self.scale
            low = torch.finfo(self.arithmetic_dtype).tiny
            high = min(torch.finfo(dtype).max for dtype in (self.arithmetic_dtype, self.output_dtype))
            if scale != 0 and not low <= abs(scale) <= high:
                raise ValueError(
                    f"Field scale must be 0 or of a size from {low:.3g} to {high:.3g}, as it is applied in "
                    f"{self.arithmetic_dtype} for samples of {self.output_dtype}; found {scale}."
                )
            object.__setattr__(self, "scale", float(scale))
        if self.dtype.is_floating_point and not sampled.is_floating_point:
            raise ValueError(
                f"Field of {self.dtype} cannot be sampled as {self.sample_dtype}: that would cut off fractions. "
                "Use a floating sample_dtype."
            )

    @cached_property
    def elements(self) -> int:
        """Numbers in one transition."""
        return math.prod(self.shape)

    @cached_property
    def row_bytes(self) -> int:
        """Stored bytes of one transition."""
        return self.elements * self.dtype.itemsize

    @cached_property
    def output_dtype(self) -> torch.dtype:
        """The dtype that `sample()` returns."""
        if self.sample_dtype is not None:
            return self.sample_dtype
        if self.scale is not None and not self.dtype.is_floating_point:
            return torch.float32
        return self.dtype

    @cached_property
    def converts(self) -> bool:
        """Whether sampled values differ from stored bytes."""
        return self.scale is not None or self.output_dtype != self.dtype

    @cached_property
    def arithmetic_dtype(self) -> torch.dtype:
        """The dtype in which `scale` is applied."""
        wide = torch.float64 in (self.dtype, self.output_dtype)
        return torch.float64 if wide else torch.float32


# of each step or transition
REWARD, FLAG = Field((), torch.float32), Field((), torch.bool)


def check_fields(fields: object) -> dict[str, Field]:
    """The fields as a flat dict of their own, or TypeError / ValueError / KeyError that says which one is wrong."""
    if not isinstance(fields, Mapping):
        raise TypeError(f"fields must be a dict of name to Field; found {type(fields).__name__}.")
    flat = flattened(fields)
    if not flat:
        raise ValueError('fields must name at least one Field, such as {"obs": Field((4,), torch.float32)}.')
    for name, field in flat.items():
        if not isinstance(name, str) or not name or name[0] == "." or name[-1] == ".":
            raise ValueError(
                f"field name {name!r} must be a string such as 'obs' or 'obs.camera', not empty and without a dot at "
                "its ends."
            )
        if name in RESERVED:
            raise ValueError(
                f"field name {name!r} is reserved ({', '.join(_RESERVED_ARGS)} and the attributes of Batch); choose "
                "another name."
            )
        if not isinstance(field, Field):
            raise TypeError(f"field {name!r} must be a Field(shape, dtype); found {type(field).__name__}.")
    return flat


def flattened(values: Mapping[str, Any], names: Collection[str] = ()) -> dict[str, Any]:
    """Nested dictionaries as one of dotted names: `{"obs": {"image": x}}` becomes `{"obs.image": x}`.

    names: to reach; the tuples of a Gymnasium Tuple space become `obs.item_0` and so on where these are among them.
    Raises KeyError for a name that comes twice.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, tuple) and name not in names and has_items(name, names):
            value = {f"item_{place}": part for place, part in enumerate(value)}
        inside = {name: value}
        if isinstance(value, DICTIONARIES):
            inside = flattened({f"{name}.{part}": each for part, each in value.items()}, names)
        for leaf, part in inside.items():
            if leaf in flat:
                raise KeyError(f"{leaf!r} is given twice: inside a dictionary and by its dotted name.")
            flat[leaf] = part
    return flat


def has_items(name: str, names: Collection[str]) -> bool:
    """Whether `name` is that of a Tuple space, whose parts are among the names to reach."""
    first = f"{name}.item_0"
    return any(each == first or each.startswith(f"{first}.") for each in names)


def check_names(values: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raise KeyError for an `add` whose names are not those of the fields."""
    if values.keys() == fields.keys():
        return
    wrong = {
        "is missing": [name for name in fields if name not in values],
        "has unknown": [name for name in values if name not in fields],
    }
    said = " and ".join(f"{what} {', '.join(map(repr, names))}" for what, names in wrong.items() if names)
    raise KeyError(f"add {said}; the buffer's fields are {', '.join(fields)}.")
