"""Fields and samplers as plain JSON values and back: what a checkpoint says about the buffer it came from."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import torch

from gpu_replay.fields import Field
from gpu_replay.samplers import Combined, Latest, Proportional, RankBased, Sampler, Uniform
from gpu_replay.schedule import LinearSchedule

_KINDS = {kind.__name__: kind for kind in (Uniform, Proportional, RankBased, Latest, Combined, LinearSchedule)}


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def describe_field(field: Field) -> dict[str, Any]:
    """The field as JSON values."""
    return {
        "shape": list(field.shape),
        "dtype": dtype_name(field.dtype),
        "sample_dtype": None if field.sample_dtype is None else dtype_name(field.sample_dtype),
        "scale": field.scale,
    }


def field_from(described: dict[str, Any]) -> Field:
    """The field that `describe_field` described."""
    sample_dtype = described["sample_dtype"]
    return Field(
        tuple(described["shape"]),
        getattr(torch, described["dtype"]),
        None if sample_dtype is None else getattr(torch, sample_dtype),
        described["scale"],
    )


def describe_sampler(setting: Any) -> Any:
    """A sampler, a schedule or a plain value as JSON values."""
    kind = type(setting).__name__
    if kind not in _KINDS:
        return setting.item() if isinstance(setting, np.generic) else setting
    values = {each.name: describe_sampler(getattr(setting, each.name)) for each in dataclass_fields(setting)}
    return {"kind": kind, **values}


def sampler_from(described: dict[str, Any]) -> Sampler:
    """The sampler that `describe_sampler` described; KeyError for a kind that this version does not have."""
    return _build(described)


def _build(described: Any) -> Any:
    if not isinstance(described, dict):
        return described
    values = {name: _build(value) for name, value in described.items() if name != "kind"}
    return _KINDS[described["kind"]](**values)


def difference(wanted: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first setting in which two descriptions differ, in words; None when they agree."""
    # of another kind everything else differs too
    for name in ("kind", *sorted({*wanted, *found})):
        if wanted.get(name) != found.get(name):
            return f"{name} is {wanted.get(name)!r} here and {found.get(name)!r} there"
    return None
