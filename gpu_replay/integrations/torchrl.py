"""TorchRL: a buffer with the methods of its TensorDictReplayBuffer, prioritized or not; needs only tensordict.

from gpu_replay.integrations.torchrl import TensorDictReplayBuffer

rb = TensorDictReplayBuffer(100_000, sampler=Proportional(alpha=0.7, beta=0.5), batch_size=128)
rb.extend(data)                        # from a collector
batch = rb.sample()
loss(batch)["loss"].backward()         # weighs by "priority_weight", writes "td_error"
rb.update_tensordict_priority(batch)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Batch, Field, ReplayBuffer, Uniform
from gpu_replay.integrations.streams import library, load_like
from gpu_replay.samplers import Sampler

with library(__name__):
    from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor

# entries that `sample` adds to the fields, and that a loss writes: not stored when a sample is added again
_ADDED = ("index", "priority_weight")


class TensorDictReplayBuffer:
    """A ring of the last `capacity` rows of TensorDicts, nested ones included.

    capacity:     rows, from 1 to 2**31 - 1.
    sampler:      Uniform, Proportional, RankBased, Latest or Combined.
    batch_size:   default of `sample()`.
    priority_key: entry that holds TD errors in `extend` and `update_tensordict_priority`; it is not stored. A nested
                  entry is named by a tuple.
    device:       where rows are stored and samples are returned; by default "cuda" if available, else "cpu".
    seed:         seed of sampling.

    The first TensorDict defines the fields. From then on `buffer` is the underlying ReplayBuffer; before, it is None.
    Its field for ("next", "reward") is `next.reward`, and a dot inside a name is written %2E. "index" holds keys, which
    count rows and are never reused, so a late priority cannot reach another row. Iteration yields samples endlessly.
    Raises ValueError for a `priority_key` with a dot.
    """

    def __init__(
        self,
        capacity: int,
        *,
        sampler: Sampler = Uniform(replacement=True),  # noqa: B008 (frozen)
        batch_size: int | None = None,
        priority_key: str | tuple[str, ...] = "td_error",
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(priority_key, str) and "." in priority_key:
            parts = tuple(priority_key.split("."))
            raise ValueError(f"priority_key={priority_key!r} has a dot; for a nested entry pass the tuple {parts}.")
        self.buffer: ReplayBuffer | None = None
        self.batch_size = batch_size
        self.priority_key = priority_key
        self._capacity = capacity
        self._settings: dict[str, Any] = {"sampler": sampler, "device": device, "seed": seed}

    def extend(self, data: TensorDictBase) -> Tensor:
        """Store the rows of a TensorDict of batch size [rows]; returns their keys, (rows,) int64.

        Rows with a `priority_key` enter with that priority. Raises TypeError for anything but a TensorDict of tensors,
        ValueError for more than one batch dimension, KeyError if it has both "a.b" and ("a", "b"), and what
        `ReplayBuffer.add` raises for names, shapes or dtypes that differ from the first TensorDict's.
        """
        _check("extend", data)
        if data.dim() != 1:
            raise ValueError(
                f"extend stores rows, of one batch dimension; found batch size {list(data.batch_size)}. "
                f"{'data.reshape(-1) gives the steps of sequences as rows.' if data.dim() else 'Use add(data).'}"
            )
        if not len(data):
            raise ValueError("extend needs at least one row; found a TensorDict of batch size [0].")
        priority = data.get(self.priority_key, None)
        left = data.exclude(self.priority_key, *_ADDED)
        values: dict[str, Tensor] = {}
        dotted = set()
        for name, value in left.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name!r} is not a tensor and cannot be stored; leave it out with exclude({name!r}).")
            parts = (name,) if isinstance(name, str) else name
            if ".".join(parts) in dotted:
                raise KeyError(f"{'.'.join(parts)!r} is given twice: nested, and with a dot in its name. Rename one.")
            dotted.add(".".join(parts))
            values[_field(parts)] = value.detach()
        buffer = self.buffer
        if buffer is None:
            fields = {name: Field(tuple(value.shape[1:]), value.dtype) for name, value in values.items()}
            buffer = ReplayBuffer(self._capacity, fields, **self._settings)
        keys = buffer.add(**values, priority=None if priority is None else _of_rows(priority))
        # rows that were refused must not define the fields
        self.buffer = buffer
        return keys

    def add(self, data: TensorDictBase) -> Tensor:
        """Store one TensorDict without batch dimensions; returns its key, () int64. Raises as `extend` does."""
        _check("add", data)
        if data.dim():
            raise ValueError(
                f"add stores one row, without batch dimensions; found batch size {list(data.batch_size)}. Use "
                "extend(data), or extend(data.reshape(-1)) for several batch dimensions."
            )
        return self.extend(data.unsqueeze(0))[0]

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Sample a TensorDict of `batch_size` rows, with "index" and "priority_weight"; with `return_info` also a dict.

        Raises RuntimeError while the buffer is empty, ValueError if neither the call nor the buffer has a batch size.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("sample needs a batch size: sample(256), or TensorDictReplayBuffer(..., batch_size=256).")
        batch = self._filled(f"sample({size})").sample(size)
        info = {"index": batch.key, "priority_weight": batch.weight}
        found = self._rows(batch, info)
        return (found, info) if return_info else found

    def __iter__(self) -> Iterator[Any]:
        """Yield samples of `batch_size` rows, endlessly."""
        while True:
            yield self.sample()

    def __getitem__(self, index: Any) -> Any:
        """Stored rows as a TensorDict with their "index"; a single key gives one row without a batch dimension.

        index: one key or several, as in "index"; a slice of all rows, oldest first; or the name of an entry, for that
               entry of all rows.

        Raises KeyError for a key that is not stored, RuntimeError while the buffer is empty.
        """
        if isinstance(index, (str, tuple)):
            return self[:][index]
        buffer = self._filled("rb[...]")
        batch = buffer[buffer.keys()[index] if isinstance(index, slice) else index]
        found = self._rows(batch, {"index": batch.key})
        return found if isinstance(index, slice) or np.ndim(index) else found[0]

    def _filled(self, call: str) -> ReplayBuffer:
        """The buffer. Raises RuntimeError before the first row is stored."""
        if self.buffer is None:
            raise RuntimeError(f"{call}: the buffer holds no rows. Add more first.")
        return self.buffer

    def _rows(self, batch: Batch, info: dict[str, Tensor]) -> Any:
        """The fields of a batch under their original names, together with `info`."""
        found = TensorDict(info, batch_size=[len(batch)], device=batch.key.device)
        for name in self._filled("rows").fields:
            found.set(tuple(map(unquote, name.split("."))), batch[name])
        return found

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample's rows to the TD errors that a loss wrote into it."""
        rows = data.reshape(-1)
        missing = [name for name in ("index", self.priority_key) if rows.get(name, None) is None]
        if missing:
            raise KeyError(f"update_tensordict_priority needs {missing[0]!r}: pass a sample that a loss wrote to.")
        self.update_priority(rows["index"], rows[self.priority_key])

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of the rows with these keys.

        index:    the keys, as a tensor, an array, a list or one number.
        priority: one value per row; if a row has several, the largest magnitude counts.
        """
        if self.buffer is not None:
            self.buffer.update_priorities(index, _of_rows(priority))

    def empty(self) -> None:
        """Forget all rows."""
        if self.buffer is not None:
            self.buffer.clear()

    def __len__(self) -> int:
        return 0 if self.buffer is None else len(self.buffer)

    def __repr__(self) -> str:
        held = self.buffer or f"0 of {self._capacity:,} rows; {self._settings['sampler']}"
        return f"{type(self).__name__}({held}, batch_size={self.batch_size}, priority_key={self.priority_key!r})"

    def state_dict(self) -> dict[str, Any]:
        """Copies of the whole state in memory, as `ReplayBuffer.state_dict`; empty before the first row."""
        return {} if self.buffer is None else self.buffer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state: the next `sample` returns what the saved buffer's next one would have returned.

        Raises ValueError if capacity, sampler or fields differ from this buffer's, TypeError or KeyError if `state` is
        not from `state_dict`. Nothing is changed then.
        """
        if not isinstance(state, Mapping) or (state and "settings" not in state):
            raise TypeError(f"load_state_dict needs what state_dict() of a {type(self).__name__} returned.")
        buffer = self.buffer if state else None
        if state and buffer is None:
            found = state["settings"]["fields"].items()
            fields = {name: Field(tuple(each["shape"]), getattr(torch, each["dtype"])) for name, each in found}
            buffer = ReplayBuffer(self._capacity, fields, **self._settings)
        if buffer is not None:
            buffer.load_state_dict(state)
        self.buffer = buffer

    def dumps(self, path: str | Path) -> None:
        """Write the whole state to a folder, which `loads` reads; see `ReplayBuffer.save`."""
        self._filled("dumps").save(path)

    def loads(self, path: str | Path) -> None:
        """Load what `dumps` wrote. Raises CheckpointError if it is damaged or of another capacity or sampler."""
        wanted = {"capacity": self._capacity, "sampler": self._settings["sampler"]}
        self.buffer = load_like(ReplayBuffer, path, self._settings["device"], **wanted)


def _check(call: str, data: object) -> None:
    """Raise TypeError for anything but a TensorDict."""
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"{call} needs a TensorDict; found {type(data).__name__}.")


def _field(parts: tuple[str, ...]) -> str:
    """The field name of an entry; `unquote` gives back each part."""
    return ".".join(part.replace("%", "%25").replace(".", "%2E") for part in parts)


def _of_rows(priority: Any) -> Tensor:
    """One number per row: the largest magnitude in the row."""
    found = (priority if isinstance(priority, Tensor) else torch.as_tensor(priority, device="cpu")).detach().abs()
    return found.flatten(1).amax(1) if found.dim() > 1 else found.reshape(-1)
