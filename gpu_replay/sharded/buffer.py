"""`ShardedReplayBuffer`: one replay buffer over the ranks of a process group, a shard on the device of each."""

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
from gpu_replay.base.state import config_of
from gpu_replay.batch import Batch
from gpu_replay.checkpoint.joint import KIND, JointCheckpoint
from gpu_replay.engines.draw_plan import DrawPlan, plan_of
from gpu_replay.engines.placement import StoragePath
from gpu_replay.engines.storage import UNIFORM, check_capacity
from gpu_replay.fields import Field, check_fields
from gpu_replay.ops.counters import Counter
from gpu_replay.samplers import LinearSchedule, Sampler
from gpu_replay.sharded import saving
from gpu_replay.sharded.global_draw import deal, exchanged
from gpu_replay.sharded.group import MAKING, Agreed, Group, Message, Offer
from gpu_replay.sharded.local_draw import levels_of, weighed
from gpu_replay.sharded.shard import Column, Shard, ShardDraw
from gpu_replay.sharded.statistics import combined, numbers_of
from gpu_replay.stats import Stats

Mode = Literal["local", "global"]


class ShardedReplayBuffer:
    """A replay buffer over all ranks of a `torch.distributed` process group: each holds a shard on its own device.

    capacity: transitions of all ranks together, rounded down to a multiple of the number R of ranks; at least R.
    fields:   name to Field, as in `ReplayBuffer`; the same on every rank, and so are sampler, mode and seed.
    sampler:  Uniform, Proportional, RankBased, Latest or Combined. By rank only in local mode and with
              `normalize="batch"`: global ranks would take a sort over all shards at every draw.
    mode:     "local": each rank draws from its own shard, no transition travels, and one small all-reduce makes the
              weights those of the whole. "global": the ranks together draw exactly what one buffer would, and rows
              travel to the ranks that asked for them.
    group:    of `torch.distributed`; None is the default group. Messages use NCCL for shards on GPUs and gloo for those
              on CPUs. A buffer over all ranks of the program makes a process group of its own.
    device:   of the shard; None is the GPU of the local rank with NCCL, else the CPU.
    seed:     of the random streams of all ranks.
    timeout:  seconds after which a rank that waits for another raises RuntimeError.
    storage_device, storage_path: of each shard, as in `ReplayBuffer`; rank r has the folder `rank{r}` in that path.

    Keys are global: `local key * R + rank`, where the local key counts the transitions that this rank added.

    Collective calls must be made by every rank, in the same order: making the buffer, `sample`, `update_priorities`,
    `stats`, `len`, `clear`, `save`, `load` and `close`. The others concern the rank's own shard and wait for nobody:
    `add`, `keys`, `in`, `buffer[keys]`, `priorities`, `local_size` and the attributes. The priority of new transitions
    with `initial="running"` is the largest ever given to any rank, agreed on with every `update_priorities` and
    `sample`; `add` waits until the last `update_priorities` has ended everywhere. With "stored" it is the largest in
    the shard.

    A rank that dies, or makes no call, makes the others raise RuntimeError within `timeout`; the buffer then refuses
    every further collective call, so load a checkpoint in new processes. What only the arguments or the content of one
    rank make impossible is raised by all ranks, and the buffer goes on. So is a call that another rank made with other
    arguments, or in whose place it made another one: nothing is done then. On GPUs a local `sample` and `add` do not
    wait for the device: what another rank got wrong in such a `sample` is raised by the next call that waits, as all
    other collective calls do, and it is the watchdog of NCCL that ends a process whose peer died meanwhile.

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
        self._known = 0
        ranks, slots = self._group.size, 0

        def checked() -> Offer:
            nonlocal slots
            slots = check_capacity(capacity)
            if slots < ranks:
                raise ValueError(f"capacity must be at least 1 on each of {ranks} ranks; found {slots}.")
            self._mode = validation.choice("mode", mode, ("local", "global"))
            self._fields, self._sampler, self._plan = check_fields(fields), sampler, plan_of(sampler)
            _check_plan(self._plan, sampler, self._mode)
            self._seed = validation.whole("seed", seed)
            settings = self._config(slots // ranks * ranks)
            return {"asked": slots, **settings, "seed": self._seed, "device": self._group.device.type}, None

        def made() -> Offer:
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
            self._group.own()
            self._group.agree(MAKING, made)

    def _config(self, capacity: int) -> dict[str, Any]:
        settings = config_of(KIND, capacity, self._fields, self._sampler)
        return {**settings, "mode": self._mode, "ranks": self._group.size}

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
        """How it draws: "local" or "global"."""
        return self._mode

    @property
    def device(self) -> torch.device:
        """The device of this rank's shard and of its batches."""
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

    def __len__(self) -> int:
        """Stored transitions of all ranks together; collective."""
        with self._group.call("len"):
            return int(self._group.agree("len", lambda: ({}, self._shard.size()))[:, 0].sum())

    # calls

    def add(self, *, priority: Any = None, **fields: Any) -> Tensor:
        """Store `m` transitions in this rank's shard and return their keys, (m,) int64; not collective.

        fields, priority: as in `ReplayBuffer.add`; `m` may differ between ranks.

        Raises as `ReplayBuffer.add`; nothing is stored by a call that raises.
        """
        self._settle()
        return self._global_keys(self._shard.add(priority=priority, **fields))

    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        """Sample `B` transitions on each rank, as a Batch on its device; collective.

        batch_size: B >= 1, the same on every rank.
        beta:       exponent of the importance weights for this call, instead of the sampler's; the same on every rank.
        returns:    fields (B, *shape), `key` (B,) int64, global, `probability` (B,) float32 that one row of all ranks'
                    is that transition, `weight` (B,) float32, 1 for the largest on all ranks together.

        Local mode: row by row the probability is q(i) = mass(i) / (R T_r), with T_r the total of the shard. Weights are
        (R T_r / T) * (N mass(i) / T) ** -beta, divided by the largest: the expected weighted mean over all ranks is
        that of one buffer. `Combined` and `Latest` take the newest of the shard.
        Global mode: the rows are those from `rank * B` on of the `R * B` that one buffer would draw whose slots are
        those of the shards, rank after rank; uniform draws count live slots in that order. The newest are those with
        the largest keys.

        Raises RuntimeError where a rank has nothing to draw from, ValueError on all ranks where batch sizes or betas
        differ or more distinct transitions are asked for than there are. A beta schedule advances by one.
        """
        sample = self._sample_local if self._mode == "local" else self._sample_global
        with self._group.call("sample"), self._shard._alone():
            self._settle()
            return Batch(sample(batch_size, beta))

    def _sample_local(self, batch_size: int, beta: float | None) -> dict[str, Tensor]:
        shard = self._shard
        drawn: ShardDraw

        def draw() -> Offer:
            nonlocal drawn
            batch, exponent = _checked(batch_size, beta)
            drawn = shard.draw(batch, exponent)
            return {"batch size": batch, "beta": exponent}, shard.row(drawn.level)

        # on a GPU the host does not wait where every rank is known to have enough
        late = shard.device.type == "cuda"
        unread = late and isinstance(batch_size, int) and self._known >= max(1, self._plan.distinct(batch_size))
        mark = shard._draws.mark()
        try:
            table = self._group.agree("sample", draw, late=late, unread=unread)
        except Agreed:
            shard._take_back(mark)
            raise
        if not unread:
            self._known = int(table[:, Column.SIZE].min())
        shard.raise_largest(table[:, Column.LARGEST].max())
        drawn.tensors["key"] = self._global_keys(drawn.tensors["key"])
        return weighed(drawn, levels_of(table))

    def _sample_global(self, batch_size: int, beta: float | None) -> dict[str, Tensor]:
        shard, batch = self._shard, 0

        def checked() -> Offer:
            nonlocal batch
            batch, exponent = _checked(batch_size, beta)
            level = torch.zeros((), dtype=torch.float64, device=shard.device)
            return {"batch size": batch, "beta": exponent}, shard.row(level)

        found = self._group.agree("sample", checked)
        table, rows = found.cpu().numpy(), batch * self.ranks
        try:
            stored = int(table[:, Column.SIZE].sum())
            shard._check_enough(rows, available=stored, call=f"sample({batch}) on {self.ranks} ranks")
        except (RuntimeError, ValueError) as error:
            raise Agreed(error) from None
        shard.raise_largest(found[:, Column.LARGEST].max())
        planned = self._plan.beta
        if beta is None:
            step = int(table[:, Column.STEP].max())
            beta = planned(step) if isinstance(planned, LinearSchedule) else planned
        dealt = deal(self._plan, table, rows, self._seed)
        return exchanged(shard, self._plan, dealt, table, self.rank, beta, self._group.all_to_all)

    def update_priorities(self, keys: Any, priorities: Any) -> None:
        """Give the transitions with these keys new priorities, wherever they are stored; collective.

        keys:       (m,) int64 as `batch.key`; `m` may differ between ranks, and be 0. Those no longer live are ignored
                    and counted by the rank that held them.
        priorities: (m,) absolute TD errors or other non-negative numbers; the sign is dropped.

        A key that appears twice: the last one wins, and that of a later rank after that of an earlier one. Raises on
        all ranks where the arguments of one are invalid, as `ReplayBuffer.update_priorities`; nothing is changed then.
        """
        group, shard, name = self._group, self._shard, "update_priorities"
        rows = torch.zeros((0, 2), dtype=torch.int64)

        def addressed() -> Offer:
            nonlocal rows
            found, numbers = validation.as_update(keys, priorities, shard.device, as_array=False)
            found, numbers = found.to(shard.device), numbers.to(shard.device, torch.float64)
            owner = found % group.size
            rows = torch.stack([found, numbers.view(torch.int64)], dim=1)[owner.sort(stable=True).indices]
            return {}, torch.bincount(owner, minlength=group.size)

        with group.call(name):
            self._settle()
            counts = group.agree(name, addressed)[:, : group.size].tolist()
            mine = group.all_to_all(rows, counts[group.rank], [row[group.rank] for row in counts])
            local = torch.div(mine[:, 0], group.size, rounding_mode="floor")
            shard.update_priorities(local, mine[:, 1].contiguous().view(torch.float64))
            if self._plan.prioritized and self._plan.initial == "running":
                largest = shard._counters[Counter.MAX_MASS].clone()
                self._largest = group.all_reduce(largest, largest=True)

    def _settle(self) -> None:
        """Take into account the largest mass that the last update gave on any rank."""
        if self._largest is not None:
            with self._group.lock:
                message, self._largest = self._largest, None
                if message is not None:
                    with self._group.call("update_priorities"):
                        largest = message.wait()
                    with self._shard._alone():
                        self._shard.raise_largest(largest)

    def clear(self) -> None:
        """Forget all transitions of all ranks; keys go on counting. Collective."""
        with self._group.call("clear"):
            self._settle()
            self._group.agree("clear", lambda: ({}, None))
            self._known = 0
            self._shard.clear()

    def stats(self) -> Stats:
        """Diagnostics of all ranks together, the same on each; collective.

        Ages count stored transitions in the order of keys. Entropy and effective sample size are those of the
        distribution that weights refer to, in which a transition has its share of all masses.
        """

        def numbers() -> Offer:
            with self._shard._alone():
                return {}, numbers_of(self._shard.stats(), int(self._shard.total())).to(self.device)

        with self._group.call("stats"):
            self._settle()
            return combined(self._group.agree("stats", numbers))

    # state

    def save(self, path: str | PathLike[str]) -> None:
        """Write one checkpoint folder of all ranks; collective, and on a file system that all ranks share.

        Each rank writes its own files; rank 0 writes the manifest when all are on the disk, so that a crash of any rank
        leaves the old checkpoint or the new one. Files whose rows have not changed are not written again. Writing takes
        as long as it does: the timeout is for a rank that dies.

        Raises as `ReplayBuffer.save`, on all ranks if one fails.
        """
        with self._group.call("save"):
            self._settle()
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
        """The buffer that `save` wrote, on any number of ranks; collective.

        mode: another one than the saved buffer's.
        storage_device, storage_path: where the fields of the shards are to be.

        On as many ranks as saved it, everything is as it was: the next `sample` is the one that they would have drawn.
        On another number of ranks the rows are numbered again in the order of their keys, the newest
        `added - 1`: keys stay as they were where every rank had added as many. Capacity is that of the saved buffer,
        rounded down to a multiple of the ranks. Each rank then reads all files. `ReplayBuffer.load(path)` loads it as
        one buffer, by the same order, and `ShardedReplayBuffer.load` loads the checkpoint of a ReplayBuffer.

        Raises CheckpointError that names the damage, on all ranks if one fails.
        """
        ranks = Group(group, device, timeout)
        arguments: dict[str, Any] = {"storage_device": storage_device, "storage_path": storage_path}
        found: JointCheckpoint

        def opened() -> Offer:
            nonlocal found
            found = JointCheckpoint(path)
            arguments.update(saving.load_arguments(found))
            if mode is not None:
                arguments["mode"] = mode
            return {"checkpoint": found.checkpoint.sha256}, None

        with ranks.call("load"):
            ranks.agree("load", opened)
        buffer = cls(**arguments, group=group, device=device, timeout=timeout)
        with buffer._group.call("load"), buffer._shard._alone():
            saving.fill(buffer._group, buffer._shard, found)
        return buffer

    def close(self) -> None:
        """Give up the process group; afterwards only calls on the rank's own shard work. Collective."""
        self._group.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ShardedReplayBuffer belongs to its process group and cannot be copied; save and load it.")

    # calls on this rank's shard

    def keys(self) -> Tensor:
        """(local_size,) int64 on the device, the live keys of this rank's shard, oldest first; not collective."""
        return self._global_keys(self._shard.keys())

    def __contains__(self, key: object) -> bool:
        """Whether a key, an int, is live in this rank's shard; not collective."""
        if isinstance(key, Tensor) and key.dim() == 0 and not key.dtype.is_floating_point:
            key = key.item()
        if isinstance(key, bool) or not isinstance(key, (int, np.integer)):
            # the shard checks the type of the key
            return key in self._shard
        return int(key) % self.ranks == self.rank and int(key) // self.ranks in self._shard

    def __getitem__(self, keys: Any) -> Batch:
        """The transitions of these live keys of this rank's shard, in their order; not collective.

        Raises KeyError naming the first key that is not live, or that another rank holds.
        """
        found = self._local_keys(keys)
        return Batch({**dict(self._shard[found].items()), "key": self._global_keys(found)})

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
        found = validation.as_keys(keys, self.device).to(self.device)
        elsewhere = (found % self.ranks != self.rank).nonzero()
        if elsewhere.numel():
            key = int(found[elsewhere[0, 0]])
            raise KeyError(f"key {key} is held by rank {key % self.ranks}; this is rank {self.rank} of {self.ranks}.")
        return torch.div(found, self.ranks, rounding_mode="floor")


def _checked(batch_size: object, beta: object) -> tuple[int, float | None]:
    return validation.batch_size(batch_size), None if beta is None else validation.importance(beta)


def _check_plan(plan: DrawPlan, sampler: Sampler, mode: str) -> None:
    """Raise ValueError for a sampler that this mode does not support."""
    if plan.kind != "rank":
        return
    if mode == "global":
        raise ValueError(
            f'mode="global" cannot draw by rank: {sampler} would sort all shards at every draw. '
            'Use Proportional(...), or mode="local", which ranks within each shard.'
        )
    if plan.lowest_of_all:
        raise ValueError(
            f'{sampler}: shards drawn by rank have no largest weight in common. Use normalize="batch", or Proportional.'
        )


def seed_of(seed: int, rank: int) -> int:
    """The seed of a rank's own draws; that of rank 0 is the buffer's."""
    if rank == 0:
        return seed
    words = np.random.SeedSequence((seed % 2**64, rank)).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))
