"""Fields and samplers as plain JSON values and back: what a checkpoint says about the buffer it came from."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import torch

from gpu_replay.fields import Field
from gpu_replay.samplers import Combined, Latest, Proportional, RankBased, Uniform
from gpu_replay.schedule import LinearSchedule

_KINDS = {kind.__name__: kind for kind in (Uniform, Proportional, RankBased, Latest, Combined, LinearSchedule)}


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
    kind = type(setting).__name__
    if kind not in _KINDS:
        return setting.item() if isinstance(setting, np.generic) else setting
    values = {each.name: describe_sampler(getattr(setting, each.name)) for each in dataclass_fields(setting)}
    return {"kind": kind, **values}


def sampler_from(described: Any) -> Any:
    """What `describe_sampler` described; KeyError for a kind that this version does not have."""
    if not isinstance(described, dict):
        return described
    values = {name: sampler_from(value) for name, value in described.items() if name != "kind"}
    return _KINDS[described["kind"]](**values)


def difference(wanted: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first setting in which two descriptions differ as a sentence; None when they agree."""
    # of another kind everything else differs too
    for name in ("kind", *sorted({*wanted, *found})):
        if wanted.get(name) != found.get(name):
            return f"{name} is {wanted.get(name)!r} here and {found.get(name)!r} there"
    return None
