"""The buffers' calls as custom operators, so that `torch.compile(fullgraph=True)` takes a whole learning step.

Compiled code sees `add`, `sample`, `update_priorities` and `write` as one operator each: it knows what they return and
never looks inside. When it runs they make the very calls that eager code makes, locks, checks and kernels included.

The storage of a buffer is not an argument of its operators. A compiler may copy an argument that is written and put the
copy back afterwards: that would copy gigabytes, and lose the rows that another thread added meanwhile. All that
compiled code must know is that a call depends on those before it and cannot be left out, moved or made twice. A token
tells it: an empty tensor of the buffer that every operator declares as written. It costs nothing to copy and nothing is
ever in it. The buffer is found by a name that no other buffer of the process has.

Shapes and dtypes of a batch are spelled out in an argument, so that they follow from arguments alone: compiled
code that is kept on disk is then never taken for that of a buffer with other fields.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor

from gpu_replay.batch import Batch
from gpu_replay.fields import flattened

# dtype, and shape without the batch dimension
Output = tuple[torch.dtype, tuple[int, ...]]

# the tensors that every draw gives in addition to the fields
_ALWAYS: dict[str, Output] = {
    "key": (torch.int64, ()),
    "probability": (torch.float32, ()),
    "weight": (torch.float32, ()),
}
# not `custom_op`: its overhead takes as long as the call
_library = torch.library.Library("gpu_replay", "FRAGMENT")
# graphs captured by a compiler would miss the counts on the host; those of `buffer.capture` do not
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_buffers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_draws: dict[int, Any] = {}
_defining = threading.Lock()


class BatchKind(NamedTuple):
    """One kind of batch that a buffer gives.

    names:  of its tensors.
    layout: their dtypes and shapes, as `_parsed` reads them.
    draw:   the operator that returns this number of tensors.
    """

    names: tuple[str, ...]
    layout: str
    draw: Any


def batch_kind(outputs: Mapping[str, Output]) -> BatchKind:
    """The kind of batch that holds these tensors and those that every draw gives."""
    every = {**outputs, **_ALWAYS}
    entries = (
        f"{quote(name)} {str(dtype).removeprefix('torch.')} {','.join(map(str, shape))}"
        for name, (dtype, shape) in every.items()
    )
    return BatchKind(tuple(every), ";".join(entries), _draw_of(len(every)))


@lru_cache
def _parsed(layout: str) -> tuple[tuple[str, torch.dtype, list[int]], ...]:
    """Parse names, dtypes and shapes from `obs float32 4,84,84;reward float32 ;...`."""
    entries = (entry.split(" ") for entry in layout.split(";"))
    return tuple(
        (unquote(name), getattr(torch, dtype), list(map(int, shape.split(","))) if shape else [])
        for name, dtype, shape in entries
    )


class Operators:
    """The custom operators of one buffer, which its methods call while they are compiled.

    name:  by it the operators find the buffer.
    token: the tensor that keeps them in order.

    Dynamo traces these methods: they take no lock, read no tensor and look at no part of the buffer.
    """

    def __init__(self, buffer: object, device: torch.device) -> None:
        self.name = f"{type(buffer).__name__} {next(_numbers)}"
        # an inference tensor could not be written outside of inference mode
        with torch.inference_mode(False):
            self.token = torch.empty(0, device=device)
        _buffers[self.name] = buffer

    def add(self, fields: Mapping[str, Any], priority: Any) -> Tensor:
        """The buffer's `add`; every field is a tensor or an array."""
        flat = flattened(fields) if any(isinstance(value, (dict, Batch)) for value in fields.values()) else fields
        priorities = None if priority is None else _tensor("priority", priority)
        names, columns = _columns(flat)
        keys: Tensor = _ADD(self.token, self.name, names, columns, priorities)
        return keys

    def write(self, keys: Any, fields: Mapping[str, Any]) -> None:
        """The buffer's `write`, of tensors or arrays."""
        _WRITE(self.token, self.name, _tensor("keys", keys), *_columns(fields))

    def sample(self, kind: BatchKind, batch: int, beta: float | None) -> Batch:
        """The buffer's `sample`."""
        # a Python number would be a constant, and each new value would be compiled again
        exponent = None if beta is None else torch.ones((), dtype=torch.float64, device="cpu") * beta
        tensors = kind.draw(self.token, self.name, kind.layout, batch, exponent)
        return Batch(dict(zip(kind.names, tensors, strict=True)))

    def update(self, keys: Any, priorities: Any) -> None:
        """The buffer's `update_priorities`, of tensors or arrays."""
        _UPDATE(self.token, self.name, _tensor("keys", keys), _tensor("priorities", priorities))


def _columns(fields: Mapping[str, Any]) -> tuple[str, list[Tensor]]:
    """The names of fields in one text, since names may hold commas, and their values."""
    names = ",".join(name.replace("%", "%25").replace(",", "%2C") for name in fields)
    return names, [_tensor(name, value) for name, value in fields.items()]


def _named(names: str, values: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(map(unquote, names.split(",")), values, strict=True)) if names else {}


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value, device="cpu")
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name!r} must be a tensor or an array inside torch.compile, with its leading axis; found "
            f"{type(value).__name__}."
        )
    # nothing flows back through a buffer
    return value.detach()


# the operators: their implementations, and the shapes that compilers see


def _define(schema: str, runs: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `gpu_replay::NAME` of a schema `NAME(...) -> ...`; none of its results needs a gradient."""
    name, _, _ = schema.partition("(")
    _library.define(schema, tags=_TAGS)
    _library.impl(name, runs, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gpu_replay::{name}", fake, lib=_library)
    return getattr(torch.ops.gpu_replay, name).default


def _buffer_named(name: str) -> Any:
    buffer = _buffers.get(name)
    if buffer is None:
        raise RuntimeError(f"this code was compiled for {name}, a buffer that is gone. Compile it for another one.")
    return buffer


def _add(token: Tensor, buffer: str, names: str, values: Sequence[Tensor], priority: Tensor | None) -> Tensor:
    fields, replay = _named(names, values), _buffer_named(buffer)
    if any(name in fields and fields[name].dim() == len(field.shape) for name, field in replay.fields.items()):
        raise ValueError("inside torch.compile every value of add has its leading axis: give value[None].")
    keys: Tensor = replay.add(priority=priority, **fields)
    return keys


def _write(token: Tensor, buffer: str, keys: Tensor, names: str, values: Sequence[Tensor]) -> None:
    _buffer_named(buffer).write(keys, **_named(names, values))


def _add_fake(token: Tensor, buffer: str, names: str, values: Sequence[Tensor], priority: Tensor | None) -> Tensor:
    # without fields the call itself raises the error
    return token.new_empty(values[0].shape[:1] if values else (0,), dtype=torch.int64)


def _update(token: Tensor, buffer: str, keys: Tensor, priorities: Tensor) -> None:
    _buffer_named(buffer).update_priorities(keys, priorities)


def _sample(token: Tensor, buffer: str, layout: str, batch: int, beta: Tensor | None) -> tuple[Tensor, ...]:
    replay = _buffer_named(buffer)
    # on the CPU: no device is asked for it
    drawn = replay.sample(batch, beta=None if beta is None else beta.item())
    return tuple(_parted([drawn[name] for name, _, _ in _parsed(layout)]))


def _sample_fake(token: Tensor, buffer: str, layout: str, batch: int, beta: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(token.new_empty((batch, *shape), dtype=dtype) for _, dtype, shape in _parsed(layout))


def _parted(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, contiguous and in separate memory: results of an operator must not overlap."""
    seen: set[int] = set()
    copies = []
    for tensor in tensors:
        copy = tensor.contiguous()
        if copy.untyped_storage().data_ptr() in seen:
            copy = copy.clone()
        seen.add(copy.untyped_storage().data_ptr())
        copies.append(copy)
    return copies


_ADD = _define(
    "add(Tensor(a!) token, str buffer, str names, Tensor[] values, Tensor? priority) -> Tensor", _add, _add_fake
)
_WRITE = _define(
    "write(Tensor(a!) token, str buffer, Tensor keys, str names, Tensor[] values) -> ()", _write, lambda *_: None
)
_UPDATE = _define(
    "update_priorities(Tensor(a!) token, str buffer, Tensor keys, Tensor priorities) -> ()", _update, lambda *_: None
)


def _draw_of(count: int) -> Any:
    """The operator `gpu_replay::sample_N` that returns N tensors: one that writes may not return a list of them."""
    with _defining:
        if count not in _draws:
            schema = (
                f"sample_{count}(Tensor(a!) token, str buffer, str layout, SymInt batch, Tensor? beta) -> "
                f"({', '.join(['Tensor'] * count)})"
            )
            _draws[count] = _define(schema, _sample, _sample_fake)
        return _draws[count]
