"""The ring of steps on CUDA tensors, through Triton kernels; also on CPU tensors, interpreted.

As in `device.py` nothing waits for the device unless its docstring states it. The exact number of eligible
starts is known to the device only; the host keeps a lower bound, and reads the number when the bound is too small.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.device import DeviceSampler, Sample
from gpu_replay.engines.storage import TrajectoryStorage
from gpu_replay.fields import Field
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.hindsight import goal_blocks, goal_sums, make_choose_goals
from gpu_replay.ops.launch import allocator, per_arguments
from gpu_replay.ops.ring import Finish, Gather, make_gather
from gpu_replay.ops.steps import (
    GivenFinals,
    endings,
    make_add_step,
    powers_of,
    warn_of_flaw,
)
from gpu_replay.ops.windows import make_gather_windows
from gpu_replay.validation import as_tensor

if TYPE_CHECKING:
    from gpu_replay.hindsight import Hindsight

# rows that `extend` brings to the device at once
_TOGETHER = 2**16


class TrajectoryDeviceEngine:
    """Adds steps, samples and reads windows of one trajectory buffer, in 1, 2 and 1 launches; draws by rank
    sort as well.

    The buffer has checked all arguments and holds the lock.
    """

    def __init__(self, storage: TrajectoryStorage, sampling: DeviceSampler) -> None:
        self.sampling = sampling
        self._storage = storage
        self._shape = storage.streams.shape
        sampling.warn = partial(warn_of_flaw, self._shape)
        powers = torch.from_numpy(powers_of(storage.gamma, self._shape.n_step)).to(sampling.device)
        # none of these refers to this object: a buffer that nobody holds gives its memory back at once
        streams, stores, fields, counters = storage.streams, storage.tensors, storage.fields, sampling.counters
        self._new_keys = allocator((self._shape.num_envs,), torch.int64, sampling.device)
        # by the dtype of priorities, and whether final observations come with the step
        new = partial(make_add_step, stores, fields, streams, sampling.masses, sampling.state.trees, counters)
        sampled, finals = storage.times_sampled, storage.finals
        self._steps = per_arguments(lambda dtype, final: new(sampled, finals if final else {}))
        # windows to read, by their number
        self._windows = per_arguments(lambda batch: make_gather_windows(storage, batch, powers, counters))
        # single steps, by their number
        self._rows = per_arguments(lambda rows: make_gather(stores, fields, rows, counters))
        relabel = storage.relabel

        def make_sample(batch: int, scheduled: bool) -> Sample:
            if relabel is not None and (count := relabel.count(batch)):
                return sampling.make_sample(batch, scheduled, partial(make_relabeled, batch, relabel, count))
            make = partial(make_gather_windows, storage, batch, powers, counters)
            return sampling.make_sample(batch, scheduled, make)

        def make_relabeled(batch: int, relabel: Hindsight, count: int, end: Finish) -> Gather:
            achieved = relabel.achieved_field
            sums = torch.from_numpy(goal_sums(relabel.gamma, streams.shape.steps)).to(sampling.device)
            windows = make_gather_windows(storage, batch, powers, counters)
            choose = make_choose_goals(streams, batch, counters, count, relabel.strategy, sums, end.blocks)
            # as they are stored
            raw = {achieved: Field(fields[achieved].shape, fields[achieved].dtype)}
            rows = make_gather({achieved: stores[achieved]}, raw, count, counters)
            blocks = end.blocks + goal_blocks(count, relabel.strategy)
            finish = make_gather({}, {}, batch, counters, end._replace(blocks=blocks))

            def gather(slots: Tensor, *arguments: Any) -> dict[str, Tensor]:
                tensors, chosen = windows(slots), choose(slots)
                relabel.rewrite(tensors, chosen, rows(chosen.slots)[achieved], storage)
                return tensors | finish(slots, *arguments)

            return gather

        # by the batch, and whether a schedule gives beta
        self._samples = per_arguments(make_sample)

    # add

    def add_step(
        self,
        values: dict[str, Tensor],
        priorities: Tensor | None,
        finals: dict[str, Tensor] | None,
        ready: bool,
    ) -> Tensor:
        """Store one step of all environments and return its (num_envs,) keys; 1 launch.

        ready: whether a kernel can read the values as they are.
        """
        sampling = self.sampling
        with sampling.order:
            # inputs are copied to the device before the first write to the ring, since a copy may fail
            final_rows = None if finals is None else {name: sampling.moved(value) for name, value in finals.items()}
            moved, given = sampling.on_device(values, priorities, ready)
            keys = self._new_keys()
            step = self._steps(None if given is None else given.dtype, final_rows is not None)
            sampling.launch_add(self._shape.num_envs, step, moved, final_rows, given, keys, ready)
        return keys

    def extend(
        self,
        values: dict[str, Tensor | np.ndarray],
        priorities: Tensor | None,
        finals: GivenFinals | None,
        keys: Tensor,
    ) -> Tensor:
        """Store T steps of all environments, as T calls of `add_step` do, and return `keys`.

        Values go to the device piece by piece. An interrupt leaves the steps before it.
        """
        move, device, envs = self.sampling.moved, self.sampling.device, self._shape.num_envs
        together = max(1, _TOGETHER // envs)
        place = np.full(len(keys), -1) if finals is None else finals.place
        final_rows = {} if finals is None else {name: torch.as_tensor(rows) for name, rows in finals.rows.items()}
        with self.sampling.order:
            for begin in range(0, len(keys), together):
                some = slice(begin, begin + together)
                pieces = {name: move(as_tensor(name, value[some], device)) for name, value in values.items()}
                numbers = None if priorities is None else move(priorities[some])
                for step in range(len(pieces["reward"])):
                    row = slice(int(place[begin + step]) * envs, (int(place[begin + step]) + 1) * envs)
                    known = {name: rows[row] for name, rows in final_rows.items()} if place[begin + step] >= 0 else None
                    now = {name: piece[step] for name, piece in pieces.items()}
                    given = None if numbers is None else numbers[step]
                    self.add_step(now, given, known, False)
        return keys

    def break_streams(self, envs: Tensor) -> None:
        """The next step of these environments, a bool (num_envs,), is the first of an episode."""
        with self.sampling.order:
            self._storage.streams.cut(self.sampling.moved(envs), self.sampling.counters)

    # sample

    def count_at_least(self, needed: int) -> int:
        """Eligible starts, exact only below `needed`.

        Waits for the device when the host does not know of enough: a few times while a buffer fills, and whenever
        adds that others replay may have changed the answer. While capturing it takes them for enough.
        """
        sampling, shape = self.sampling, self._shape
        if sampling.capturing():
            return needed
        if sampling.interrupted:
            sampling.look()
        # a lower bound, without asking the device
        least = 0 if sampling.host_count_stale else sampling.eligible
        if sampling.overwritten:
            # whatever lost a frame of its stack lies in the steps overwritten and the stack - 1 steps after them
            least -= sampling.overwritten + (shape.stack - 1) * shape.num_envs
        if least >= needed:
            return least
        with sampling.order:
            sampling.eligible, sampling.overwritten = sampling.counts()[Counter.ELIGIBLE], 0
            return sampling.eligible

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` starts: fields, windows, key, probability and weight; 2 launches.

        By rank 1 and a sort come first where something has changed. With `relabel` there are 3 more, and small ones of
        torch; the user's functions run before the sample is counted, so that one that raises leaves all as it was.
        """
        with self.sampling.order:
            return self._samples(batch, beta is None)(beta)

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """The transitions, or sequences, from the eligible starts in these slots on."""
        with self.sampling.order:
            return self._windows(slots.shape[0])(slots)

    def stored(self, slots: Tensor) -> dict[str, Tensor]:
        """The single steps that are stored in these slots."""
        with self.sampling.order:
            return self._rows(slots.shape[0])(slots) | endings(self._storage.streams.flags.take(slots))
