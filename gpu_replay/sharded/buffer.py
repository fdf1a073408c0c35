"""`ShardedReplayBuffer`: one replay buffer over the ranks of a process group, a shard on the device of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.batch import Batch
from gpu_replay.checkpoint.config import describe_field, describe_sampler, difference
from gpu_replay.checkpoint.joint import KIND, JointCheckpoint
from gpu_replay.engines.draw_plan import DrawPlan, plan_of
from gpu_replay.engines.placement import StoragePath
from gpu_replay.engines.storage import UNIFORM, check_capacity
from gpu_replay.fields import Field, check_fields
from gpu_replay.ops.counters import Counter
from gpu_replay.samplers import Sampler
from gpu_replay.schedule import LinearSchedule
from gpu_replay.sharded import saving
from gpu_replay.sharded.contents import LocalContents, Mode
from gpu_replay.sharded.global_draw import deal, exchanged
from gpu_replay.sharded.group import Agreed, Group, Message
from gpu_replay.sharded.local_draw import levels_of, weighed
from gpu_replay.sharded.shard import Column, Shard
from gpu_replay.sharded.statistics import combined, numbers_of
from gpu_replay.stats import Stats


class ShardedReplayBuffer(LocalContents):
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
    seed:     of the draws of all ranks.
    timeout:  seconds after which a rank that waits for another raises RuntimeError.
    storage_device, storage_path: of each shard, as in `ReplayBuffer`; rank r has the folder `rank{r}` in that path.

    Keys are global: `local key * R + rank`, where the local key counts what this rank has added.

    Collective calls must be made by every rank, in the same order: making the buffer, `sample`, `update_priorities`,
    `stats`, `len`, `clear`, `save`, `load` and `close`. The others concern the rank's own shard and wait for nobody:
    `add`, `keys`, `in`, `buffer[keys]`, `priorities`, `local_size` and the attributes. The priority of new transitions
    with `initial="running"` is the largest ever given to any rank, agreed on with every `update_priorities` and
    `sample`; `add` waits until the last `update_priorities` has ended everywhere. With "stored" it is the largest in
    the shard.

    A rank that dies, or does not make the same call, makes the others raise RuntimeError within `timeout`; the buffer
    then refuses every further collective call, so load a checkpoint in new processes. An error that only the arguments
    or the content of one rank cause is raised by all, and the buffer goes on. On GPUs a local `sample` and `add` do not
    wait for the device, so there it is the watchdog of NCCL that ends a process whose peer died meanwhile;
    `update_priorities` and a global `sample` wait for the device once.

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
        slots = check_capacity(capacity)
        self._mode: Mode = validation.choice("mode", mode, ("local", "global"))
        self._fields = check_fields(fields)
        self._sampler = sampler
        self._plan = plan_of(sampler)
        _check_plan(self._plan, sampler, self._mode)
        self._seed = validation.whole("seed", seed)
        self._group = Group(group, device, timeout)
        ranks = self._group.size
        self._largest: Message | None = None
        # stored transitions that each rank is known to have
        self._known = 0
        name = "making a ShardedReplayBuffer"
        with self._group.call(name):
            own: BaseException | None = None
            try:
                if slots < ranks:
                    raise ValueError(f"capacity must be at least 1 on each of {ranks} ranks; found {slots}.")
                self._shard = Shard(
                    slots // ranks,
                    self._fields,
                    whole=slots // ranks * ranks,
                    sampler=sampler,
                    device=self._group.device,
                    seed=self._seed if self._mode == "global" else seed_of(self._seed, self._group.rank),
                    storage_device=storage_device,
                    storage_path=None if storage_path is None else Path(storage_path) / f"rank{self._group.rank}",
                )
            except Exception as error:
                own = error
            settings = {"asked": slots, **self._config(slots // ranks * ranks), "seed": self._seed}
            told = self._group.tell(json.dumps({"error": None if own is None else str(own), "settings": settings}))
            answers = [json.loads(each) for each in told]
            self._group.agree([answer["error"] for answer in answers], own, name)
            for rank, answer in enumerate(answers):
                unlike = difference(answers[0]["settings"], answer["settings"])
                if unlike is not None:
                    unlike = unlike.replace(" here", " on rank 0").replace(" there", f" on rank {rank}")
                    raise Agreed(ValueError(f"all ranks must make the same ShardedReplayBuffer: {unlike}."))

    def _config(self, capacity: int) -> dict[str, Any]:
        return {
            "kind": KIND,
            "capacity": capacity,
            "fields": {name: describe_field(field) for name, field in self._fields.items()},
            "sampler": describe_sampler(self._sampler),
            "mode": self._mode,
            "ranks": self._group.size,
        }

    def __len__(self) -> int:
        """Stored transitions of all ranks together; collective."""
        with self._call("len"):
            return int(self._group.all_reduce(self._shard.size()).wait(on_host=True))

    # calls

    def add(self, *, priority: Any = None, **fields: Any) -> Tensor:
        """Store `m` transitions in this rank's shard and return their keys, (m,) int64; not collective.

        fields, priority: as in `ReplayBuffer.add`; `m` may differ between ranks.

        Raises as `ReplayBuffer.add`; nothing is stored by a call that raises.
        """
        self._settle()
        return self._global_keys(self._shard.add(priority=priority, **fields))

    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        """Draw `B` transitions on each rank, as a Batch on its device; collective.

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

        Raises RuntimeError where a rank has nothing to draw from, ValueError on all ranks where batch sizes differ or
        more distinct transitions are asked for than there are. A beta schedule advances by one.
        """
        batch = validation.batch_size(batch_size)
        exponent = None if beta is None else validation.importance(beta)
        with self._call("sample"), self._shard._alone():
            self._settle()
            tensors = (self._sample_local if self._mode == "local" else self._sample_global)(batch, exponent)
        return Batch(tensors)

    def _sample_local(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        shard, own, drawn = self._shard, None, None
        try:
            shard._check_enough(batch)
        except (RuntimeError, ValueError) as error:
            own = error
        mark = shard._draws.mark()
        if own is None:
            drawn = shard.begin_draw(batch, beta)
        message = self._group.table(shard.row(batch, None if drawn is None else drawn.level))
        # while the ranks agree
        tensors = {} if drawn is None else drawn.gather()
        needed = max(1, self._plan.distinct(batch))
        unread = shard.device.type == "cuda" and own is None and self._known >= needed
        table = message.wait(on_host=not unread)
        if not unread:
            try:
                self._check(table.cpu().numpy(), batch, own)
            except Agreed:
                shard._take_back(mark)
                raise
        if drawn is None:
            raise RuntimeError("a rank that cannot draw has refused.")
        shard.raise_largest(table[:, Column.LARGEST].max())
        tensors["key"] = self._global_keys(tensors["key"])
        return weighed(tensors, drawn, levels_of(table))

    def _sample_global(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        shard, rank, rows = self._shard, self.rank, batch * self.ranks
        level = torch.zeros((), dtype=torch.float64, device=shard.device)
        message = self._group.table(shard.row(batch, level))
        found = message.wait(on_host=True)
        table = found.cpu().numpy()
        self._check(table, batch, None)
        try:
            stored = int(table[:, Column.SIZE].sum())
            shard._check_enough(rows, among=stored, call=f"sample({batch}) on {self.ranks} ranks")
        except (RuntimeError, ValueError) as error:
            raise Agreed(error) from None
        shard.raise_largest(found[:, Column.LARGEST].max())
        planned = self._plan.beta
        if beta is None:
            step = int(table[:, Column.STEP].max())
            beta = planned(step) if isinstance(planned, LinearSchedule) else planned
        dealt = deal(self._plan, table, rows, self._seed)
        return exchanged(shard, self._plan, dealt, table, rank, beta, self._group.all_to_all)

    def _check(self, table: np.ndarray, batch: int, own: BaseException | None) -> None:
        """Raise on every rank where one cannot draw, or the batches differ."""
        sizes = table[:, Column.SIZE].tolist()
        asked = sorted(set(table[:, Column.BATCH].tolist()))
        if len(asked) > 1:
            raise Agreed(ValueError(f"sample needs the same batch size on every rank; found {asked}."))
        errors = [
            f"it cannot draw {batch} rows from its shard, which holds {size} transitions. Add more there first."
            if failed
            else None
            for failed, size in zip(table[:, Column.FAILED].tolist(), sizes, strict=True)
        ]
        self._group.agree(errors, own, f"sample({batch})")
        self._known = min(sizes)

    def update_priorities(self, keys: Any, priorities: Any) -> None:
        """Give the transitions with these keys new priorities, wherever they are stored; collective.

        keys:       (m,) int64 as `batch.key`; `m` may differ between ranks, and be 0. Those no longer live are ignored
                    and counted by the rank that held them.
        priorities: (m,) absolute TD errors or other non-negative numbers; the sign is dropped.

        A key that appears twice: the last one wins, and that of a later rank after that of an earlier one. Raises on
        all ranks where the arguments of one are invalid, as `ReplayBuffer.update_priorities`; nothing is changed then.
        """
        group, shard, name = self._group, self._shard, "update_priorities"
        with self._call(name):
            self._settle()
            found = numbers = torch.zeros(0, dtype=torch.int64, device=shard.device)
            own: BaseException | None = None
            try:
                found, numbers = validation.as_update(keys, priorities, shard.device, as_array=False)
            except Exception as error:
                own = error
            found, numbers = found.to(shard.device), numbers.to(shard.device, torch.float64)
            owner = found % group.size
            order = owner.sort(stable=True).indices
            counts = torch.bincount(owner, minlength=group.size)
            head = torch.stack([counts, torch.full_like(counts, own is not None)], dim=1)
            ones = [1] * group.size
            heads = torch.stack([head, group.all_to_all(head, ones, ones)]).tolist()
            failed = [f"{name} was given invalid arguments there" if each[1] else None for each in heads[1]]
            group.agree(failed, own, name)
            rows = torch.stack([found, numbers.view(torch.int64)], dim=1)[order]
            mine = group.all_to_all(rows, [each[0] for each in heads[0]], [each[0] for each in heads[1]])
            local = torch.div(mine[:, 0], group.size, rounding_mode="floor")
            shard.update_priorities(local, mine[:, 1].contiguous().view(torch.float64))
            if self._plan.prioritized and self._plan.initial == "running":
                largest = shard._counters[Counter.MAX_MASS].clone()
                self._largest = group.all_reduce(largest, largest=True)

    def _settle(self) -> None:
        """Count with the largest mass that the last update gave on any rank."""
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
        with self._call("clear"):
            self._settle()
            self._group.all_reduce(self._shard.size()).wait(on_host=True)
            self._known = 0
            self._shard.clear()

    def stats(self) -> Stats:
        """Diagnostics of all ranks together, the same on each; collective.

        Ages count in the order of keys, over what is stored. Entropy and effective sample size are those of the
        distribution that weights refer to, in which a transition has its share of all masses.
        """
        with self._call("stats"):
            self._settle()
            with self._shard._alone():
                row = numbers_of(self._shard.stats(), int(self._shard.total()))
            return combined(self._group.table(row.to(self.device)).wait(on_host=True).cpu().numpy())

    # state

    def save(self, path: str | PathLike[str]) -> None:
        """Write one checkpoint folder of all ranks; collective, and on a file system that all ranks share.

        Each rank writes its own files; rank 0 writes the manifest when all are on the disk, so that a crash of any rank
        leaves the old checkpoint or the new one. Files whose rows have not changed are not written again. Writing takes
        as long as it does: the timeout is for a rank that dies.

        Raises as `ReplayBuffer.save`, on all ranks if one fails.
        """
        with self._call("save"):
            self._settle()
            with self._shard._alone():
                saving.save(self._group, self._shard, path, self._config(self.capacity), self._seed)

    @classmethod
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
        On another number rows go by their keys, in the order of which they are numbered again, the newest
        `added - 1`: keys stay as they were where every rank had added as many. Capacity is that of the saved buffer,
        rounded down to a multiple of the ranks. Each rank then reads all files. `ReplayBuffer.load(path)` loads it as
        one buffer, by the same order, and `ShardedReplayBuffer.load` loads what a ReplayBuffer saved.

        Raises CheckpointError that says what is damaged, on all ranks if one fails.
        """
        found = JointCheckpoint(path)
        arguments = saving.load_arguments(found)
        if mode is not None:
            arguments["mode"] = mode
        arguments |= {"storage_device": storage_device, "storage_path": storage_path}
        buffer = cls(**arguments, group=group, device=device, timeout=timeout)
        with buffer._call("load"), buffer._shard._alone():
            saving.fill(buffer._group, buffer._shard, found)
        return buffer

    def close(self) -> None:
        """Give up the process group; only what concerns the rank's own shard works from then on. Collective."""
        self._group.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ShardedReplayBuffer belongs to its process group and cannot be copied; save and load it.")

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        with self._group.call(name):
            yield


def _check_plan(plan: DrawPlan, sampler: Sampler, mode: str) -> None:
    """Raise ValueError for what ranks cannot draw together."""
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
