"""`ShardedReplayBuffer`: one replay buffer over the ranks of a process group; each rank's device stores one shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.base.refusals import class_only
from gpu_replay.base.state import SharedSettings
from gpu_replay.batch import Batch
from gpu_replay.checkpoint.config import config_of
from gpu_replay.checkpoint.joint import KIND, BufferCheckpoint
from gpu_replay.engines.placement import StoragePath, check_placement
from gpu_replay.engines.storage import UNIFORM, check_capacity
from gpu_replay.fields import Field, check_fields
from gpu_replay.ops.counters import Counter
from gpu_replay.samplers import Sampler, check_sampler
from gpu_replay.sharded import saving
from gpu_replay.sharded.global_draw import assign_rows, exchange_rows
from gpu_replay.sharded.group import MAKING, CollectiveError, Contribution, Group, Message
from gpu_replay.sharded.local_draw import log_scales_of, weighed
from gpu_replay.sharded.shard import Column, Shard, ShardDraw
from gpu_replay.sharded.statistics import combined, numbers_of
from gpu_replay.stats import Stats

Mode = Literal["local", "global"]


class ShardedReplayBuffer(SharedSettings):
    """A replay buffer over all ranks of a `torch.distributed` process group; each rank stores a shard on its device.

    capacity: transitions on all ranks together, rounded down to a multiple of the number of ranks R; at least R.
    fields:   name to Field, as in `ReplayBuffer`. Fields, sampler, mode and seed must be the same on every rank.
    sampler:  Uniform, Proportional, RankBased, Latest or Combined. RankBased works in local mode only, with
              `normalize="batch"`: ranks over all shards would need a sort over all shards for every sample.
    mode:     "local": each rank samples from its own shard, sends no transition, and corrects its weights to those of
              the whole buffer by one small message. "global": the ranks together sample exactly what one buffer would,
              and send rows to the ranks that asked for them.
    group:    a `torch.distributed` process group; None is the default group. Messages use NCCL for shards on GPUs and
              gloo for shards on CPUs. A buffer over all ranks of the program makes its own process group.
    device:   of the shard; None is the GPU of the local rank with NCCL, else the CPU.
    seed:     for the random streams of all ranks.
    timeout:  seconds after which a rank that waits for another raises RuntimeError, from 0.001 to 1e9.
    storage_device, storage_path: for each shard, as in `ReplayBuffer`; rank r uses the folder `rank{r}` in that path.

    Keys are global: `local key * R + rank`, where the local key counts the transitions that this rank added.

    Every rank must make the collective calls, in the same order: the constructor, `sample`, `update_priorities`,
    `stats`, `len`, `clear`, `save`, `load` and `close`. The other calls use the rank's own shard only and exchange no
    message: `add`, `keys`, `in`, `buffer[keys]`, `priorities`, `local_size` and the attributes. With
    `initial="running"` new transitions get the largest priority that any rank was ever given; every
    `update_priorities` and `sample` exchanges it, so `add` first waits for the last `update_priorities` to end on all
    ranks. With "stored" they get the largest priority in the shard.

    If a rank dies or does not make a call, the others raise RuntimeError within `timeout`; the buffer then refuses
    every further collective call, so load a checkpoint in new processes. If the arguments or the contents of one rank
    do not allow a call, or ranks pass different arguments or make different calls, all ranks raise, nothing changes,
    and you can continue to use the buffer. On GPUs `add` and a local `sample` do not wait for the device; all other
    calls do. The next call that waits raises the error of another rank in such a `sample`. If a rank died meanwhile,
    the NCCL watchdog ends the processes that wait for it.

    Raises RuntimeError without an initialised process group, ValueError where ranks disagree or the group has no
    backend for the device, MemoryError as `ReplayBuffer` does.
    """

    def __init__(
        self,
        capacity: int,
        fields: Mapping[str, Field],
        *,
        sampler: Sampler = UNIFORM,
        mode: Mode = "local",
        group: Any = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        timeout: float = 60.0,
        storage_device: torch.device | str | None = None,
        storage_path: StoragePath | None = None,
    ) -> None:
        self._group = Group(group, device, timeout)
        self._largest: Message | None = None
        # stored transitions that each rank is known to have
        self._least_size = 0
        ranks, slots = self._group.size, 0

        def checked() -> Contribution:
            nonlocal slots
            slots = check_capacity(capacity)
            if slots < ranks:
                raise ValueError(f"capacity must be at least 1 on each of {ranks} ranks; found {slots}.")
            check_placement(self._group.device, storage_device, storage_path)
            self._mode = validation.check_choice("mode", mode, ("local", "global"))
            self._fields, self._sampler = check_fields(fields), check_sampler(sampler)
            _check_mode(sampler, self._mode)
            self._seed = validation.check_int("seed", seed)
            settings = self._config(slots // ranks * ranks)
            return {"asked": slots, **settings, "seed": self._seed, "device": self._group.device.type}, None

        def made() -> Contribution:
            self._shard = Shard(
                slots // ranks,
                self._fields,
                total_slots=slots // ranks * ranks,
                sampler=sampler,
                device=self._group.device,
                seed=self._seed if self._mode == "global" else seed_of(self._seed, self._group.rank),
                storage_device=storage_device,
                storage_path=None if storage_path is None else Path(storage_path) / f"rank{self._group.rank}",
            )
            return {}, None

        with self._group.call(MAKING):
            self._group.agree(MAKING, checked)
            self._group.adopt_group()
            self._group.agree(MAKING, made)

    def _config(self, capacity: int) -> dict[str, Any]:
        arguments = {"capacity": capacity, "fields": self._fields, "sampler": self._sampler, "mode": self._mode}
        return config_of(KIND, {**arguments, "ranks": self._group.size})

    # attributes

    @property
    def capacity(self) -> int:
        """Transitions that fit on all ranks together, a multiple of their number."""
        return self._shard.capacity * self._group.size

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        """Processes that share the buffer, `R`."""
        return self._group.size

    @property
    def mode(self) -> Mode:
        """With "local" each rank samples from its shard, with "global" all ranks sample as one buffer."""
        return self._mode

    @property
    def device(self) -> torch.device:
        """The device of this rank's shard and of its batches."""
        return self._shard.device

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shard."""
        return self._shard.nbytes

    @property
    def local_size(self) -> int:
        """Transitions stored in this rank's shard; no communication."""
        return len(self._shard)

    def __bool__(self) -> bool:
        """Whether this rank's shard stores a transition; no communication, so `if buffer` is safe on one rank."""
        return len(self._shard) > 0

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._mode}, rank {self.rank} of {self.ranks} with {len(self._shard):,} of "
            f"{self._shard.capacity:,} transitions of {', '.join(self._fields)}; {self._sampler}; "
            f"{self.nbytes / 1e6:,.1f} MB on {self.device})"
        )

    def __len__(self) -> int:
        """Stored transitions of all ranks together; collective."""
        with self._group.call("len"):
            return int(self._group.agree("len", lambda: ({}, self._shard.size()))[:, 0].sum())

    # calls

    def add(self, *unnamed: NoReturn, priority: Any = None, **fields: Any) -> Tensor:
        """Store `m` transitions in this rank's shard and return their keys, (m,) int64; not collective.

        fields, priority: as in `ReplayBuffer.add`; `m` may differ between ranks.

        Raises as `ReplayBuffer.add`; nothing is stored by a call that raises.
        """
        self._apply_max_priority()
        return self._global_keys(self._shard.add(*unnamed, priority=priority, **fields))

    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        """Sample `B` transitions on each rank, as a Batch on its device; collective.

        batch_size: B >= 1, the same on every rank.
        beta:       exponent of the importance weights for this call, instead of the sampler's; the same on every rank.
        returns:    fields (B, *shape), `key` (B,) int64, global, `probability` (B,) float32 that one row of any rank is
                    that transition, `weight` (B,) float32, 1 for the largest over all ranks.

        Local mode: a row is transition i with probability q(i) = mass(i) / (R T_r), where T_r is the total mass of the
        shard. Weights are (R T_r / T) * (N mass(i) / T) ** -beta, divided by the largest, so the expected weighted mean
        over all ranks equals one buffer's. `Combined` and `Latest` take the newest transitions of the shard.
        Global mode: one buffer with the slots of all shards, in the order of ranks, would sample `R * B` rows; this
        rank gets B of them, from row `rank * B` on. The newest transitions are those with the largest keys.

        Raises RuntimeError if a rank stores nothing, ValueError on all ranks if batch sizes or betas differ or more
        distinct transitions are asked for than are stored. A beta schedule advances by one step.
        """
        sample = self._sample_local if self._mode == "local" else self._sample_global
        with self._group.call("sample"), self._shard._alone():
            self._apply_max_priority()
            return Batch(sample(batch_size, beta))

    def _sample_local(self, batch_size: int, beta: float | None) -> dict[str, Tensor]:
        shard = self._shard
        drawn: ShardDraw

        def draw() -> Contribution:
            nonlocal drawn
            batch, exponent = validation.check_batch_size(batch_size), validation.check_beta(beta)
            drawn = shard.draw(batch, exponent)
            return {"batch size": batch, "beta": exponent}, shard.row(drawn.log_scale)

        # on a GPU the host does not wait where every rank is known to have enough
        late = shard.device.type == "cuda"
        unread = late and isinstance(batch_size, int) and self._least_size >= max(1, self._sampler.needs(batch_size)[1])
        table = self._group.agree("sample", draw, late=late, unread=unread)
        if not unread:
            self._least_size = int(table[:, Column.SIZE].min())
        shard.raise_largest(table[:, Column.LARGEST].max())
        tensors = weighed(drawn, log_scales_of(table))
        return tensors | {"key": self._global_keys(tensors["key"])}

    def _sample_global(self, batch_size: int, beta: float | None) -> dict[str, Tensor]:
        shard, batch = self._shard, 0

        def checked() -> Contribution:
            nonlocal batch
            batch, exponent = validation.check_batch_size(batch_size), validation.check_beta(beta)
            log_scale = torch.zeros((), dtype=torch.float64, device=shard.device)
            return {"batch size": batch, "beta": exponent}, shard.row(log_scale)

        gathered = self._group.agree("sample", checked)
        table, rows = gathered.cpu().numpy(), batch * self.ranks
        try:
            stored = int(table[:, Column.SIZE].sum())
            shard._check_enough(rows, available=stored, call=f"sample({batch}) on {self.ranks} ranks")
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(error) from None
        shard.raise_largest(gathered[:, Column.LARGEST].max())
        if beta is None:
            beta = self._sampler.base.beta_at(int(table[:, Column.STEP].max()))
        assigned = assign_rows(self._sampler, table, rows, self._seed)
        return exchange_rows(shard, assigned, table, self.rank, beta, self._group.all_to_all)

    def update_priorities(self, keys: Any, priorities: Any) -> None:
        """Set the priorities of the transitions with these keys, wherever they are stored; collective.

        keys:       (m,) int64 as `batch.key`; `m` may differ between ranks, and be 0. Keys that are no longer live are
                    ignored, and counted by the rank that stored them; -1 stands for no key.
        priorities: (m,) absolute TD errors or other non-negative numbers, as in `ReplayBuffer.update_priorities`.

        If a key appears twice, its last priority wins; between ranks the higher rank wins. If the arguments of one rank
        are invalid, all ranks raise as `ReplayBuffer.update_priorities` does, and nothing changes.
        """
        group, shard, name = self._group, self._shard, "update_priorities"
        rows = torch.zeros((0, 2), dtype=torch.int64)

        def addressed() -> Contribution:
            nonlocal rows
            checked, numbers, _ = validation.as_update(keys, priorities, shard.device, as_array=False)
            checked, numbers = checked.to(shard.device), numbers.to(shard.device, torch.float64)
            owner = checked % group.size
            rows = torch.stack([checked, numbers.view(torch.int64)], dim=1)[owner.sort(stable=True).indices]
            return {}, torch.bincount(owner, minlength=group.size)

        with group.call(name):
            self._apply_max_priority()
            counts = group.agree(name, addressed)[:, : group.size].tolist()
            mine = group.all_to_all(rows, counts[group.rank], [row[group.rank] for row in counts])
            local = torch.div(mine[:, 0], group.size, rounding_mode="floor")
            shard.update_priorities(local, mine[:, 1].contiguous().view(torch.float64))
            if self._sampler.base.initial == "running":
                largest = shard._counters[Counter.MAX_MASS].clone()
                self._largest = group.all_reduce(largest, largest=True)

    def _apply_max_priority(self) -> None:
        """Wait for the largest mass that the last update gave on any rank, and store it as the initial mass here."""
        if self._largest is not None:
            with self._group.lock:
                message, self._largest = self._largest, None
                if message is not None:
                    with self._group.call("update_priorities"):
                        largest = message.wait()
                    with self._shard._alone():
                        self._shard.raise_largest(largest)

    def clear(self) -> None:
        """Remove all transitions of all ranks; keys continue to count up. Collective."""
        with self._group.call("clear"):
            self._apply_max_priority()
            self._group.agree("clear", lambda: ({}, None))
            self._least_size = 0
            self._shard.clear()

    def stats(self) -> Stats:
        """Diagnostics of all ranks together, the same on each; collective.

        Ages count stored transitions in the order of keys. Entropy and effective sample size describe the distribution
        that the weights correct for, in which a transition has its share of all masses.
        """

        def numbers() -> Contribution:
            with self._shard._alone():
                return {}, numbers_of(self._shard.stats(), int(self._shard.total())).to(self.device)

        with self._group.call("stats"):
            self._apply_max_priority()
            return combined(self._group.agree("stats", numbers))

    # state

    def save(self, path: str | PathLike[str]) -> None:
        """Write one checkpoint folder of all ranks; collective, and on a file system that all ranks share.

        Each rank writes its own files; rank 0 writes the manifest when all are on the disk, so that a crash of any rank
        leaves the old checkpoint or the new one. Files whose rows have not changed are not written again. The timeout
        does not limit how long writing takes, only how long the ranks wait for one that died.

        Raises as `ReplayBuffer.save`, on all ranks if one fails.
        """
        with self._group.call("save"):
            self._apply_max_priority()
            with self._shard._alone():
                saving.save(self._group, self._shard, path, self._config(self.capacity), self._seed)

    @class_only
    def load(
        cls,
        path: str | PathLike[str],
        device: torch.device | str | None = None,
        *,
        mode: Mode | None = None,
        group: Any = None,
        timeout: float = 60.0,
        storage_device: torch.device | str | None = None,
        storage_path: StoragePath | None = None,
    ) -> ShardedReplayBuffer:
        """Load the buffer that `save` wrote, on any number of ranks; collective.

        mode: the mode of the loaded buffer; None keeps the saved one.
        storage_device, storage_path: where the shards store their fields.

        On the number of ranks that saved it the whole state is restored: the next `sample` returns what it would have
        returned there. On another number of ranks the rows get new keys in the order of the old ones, the newest
        `added - 1`; keys do not change if every rank had added equally many. The capacity is rounded down to a multiple
        of the number of ranks, and each rank reads all files. `ReplayBuffer.load(path)` loads the checkpoint as one
        buffer, in the same order, and `ShardedReplayBuffer.load` loads the checkpoint of a ReplayBuffer.

        Raises CheckpointError that names the damage, on all ranks if one fails.
        """
        ranks = Group(group, device, timeout)
        arguments: dict[str, Any] = {"storage_device": storage_device, "storage_path": storage_path}
        saved: BufferCheckpoint

        def opened() -> Contribution:
            nonlocal saved
            saved = BufferCheckpoint(path)
            arguments.update({"mode": "local", **saved.arguments(), "capacity": saved.capacity, "seed": saved.seed})
            if mode is not None:
                arguments["mode"] = mode
            return {"checkpoint": saved.checkpoint.sha256}, None

        with ranks.call("load"):
            ranks.agree("load", opened)
        buffer = cls(**arguments | {"group": group, "device": device, "timeout": timeout})
        with buffer._group.call("load"), buffer._shard._alone():
            saving.fill(buffer._group, buffer._shard, saved)
        return buffer

    def close(self) -> None:
        """Release the process group; afterwards only calls on the rank's own shard work. Collective."""
        try:
            if self._group.works:
                self._apply_max_priority()
        finally:
            self._group.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ShardedReplayBuffer belongs to its process group and cannot be copied; save and load it.")

    # calls on this rank's shard

    def keys(self) -> Tensor:
        """(local_size,) int64 on the device, the live keys of this rank's shard, oldest first; not collective."""
        return self._global_keys(self._shard.keys())

    def __contains__(self, key: object) -> bool:
        """Whether a key, an int, is live in this rank's shard; not collective."""
        number = validation.check_key(key)
        return number % self.ranks == self.rank and number // self.ranks in self._shard

    def __getitem__(self, keys: Any) -> Batch:
        """The transitions of these live keys of this rank's shard, in their order; not collective.

        Raises KeyError naming the first key that is not live, or that another rank holds.
        """
        local = self._local_keys(keys)
        return Batch({**dict(self._shard[local].items()), "key": self._global_keys(local)})

    def priorities(self, keys: Any) -> Tensor:
        """The priorities of these live keys of this rank's shard, (m,) float64; not collective.

        Raises as `ReplayBuffer.priorities`, and KeyError for keys that another rank holds.
        """
        return self._shard.priorities(self._local_keys(keys))

    def __iter__(self) -> Iterator[Any]:
        """Raises TypeError."""
        raise TypeError("a ShardedReplayBuffer is not iterable: `buffer[buffer.keys()]` is what this rank holds.")

    def _global_keys(self, local: Tensor) -> Tensor:
        return local * self.ranks + self.rank

    def _local_keys(self, keys: Any) -> Tensor:
        checked = validation.as_keys(keys, self.device).to(self.device)
        elsewhere = (checked % self.ranks != self.rank).nonzero()
        if elsewhere.numel():
            key = int(checked[elsewhere[0, 0]])
            raise KeyError(f"key {key} is held by rank {key % self.ranks}; this is rank {self.rank} of {self.ranks}.")
        return torch.div(checked, self.ranks, rounding_mode="floor")


def _check_mode(sampler: Sampler, mode: str) -> None:
    """Raise ValueError for a sampler that this mode does not support."""
    base = sampler.base
    if mode not in base.shards:
        able = [name for name, kind in Sampler.kinds.items() if mode in getattr(kind, "shards", ())]
        other = f', or mode="{base.shards[0]}"' if base.shards else ""
        raise ValueError(f'mode="{mode}" cannot draw by {sampler}; use {" or ".join(able)}{other}.')
    if base.normalizes_over_buffer and not base.summed:
        raise ValueError(
            f'{sampler}: shards drawn by rank have no largest weight in common. Use normalize="batch", or Proportional.'
        )


def seed_of(seed: int, rank: int) -> int:
    """The seed of a rank's own draws; that of rank 0 is the buffer's."""
    if rank == 0:
        return seed
    words = np.random.SeedSequence((seed % 2**64, rank)).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))
