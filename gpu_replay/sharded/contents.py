"""What a rank knows of its own shard: settings, keys and rows, without a word to the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.batch import Batch
from gpu_replay.fields import Field
from gpu_replay.samplers import Sampler
from gpu_replay.sharded.group import Group
from gpu_replay.sharded.shard import Shard

Mode = Literal["local", "global"]


class LocalContents:
    """The shard of one rank, in global keys; none of its calls is collective."""

    _group: Group
    _shard: Shard
    _mode: Mode
    _fields: dict[str, Field]
    _sampler: Sampler
    _seed: int

    # attributes

    @property
    def capacity(self) -> int:
        """Transitions that fit on all ranks together, a multiple of their number."""
        return self._shard.capacity * self._group.size

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        """Processes that share the buffer, `R`."""
        return self._group.size

    @property
    def mode(self) -> Mode:
        """How it draws: "local" or "global"."""
        return self._mode

    @property
    def device(self) -> torch.device:
        """Where this rank's shard is stored, and its batches are."""
        return self._shard.device

    @property
    def fields(self) -> dict[str, Field]:
        """The fields by name, as a copy."""
        return dict(self._fields)

    @property
    def sampler(self) -> Sampler:
        """The sampler's settings."""
        return self._sampler

    @property
    def seed(self) -> int:
        """The seed of its draws, the same on all ranks."""
        return self._seed

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shard."""
        return self._shard.nbytes

    @property
    def local_size(self) -> int:
        """Transitions stored in this rank's shard; no communication."""
        return len(self._shard)

    def __bool__(self) -> bool:
        """Whether this rank's shard holds anything; no communication, so that `if buffer` is safe on one rank."""
        return len(self._shard) > 0

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._mode}, rank {self.rank} of {self.ranks} with {len(self._shard):,} of "
            f"{self._shard.capacity:,} transitions of {', '.join(self._fields)}; {self._sampler}; "
            f"{self.nbytes / 1e6:,.1f} MB on {self.device})"
        )

    # what this rank holds

    def keys(self) -> Tensor:
        """(local_size,) int64 on the device, the live keys of this rank's shard, oldest first; not collective."""
        return self._global_keys(self._shard.keys())

    def __contains__(self, key: object) -> bool:
        """Whether a key, an int, is live in this rank's shard; not collective."""
        if isinstance(key, Tensor) and key.dim() == 0 and not key.dtype.is_floating_point:
            key = key.item()
        if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
            return int(key) % self.ranks == self.rank and int(key) // self.ranks in self._shard
        # which says what a key is
        return key in self._shard

    def __getitem__(self, keys: Any) -> Batch:
        """The transitions of these live keys of this rank's shard, in their order; not collective.

        Raises KeyError naming the first key that is not live, or that another rank holds.
        """
        found = self._local_keys(keys)
        return Batch({**dict(self._shard[found].items()), "key": self._global_keys(found)})

    def priorities(self, keys: Any) -> Tensor:
        """The priorities of these live keys of this rank's shard, (m,) float64; not collective.

        As `ReplayBuffer.priorities`, and KeyError for keys that another rank holds.
        """
        return self._shard.priorities(self._local_keys(keys))

    def __iter__(self) -> Iterator[Any]:
        """Raises TypeError."""
        raise TypeError("a ShardedReplayBuffer is not iterable: `buffer[buffer.keys()]` is what this rank holds.")

    def _global_keys(self, local: Tensor) -> Tensor:
        return local * self.ranks + self.rank

    def _local_keys(self, keys: Any) -> Tensor:
        found = validation.as_keys(keys, self.device).to(self.device)
        elsewhere = (found % self.ranks != self.rank).nonzero()
        if elsewhere.numel():
            key = int(found[elsewhere[0, 0]])
            raise KeyError(f"key {key} is held by rank {key % self.ranks}; this is rank {self.rank} of {self.ranks}.")
        return torch.div(found, self.ranks, rounding_mode="floor")
