"""`Field`: one tensor of a transition; dotted names for nested dictionaries; fields made from Gymnasium's spaces."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpu_replay.batch import Batch

if TYPE_CHECKING:
    from gymnasium import Space
    from gymnasium.vector import VectorEnv

# bfloat16 is the one that NumPy lacks
TORCH_OF: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(name): getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}
STORABLE = (*TORCH_OF.values(), torch.bfloat16)
# arguments that stand for several fields at once
DICTIONARIES = (Mapping, Batch)
_OWN = ("key", "weight", "probability", "priority", "self")
# a field named as an attribute of a batch could not be reached as one
RESERVED = frozenset((*_OWN, *dir(Batch)))
# of one transition; no memory holds more
_MOST_ELEMENTS = 2**48


# unsigned numbers that torch cannot compute with are stored in the next wider signed dtype
_WIDENED = {"uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}
# the values of Gymnasium's AutoresetMode
_AUTORESET = {"NextStep": "next_step", "SameStep": "same_step", "Disabled": "disabled"}


@dataclass(frozen=True)
class Field:
    """One stored tensor per transition.

    shape:        of one transition, without batch or capacity dimension; `()` is a scalar.
    dtype:        how it is stored.
    sample_dtype: how it leaves `sample()`; default `dtype`, or float32 when an integer field has a `scale`.
    scale:        multiplies the value on its way out, in float32 (float64 when either dtype is float64); finite there
                  and in `sample_dtype`.

    `Field((84, 84), torch.uint8, torch.float16, 1 / 255)` is stored as bytes and sampled as scaled half floats.
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
        for name, dtype in (("dtype", self.dtype), ("sample_dtype", self.sample_dtype)):
            if dtype is None and name == "sample_dtype":
                continue
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
        if self.sample_dtype is not None and self.dtype.is_floating_point and not self.sample_dtype.is_floating_point:
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
                f"field name {name!r} is reserved ({', '.join(_OWN)} and the attributes of Batch); choose another name."
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
        if isinstance(value, DICTIONARIES):
            parts: Any = value.items()
        elif isinstance(value, tuple) and name not in names and has_items(name, names):
            parts = ((f"item_{place}", part) for place, part in enumerate(value))
        else:
            parts = None
        for leaf, part in [(name, value)] if parts is None else _leaves(name, parts, names):
            if leaf in flat:
                raise KeyError(f"{leaf!r} is given twice: inside a dictionary and by its dotted name.")
            flat[leaf] = part
    return flat


def has_items(name: str, names: Collection[str]) -> bool:
    """Whether `name` is that of a Tuple space, whose parts are among the names to reach."""
    first = f"{name}.item_0"
    return any(each == first or each.startswith(f"{first}.") for each in names)


def _leaves(name: str, parts: Iterable[tuple[Any, Any]], names: Collection[str]) -> Iterable[tuple[str, Any]]:
    return flattened({f"{name}.{part}": value for part, value in parts}, names).items()


def check_names(values: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raise KeyError for an `add` whose names are not those of the fields."""
    if values.keys() == fields.keys():
        return
    missing = [name for name in fields if name not in values]
    unknown = [name for name in values if name not in fields]
    parts = []
    if missing:
        parts.append(f"is missing {', '.join(map(repr, missing))}")
    if unknown:
        parts.append(f"has unknown {', '.join(map(repr, unknown))}")
    raise KeyError(f"add {' and '.join(parts)}; the buffer's fields are {', '.join(fields)}.")


def autoreset_name(mode: Any) -> Any:
    """The name of an autoreset mode in this package, given Gymnasium's AutoresetMode, its text, or that name itself."""
    value = getattr(mode, "value", mode)
    return _AUTORESET.get(value, value) if isinstance(value, str) else mode


def classic_fields(
    observation_space: Space[Any], action_space: Space[Any], dtypes: Any = None, extra: Any = None
) -> dict[str, Field]:
    """obs, action, reward, next_obs, terminated; composite spaces give one field per leaf, `obs.NAME`.

    dtypes: of fields by their names, or of whole groups; that of `obs` is that of `next_obs` too.
    extra:  further fields by name.
    """
    fields = _fields("obs", observation_space)
    fields.update(_fields("action", action_space))
    fields["reward"] = Field((), torch.float32)
    fields.update(_fields("next_obs", observation_space))
    fields["terminated"] = Field((), torch.bool)
    return _with_extra(_stored_as(fields, dtypes), extra)


def step_fields(
    observation_space: Space[Any], action_space: Space[Any], dtypes: Any = None, extra: Any = None
) -> dict[str, Field]:
    """obs and action of one step of one environment, with `dtypes` and `extra` as in `classic_fields`."""
    fields = {**_fields("obs", observation_space), **_fields("action", action_space)}
    return _with_extra(_stored_as(fields, dtypes), extra)


def vector_settings(env: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
    """`num_envs`, the spaces of one environment, and `autoreset` where a vector environment says which it is.

    Raises TypeError for anything but a vector environment of Gymnasium.
    """
    names = ("num_envs", "single_observation_space", "single_action_space")
    if any(getattr(env, name, None) is None for name in names):
        raise TypeError(
            f"from_env needs a vector environment of Gymnasium; found {type(env).__name__}. Make one with "
            "gymnasium.make_vec(...), or use from_spaces."
        )
    settings = {
        "num_envs": env.num_envs,
        "observation_space": env.single_observation_space,
        "action_space": env.single_action_space,
    }
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    if mode is None:
        return settings
    if autoreset_name(mode) not in _AUTORESET.values():
        raise ValueError(f"the environment's metadata has autoreset_mode={mode!r}; give autoreset=... yourself.")
    # before gymnasium 1.4 vector environments of a class share their metadata, with the mode of the last one made
    own = autoreset_name(getattr(getattr(env, "unwrapped", env), "autoreset_mode", mode))
    return {**settings, "autoreset": own if own in _AUTORESET.values() else autoreset_name(mode)}


def warn_of_stacks(fields: Mapping[str, Field]) -> None:
    """Warn if observations look like stacks of frames, since each frame would be stored once in every stack."""
    for name, field in fields.items():
        if name.split(".")[0] != "obs" or field.dtype != torch.uint8 or len(field.shape) not in (3, 4):
            continue
        frames, *frame = field.shape
        # (frames, height, width), with channels behind them or not; three may be colours
        pictures = frame[:2] if len(frame) == 2 else sorted(frame)[1:]
        if 1 < frames <= 8 and (frames != 3 or len(frame) == 3) and min(pictures) >= 16:
            warnings.warn(
                f"{name} {list(field.shape)} looks like {frames} stacked frames: each would be stored {frames} times. "
                f"Make the buffer with Field({tuple(frame)}, torch.uint8) for {name!r} and stack={frames} instead, and "
                f"add `{name}[:, -1]`: then each frame is stored once, and batches have the stacks.",
                stacklevel=3,
            )


def _with_extra(fields: dict[str, Field], extra: object) -> dict[str, Field]:
    """The fields with the extra ones; KeyError for an extra name that the spaces already gave."""
    further = {} if extra is None else check_fields(extra)
    twice = [name for name in further if name in fields]
    if twice:
        raise KeyError(f"extra has {twice[0]!r}, which the spaces give; leave it out, or change its dtype with dtypes.")
    return {**fields, **further}


def _stored_as(fields: dict[str, Field], dtypes: object) -> dict[str, Field]:
    """The fields with the dtypes that were asked for, by name or for whole groups."""
    if dtypes is not None and not isinstance(dtypes, Mapping):
        raise TypeError(f"dtypes must be a dict such as {{'obs': torch.float64}}; found {dtypes!r}.")
    asked = flattened(dtypes or {})
    for name in asked:
        if not any(each == name or each.startswith(f"{name}.") for each in fields):
            raise KeyError(f"dtypes has unknown {name!r}; the fields are {', '.join(fields)}.")
    stored = {}
    for name, field in fields.items():
        # the longest name that fits, and for next_obs those of obs after its own
        names = [*_groups(name), *(_groups(name.removeprefix("next_")) if name.startswith("next_") else ())]
        dtype = next((asked[each] for each in names if each in asked), field.dtype)
        stored[name] = Field(field.shape, dtype)
    return stored


def _groups(name: str) -> list[str]:
    """`a.b.c` and the groups that it is in: `a.b` and `a`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _fields(name: str, space: Space[Any]) -> dict[str, Field]:
    from gymnasium import spaces

    if not isinstance(space, spaces.Space):
        raise TypeError(f"{name} needs a Gymnasium space such as Box or Discrete; found {space!r}.")
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        fields: dict[str, Field] = {}
        for key, part in parts:
            leaf = key if isinstance(space, spaces.Dict) else f"item_{key}"
            fields.update(_fields(f"{name}.{leaf}", part))
        return fields
    if space.shape is None or space.dtype is None or isinstance(space, (spaces.Text, spaces.Sequence, spaces.Graph)):
        raise TypeError(
            f"{name} has the space {space}, which has no fixed shape and dtype; describe the fields yourself, with "
            "fields={...} of the buffer's constructor."
        )
    dtype = _dtype(name, space.dtype)
    if isinstance(space, spaces.Box) and dtype == torch.float64:
        # networks take float32; simulators return float64 by default
        dtype = torch.float32
    return {name: Field(tuple(int(side) for side in space.shape), dtype)}


def _dtype(name: str, dtype: Any) -> torch.dtype:
    kind = np.dtype(dtype).name
    stored = _WIDENED.get(kind, getattr(torch, kind, None))
    if not isinstance(stored, torch.dtype):
        raise TypeError(f"{name} has NumPy dtype {kind}, which cannot be stored; describe the fields yourself.")
    return stored
