"""A buffer's whole state, as a dictionary in memory and as a checkpoint on disk, and its settings as JSON values.

The sums of the mass tree are not part of it; they follow from the masses, whatever layout the loading device uses.
"""

from __future__ import annotations

import json
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.checkpoint import CheckpointError
from gpu_replay.checkpoint.format import Kind, check_fit, check_version, read_checkpoint
from gpu_replay.fields import Field
from gpu_replay.ops.counters import ADDED_LATER, LASTING
from gpu_replay.samplers import LinearSchedule, RankBased, Sampler, Sequences
from gpu_replay.validation import check_int

# a sampler's field of the name `kind`, which in a description is the class
_FIELD_KIND = "self.kind"


def describe_field(field: Field) -> dict[str, Any]:
    """The field as JSON values; dtypes by their names."""
    values = {each.name: getattr(field, each.name) for each in dataclass_fields(field)}
    named = {key: str(value).removeprefix("torch.") for key, value in values.items() if isinstance(value, torch.dtype)}
    return {**values, "shape": list(field.shape), **named}


def field_from(described: dict[str, Any]) -> Field:
    """The field that `describe_field` described."""
    dtypes = {key: getattr(torch, described[key]) for key in ("dtype", "sample_dtype") if described[key] is not None}
    return Field(**{**described, **dtypes, "shape": tuple(described["shape"])})


def describe_sampler(sampler: Sampler) -> dict[str, Any]:
    """The sampler as JSON values: its class as `kind`, and the fields that its constructor takes.

    Raises TypeError that names a field which no checkpoint gives back as it is.
    """
    described: dict[str, Any] = {"kind": type(sampler).__name__}
    for name in [each.name for each in dataclass_fields(sampler) if each.init]:  # type: ignore[arg-type]
        value, place = getattr(sampler, name), f"{type(sampler).__name__}.{name}"
        described[_FIELD_KIND if name == "kind" else name] = (
            describe_sampler(value) if value is sampler.base else _describe_value(value, place)
        )
    return described


def _describe_value(value: Any, place: str) -> Any:
    """The value of a sampler's field as JSON values; `place` names it in errors."""
    if isinstance(value, np.generic) and value.dtype.kind in "biufU":
        value = value.item()
    kind = type(value)
    # not a number differs from itself, so no buffer would take a state of its own
    if kind in (bool, int, float, str, type(None)) and value == value:
        return value
    if kind is LinearSchedule:
        return {"kind": kind.__name__, **vars(value)}
    if kind in (tuple, list):
        items = [_describe_value(each, f"{place}[{number}]") for number, each in enumerate(value)]
        return items if kind is list else {"kind": "tuple", "items": items}
    if kind is dict and all(type(name) is str for name in value):
        return {
            "kind": "dict",
            "items": {name: _describe_value(each, f"{place}[{name!r}]") for name, each in value.items()},
        }
    raise TypeError(
        f"{place} is {reprlib.repr(value)} ({kind.__name__}), which a checkpoint does not give back as it is. Fields "
        "of a sampler are numbers (not NaN), strings, bools, None, LinearSchedule, and tuples, lists and string-keyed "
        "dicts of these; what __post_init__ computes from them may be anything, as field(init=False)."
    )


def check_described(sampler: Sampler) -> None:
    """Raise TypeError for a sampler that a checkpoint would not give back as it is."""
    described = describe_sampler(sampler)
    try:
        again = describe_sampler(sampler_from(json.loads(json.dumps(described)), (type(sampler), type(sampler.base))))
    except Exception as error:
        raise TypeError(f"{sampler} cannot be made again from its fields, as `load` does: {error}") from error
    unlike = difference(described, again)
    if unlike is not None:
        raise TypeError(
            f"{sampler} made again from its fields, as `load` does, is another one: {unlike}. __post_init__ must leave "
            "them as they are; what it computes from them is a field(init=False)."
        )


def sampler_from(described: Any, others: Iterable[type[Any]] = ()) -> Any:
    """The sampler that `describe_sampler` described, in this version or an earlier one.

    others: classes that are taken by their names before those that are defined.

    Raises ValueError for a sampler whose class is not defined, and where ranks were not exact at every sample.
    """
    kinds = {**Sampler.kinds, LinearSchedule.__name__: LinearSchedule} | {each.__name__: each for each in others}
    return _value_from(described, kinds)


def _value_from(described: Any, kinds: Mapping[str, Any]) -> Any:
    """A sampler, or a value of a field, from its description; samplers and schedules are of these classes.

    In earlier versions tuples and dictionaries stood as they were, fields with `init=False` too, and RankBased had
    `resort_every`.
    """
    if isinstance(described, (tuple, list)):
        items = [_value_from(each, kinds) for each in described]
        return items if isinstance(described, list) else tuple(items)
    if not isinstance(described, Mapping):
        return described
    name = described.get("kind")
    if name == "tuple":
        return tuple(_value_from(described["items"], kinds))
    if name in (None, "dict"):
        named = described if name is None else described["items"]
        return {key: _value_from(value, kinds) for key, value in named.items()}
    if name not in kinds:
        raise ValueError(f"its sampler is {name}, which is not defined here. Import the module that defines it first.")
    known = getattr(kinds[name], "__dataclass_fields__", {})
    made = [key for key in described if key != "kind" and (key not in known or known[key].init)]
    values = {key: _value_from(described[key], kinds) for key in made}
    every = values.pop("resort_every", 1) if name == RankBased.__name__ else 1
    if every != 1:
        raise ValueError(
            f"its sampler is RankBased(resort_every={every}), and this version ranks exactly at every sample. "
            "Load it with the version that saved it."
        )
    if _FIELD_KIND in values:
        values["kind"] = values.pop(_FIELD_KIND)
    return kinds[name](**values)


def without_shifts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a buffer as this version has them: those of earlier ones could also shift images in each sample; one
    that did warns (UserWarning).
    """
    if shift := settings.get("random_shift"):
        warnings.warn(
            f"the saved buffer shifted the images of its samples by random_shift={shift}; this one samples them as "
            "they are stored. The guide, Random shifts of images, has eight lines that shift a batch.",
            UserWarning,
            stacklevel=2,
        )
    return {name: value for name, value in settings.items() if name != "random_shift"}


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """The first setting in which two descriptions differ as a sentence; None when they agree."""
    # of another kind everything else differs too
    for name in ("kind", *sorted({*here, *there})):
        if here.get(name) != there.get(name):
            return f"{name} is {here.get(name)!r} here and {there.get(name)!r} there"
    return None


def config_of(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The class of a buffer and its constructor's arguments as JSON values."""
    fields = {name: describe_field(field) for name, field in arguments["fields"].items()}
    config = {"kind": kind, **arguments, "fields": fields, "sampler": describe_sampler(arguments["sampler"])}
    if arguments.get("relabel") is not None:
        config["relabel"] = arguments["relabel"].describe()
    if not config.get("terminal_obs"):
        # as versions before this setting wrote it
        config.pop("terminal_obs", None)
    if arguments.get("sequences") is not None:
        config["sequences"] = asdict(arguments["sequences"])
    return config


VERSION = 1


def checked_snapshot(
    snapshot: Mapping[str, Any], config: Mapping[str, Any], views_of: Callable[[int], Mapping[str, Tensor]]
) -> tuple[dict[str, int], int, dict[str, Tensor]]:
    """The counters, the seed and the tensors of a snapshot that fits a buffer, or the error that says what does not.

    config:   class, capacity, fields, sampler and more as JSON values: what two buffers must share to share a state.
    views_of: the buffer's memory that is in use after so many transitions, by name.
    """
    needed = "load_state_dict needs what state_dict() returned"
    if not isinstance(snapshot, Mapping):
        raise TypeError(f"{needed}; found {type(snapshot).__name__}.")
    if missing := [name for name in ("version", "settings", "seed", "counters", "tensors") if name not in snapshot]:
        raise KeyError(f"{needed}; {', '.join(missing)} is missing.")
    for name in ("settings", "counters", "tensors"):
        if not isinstance(snapshot[name], Mapping):
            raise TypeError(f"the state's {name} must be a dictionary; found {type(snapshot[name]).__name__}.")
    tensors = snapshot["tensors"]

    def shape_of(name: str) -> Kind:
        if name not in tensors:
            raise KeyError(f"the state lacks the tensor {name!r}.")
        found = tensors[name]
        kind = type(found).__name__
        if isinstance(found, Tensor):
            kind = "nested" if found.is_nested else str(found.layout if found.device.type != "meta" else found.device)
            if kind == str(torch.strided):
                return found.dtype, tuple(found.shape)
        raise TypeError(f"the state's {name!r} must be a tensor; found {kind}. Give a dense one that has memory.")

    try:
        check_version("the state has version", snapshot["version"], VERSION)
        settings = without_shifts(snapshot["settings"])
        if settings["sampler"] != config["sampler"]:
            # an earlier version may have described the same one in another way
            settings["sampler"] = describe_sampler(sampler_from(settings["sampler"]))
        unlike = difference(config, settings)
        if unlike is not None:
            raise ValueError(f"the state is of another buffer: {unlike}. Make a buffer with the same settings.")
        counters, seed = checked_counters(snapshot["counters"]), check_int("the state's seed", snapshot["seed"])
        views = views_of(counters["ADDED"])
        check_fit("the state", views, shape_of)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    return counters, seed, {name: tensors[name] for name in views}


def checked_counters(counters: Any) -> dict[str, int]:
    """Counters by name, as a manifest gives them; KeyError, TypeError or ValueError for anything else."""
    # what only earlier versions counted is left out
    checked = {name: counters.get(name, 0) if name in ADDED_LATER else counters[name] for name in LASTING}
    for name, count in checked.items():
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**63:
            raise ValueError(f"counter {name} must be a whole number of 63 bits; found {count!r}.")
    return checked


# a class of earlier versions
OF_RANKS = "ShardedReplayBuffer"
NO_SETTINGS = "its settings are not those of a buffer"


class BufferCheckpoint:
    """An opened checkpoint of a buffer.

    kind: the class whose checkpoint is taken; None takes them all.

    Raises CheckpointError for a damaged one, or one of another kind.
    """

    def __init__(self, path: str | PathLike[str], kind: str | None = None) -> None:
        self.path = path
        self.checkpoint = read_checkpoint(path)
        manifest = self.checkpoint.manifest
        with self.refusing("the manifest is not of a replay buffer"):
            version, self.config = manifest["version"], dict(manifest["settings"])
            self.seed, found = check_int("seed", manifest["seed"]), self.config["kind"]
            check_version(f"{path} has state version", version, VERSION)
            if found == OF_RANKS:
                raise CheckpointError(
                    f"{path} was written by {OF_RANKS}; gpu_replay 0.3 is the last version that reads it. There "
                    "ReplayBuffer.load makes one buffer of it, whose own checkpoint this version loads."
                )
            if kind not in (None, found):
                raise CheckpointError(f"{path} holds a {found}; load it with {found}.load.")
            self.counters = checked_counters(manifest["counters"])

    @contextmanager
    def refusing(self, what: str) -> Iterator[None]:
        """Within it, an error caused by the contents of the file becomes CheckpointError."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: {what}: {error}") from error

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments; `relabel`, whose functions are not saved, as it is described."""
        with self.refusing(NO_SETTINGS):
            arguments = {name: value for name, value in without_shifts(self.config).items() if name != "kind"}
            fields = {name: field_from(described) for name, described in arguments["fields"].items()}
            if arguments.get("relabel") is not None:
                arguments["relabel"] = dict(arguments["relabel"])
            if arguments.get("sequences") is not None:
                arguments["sequences"] = Sequences(**arguments["sequences"])
            return {**arguments, "fields": fields, "sampler": sampler_from(arguments["sampler"])}
