"""Converts the arguments of a buffer's constructor to JSON values and back, for the settings in a checkpoint."""

from __future__ import annotations

import json
import reprlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import torch

from gpu_replay.fields import Field
from gpu_replay.samplers import LinearSchedule, RankBased, Sampler

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
    return _value_from(renewed(described), kinds)


def _value_from(described: Any, kinds: Mapping[str, Any]) -> Any:
    """A sampler, or a value of a field, from its description; samplers and schedules are of these classes."""
    if isinstance(described, list):
        return [_value_from(each, kinds) for each in described]
    if not isinstance(described, Mapping):
        return described
    name = described["kind"]
    if name == "tuple":
        return tuple(_value_from(described["items"], kinds))
    if name == "dict":
        return {key: _value_from(value, kinds) for key, value in described["items"].items()}
    if name not in kinds:
        raise ValueError(f"its sampler is {name}, which is not defined here. Import the module that defines it first.")
    values = {key: _value_from(value, kinds) for key, value in described.items() if key != "kind"}
    if _FIELD_KIND in values:
        values["kind"] = values.pop(_FIELD_KIND)
    return kinds[name](**values)


def renewed(described: Any) -> Any:
    """A sampler that an earlier version described, as this one does.

    RankBased had `resort_every`; tuples and dictionaries stood as they were, and fields with `init=False` too.
    Raises ValueError where `resort_every` was not 1.
    """
    if isinstance(described, (tuple, list)):
        items = [renewed(each) for each in described]
        return items if isinstance(described, list) else {"kind": "tuple", "items": items}
    if not isinstance(described, Mapping):
        return described
    kind = described.get("kind")
    if kind in ("tuple", "dict"):
        return described
    values = {name: renewed(value) for name, value in described.items()}
    if kind is None:
        return {"kind": "dict", "items": values}
    every = values.pop("resort_every", 1) if kind == RankBased.__name__ else 1
    if every != 1:
        raise ValueError(
            f"its sampler is RankBased(resort_every={every}), and this version ranks exactly at every sample. "
            "Load it with the version that saved it."
        )
    known = getattr(Sampler.kinds.get(str(kind)), "__dataclass_fields__", {})
    return {name: value for name, value in values.items() if name == "kind" or name not in known or known[name].init}


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


def difference(here: dict[str, Any], there: dict[str, Any]) -> str | None:
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
    return config


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments from a config; `relabel`, whose functions are not saved, as it is described."""
    arguments = {name: value for name, value in without_shifts(config).items() if name != "kind"}
    fields = {name: field_from(described) for name, described in config["fields"].items()}
    if arguments.get("relabel") is not None:
        arguments["relabel"] = dict(arguments["relabel"])
    return {**arguments, "fields": fields, "sampler": sampler_from(config["sampler"])}
