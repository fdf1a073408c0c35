"""An opened checkpoint: the rows of a buffer, or of ranks that shared one, by their keys, for any number of buffers.

That of ranks is a checkpoint like all others, in which the tensors of rank `r` are called `rank{r}/NAME`. The global
key of a transition is `local key * R + r`. In the order of these, all that is stored is numbered anew so that the
newest has the number `added - 1`, with `added` of all ranks: where they had added as many each, these are the keys that
there were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_replay.checkpoint.config import arguments_of
from gpu_replay.checkpoint.format import read_checkpoint
from gpu_replay.checkpoint.manifest import check_version
from gpu_replay.checkpoint.shards import Part
from gpu_replay.checkpoint.state import VERSION, BufferState, checked_counters
from gpu_replay.errors import CheckpointError
from gpu_replay.validation import check_int

KIND = "ShardedReplayBuffer"
SINGLE = "ReplayBuffer"
NO_SETTINGS = "its settings are not those of a buffer"


class Share(NamedTuple):
    """One of several buffers among which rows are dealt by their numbers, and how many slots it has."""

    ranks: int
    rank: int
    capacity: int


def name_of(rank: int, name: str) -> str:
    """What a tensor of a rank is called in a checkpoint."""
    return f"rank{rank}/{name}"


class BufferCheckpoint:
    """An opened checkpoint of R ranks, or of a single buffer, which is as that of one rank.

    kinds: the classes whose checkpoints are taken; None takes them all.

    Raises CheckpointError for a damaged one, or one of another kind.
    """

    def __init__(self, path: str | PathLike[str], kinds: Collection[str] | None = (KIND, SINGLE)) -> None:
        self.path = path
        self.checkpoint = read_checkpoint(path)
        manifest = self.checkpoint.manifest
        with self.refusing("the manifest is not of a replay buffer"):
            version, self.config = manifest["version"], dict(manifest["settings"])
            self.seed, kind = check_int("seed", manifest["seed"]), self.config["kind"]
        check_version(f"{path} has state version", version, VERSION)
        if kinds is not None and kind not in kinds:
            raise CheckpointError(f"{path} holds a {kind}; load it with {kind}.load.")
        with self.refusing("the manifest is not of a replay buffer"):
            self.single, counters = kind != KIND, manifest["counters"]
            self.ranks = 1 if self.single else check_int("ranks", self.config["ranks"], 1)
            self.capacity = check_int("capacity", self.config["capacity"], self.ranks)
            self.saved = [checked_counters(each) for each in ([counters] if self.single else counters)]
            if len(self.saved) != self.ranks:
                raise ValueError(f"it has counters of {len(self.saved)} ranks, and was saved by {self.ranks}")

    @contextmanager
    def refusing(self, what: str) -> Iterator[None]:
        """Within it, an error caused by the contents of the file becomes CheckpointError."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: {what}: {error}") from error

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments of a single buffer; of ranks also their `mode`."""
        with self.refusing(NO_SETTINGS):
            return arguments_of({name: value for name, value in self.config.items() if name != "ranks"})

    def tensor_name(self, rank: int, name: str) -> str:
        """What a tensor of a saved rank is called."""
        return name if self.single else name_of(rank, name)

    def _spans(self) -> list[tuple[int, int]]:
        """The first live key of each saved rank and its next one."""
        slots = self.capacity // self.ranks
        return [(max(each["FIRST"], each["ADDED"] - slots), each["ADDED"]) for each in self.saved]

    def counters(self, share: Share) -> dict[str, int]:
        """The counters of one of the buffers among which all rows are dealt."""
        spans = self._spans()
        added, size = sum(end for _, end in spans), sum(end - first for first, end in spans)
        counters = dict.fromkeys(self.saved[0], 0)
        for name in ("RANDOM", "STEP", "TOP"):
            counters[name] = max(each[name] for each in self.saved)
        for name, end in (("ADDED", added), ("FIRST", added - size)):
            # numbers below the end that this buffer has
            counters[name] = (end - share.rank + share.ranks - 1) // share.ranks
        if share.rank == 0:
            for name in ("STALE", "REJECTED", "SATURATED"):
                counters[name] = sum(each[name] for each in self.saved)
        return counters

    def slots_of(self, part: Part, rank: int, share: Share) -> tuple[Tensor, Tensor]:
        """Which rows of a part of this rank, (rows,) bool, such a buffer is dealt, and the slots that they come to."""
        spans, slots = self._spans(), self.capacity // self.ranks
        added, size = sum(end for _, end in spans), sum(end - first for first, end in spans)
        first, end = spans[rank]
        slot = torch.arange(part.start, part.stop, device="cpu")
        head = end % slots
        local = slot + (end - head) - slots * (slot >= head)
        key = local * self.ranks + rank
        number = torch.full_like(key, added - size)
        for other, (start, stop) in enumerate(spans):
            # its live keys below this one
            below = torch.div(key - other + self.ranks - 1, self.ranks, rounding_mode="floor")
            number += (below.clamp(max=stop) - start).clamp(min=0)
        new = torch.div(number, share.ranks, rounding_mode="floor")
        last = self.counters(share)["ADDED"]
        mine = (local >= first) & (number % share.ranks == share.rank) & (new >= last - share.capacity)
        return mine, new[mine] % share.capacity

    def fill(self, views: Mapping[str, Tensor], share: Share) -> None:
        """Fill (written, ...) tensors, by name, of one of the buffers with its rows; all other rows become 0."""
        owners: dict[str, tuple[int, Tensor]] = {}
        for rank, (_, end) in enumerate(self._spans()):
            for name, view in views.items():
                stored = self.tensor_name(rank, name)
                self.checkpoint.require(stored, view.dtype, (min(end, self.capacity // self.ranks), *view.shape[1:]))
                owners[stored] = rank, view
        for view in views.values():
            view.zero_()

        def take(part: Part, rows: Tensor) -> None:
            rank, view = owners[part.name]
            mine, slots = self.slots_of(part, rank, share)
            view[slots.to(view.device)] = rows[mine].to(view.device)

        self.checkpoint.read_parts(lambda part: part.name in owners, Part.empty, take)

    def restore(self, buffer: BufferState, share: Share, seed: int) -> None:
        """Stream what one of `share.ranks` buffers is dealt into it: its own state where as many saved theirs."""
        own = share.ranks == self.ranks
        counters = self.saved[share.rank] if own else self.counters(share)
        views = buffer.views(counters["ADDED"])
        if own:
            self.checkpoint.fill({self.tensor_name(share.rank, name): view for name, view in views.items()})
        else:
            self.fill(views, share)
        with self.refusing("what it holds is no state of a buffer"):
            buffer.check(counters, views)
        buffer.finish(counters, seed)
