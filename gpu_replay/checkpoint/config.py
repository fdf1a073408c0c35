"""Converts the arguments of a buffer's constructor to JSON values and back, for the settings in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import torch

from gpu_replay.fields import Field
from gpu_replay.samplers import LinearSchedule, Sampler, Sequences


def describe_field(field: Field) -> dict[str, Any]:
    """The field as JSON values; dtypes by their names."""
    values = {each.name: getattr(field, each.name) for each in dataclass_fields(field)}
    named = {key: str(value).removeprefix("torch.") for key, value in values.items() if isinstance(value, torch.dtype)}
    return {**values, "shape": list(field.shape), **named}


def field_from(described: dict[str, Any]) -> Field:
    """The field that `describe_field` described."""
    dtypes = {key: getattr(torch, described[key]) for key in ("dtype", "sample_dtype") if described[key] is not None}
    return Field(**{**described, **dtypes, "shape": tuple(described["shape"])})


def describe_sampler(setting: Any) -> Any:
    """A sampler, a schedule or a plain value as JSON values."""
    if not isinstance(setting, (Sampler, LinearSchedule)):
        return setting.item() if isinstance(setting, np.generic) else setting
    names = [each.name for each in dataclass_fields(setting)]  # type: ignore[arg-type]
    values = {name: describe_sampler(getattr(setting, name)) for name in names}
    return {"kind": type(setting).__name__, **values}


def sampler_from(described: Any) -> Any:
    """What `describe_sampler` described, in this version or an earlier one.

    Raises ValueError for a sampler whose class is not defined, and where ranks were not exact at every sample.
    """
    if not isinstance(described, dict):
        return described
    values = {name: sampler_from(value) for name, value in renewed(described).items() if name != "kind"}
    kinds, name = {**Sampler.kinds, "LinearSchedule": LinearSchedule}, described["kind"]
    if name not in kinds:
        raise ValueError(f"its sampler is {name}, which is not defined here. Import the module that defines it first.")
    return kinds[name](**values)


def renewed(described: Any) -> Any:
    """Settings that an earlier version described, as this one does: without `resort_every` of RankBased.

    Raises ValueError where that was not 1.
    """
    if not isinstance(described, Mapping):
        return described
    every = described.get("resort_every", 1)
    if every != 1:
        raise ValueError(
            f"its sampler is RankBased(resort_every={every}), and this version ranks exactly at every sample. "
            "Load it with the version that saved it."
        )
    return {name: renewed(value) for name, value in described.items() if name != "resort_every"}


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
    if arguments.get("sequences") is not None:
        config["sequences"] = asdict(arguments["sequences"])
    return config


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments from a config; `relabel`, whose functions are not saved, as it is described."""
    arguments = {name: value for name, value in config.items() if name != "kind"}
    fields = {name: field_from(described) for name, described in config["fields"].items()}
    if arguments.get("relabel") is not None:
        arguments["relabel"] = dict(arguments["relabel"])
    if arguments.get("sequences") is not None:
        arguments["sequences"] = Sequences(**arguments["sequences"])
    return {**arguments, "fields": fields, "sampler": sampler_from(config["sampler"])}
