"""The ring of steps on CUDA tensors, through Triton kernels; also on CPU tensors, interpreted.

As in `device.py` nothing waits for the device unless its docstring states it. The exact number of eligible
starts is known to the device only; the host keeps a lower bound, and reads the number when the bound is too small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.device_sampler import DeviceSampler
from gpu_replay.engines.storage import check_live
from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.fields import Field
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import (
    Flag,
    GivenFinals,
    endings,
    plan_add_step,
    plan_keep_finals,
    powers_of,
    sequence_starts,
)
from gpu_replay.ops.frames import plan_gather_sequences, plan_gather_windows
from gpu_replay.ops.hindsight import (
    gather_goals,
    goal_blocks,
    plan_choose_goals,
    put_goals,
)
from gpu_replay.ops.launch import plans
from gpu_replay.ops.ring import plan_gather
from gpu_replay.ops.weights import Drawn
from gpu_replay.validation import as_tensor

if TYPE_CHECKING:
    from gpu_replay.hindsight import Hindsight

# rows that `extend` brings to the device at once
_TOGETHER = 2**16


class TrajectoryDeviceEngine:
    """Adds steps, samples and reads windows of one trajectory buffer, in at most 3, 2 and 1 launches; a draw by rank
    sorts besides.

    The buffer has checked all arguments and holds the lock.
    """

    def __init__(self, storage: TrajectoryStorage, draws: DeviceSampler) -> None:
        self.draws = draws
        self._storage = storage
        self._shape = storage.streams.shape
        self._powers = torch.from_numpy(powers_of(storage.gamma, self._shape.n_step)).to(draws.device)
        # eligible starts when their number was last read, and steps overwritten since
        self._eligible = self._overwritten = 0
        powers, counters = self._powers, draws.counters
        # by the dtype of priorities, and whether final observations come with the step
        self._steps = plans(
            lambda own, with_final: plan_add_step(
                *(storage.tensors, storage.fields, storage.streams, draws.masses, draws.state.eligible_tree, counters, storage.times_sampled),
                draws.source,
                with_final=with_final,
            )
        )
        self._finals = plans(lambda: plan_keep_finals(storage.streams, storage.finals, storage.fields, counters))
        self._windows = plans(
            lambda batch, drawn: plan_gather_windows(
                storage, batch, powers, counters, shifted=drawn and storage.random_shift > 0, drawn=drawn
            )
        )
        # by what is asked for, and whether a schedule gives beta
        shifted = storage.random_shift > 0
        self._samples = plans(
            lambda batch, scheduled: draws.plan_sample(batch, self._windows(batch, True), shifted=shifted)
        )
        self._sequences = plans(lambda batch, length, scheduled: self._plan_sequences(draws, batch, length))
        # by the batch, the rows that get other goals, and where these come from
        self._goals = plans(
            lambda batch, count, strategy, after: plan_choose_goals(
                storage.streams, batch, counters, count, strategy, after
            )
        )
        # rows of all fields, by their number
        self._rows = plans(lambda rows: plan_gather(storage.tensors, storage.fields, rows, counters, drawn=False))
        # rows of a field as they are stored, wherever that is, by its name and their number
        self._raw_rows = plans(
            lambda name, rows: plan_gather(
                {name: storage.tensors[name]},
                {name: Field(storage.fields[name].shape, storage.fields[name].dtype)},
                rows,
                counters,
                drawn=False,
            )
        )

    def rebuild(self, seed: int) -> None:
        """Take over a restored state; the counters hold the seed. Waits for the device."""
        self.draws.rebuild()
        self._eligible = self._overwritten = 0

    def on_clear(self) -> None:
        """Reset host state after `clear`."""
        self._eligible = self._overwritten = 0
        self.draws.on_clear()

    def on_replay(self, rows: int) -> None:
        """Count the rows of a replay, whole steps of all environments, or of an `add` that runs now."""
        self.draws.added += rows
        self._overwritten += min(rows, max(0, self.draws.added - self._shape.slots)) // self._shape.num_envs

    # add

    def add_step(
        self,
        values: dict[str, Tensor],
        terminated: Tensor,
        truncated: Tensor,
        priorities: Tensor | None,
        finals: dict[str, Tensor] | None,
    ) -> Tensor:
        """Store one step of all environments and return its (num_envs,) keys; 2 launches, 3 with final observations."""
        draws = self.draws
        with draws.ordered():
            # inputs are copied to the device before the first write to the ring, since a copy may fail
            flags = draws.moved(terminated), draws.moved(truncated)
            final_rows = None if finals is None else {name: draws.moved(value) for name, value in finals.items()}
            moved, own = draws.on_device(values, priorities)
            keys = torch.empty(self._shape.num_envs, dtype=torch.int64, device=draws.device)
            step = self._steps(None if own is None else own.dtype, final_rows is not None)
            draws.changed()
            # into free rows: only the last launch changes what is stored
            if final_rows is not None:
                self._finals()(final_rows, *flags)
            step(moved, *flags, own, keys)
            if draws.runs_now(self._shape.num_envs):
                self.on_replay(self._shape.num_envs)
        return keys

    def extend(
        self,
        values: dict[str, Tensor | np.ndarray],
        terminated: np.ndarray,
        truncated: np.ndarray,
        priorities: Tensor | None,
        finals: GivenFinals | None,
        keys: Tensor,
    ) -> Tensor:
        """Store T steps of all environments, as T calls of `add_step` do, and return `keys`.

        Values go to the device piece by piece. An interrupt leaves the steps before it.
        """
        draws, envs, together = self.draws, self._shape.num_envs, max(1, _TOGETHER // self._shape.num_envs)
        place = np.full(len(keys), -1) if finals is None else finals.place
        given = {} if finals is None else {name: torch.as_tensor(rows) for name, rows in finals.rows.items()}
        flags = torch.from_numpy(np.stack((terminated, truncated)))
        with draws.ordered():
            for begin in range(0, len(keys), together):
                some = slice(begin, begin + together)
                pieces = {name: draws.moved(as_tensor(name, value[some], draws.device)) for name, value in values.items()}
                ended, own = draws.moved(flags[:, some]), None if priorities is None else draws.moved(priorities[some])
                for step in range(ended.shape[1]):
                    row = slice(int(place[begin + step]) * envs, (int(place[begin + step]) + 1) * envs)
                    known = {name: rows[row] for name, rows in given.items()} if place[begin + step] >= 0 else None
                    self.add_step(
                        {name: piece[step] for name, piece in pieces.items()},
                        *ended[:, step],
                        None if own is None else own[step],
                        known,
                    )
        return keys

    def break_streams(self, envs: Tensor) -> None:
        """The next step of these environments, a bool (num_envs,), is the first of an episode."""
        num_envs, flags, draws = self._shape.num_envs, self._storage.streams.flags, self.draws
        with draws.ordered():
            added = draws.counters[Counter.ADDED]
            # before the first step there is none to mark
            cut = draws.moved(envs).to(torch.uint8) * Flag.CUT * (added > 0)
            slots = (added - num_envs + torch.arange(num_envs, device=draws.device)) % self._shape.slots
            flags.index_copy_(0, slots, flags[slots] | cut)

    def span_of_steps(self) -> tuple[int, int]:
        """The oldest stored step and the next one.

        Waits for the device only when adds that others replay may have changed the answer; while capturing it takes the
        ring for full then.
        """
        steps, envs, draws = self._shape.steps, self._shape.num_envs, self.draws
        if draws.uncounted:
            if draws.capturing():
                return 0, steps
            draws.look()
        return max(draws.first // envs, draws.added // envs - steps), draws.added // envs

    # sample

    def count_at_least(self, needed: int, skipped: int) -> int:
        """Eligible starts, those in the newest `skipped` slots left out, exact only below `needed`.

        Waits for the device when the host does not know of enough: a few times while a buffer fills, and whenever
        adds that others replay may have changed the answer. While capturing it takes them for enough.
        """
        if self.draws.capturing():
            return needed
        least = self._at_least() - skipped
        if least >= needed:
            return least
        with self.draws.ordered():
            counts = self.draws.counters.tolist()
            self._eligible, self._overwritten = counts[Counter.ELIGIBLE], 0
            return self._eligible - self._count_newest(counts[Counter.ADDED], skipped)

    def _at_least(self) -> int:
        """A lower bound of the eligible starts, without asking the device."""
        if self.draws.uncounted:
            return 0
        if not self._overwritten:
            return self._eligible
        # with k steps overwritten, whatever lost a frame of its stack lies in them and the stack - 1 steps after them
        return self._eligible - (self._overwritten + self._shape.stack - 1) * self._shape.num_envs

    def _count_newest(self, added: int, slots: int) -> int:
        """Eligible starts in the newest `slots` slots; waits for the device."""
        if not slots:
            return 0
        eligible = self.draws.state.eligible.masses > 0
        return int(eligible.roll(-(added % self._shape.slots))[-slots:].sum())

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` starts: fields, windows, key, probability and weight; 2 launches.

        By rank 1 and a sort come first where something has changed.
        """
        with self.draws.ordered():
            return self._samples(batch, beta is None)(beta)

    def sequence_sampler(self, length: int, strict: bool, stride: int) -> tuple[DeviceSampler, int]:
        """A sampler of only the starts that `sequence_starts` names, and their number.

        Waits for the device for their number; while capturing it takes them for enough.
        """
        draws = self.draws
        with draws.ordered():
            added = draws.counters[Counter.ADDED]
            sampler = draws.restricted_to(sequence_starts(self._storage.streams, added, length, strict, stride))
            if draws.capturing():
                return sampler, self._shape.slots
            return sampler, int((sampler.state.eligible.masses > 0).sum())

    def sample_sequences(
        self, batch: int, length: int, beta: float | None, sampler: DeviceSampler | None = None
    ) -> dict[str, Tensor]:
        """Draw `batch` starts whose `length` steps are stored, from `sampler` if given, and read those steps."""
        with self.draws.ordered():
            if sampler is None:
                return self._sequences(batch, length, beta is None)(beta)
            return self._plan_sequences(sampler, batch, length, 0)(beta)

    def _plan_sequences(self, draws: DeviceSampler, batch: int, length: int, skipped: int | None = None) -> Any:
        storage, shifted = self._storage, self._storage.random_shift > 0
        skipped = (length - 1) * self._shape.num_envs if skipped is None else skipped
        gather = plan_gather_sequences(
            storage, batch, length, self._powers, draws.counters, shifted=shifted, drawn=True
        )
        return draws.plan_sample(batch, gather, skipped=skipped, shifted=shifted)

    def sample_relabeled(
        self, batch: int, beta: float | None, relabel: Hindsight, count: int
    ) -> dict[str, Tensor]:
        """Sample as `sample` does, with other goals in `count` rows; 3 more launches, and small ones of torch.

        The user's functions run before the sample is counted, so that one that raises leaves all as it was.
        """
        storage, achieved, strategy = self._storage, relabel.achieved_field, relabel.strategy
        shifted = storage.random_shift > 0
        windows = plan_gather_windows(
            storage, batch, self._powers, self.draws.counters, shifted=shifted, drawn=False
        )
        end = plan_gather({}, {}, batch, self.draws.counters, drawn=True)

        def gather(slots: Tensor, words: tuple[Tensor, ...], sample: Drawn) -> dict[str, Tensor]:
            tensors = windows(slots, words)
            chosen = self._goals(batch, count, strategy, sample.blocks - goal_blocks(count, strategy))(slots)
            raw = self._raw_rows(achieved, count)(chosen.slots)[achieved]
            goals = gather_goals(chosen, raw, storage.finals.get(achieved), storage.fields[relabel.desired_field])
            shown = put_goals(tensors, chosen, goals, relabel, self._shape.stack)
            relabel.rewrite(tensors, shown, storage.gamma)
            return tensors | end(slots, sample)

        with self.draws.ordered():
            more = goal_blocks(count, strategy)
            return self.draws.plan_sample(batch, gather, shifted=shifted, more=more)(beta)

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The transitions from these keys; KeyError naming the first that is not live or not eligible.

        Waits for the device.
        """
        with self.draws.ordered():
            slots = keys % self._shape.slots
            check_live(keys, *self.draws.span(), self.draws.state.eligible.masses[slots] > 0)
            return self._windows(keys.shape[0], False)(slots)

    def stored(self, keys: Tensor) -> dict[str, Tensor]:
        """The single steps of these live keys."""
        storage = self._storage
        with self.draws.ordered():
            slots = keys % self._shape.slots
            return self._rows(keys.shape[0])(slots) | endings(storage.streams.flags.take(slots))
