"""How a buffer is saved, loaded and copied, as plain functions of a buffer or of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from gpu_replay.checkpoint import state as checkpoint_state
from gpu_replay.checkpoint.config import describe_field, describe_sampler, field_from, sampler_from
from gpu_replay.engines.placement import check_placement
from gpu_replay.engines.storage import check_device, free_bytes
from gpu_replay.fields import Field
from gpu_replay.samplers import Sampler

if TYPE_CHECKING:
    from gpu_replay.base.buffer import Buffer

Kind = TypeVar("Kind", bound="Buffer")


def config_of(kind: str, capacity: int, fields: Mapping[str, Field], sampler: Sampler) -> dict[str, Any]:
    """Class, capacity, fields and sampler as JSON values."""
    return {
        "kind": kind,
        "capacity": capacity,
        "fields": {name: describe_field(field) for name, field in fields.items()},
        "sampler": describe_sampler(sampler),
    }


def arguments_of(config: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments from a config."""
    own = {name: value for name, value in config.items() if name != "kind"}
    fields = {name: field_from(described) for name, described in config["fields"].items()}
    return {**own, "fields": fields, "sampler": sampler_from(config["sampler"])}


def check_copy(tensors: Mapping[str, Tensor]) -> None:
    """Raise MemoryError where copies of these in memory are known not to fit."""
    needed, free = sum(tensor.nbytes for tensor in tensors.values()), free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        raise MemoryError(
            f"a copy of what the buffer holds needs {needed:,} bytes of memory, where {free:,} are free. Use "
            "save(path) and load(path), which read and write in pieces, or copy.deepcopy(buffer)."
        )


def loaded(
    kind: type[Kind], saved: checkpoint_state.Saved, device: torch.device | str | None, **arguments: Any
) -> Kind:
    """The saved buffer on this device, made with these arguments besides the saved ones."""
    with saved.refusing(saved.NO_SETTINGS):
        own = arguments_of(saved.config)
    # errors in these are errors of this call, not of the checkpoint
    device = check_device(device)
    check_placement(device, arguments["storage_device"], arguments["storage_path"])
    with saved.refusing(saved.NO_SETTINGS):
        buffer = kind(**(own | arguments | {"device": device, "seed": saved.seed}))
    with buffer._alone():
        saved.fill(buffer._buffer_state())
    return buffer


def remade(kind: type[Kind], settings: dict[str, Any], state: dict[str, Any]) -> Kind:
    """A buffer of these settings in this state."""
    buffer = kind(**settings)
    buffer.load_state_dict(state)
    return buffer
