"""`ShardedReplay`: the buffers that the ranks of a process group made for their own environments, as one memory.

Each rank samples from its own buffer, and one small message corrects the weights to those of the whole memory.

Let the buffer of rank `r` of `R` have the total mass `T_r`, let `T` be their sum and `N` the number of all rows that
can be drawn. One buffer with all rows would sample `i` with P(i) = mass(i) / T, with the weight (N P(i)) ** -beta. Here
every rank samples equally many rows, so a row of any rank is `i` with q(i) = (1 / R) mass(i) / T_r. Its weight is then

    w(i) = P(i) / q(i) * (N P(i)) ** -beta = (R T_r / T) * (N mass(i) / T) ** -beta

and the expected weighted mean over all rows equals that of one buffer, for every beta. Dividing by the largest weight
cancels all factors that the ranks share. The rank's own buffer gives its rows the probability p(i) = mass(i) / T_r and
the weight v(i) = (l_r / mass(i)) ** beta, of some l_r. So any of its rows tells

    g_r = T_r l_r ** -beta = T_r (T_r p(i)) ** -beta / v(i),     and     w(i) / max w = v(i) g_r / max(g):

the ranks exchange only log2(g_r). Nothing is summed over the ranks, so masses need no bound beyond that of each buffer.
By rank, uniformly, and with samplers of one's own a buffer's share is that of its rows, and their number takes the
place of T_r.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields
from os import PathLike
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.base.buffer import Buffer
from gpu_replay.base.refusals import class_only
from gpu_replay.batch import Batch
from gpu_replay.buffer import ReplayBuffer
from gpu_replay.checkpoint import CheckpointError
from gpu_replay.checkpoint.format import read_manifest
from gpu_replay.checkpoint.state import BufferCheckpoint
from gpu_replay.engines.host import HostSampler
from gpu_replay.ops.counters import Counter
from gpu_replay.samplers import LinearSchedule
from gpu_replay.sharded import saving
from gpu_replay.sharded.group import MAKING, NUMBERS, CollectiveError, Contribution, Group
from gpu_replay.stats import Stats
from gpu_replay.trajectory_buffer import TrajectoryReplayBuffer

_NAMES = [field.name for field in fields(Stats)]
# all that are no floats but the ages and times
_COUNTS = tuple(field.name for field in fields(Stats) if field.type == "int" and not field.name.startswith("max_"))


def combined(ranks: Sequence[dict[str, Any]]) -> Stats:
    """The statistics of all ranks' buffers; ranks: those of each, and the `total` of its masses or of its rows.

    The distribution over all rows is a mixture of the buffers' distributions, each with its share s of all masses: its
    entropy is sum s (entropy - log s), and its effective sample size 1 / sum (s ** 2 / effective sample size of one).
    """
    counts = {name: sum(each[name] for each in ranks) for name in _COUNTS}
    drawable = [each for each in ranks if each["eligible"]]
    found = {**dict.fromkeys(_NAMES, 0), **dict.fromkeys(("min_priority", "mean_priority", "max_priority"), math.nan)}
    sizes = np.array([each["size"] for each in ranks]) / max(counts["size"], 1)
    for name in ("mean_age", "mean_times_sampled"):
        found[name] = float((sizes * [each[name] for each in ranks]).sum())
    for name in ("max_age", "max_times_sampled"):
        found[name] = max(each[name] for each in ranks)
    if drawable:
        of = {name: np.array([each[name] for each in drawable], dtype=np.float64) for name in [*_NAMES, "total"]}
        shares, rows = of["total"] / of["total"].sum(), of["eligible"] / of["eligible"].sum()
        found["min_priority"], found["max_priority"] = float(of["min_priority"].min()), float(of["max_priority"].max())
        found["mean_priority"] = float((rows * of["mean_priority"]).sum())
        found["entropy"] = float((shares * (of["entropy"] - np.log(shares))).sum())
        found["effective_sample_size"] = float(1 / (shares**2 / of["effective_sample_size"]).sum())
    return Stats(**found | counts)


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (ReplayBuffer, TrajectoryReplayBuffer)}
# what each rank may have its own of
_OWN_SETTINGS = ("capacity", "num_envs", "final_capacity")
# what concerns the rank's own buffer alone
_OWN_WRITES = ("add", "extend", "begin_episodes", "update_priorities", "write", "exclude")
_OWN_READS = ("keys", "priorities", "batches", "epoch")


def exponent_of(buffer: Buffer, beta: float | None) -> Tensor:
    """The beta of the next sample, a float64 scalar on the device."""
    planned = buffer.sampler.base.beta if beta is None else beta
    if isinstance(planned, LinearSchedule):
        share = (buffer._counters[Counter.STEP].to(torch.float64) / planned.steps).clamp(max=1.0)
        return planned.start + (planned.end - planned.start) * share
    return torch.full((), float(planned), dtype=torch.float64, device=buffer.device)


def size_of(buffer: Buffer) -> Tensor:
    """What the share of a buffer is proportional to, its T_r: a float64 scalar on the device."""
    state, counts = buffer._state, buffer._counters
    if state.summed is not None:
        size = state.summed.levels[-1].sum()
    elif buffer._shape:
        size = counts[Counter.ELIGIBLE]
    elif state.tree is not None and state.excluded:
        size = (state.tree.masses > 0).sum()
    else:
        size = counts[Counter.ADDED] - torch.maximum(counts[Counter.FIRST], counts[Counter.ADDED] - buffer.capacity)
    return size.to(torch.float64)


def log_scale_of(buffer: Buffer, batch: Batch, chance: int, exponent: Tensor) -> Tensor:
    """log2(g_r) by the row of the largest weight among the first `chance`, which were drawn by chance: float64."""
    if not chance:
        return torch.zeros_like(exponent)
    # a place without dimensions would be read by the host
    top, size = batch.weight[:chance].argmax(keepdim=True), size_of(buffer)
    weight, probability = (batch[name][top][0].to(torch.float64) for name in ("weight", "probability"))
    return size.log2() - exponent * (size * probability).log2() - weight.log2()


def correct(batch: Batch, chance: int, log_scale: Tensor, log_scales: Tensor) -> None:
    """Change one rank's rows, in place, to the weights and probabilities over all ranks."""
    factor = (log_scale - log_scales.max()).exp2().nan_to_num(0.0)
    for name, change in (("weight", factor), ("probability", 1.0 / log_scales.numel())):
        rows = batch[name][:chance]
        rows.copy_(rows.to(torch.float64) * change)


class ShardedReplay:
    """The buffers of all ranks of a `torch.distributed` process group as one memory: each rank samples from its own,
    with the weights of the whole, and no transition travels.

    buffer:  this rank's own ReplayBuffer or TrajectoryReplayBuffer, with any sampler. The class, the sampler, the
             fields and the settings of windows must be the same on every rank, and the seeds must differ (`seed=rank`);
             capacity and number of environments may differ.
    group:   a `torch.distributed` process group; None is the default group. Messages use NCCL for buffers on GPUs and
             gloo for those on CPUs. A memory over all ranks of the program makes its own process group.
    timeout: seconds after which a rank that waits for another raises RuntimeError, from 0.001 to 1e9.

    `add`, `extend`, `begin_episodes`, `update_priorities`, `write`, `exclude`, `keys`, `priorities`, `batches`,
    `epoch`, `in`, `shard[keys]`, `len` and `stats` are those of the rank's own buffer, whose keys never leave their
    rank. They send nothing. `shard.buffer` has all others; `rank` and `ranks` say which process of how many this is.
    Every rank must make the collective calls, in the same order: the constructor, `sample`, `global_stats`, `clear`,
    `save`, `load` and `close`. With `initial="running"` every sample tells all ranks the largest priority that any was
    given.

    If a rank dies or does not make a call, the others raise RuntimeError within `timeout`; all further collective calls
    are then refused, so load a checkpoint in new processes. If the arguments or the contents of one rank do not allow a
    call, or ranks pass different arguments or make different calls, all ranks raise, nothing changes, and you can go
    on. On GPUs a sample does not wait for the device, except for the first of its kind (of more rows than any before
    it). In the others only the device knows what the other ranks say: the next collective call that waits raises their
    errors. If a rank died meanwhile, the NCCL watchdog ends the processes that wait.

    Raises RuntimeError without an initialised process group, TypeError for anything but a buffer, ValueError where
    ranks disagree, have equal seeds, or the group has no backend for the device.
    """

    def __init__(self, buffer: Buffer, group: Any = None, timeout: float = 60.0) -> None:
        self._group = Group(group, getattr(buffer, "device", "cpu"), timeout)
        self.rank, self.ranks = self._group.rank, self._group.size
        # the largest batch that all ranks are known to have enough for
        self._proven = 0

        def checked() -> Contribution:
            if not isinstance(buffer, Buffer):
                raise TypeError(f"ShardedReplay needs a ReplayBuffer or TrajectoryReplayBuffer; found {buffer!r}.")
            alike = {name: value for name, value in buffer._config().items() if name not in _OWN_SETTINGS}
            numbers = torch.zeros(NUMBERS, dtype=torch.int64, device=buffer.device)
            numbers[1] = buffer._counters[Counter.SEED]
            return alike | {"device": buffer.device.type, "backend": buffer._backend}, numbers

        with self._group.call(MAKING):
            seeds = self._group.agree(MAKING, checked)[:, 1].tolist()
            if len({*seeds}) < len(seeds):
                message = f"each rank's buffer needs a seed of its own, such as seed=rank; the ranks have {seeds}."
                raise CollectiveError(ValueError(message))
            self._group.adopt_group()
        self.buffer = buffer

    # calls on this rank's own buffer

    def __getattr__(self, name: str) -> Any:
        if name in _OWN_WRITES or name in _OWN_READS:
            return getattr(self.buffer, name)
        raise AttributeError(f"ShardedReplay has no {name!r}; shard.buffer, this rank's own buffer, may have it.")

    def __len__(self) -> int:
        """Transitions stored in this rank's buffer."""
        return len(self.buffer)

    def stats(self) -> Stats:
        """Diagnostics of this rank's buffer; `global_stats` are those of all ranks together."""
        return self.buffer.stats()

    def __getitem__(self, keys: Any) -> Batch:
        """What this rank's buffer holds under these keys."""
        return self.buffer[keys]

    def __contains__(self, key: object) -> bool:
        """Whether a key is live in this rank's buffer."""
        return key in self.buffer

    def __iter__(self) -> Iterator[Any]:
        """Raises TypeError, as the buffer does."""
        return iter(self.buffer)

    def __repr__(self) -> str:
        return f"ShardedReplay(rank {self.rank} of {self.ranks} with {self.buffer!r})"

    # collective calls

    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        """Sample `B` rows on each rank, from its own buffer, as that buffer's `sample`; collective.

        batch_size, beta: the same on every rank.

        With N rows that can be drawn and the total mass T on all ranks, and T_r on this one, a row `i` has the
        `probability` mass(i) / (R T_r), and the `weight` (R T_r / T) * (N mass(i) / T) ** -beta, divided by the largest
        over all ranks (of the batches, or with `normalize="buffer"` of all rows): so the expected weighted mean over
        all ranks is that of one buffer with all rows. By rank, and with samplers of your own, the share of a buffer is
        that of its rows. `Combined` and `Latest` take the newest rows of the rank.

        Raises as the buffer's `sample`, on all ranks if on one; ValueError if batch sizes or betas differ.
        """
        buffer, group, counts = self.buffer, self._group, self.buffer._counters
        sampling, last_steps, chance = buffer._made_engine.sampling, list[Callable[[], object]](), 0
        late = buffer.device.type == "cuda"
        batch: Batch

        def asked() -> tuple[dict[str, Any], Tensor]:
            rows, power = validation.check_batch_size(batch_size), validation.check_beta(beta)
            buffer._check_enough(rows)
            numbers = torch.zeros(NUMBERS, dtype=torch.int64, device=buffer.device)
            numbers[0] = exponent_of(buffer, power).view(torch.int64)
            return {"batch size": rows, "beta": power}, numbers

        def drawn() -> Contribution:
            nonlocal batch, chance, last_steps
            alike, numbers = asked()
            with sampling.postponing() if isinstance(sampling, HostSampler) else nullcontext(last_steps) as last_steps:
                batch = buffer.sample(batch_size, beta=beta)
            chance = batch_size - buffer.sampler.newest_of(batch_size)
            log_scale = log_scale_of(buffer, batch, chance, numbers[0].view(torch.float64))
            numbers[1], numbers[2] = log_scale.view(torch.int64), counts[Counter.MAX_MASS]
            return alike, numbers

        with group.call("sample"), buffer._alone():
            known = late and isinstance(batch_size, int) and batch_size <= self._proven
            if not isinstance(sampling, HostSampler) and not known:
                # a launch that gathers rows counts them as well: before it the ranks agree on what the hosts know
                group.agree("sample", asked, late=late)
                self._proven = batch_size
            table = group.agree("sample", drawn, late=late, unread=late)
            log_scales = table[:, 1].contiguous().view(torch.float64)
            correct(batch, chance, log_scales[self.rank], log_scales)
            largest = table[:, 2].max().clamp(max=buffer._state.rule.limit)
            counts[Counter.MAX_MASS] = torch.maximum(counts[Counter.MAX_MASS], largest)
            for count in last_steps:
                count()
            return batch

    def global_stats(self) -> Stats:
        """Diagnostics of all ranks together, the same on each; collective.

        Ages count the transitions that the same rank added since. Entropy and effective sample size describe the
        distribution that the weights correct for, in which a row has its share of all masses.
        """
        text = ""

        def numbers() -> Contribution:
            nonlocal text
            with self.buffer._alone():
                text = json.dumps(vars(self.buffer.stats()) | {"total": float(size_of(self.buffer))})
            return {}, None

        with self._group.call("global_stats"):
            self._group.agree("global_stats", numbers)
            return combined([json.loads(each) for each in self._group.all_gather_text(text)])

    def clear(self) -> None:
        """Remove all transitions of all ranks; keys continue to count up. Collective."""
        with self._group.call("clear"):
            self._group.agree("clear", lambda: ({}, None))
            self._proven = 0
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
        seed: int | None = None,
        group: Any = None,
        timeout: float = 60.0,
        **settings: Any,
    ) -> ShardedReplay:
        """Load what `save` wrote, on the same number of ranks: the next `sample` returns what it would have there.

        device:   of this rank's buffer.
        seed:     of this rank's buffer from now on, other than those of all other ranks; None goes on with the saved
                  random stream. Give another to each rank where two runs go on from one checkpoint.
        group, timeout: as in the constructor.
        settings: of the `load` of the buffer's class: `sampler`, `sequences`, `relabel`, `begin_episodes`,
                  `storage_device`, `storage_path`.

        Raises CheckpointError that names the damage, on all ranks if one fails, or says where the ranks' own
        checkpoints are, if another number of ranks saved them.
        """
        ranks = Group(group, device, timeout)
        read: Callable[[], Buffer]

        def opened() -> Contribution:
            nonlocal read
            given = None if seed is None else validation.check_int("seed", seed)
            folder, parts = saving.read_set(path)
            part = saving.part_of(folder, ranks.rank)
            kind = BufferCheckpoint(saving.part_of(folder, 0)).config["kind"]
            if kind not in KINDS:
                raise CheckpointError(f"{path} holds a {kind} of each rank: load {part} by its class, and wrap that.")
            if len(parts) != ranks.size:
                first = str(saving.part_of(folder, 0))
                raise CheckpointError(
                    f"{path} was saved by {len(parts)} ranks and cannot be loaded by {ranks.size}. The part of each is "
                    f"a checkpoint of its own: {kind}.load({first!r}) reads the first, and so on to "
                    f"rank{len(parts) - 1}. Fill new buffers from old.batches(size), and save those."
                )
            if read_manifest(part).sha256 != parts[ranks.rank]:
                raise CheckpointError(f"{part} is not what the ranks saved together; another save has replaced it.")

            def read() -> Buffer:
                buffer = KINDS[kind].load(part, device, **settings)
                if given is not None:
                    with buffer._alone():
                        buffer._take_over(buffer._snapshot()["counters"], given)
                return buffer

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
