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

from gpu_replay.checkpoint.config import difference, renewed, without_shifts
from gpu_replay.checkpoint.format import check_fit, write_checkpoint
from gpu_replay.checkpoint.manifest import check_version
from gpu_replay.errors import CheckpointError
from gpu_replay.ops.counters import ADDED_LATER, LASTING, counter_values
from gpu_replay.validation import check_int

VERSION = 1


@dataclass(frozen=True)
class BufferState:
    """The parts of a buffer that are saved and restored.

    config:   class, capacity, fields, sampler and more as JSON values: what two buffers must share to share a state.
    counters: the buffer's own tensor.
    views:    by name all memory that is in use after so many transitions were added.
    check:    raises ValueError for counters and tensors, of the right shapes, that contradict each other.
    rebuild:  takes over what was written into views and counters; draws then follow from this seed.
    """

    config: dict[str, Any]
    seed: int
    counters: Tensor
    views: Callable[[int], dict[str, Tensor]]
    check: Callable[[dict[str, int], Mapping[str, Tensor]], None]
    rebuild: Callable[[int], None]

    def lasting(self) -> dict[str, int]:
        """The counters that outlive a call, by name."""
        counts = self.counters.tolist()
        return {name: counts[place] for name, place in LASTING.items()}

    def take_over(self, counters: dict[str, int], seed: int) -> None:
        """Take over the counters, after all tensors."""
        self.counters.copy_(torch.tensor(counter_values(counters, seed), dtype=torch.int64, device="cpu"))
        self.rebuild(seed)


def take_snapshot(buffer: BufferState, *, copied: bool = True) -> dict[str, Any]:
    """Copies of the whole state on its device, or views where these suffice."""
    manifest = _manifest(buffer)
    tensors = buffer.views(manifest["counters"]["ADDED"])
    return {**manifest, "tensors": {name: each.clone() if copied else each for name, each in tensors.items()}}


def _manifest(buffer: BufferState) -> dict[str, Any]:
    """All but the tensors."""
    return {"version": VERSION, "settings": buffer.config, "seed": buffer.seed, "counters": buffer.lasting()}


def checked_snapshot(buffer: BufferState, snapshot: Mapping[str, Any]) -> Callable[[], None]:
    """Check a snapshot as a whole; returns the function that makes it the state of the buffer."""
    needed = "load_state_dict needs what state_dict() returned"
    if not isinstance(snapshot, Mapping):
        raise TypeError(f"{needed}; found {type(snapshot).__name__}.")
    if missing := [name for name in ("version", "settings", "seed", "counters", "tensors") if name not in snapshot]:
        raise KeyError(f"{needed}; {', '.join(missing)} is missing.")
    for name in ("settings", "counters", "tensors"):
        if not isinstance(snapshot[name], Mapping):
            raise TypeError(f"the state's {name} must be a dictionary; found {type(snapshot[name]).__name__}.")
    tensors = snapshot["tensors"]

    def shape_of(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        if name not in tensors:
            raise KeyError(f"the state lacks the tensor {name!r}.")
        found = tensors[name]
        kind = type(found).__name__
        if isinstance(found, Tensor):
            kind = "nested" if found.is_nested else str(found.layout if found.device.type != "meta" else found.device)
            if kind == str(torch.strided):
                return found.dtype, tuple(found.shape)
        raise TypeError(f"the state's {name!r} must be a tensor; found {kind}. Give a dense one that has memory.")

    try:
        check_version("the state has version", snapshot["version"], VERSION)
        settings = without_shifts(snapshot["settings"])
        unlike = difference(buffer.config, {**settings, "sampler": renewed(settings.get("sampler"))})
        if unlike is not None:
            raise ValueError(f"the state is of another buffer: {unlike}. Make a buffer with the same settings.")
        counters, seed = checked_counters(snapshot["counters"]), check_int("the state's seed", snapshot["seed"])
        views = buffer.views(counters["ADDED"])
        check_fit("the state", views, shape_of)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    buffer.check(counters, {name: tensors[name] for name in views})

    def take_over() -> None:
        for name, view in views.items():
            # else the ring would take part in the graph of a tensor that requires gradients
            view.copy_(tensors[name].detach())
        buffer.take_over(counters, seed)

    return take_over


def save(buffer: BufferState, path: str | PathLike[str]) -> None:
    """Write a checkpoint from the buffer's own memory, without a second copy of it."""
    manifest = _manifest(buffer)
    write_checkpoint(path, manifest, buffer.views(manifest["counters"]["ADDED"]))


def checked_counters(counters: Any) -> dict[str, int]:
    """Counters by name, as a manifest gives them; KeyError, TypeError or ValueError for anything else."""
    # what only earlier versions counted is left out
    checked = {name: counters.get(name, 0) if name in ADDED_LATER else counters[name] for name in LASTING}
    for name, count in checked.items():
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**63:
            raise ValueError(f"counter {name} must be a whole number of 63 bits; found {count!r}.")
    return checked
