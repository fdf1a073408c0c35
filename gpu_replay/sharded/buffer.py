"""`ShardedReplay`: the buffers that the ranks of a process group made for their own environments, as one memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.base.buffer import Buffer
from gpu_replay.base.refusals import class_only
from gpu_replay.batch import Batch
from gpu_replay.buffer import ReplayBuffer
from gpu_replay.checkpoint.config import config_of
from gpu_replay.checkpoint.format import read_checkpoint
from gpu_replay.engines.storage import check_device
from gpu_replay.errors import CheckpointError
from gpu_replay.ops.counters import Counter
from gpu_replay.sharded import saving
from gpu_replay.sharded.group import MAKING, CollectiveError, Contribution, Group
from gpu_replay.sharded.statistics import combined
from gpu_replay.sharded.weights import correct, drawable, exponent_of, log_scale_of
from gpu_replay.stats import Stats
from gpu_replay.trajectory_buffer import TrajectoryReplayBuffer

# what each rank may have its own of
_OWN_SETTINGS = ("capacity", "num_envs", "final_capacity")
# what concerns the rank's own buffer alone
_OWN_CALLS = {"add", "extend", "begin_episodes", "update_priorities", "write", "keys", "priorities", "batches"}
_OWN_CALLS |= {"device", "fields", "sampler"}


class ShardedReplay:
    """The buffers of all ranks of a `torch.distributed` process group as one memory: each rank samples from its own, with
    the weights of the whole, and no transition travels.

    buffer:  this rank's own ReplayBuffer or TrajectoryReplayBuffer, with any sampler. The class, the sampler, the fields
             and the settings of windows must be the same on every rank, the seeds must differ (`seed=rank`); capacity
             and number of environments may differ.
    group:   a `torch.distributed` process group; None is the default group. Messages use NCCL for buffers on GPUs and
             gloo for those on CPUs. A memory over all ranks of the program makes its own process group.
    timeout: seconds after which a rank that waits for another raises RuntimeError, from 0.001 to 1e9.

    `add`, `extend`, `begin_episodes`, `update_priorities`, `write`, `keys`, `priorities`, `batches`, `in` and
    `shard[keys]` are those of the rank's own buffer, whose keys never leave their rank; `shard.buffer` has all others.
    Every rank must make the collective calls, in the same order: the constructor, `sample`, `sample_sequences`, `stats`,
    `len`, `clear`, `save`, `load` and `close`. With `initial="running"` every sample tells all ranks the largest priority
    that any was given.

    If a rank dies or does not make a call, the others raise RuntimeError within `timeout`; all further collective calls
    are then refused, so load a checkpoint in new processes. If the arguments or the contents of one rank do not allow a
    call, or ranks pass different arguments or make different calls, all ranks raise, nothing changes, and you can go on.
    On GPUs a sample does not wait for the device, except for the first of its kind; the next call that waits raises the
    error of another rank in such a sample. If a rank died meanwhile, the NCCL watchdog ends the processes that wait.

    Raises RuntimeError without an initialised process group, ValueError where ranks disagree or the group has no backend
    for the device.
    """

    def __init__(self, buffer: Buffer, group: Any = None, timeout: float = 60.0) -> None:
        self._group = Group(group, getattr(buffer, "device", torch.device("cpu")), timeout)
        # the largest batch of each kind that all ranks are known to have enough for
        self._proven: dict[str, int] = {}

        def checked() -> Contribution:
            if not isinstance(buffer, Buffer):
                raise TypeError(f"ShardedReplay needs a ReplayBuffer or TrajectoryReplayBuffer; found {buffer!r}.")
            settings = config_of(type(buffer).__name__, buffer._arguments())
            alike = {name: value for name, value in settings.items() if name not in _OWN_SETTINGS}
            return alike | {"device": buffer.device.type}, torch.tensor([0, buffer.seed % 2**63, 0])

        with self._group.call(MAKING):
            seeds = self._group.agree(MAKING, checked)[:, 1].tolist()
            if len({*seeds}) < len(seeds):
                error = ValueError(f"each rank needs its own seed, such as seed=rank; the ranks have {seeds}.")
                raise CollectiveError(error)
            self._group.adopt_group()
        self.buffer = buffer

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        """Processes that share the memory, `R`."""
        return self._group.size

    # calls on this rank's own buffer

    def __getattr__(self, name: str) -> Any:
        if name in _OWN_CALLS:
            return getattr(self.buffer, name)
        raise AttributeError(f"ShardedReplay has no {name!r}; its `buffer` is this rank's own.")

    def __getitem__(self, keys: Any) -> Batch:
        """What this rank's buffer holds under these keys."""
        return self.buffer[keys]

    def __contains__(self, key: object) -> bool:
        """Whether a key is live in this rank's buffer."""
        return key in self.buffer

    def __iter__(self) -> Iterator[Any]:
        """Raises TypeError, as the buffer does."""
        return iter(self.buffer)

    def __bool__(self) -> bool:
        """Whether this rank's buffer stores a transition; no communication, so `if shard` is safe on one rank."""
        return len(self.buffer) > 0

    def __repr__(self) -> str:
        return f"ShardedReplay(rank {self.rank} of {self.ranks} with {self.buffer!r})"

    # collective calls

    def __len__(self) -> int:
        """Stored transitions of all ranks together."""
        with self._group.call("len"):
            return int(self._group.agree("len", lambda: ({}, torch.tensor([0, len(self.buffer), 0])))[:, 1].sum())

    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        """Sample `B` rows on each rank, from its own buffer, as that buffer's `sample`; collective.

        batch_size, beta: the same on every rank.

        A row of any rank is `i` with probability q(i) = mass(i) / (R T_r), where T_r is the total mass of its buffer:
        that is `probability`. Weights are (R T_r / T) * (N mass(i) / T) ** -beta, divided by the largest over all ranks,
        so the expected weighted mean over all ranks equals one buffer's. With RankBased and samplers of your own the
        share of a buffer is that of its rows. `Combined` and `Latest` take the newest rows of the rank.

        Raises as the buffer's `sample`, on all ranks if on one; ValueError if batch sizes or betas differ.
        """
        return self._drawn("sample", partial(self.buffer.sample, batch_size, beta=beta), batch_size, beta, {})

    def sample_sequences(
        self, batch_size: int, length: int, burn_in: int = 0, *, beta: float | None = None, **settings: Any
    ) -> Batch:
        """Sample `B` windows on each rank as its trajectory buffer's `sample_sequences`, with weights as `sample`.

        With `strict` or `stride` the share of a buffer is that of all its eligible steps, whatever part of them fits.
        """
        buffer: Any = self.buffer
        call = partial(buffer.sample_sequences, batch_size, length, burn_in, beta=beta, **settings)
        return self._drawn("sample_sequences", call, batch_size, beta, {"length": length, "burn in": burn_in, **settings})

    def _drawn(
        self, name: str, draw: Callable[[], Batch], size: int, beta: float | None, settings: dict[str, Any]
    ) -> Batch:
        buffer, batch, chance = self.buffer, None, 0
        kind = f"{name} {settings}"
        # on a GPU the host does not wait where every rank is known to have enough
        late = buffer.device.type == "cuda"
        unread = late and isinstance(size, int) and self._proven.get(kind, 0) >= size
        with self._group.call(name), buffer._alone():
            before, counts = buffer._counters.clone(), buffer._counters

            def drawn() -> Contribution:
                nonlocal batch, chance
                rows, power = validation.check_batch_size(size), validation.check_beta(beta)
                exponent = exponent_of(buffer, power)
                batch, chance = draw(), rows - buffer.sampler.newest_of(rows)
                log_scale = log_scale_of(buffer, batch, chance, exponent)
                numbers = [exponent.view(torch.int64), log_scale.view(torch.int64), counts[Counter.MAX_MASS]]
                alike = {"batch size": rows, "beta": power, **{name: int(each) for name, each in settings.items()}}
                return alike, torch.stack(numbers)

            try:
                table = self._group.agree(name, drawn, late=late, unread=unread)
            except CollectiveError:
                if batch is not None:
                    self._undo(batch.key, before)
                raise
            if not unread:
                self._proven[kind] = size
            log_scales = table[:, 1].contiguous().view(torch.float64)
            correct(batch, chance, log_scales[self.rank], log_scales)
            largest = table[:, 2].max().clamp(max=buffer._state.rule.limit)
            counts[Counter.MAX_MASS] = torch.maximum(counts[Counter.MAX_MASS], largest)
            return batch

    def _undo(self, keys: Tensor, counters: Tensor) -> None:
        """Let a sample of these keys, before which the counters were these, not have been."""
        slots = keys[keys >= 0] % self.buffer._state.slots
        self.buffer._storage.times_sampled.index_add_(0, slots, torch.full_like(slots, -1, dtype=torch.int32))
        self.buffer._counters.copy_(counters)

    def stats(self) -> Stats:
        """Diagnostics of all ranks together, the same on each; collective.

        Ages count the transitions that the same rank added since. Entropy and effective sample size describe the
        distribution that the weights correct for, in which a row has its share of all masses.
        """
        text = ""

        def numbers() -> Contribution:
            nonlocal text
            buffer = self.buffer
            with buffer._alone():
                total = buffer.total_mass() if buffer.sampler.base.summed else int(drawable(buffer))
                text = json.dumps(vars(buffer.stats()) | {"total": total})
            return {}, None

        with self._group.call("stats"):
            self._group.agree("stats", numbers)
            return combined([json.loads(each) for each in self._group.all_gather_text(text)])

    def clear(self) -> None:
        """Remove all transitions of all ranks; keys continue to count up. Collective."""
        with self._group.call("clear"):
            self._group.agree("clear", lambda: ({}, None))
            self._proven.clear()
            self.buffer.clear()

    def save(self, path: str | PathLike[str]) -> None:
        """Write the checkpoints of all ranks into one folder; collective, and on a file system that all ranks share.

        Each rank writes a complete checkpoint of its own buffer; rank 0 puts them in force when all are on the disk, so
        that a crash of any rank leaves the old set or the new one. Shards whose rows have not changed are not written
        again. The timeout does not limit how long writing takes, only how long the ranks wait for one that died.

        Raises as the buffer's `save`, on all ranks if one fails.
        """
        with self._group.call("save"):
            saving.save(self._group, self.buffer, path)

    @class_only
    def load(
        cls,
        path: str | PathLike[str],
        device: torch.device | str | None = None,
        *,
        group: Any = None,
        timeout: float = 60.0,
        **settings: Any,
    ) -> ShardedReplay:
        """Load what `save` wrote, on the same number of ranks: the next `sample` returns what it would have there.

        settings: of the `load` of the buffer's class: `relabel`, `begin_episodes`, `storage_device`, `storage_path`.

        Raises CheckpointError that names the damage, on all ranks if one fails, or says where the ranks' own checkpoints
        are, if another number of ranks saved them.
        """
        ranks = Group(group, check_device(device), timeout)
        read: Callable[[], Buffer]

        def opened() -> Contribution:
            nonlocal read
            folder, parts = saving.read_set(path)
            part = saving.part_of(folder, ranks.rank)
            if len(parts) != ranks.size:
                raise CheckpointError(
                    f"{path} was saved by {len(parts)} ranks and cannot be loaded by {ranks.size}. Each rank's part is a "
                    f"checkpoint of its own: the load of the buffer's class reads {saving.part_of(folder, 0)}, and so on "
                    f"to rank{len(parts) - 1}; fill new buffers from old.batches(size)."
                )
            saved = read_checkpoint(part)
            if saved.sha256 != parts[ranks.rank]:
                raise CheckpointError(f"{part} is not what the ranks saved together; another save has replaced it.")
            single = saved.manifest["settings"]["kind"] == ReplayBuffer.__name__
            read = partial((ReplayBuffer if single else TrajectoryReplayBuffer).load, part, device, **settings)
            return {"checkpoint": parts}, None

        with ranks.call("load"):
            ranks.agree("load", opened)
            buffer = ranks.run_on_all(lambda: read(), "load")
        return cls(buffer, group, timeout)

    def close(self) -> None:
        """Release the process group; afterwards only calls on the rank's own buffer work. Collective."""
        self._group.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ShardedReplay belongs to its process group and cannot be copied; save and load it.")
