"""State as nested dictionaries whose leaves are tensors or JSON values, and how the two are told apart for a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

SEPARATOR = "/"


def split(tree: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The tree without its tensors, and the tensors by path: {"a": {"b": t, "c": 1}} is {"a": {"c": 1}}, {"a/b": t}.

    Dictionaries stay, also where nothing is left in them. Tensors are not copied.
    """
    values: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, leaf in tree.items():
        path = f"{prefix}{name}"
        if isinstance(leaf, Tensor):
            tensors[path] = leaf
        elif isinstance(leaf, Mapping):
            values[name], inside = split(leaf, path + SEPARATOR)
            tensors |= inside
        else:
            values[name] = leaf
    return values, tensors


def join(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tree that `split` took apart, also after a trip of `values` through JSON."""
    tree = {name: join(value, {}) if isinstance(value, Mapping) else value for name, value in values.items()}
    for path, tensor in tensors.items():
        *folders, leaf = path.split(SEPARATOR)
        place = tree
        for folder in folders:
            place = place[folder]
        place[leaf] = tensor
    return tree
