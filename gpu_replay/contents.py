"""What a buffer holds, read by key and in order, and copies of a buffer: the part of both that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.batch import Batch
from gpu_replay.checkpoint import state as checkpoint_state
from gpu_replay.engines.draw_plan import DrawPlan
from gpu_replay.engines.draw_state import DrawState
from gpu_replay.engines.mapped_file import folder_for_copy
from gpu_replay.engines.storage import not_readable
from gpu_replay.stateful import Stateful

if TYPE_CHECKING:
    from gpu_replay.engines.device import DeviceEngine
    from gpu_replay.engines.device_sampler import DeviceSampler
    from gpu_replay.engines.device_trajectory import TrajectoryDeviceEngine
    from gpu_replay.engines.host import HostEngine
    from gpu_replay.engines.host_sampler import HostSampler
    from gpu_replay.engines.host_trajectory import TrajectoryHostEngine

    Engine = HostEngine | DeviceEngine | TrajectoryHostEngine | TrajectoryDeviceEngine

Own = TypeVar("Own", bound="Contents")


class Contents(Stateful):
    """Reads the stored rows of a buffer and their priorities. On CUDA each of its calls waits for the device."""

    _engine: Engine
    _draws: HostSampler | DeviceSampler
    _device: torch.device
    _plan: DrawPlan
    _state: DrawState

    def __getitem__(self, keys: Any) -> Batch:
        """The stored transitions of these live keys, in their order: `buffer[keys]`.

        keys: (m,) int64, a list of ints, or one int for a batch of one.

        Raises KeyError naming the first key that is not live, TypeError for keys that are not integers.
        """
        with self._alone():
            found = validation.as_keys(keys, self._device).to(self._device).clone()
            return Batch({**self._engine.read(found), "key": found})

    def keys(self) -> Tensor:
        """(size,) int64 on the buffer's device, the live keys, oldest first."""
        with self._alone():
            return torch.arange(*self._draws.span(), device=self._device)

    def __contains__(self, key: object) -> bool:
        """Whether a key, an int, is live: `key in buffer`."""
        if isinstance(key, Tensor) and key.dim() == 0 and not key.dtype.is_floating_point:
            key = key.item()
        if isinstance(key, bool) or not isinstance(key, (int, np.integer)):
            raise TypeError(f"`key in buffer` needs a key, an int as add returns it; found {key!r}.")
        with self._alone():
            first, added = self._draws.span()
        return first <= int(key) < added

    def __iter__(self) -> Iterator[Any]:
        """Raises TypeError: `batches` walks over what is stored."""
        raise TypeError(
            f"a {type(self).__name__} is not iterable: `for batch in buffer.batches(size)` walks over all that is "
            "stored, `buffer.sample(B)` draws."
        )

    def batches(self, size: int) -> Iterator[Batch]:
        """Walk over all that is stored, in the order of keys, by `size` rows at a time; the last batch may be smaller.

        A batch holds what `buffer[keys]` does. In a trajectory buffer its rows are single steps: their own `obs`
        without a stack, every other field, `reward`, `terminated`, `truncated` and `key`, also of steps that cannot be
        drawn. What is added meanwhile is left out, and so is what it overwrites.
        """
        rows = validation.whole("size", size, 1)
        with self._alone():
            first, added = self._draws.span()
        return self._walk(first, added, rows)

    def _walk(self, start: int, end: int, rows: int) -> Iterator[Batch]:
        while True:
            with self._alone():
                start = max(start, self._draws.span()[0])
                if start >= end:
                    return
                keys = torch.arange(start, min(start + rows, end), device=self._device)
                batch = Batch({**self._engine.stored(keys), "key": keys})
            yield batch
            start += rows

    def priorities(self, keys: Any) -> Tensor:
        """The priorities of these live keys, (m,) float64 on the buffer's device.

        keys: as for `buffer[keys]`.

        With `RankBased` exactly what was given; with `Proportional` what the mass says, after `eps`, `clip` and
        rounding: `(mass / 2**20) ** (1 / alpha) - eps`, not below 0. Steps of a trajectory buffer that cannot be drawn
        have 0. Raises KeyError naming the first key that is not live, RuntimeError for a sampler without priorities and
        for `alpha=0`, with which priorities leave no trace.
        """
        if not self._plan.prioritized or self._plan.alpha == 0:
            raise RuntimeError(
                f"{self._sampler} keeps no priorities that could be read; use Proportional or RankBased with alpha > 0."
            )
        with self._alone():
            array = validation.as_keys(keys, self._device).cpu().numpy()
            first, added = self._draws.span()
            dead = np.flatnonzero((array < first) | (array >= added))
            if dead.size:
                raise not_readable(int(array[dead[0]]), first, added)
            masses = self._state.masses.masses
            found = masses[torch.from_numpy(array % self._state.slots).to(self._device)].cpu().numpy()
        numbers = np.where(found > 0, self._state.rule.priorities(np.maximum(found, 1)), 0.0)
        return torch.from_numpy(numbers).to(self._device)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw what is stored, how it is drawn from and how often it was into a picture: .png, .pdf or .svg.

        `gpu-replay inspect DIR` draws that of a checkpoint. Raises ImportError without matplotlib.
        """
        from gpu_replay.inspection import draw, of_buffer

        with self._alone():
            found = of_buffer(self._buffer_state())
            draw(found, path)

    # copies

    def __deepcopy__(self: Own, memo: dict[int, Any]) -> Own:
        """An independent buffer with the same state: the next draws of both are equal.

        Fields at a `storage_path` are copied to the first free folder of `PATH-2`, `PATH-3`, ... beside it.
        """
        with self._alone():
            return _made(type(self), self._settings(), checkpoint_state.snapshot(self._buffer_state(), copied=False))

    def __reduce__(self) -> tuple[Any, ...]:
        with self._alone():
            state = checkpoint_state.snapshot(self._buffer_state(), check=self._check_copy)
            return _made, (type(self), self._settings(), state)


def _made(kind: Any, settings: dict[str, Any], state: dict[str, Any]) -> Any:
    """A buffer of these settings in this state; a folder that is in use for fields gets a neighbour."""
    if settings["storage_path"] is not None:
        settings["storage_path"] = folder_for_copy(settings["storage_path"])
    buffer = kind(**settings)
    buffer.load_state_dict(state)
    return buffer
