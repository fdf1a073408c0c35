"""`Batch`: what `sample` returns."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

import torch
from torch import Tensor


class Batch:
    """Named tensors with one leading batch dimension: `batch.obs` and `batch["obs"]` are the same tensor.

    `len(batch)` is the number of transitions; `keys()`, `values()`, `items()`, `in` and iteration go over the names.
    Besides the fields: `key` (B,) int64, and from `sample` also `probability` (B,) float32 and `weight` (B,) float32.
    Fields with dotted names (`obs.camera`) are also reached as a group: `batch["obs"]["camera"]`, `batch.obs.camera`.
    A batch is a snapshot: what is added or updated later does not change it.
    """

    __slots__ = ("_tensors",)

    # for type checkers; they are found as all other names are
    key: Tensor
    probability: Tensor
    weight: Tensor

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Any:
        try:
            return self._tensors[name]
        except KeyError:
            prefix = f"{name}."
            group = {k.removeprefix(prefix): v for k, v in self._tensors.items() if k.startswith(prefix)}
            if group:
                return Batch(group)
            raise KeyError(f"batch has no {name!r}; it has {', '.join(self._tensors)}.") from None

    def __getattr__(self, name: str) -> Any:
        # unpickling and copying probe for attributes before `_tensors` is there
        if name.startswith("__") or name == "_tensors":
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return next(iter(self._tensors.values())).shape[0]

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._tensors.keys()

    def values(self) -> ValuesView[Tensor]:
        """The tensors."""
        return self._tensors.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Names and tensors."""
        return self._tensors.items()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return Batch({name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self._tensors.items()})

    def __repr__(self) -> str:
        parts = (f"{name}={tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in self._tensors.items())
        return f"Batch({', '.join(parts)})"
