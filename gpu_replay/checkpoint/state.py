"""A buffer's whole state: as a dictionary in memory, and as a checkpoint on disk.

The sums of the mass tree are not part of it; they follow from the masses, whatever layout the loading device uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from gpu_replay.checkpoint.config import difference
from gpu_replay.checkpoint.format import read_checkpoint, write_checkpoint
from gpu_replay.errors import CheckpointError
from gpu_replay.ops.counters import LASTING, counter_values

VERSION = 1
# counters of a list of ranks that serves several samples
_OF_LISTS = ("RANKED", "SORTED")


@dataclass(frozen=True)
class BufferState:
    """What a buffer gives and takes back.

    config:   class, capacity, fields, sampler and more as JSON values: what two buffers must share to share a state.
    counters: the buffer's own tensor.
    views:    by name all memory that is in use after so many transitions were added.
    rebuild:  takes over what was written into views and counters; draws then follow from this seed.
    """

    config: dict[str, Any]
    seed: int
    counters: Tensor
    views: Callable[[int], dict[str, Tensor]]
    rebuild: Callable[[int], None]

    def lasting(self) -> dict[str, int]:
        """The counters that outlive a call, by name."""
        counts = self.counters.tolist()
        return {name: counts[place] for name, place in LASTING.items()}

    def finish(self, counters: dict[str, int], seed: int) -> None:
        """Take over the counters, after all tensors."""
        self.counters.copy_(torch.tensor(counter_values(counters, seed), dtype=torch.int64))
        self.rebuild(seed)


def snapshot(buffer: BufferState) -> dict[str, Any]:
    """Copies of everything, on the buffer's device."""
    manifest = _manifest(buffer)
    tensors = buffer.views(manifest["counters"]["ADDED"])
    return {**manifest, "tensors": {name: tensor.clone() for name, tensor in tensors.items()}}


def _manifest(buffer: BufferState) -> dict[str, Any]:
    """All but the tensors."""
    return {"version": VERSION, "settings": buffer.config, "seed": buffer.seed, "counters": buffer.lasting()}


def restore(buffer: BufferState, state: Mapping[str, Any]) -> None:
    """Take over a snapshot; everything is checked before anything is changed."""
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict needs what state_dict() returned; found {type(state).__name__}.")
    missing = [name for name in ("version", "settings", "seed", "counters", "tensors") if name not in state]
    if missing:
        raise KeyError(f"load_state_dict needs what state_dict() returned; {', '.join(missing)} is missing.")
    if state["version"] != VERSION:
        raise ValueError(f"the state has version {state['version']}; this package reads version {VERSION}.")
    unlike = difference(buffer.config, state["settings"])
    if unlike is not None:
        raise ValueError(f"the state is of another buffer: {unlike}. Make a buffer with the same settings.")
    counters = _checked_counters(state["counters"])
    wanted = buffer.views(counters["ADDED"])
    given = state["tensors"]
    for name, view in wanted.items():
        if name not in given:
            raise KeyError(f"the state lacks the tensor {name!r}.")
        if given[name].shape != view.shape or given[name].dtype != view.dtype:
            raise ValueError(
                f"the state's tensor {name!r} must be {view.dtype} {list(view.shape)}; "
                f"found {given[name].dtype} {list(given[name].shape)}."
            )
    for name, view in wanted.items():
        view.copy_(given[name])
    buffer.finish(counters, state["seed"])


def save(buffer: BufferState, path: str | PathLike[str]) -> None:
    """Write a checkpoint from the buffer's own memory, without a second copy of it."""
    manifest = _manifest(buffer)
    write_checkpoint(path, manifest, buffer.views(manifest["counters"]["ADDED"]))


class Saved:
    """A checkpoint on disk, opened: its config first, so that a buffer can be made, then its contents."""

    def __init__(self, path: str | PathLike[str], kind: str) -> None:
        self._path = path
        self._checkpoint = read_checkpoint(path)
        manifest = self._checkpoint.manifest
        try:
            version = manifest["version"]
            self.config: dict[str, Any] = manifest["settings"]
            self.seed: int = manifest["seed"]
            self._counters = _checked_counters(manifest["counters"])
            found = self.config["kind"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: the manifest is not of a replay buffer: {error}") from None
        if version != VERSION:
            raise CheckpointError(f"{path} has state version {version}; this package reads version {VERSION}.")
        if found != kind:
            raise CheckpointError(f"{path} holds a {found}; load it with {found}.load.")

    def fill(self, buffer: BufferState) -> None:
        """Stream the contents into a buffer made with these settings."""
        for name, view in buffer.views(self._counters["ADDED"]).items():
            self._checkpoint.read_into(name, view)
        buffer.finish(self._counters, self.seed)


def _checked_counters(counters: Any) -> dict[str, int]:
    # buffers without such a list say nothing of it, as those of earlier versions
    found = {name: counters.get(name, 0) if name in _OF_LISTS else counters[name] for name in LASTING}
    for name, count in found.items():
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**63:
            raise ValueError(f"counter {name} must be a whole number of 63 bits; found {count!r}.")
    return found
