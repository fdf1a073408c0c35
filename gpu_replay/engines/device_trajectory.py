"""The ring of steps on CUDA tensors, through Triton kernels; also on CPU tensors, interpreted.

As in `device.py` nothing waits for the device unless its docstring states it. The exact number of eligible
starts is known to the device only; the host keeps a lower bound, and reads the number when the bound is too small.
"""

from __future__ import annotations

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
    GoalRows,
    RelabelInput,
    RelabelSettings,
    Strategy,
    gather_goals,
    goal_blocks,
    plan_choose_goals,
    put_goals,
)
from gpu_replay.ops.launch import plans
from gpu_replay.ops.ring import parts_of, plan_gather
from gpu_replay.validation import as_tensor

# rows that `extend` brings to the device at once
_TOGETHER = 2**16


class TrajectoryDeviceEngine:
    """Adds steps, samples and reads windows of one trajectory buffer, in at most 3, 2 and 1 launches; a draw by rank
    sorts besides.

    The buffer has checked all arguments and holds the lock.
    """

    scratch_bytes = 0

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
                *(storage.streams, draws.masses, draws.state.eligible_tree, counters, storage.times_sampled),
                draws.source,
                with_final=with_final,
            )
        )
        self._finals = plans(lambda: plan_keep_finals(storage.streams, storage.finals, storage.fields, counters))
        # by the batch, whether pictures are moved, and whether there are weights and a schedule
        self._gathers = plans(
            lambda batch, shifted, weighed, schedule: plan_gather_windows(
                storage, batch, powers, counters, shifted=shifted, weighed=weighed
            )
        )
        # by the batch and the length, and as above
        self._sequences = plans(
            lambda batch, length, shifted, weighed, schedule: plan_gather_sequences(
                storage, batch, length, powers, counters, shifted=shifted, weighed=weighed
            )
        )
        # by the batch, the rows that get other goals, and where these come from
        self._goals = plans(
            lambda batch, count, strategy: plan_choose_goals(storage.streams, batch, counters, count, strategy)
        )
        # rows of all fields, by their number
        self._rows = plans(lambda rows: plan_gather(storage.tensors, storage.fields, rows, draws.device, weighed=False))
        # rows of a field as they are stored, wherever that is, by its name and their number
        self._raw_rows = plans(
            lambda name, rows: plan_gather(
                {name: storage.tensors[name]},
                {name: Field(storage.fields[name].shape, storage.fields[name].dtype)},
                rows,
                draws.device,
                weighed=False,
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
            launches = [lambda: draws.write(moved, keys.shape[0]), lambda: step(*flags, own, keys)]
            if final_rows is not None:
                keep_finals = self._finals()
                launches.append(lambda: keep_finals(final_rows))
            draws.add(self._shape.num_envs, self.on_replay, *launches)
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
        """Store T steps of all environments, as T calls of `add_step` do, and return `keys`. Waits for the device.

        Fields go to the device piece by piece. The metadata of the steps is copied to the host, updated by the loop of
        the host's buffers, and copied back. Any exception leaves the buffer as it was.
        """
        from gpu_replay.engines.stream_mirror import StreamMirror

        draws = self.draws
        with draws.ordered():
            numbers = None if priorities is None else priorities.detach().cpu().double().numpy()
            mirror = StreamMirror(self._storage, draws, self._powers)
            before = self._overwritten_by(keys.numel())
            try:
                kept = mirror.add(terminated, truncated, numbers, finals)
                # from here on a second interrupt, while the first one is handled, leaves rows of two times
                draws.stream_order.interrupted = True
                self._write_steps(values, len(terminated))
                if finals is not None and kept.pool.size:
                    sources, pool = torch.from_numpy(kept.given), torch.from_numpy(kept.pool)
                    for name, value in finals.rows.items():
                        rows = torch.as_tensor(value)[sources]
                        self._storage.finals[name][pool.to(draws.device)] = rows.to(draws.device)
                mirror.write_back()
                self.on_replay(keys.numel())
                draws.stream_order.interrupted = False
            except BaseException:
                draws.stream_order.settle()
                for tensor, copy in before:
                    tensor.copy_(copy)
                draws.stream_order.interrupted = False
                self.rebuild(0)
                raise
        return keys

    def _write_steps(self, values: dict[str, Tensor | np.ndarray], count: int) -> None:
        """Put T steps of all fields, (T, num_envs, ...), after the newest, as far as the ring holds them."""
        draws, envs, skipped = self.draws, self._shape.num_envs, max(0, count - self._shape.steps)
        draws.counters[Counter.ADDED] += skipped * envs
        together = max(1, _TOGETHER // envs)
        for begin in range(skipped, count, together):
            some = slice(begin, min(begin + together, count))
            rows = (some.stop - begin) * envs
            pieces = {name: as_tensor(name, value[some], draws.device) for name, value in values.items()}
            draws.write({name: draws.moved(piece.flatten(0, 1)) for name, piece in pieces.items()}, rows)
            draws.counters[Counter.ADDED] += rows

    def _overwritten_by(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """All tensors that these new transitions change, and copies of them; of fields only the live rows.

        Fields in pinned host memory are copied by the host, which waits for the device before.
        """
        self.draws.stream_order.settle()
        draws, storage, slots = self.draws, self._storage, self._shape.slots
        tensors = [draws.counters, storage.times_sampled, *storage.streams.tensors, *storage.finals.values()]
        for tree in draws.state.trees:
            tensors += [*tree.levels, *(each for each in (tree.low, tree.high) if each is not None)]
        # the live keys in whose slots new ones come
        first, added = draws.span()
        begin, end = max(first, added - slots), min(added, added - slots + rows)
        for part, _ in parts_of(begin % slots, end - begin, slots) if begin < end else ():
            tensors += [tensor[part] for tensor in storage.tensors.values()]
        return [(tensor, tensor.clone()) for tensor in tensors]

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
        draws, storage = self.draws, self._storage
        with draws.ordered():
            drawn = draws.draw(batch, beta, shifted=storage.random_shift > 0)
            gather = self._gathers(batch, drawn.words is not None, *drawn.weights)
            tensors = gather(drawn.slots, drawn.words, drawn.pending)
            tensors.update(drawn.named)
            return tensors

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
        draws, storage, skipped = self.draws, self._storage, 0 if sampler else (length - 1) * self._shape.num_envs
        with draws.ordered():
            drawn = (sampler or draws).draw(batch, beta, skipped, shifted=storage.random_shift > 0)
            gather = self._sequences(batch, length, drawn.words is not None, *drawn.weights)
            tensors = gather(drawn.slots, drawn.words, drawn.pending)
        return {**tensors, **drawn.named}

    def sample_relabeled(
        self, batch: int, beta: float | None, relabel: RelabelSettings, count: int
    ) -> tuple[dict[str, Tensor], RelabelInput]:
        """Sample as `sample` does, with other goals in `count` rows; 2 more launches, and small ones of torch."""
        storage, achieved = self._storage, relabel.achieved_field
        tensors = self.sample(batch, beta)
        with self.draws.ordered():
            chosen = self.choose_goals(tensors["key"], count, relabel.strategy)
            raw = self._raw_rows(achieved, count)(chosen.slots, None)[achieved]
            goals = gather_goals(chosen, raw, storage.finals.get(achieved), storage.fields[relabel.desired_field])
            return tensors, put_goals(tensors, chosen, goals, relabel, self._shape.stack)

    def choose_goals(self, keys: Tensor, count: int, strategy: Strategy) -> GoalRows:
        """Choose `count` rows of the batch with these keys, and where their new goals are; 1 launch."""
        with self.draws.ordered():
            chosen = self._goals(keys.shape[0], count, strategy)(keys)
            self.draws.note_blocks(goal_blocks(count, strategy))
            return chosen

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The transitions from these keys; KeyError naming the first that is not live or not eligible.

        Waits for the device.
        """
        with self.draws.ordered():
            slots = keys % self._shape.slots
            check_live(keys, *self.draws.span(), self.draws.state.eligible.masses[slots] > 0)
            return self._gathers(keys.shape[0], False, False, False)(slots, None, None)

    def stored(self, keys: Tensor) -> dict[str, Tensor]:
        """The single steps of these live keys."""
        storage = self._storage
        with self.draws.ordered():
            slots = keys % self._shape.slots
            return self._rows(keys.shape[0])(slots, None) | endings(storage.streams.flags.take(slots))
