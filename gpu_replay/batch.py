"""`Batch`: the named tensors that `sample` returns."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextlib import nullcontext
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree


class Batch:
    """Named tensors with one leading batch dimension: `batch.obs` and `batch["obs"]` are the same tensor.

    `len(batch)` is the number of transitions. `keys()`, `values()`, `items()`, `in` and iteration use the names.
    It holds the fields, `key` (B,) int64, and from `sample` also `probability` (B,) float32 and `weight` (B,) float32.
    Fields with dotted names (`obs.camera`) also form a group: `batch["obs"]["camera"]`, `batch.obs.camera`. Index rows
    to get a Batch: `batch[3:10]` of views, `batch[mask]` or `batch[index]` (arrays or lists) of copies. A batch is a
    snapshot: later calls of the buffer do not change it. It is registered as a torch pytree.
    """

    # annotated for type checkers
    key: Tensor
    probability: Tensor
    weight: Tensor

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        # the tensors are its attributes
        self.__dict__ = tensors

    @overload
    def __getitem__(self, name: str) -> Any: ...

    @overload
    def __getitem__(self, name: slice | Tensor | np.ndarray | list[int] | list[bool]) -> Batch: ...

    def __getitem__(self, name: Any) -> Any:
        if not isinstance(name, str):
            rows = name if isinstance(name, slice) else _row_index(name)
            return Batch({each: tensor[rows] for each, tensor in self.__dict__.items()})
        try:
            return self.__dict__[name]
        except KeyError:
            prefix = f"{name}."
            group = {k.removeprefix(prefix): v for k, v in self.__dict__.items() if k.startswith(prefix)}
            if group:
                return Batch(group)
            raise KeyError(f"batch has no {name!r}; it has {', '.join(self.__dict__)}.") from None

    def __getattr__(self, name: str) -> Any:
        # a group, or nothing
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __dir__(self) -> list[str]:
        """Attributes, fields and groups of fields."""
        return sorted({name.split(".")[0] for name in super().__dir__()})

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.__dict__)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name; groups of names do not count."""
        return name in self.__dict__

    def __len__(self) -> int:
        """Rows, `B`."""
        return next(iter(self.__dict__.values())).shape[0]

    def keys(self) -> KeysView[str]:
        """The names."""
        return self.__dict__.keys()

    def values(self) -> ValuesView[Tensor]:
        """The tensors."""
        return self.__dict__.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Names and tensors."""
        return self.__dict__.items()

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Batch:
        """Move the batch to another device. TypeError for a dtype: cast single tensors, `batch.obs.float()`."""
        if not isinstance(device, (torch.device, str, int)) or isinstance(device, bool):
            raise TypeError(
                f"Batch.to moves a batch to a device such as 'cpu' or 'cuda'; found {device!r}. Cast single tensors."
            )
        return Batch({name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.__dict__.items()})

    def pin_memory(self) -> Batch:
        """Copy the batch to page-locked memory, from which copies to a GPU do not wait."""
        return Batch({name: tensor.pin_memory() for name, tensor in self.__dict__.items()})

    @classmethod
    def cat(cls, batches: Iterable[Batch]) -> Batch:
        """Join the rows of several batches; raises KeyError unless all have the same names."""
        parts = list(batches)
        if not parts:
            raise ValueError("Batch.cat needs at least one batch; found none.")
        for place, part in enumerate(parts):
            if not isinstance(part, Batch):
                raise TypeError(f"Batch.cat needs batches; number {place} is a {type(part).__name__}.")
            if part.keys() != parts[0].keys():
                unlike = ", ".join(sorted(part.keys() ^ parts[0].keys()))
                raise KeyError(f"Batch.cat needs batches with the same names; number {place} differs in {unlike}.")
        where = next(iter(parts[0].values())).device.type
        # autocast refuses to concatenate some dtypes, even where all parts have the same
        off = torch.autocast(where, enabled=False) if torch.amp.is_autocast_available(where) else nullcontext()
        with off:
            return cls({name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def minibatches(self, count: int) -> list[Batch]:
        """Split into K batches of `B / K` rows, for K optimiser steps on one sample; views, no copies.

        count: K, at least 1, which divides B.

        Row `i` of batch `j` is row `i * K + j`. Stratified samplers sort a batch by age or rank, so contiguous slices
        would hold only old rows or only likely ones; each of these batches holds all kinds. Raises TypeError if K is no
        int, ValueError if K does not divide B.
        """
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
            raise TypeError(f"minibatches needs their number, an int; found {count!r}.")
        if count < 1 or len(self) % count:
            raise ValueError(f"minibatches({count}) of a batch of {len(self)} rows; use a number that divides it.")
        return [self[place :: int(count)] for place in range(count)]

    def to_dict(self) -> dict[str, Tensor]:
        """Return a new dictionary of the tensors by name; dotted names stay as they are."""
        return dict(self.__dict__)

    def to_tensordict(self) -> Any:
        """Convert to a `tensordict.TensorDict` of batch size [B]; `obs.camera` becomes ("obs", "camera").

        Raises ImportError without tensordict, ValueError where one name is a tensor and a group at once.
        """
        try:
            from tensordict import TensorDict
        except ImportError as error:
            raise ImportError(f"to_tensordict needs tensordict: pip install tensordict ({error}).") from error
        for name in self:
            inside = [each for each in self if each.startswith(f"{name}.")]
            if inside:
                raise ValueError(f"a TensorDict cannot hold {inside[0]!r} beside {name!r}; rename one of these fields.")
        return TensorDict({tuple(name.split(".")): tensor for name, tensor in self.items()}, batch_size=[len(self)])

    def __repr__(self) -> str:
        parts = (f"{name}={tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in self.__dict__.items())
        return f"Batch({', '.join(parts)})"


def _row_index(rows: Any) -> Tensor:
    """A mask or an index of rows as a tensor, or TypeError / ValueError."""
    if isinstance(rows, (list, np.ndarray)):
        # torch would make a float tensor of an empty list
        rows = torch.as_tensor(rows if len(rows) else np.zeros(0, np.int64), device="cpu")
    if not isinstance(rows, Tensor):
        raise TypeError(
            f"a batch is indexed by a field's name, or for rows by a slice, a mask or an index tensor; found {rows!r}. "
            "For a single row use batch[3:4]."
        )
    if rows.dtype == torch.uint8 or rows.dtype.is_floating_point or rows.dtype.is_complex:
        raise TypeError(f"rows of a batch need a mask (bool) or an index (int64); found {rows.dtype}.")
    if rows.dim() != 1:
        raise ValueError(f"rows of a batch need a mask or an index of one dimension; found shape {list(rows.shape)}.")
    return rows if rows.dtype == torch.bool else rows.long()


_pytree.register_pytree_node(
    Batch,
    lambda batch: (list(batch.values()), list(batch.keys())),
    lambda values, names: Batch(dict(zip(names, values, strict=True))),
    serialized_type_name="gpu_replay.Batch",
    flatten_with_keys_fn=lambda batch: ([(_pytree.MappingKey(k), v) for k, v in batch.items()], list(batch.keys())),
)
