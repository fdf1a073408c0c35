"""The ring of steps on CPU tensors: steps in, stacks and windows out; in `device_trajectory.py` kernels do it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host_sampler import HostSampler
from gpu_replay.engines.host_streams import compiled_streams
from gpu_replay.engines.storage import not_readable
from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.ops import _backend
from gpu_replay.ops.batch_memory import BatchMemory
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag, endings, sequence_starts
from gpu_replay.ops.eligibility_host import HostEligibility
from gpu_replay.ops.frames import StackPlan, gather_stacks, shift_pictures, shifts_from
from gpu_replay.ops.hindsight import (
    Chosen,
    Relabels,
    Shown,
    Strategy,
    gather_goals,
    goal_words,
    goals_from,
    put_goals,
)
from gpu_replay.ops.many_steps import GivenFinals, add_steps, overwritten_parts, steps_together
from gpu_replay.ops.ring import Write, as_numpy, commit, gather_rows, parts_of
from gpu_replay.ops.uniform_draw import PERMUTATION_WORDS
from gpu_replay.ops.windows import StoredWindows, Windows, measured, open_windows, powers_of

# starts whose windows are measured together
_MEASURED = 2**16


class TrajectoryHostEngine:
    """Adds steps, samples and reads windows of one trajectory buffer whose tensors are on the CPU.

    The buffer has checked all arguments and holds the lock.
    """

    def __init__(self, storage: TrajectoryStorage, draws: HostSampler) -> None:
        self.draws = draws
        self.count_at_least = draws.count_at_least
        state, self._streams = draws.state, storage.streams
        self._shape = shape = storage.streams.shape
        self._capacity = storage.capacity
        self._shift = storage.random_shift
        self._rows = {name: as_numpy(tensor) for name, tensor in storage.tensors.items()}
        self._rewards = self._rows["reward"]
        self._powers = powers_of(storage.gamma, shape.n_step)
        self._eligibility = HostEligibility(
            storage.streams, state.tree, state.eligible_tree, draws.counters, self._rewards, self._powers
        )
        self._lengths, self._sums = self._eligibility.length, self._eligibility.reward
        self._flags = storage.streams.flags.numpy()
        self._depth = storage.streams.depth.numpy()
        self._final = storage.streams.final.numpy()
        zero, known = storage.padding == "zero", (self._flags, self._depth, self._lengths, self._sums)
        self._windows = StoredWindows(shape, zero, *known, self._powers)
        columns = [(name, self._rows[name], field) for name, field in storage.fields.items() if name != "reward"]
        self._stacked = [column for column in columns if column[0] in storage.observations]
        self._single = [column for column in columns if column[0] not in storage.observations]
        self._pools = {name: as_numpy(tensor) for name, tensor in storage.finals.items()}
        self._outputs = BatchMemory()
        self._ahead = storage.read_ahead()
        self._loops: Any = _backend.inner_loops()
        self._storage = storage
        self._compiled = compiled_streams(storage, draws, self._windows, self._outputs)

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside storage, trees and counters."""
        return self._lengths.nbytes + self._sums.nbytes

    def on_clear(self) -> None:
        """Reset host state after `clear`: there is none."""

    def on_replay(self, rows: int) -> None:
        """Count what a replayed graph added; there are none on a CPU."""

    def rebuild(self, seed: int) -> None:
        """Take over a restored state: measure the windows of all eligible starts, and draw from this seed."""
        self.draws.reseed(seed)
        self._measure()

    def _measure(self) -> None:
        """Find the lengths and rewards of the windows of all eligible starts."""
        starts = np.flatnonzero(self.draws.state.eligible.arrays[0])
        for begin in range(0, starts.size, _MEASURED):
            some = starts[begin : begin + _MEASURED]
            self._lengths[some], self._sums[some] = measured(
                self._shape, self._flags, self._rewards, self._powers, some
            )

    # add

    def add_step(
        self,
        values: dict[str, np.ndarray],
        terminated: np.ndarray,
        truncated: np.ndarray,
        priorities: np.ndarray | None,
        finals: dict[str, Any] | None,
    ) -> Tensor:
        """Store one step of all environments and return its (num_envs,) keys."""
        draws, envs, steps = self.draws, self._shape.num_envs, self._shape.steps
        added = draws.counters.item(Counter.ADDED)
        step = added // envs
        masses, saturated = None, 0
        if priorities is not None and draws.state.tree is not None:
            masses, _, saturated = draws.state.rule.masses(priorities)
        # without priorities every start counts one
        initial = draws.initial_mass() or 1
        start = step % steps * envs
        slots = slice(start, start + envs)
        oldest = max(draws.counters.item(Counter.FIRST) // envs, step + 1 - steps)
        keys = torch.from_numpy(np.arange(added, added + envs))
        stores, counters, eligibility = self._rows, draws.counters, self._eligibility
        writes: list[Write] = [(stores[name], slots, value) for name, value in values.items()]
        writes += [(draws.times_sampled, slots, 0), (counters, Counter.ADDED, added + envs)]
        if eligibility.goes_on(step, terminated, truncated):
            extension = eligibility.extension(step, oldest, masses, initial)
            if extension is not None:
                if saturated:
                    writes += draws.given(0, saturated)
                return commit(writes, keys, extension)
        before: list[Write] = [(self._rewards, slots, self._rewards[slots].copy()), (counters, ..., counters.copy())]
        try:
            # windows that this step ends are summed up
            self._rewards[slots] = values["reward"]
            largest, kept = eligibility.add_step(
                step, oldest, terminated, truncated, masses, initial, finals is not None, before
            )
            if finals is not None and kept.size:
                rows = eligibility.final_rows(step, kept)
                writes += [(self._pools[name], rows, as_numpy(value)[kept]) for name, value in finals.items()]
            writes += draws.given(largest, saturated)
            return commit(writes, keys)
        except BaseException:
            self._put_back(before)
            raise

    def extend(
        self,
        values: dict[str, Any],
        terminated: np.ndarray,
        truncated: np.ndarray,
        priorities: np.ndarray | None,
        finals: GivenFinals | None,
        keys: Tensor,
    ) -> Tensor:
        """Store T steps of all environments, as T calls of `add_step` do, and return `keys`.

        An exception, whatever it is and wherever it comes from, leaves all as it was.
        """
        before = self._overwritten_by(keys.numel(), with_finals=finals is not None)
        try:
            self._extend(values, terminated, truncated, priorities, finals)
            return keys
        except BaseException:
            self._put_back(before)
            raise

    def _overwritten_by(self, rows: int, *, with_finals: bool) -> list[Write]:
        """All that so many new transitions change, and copies of it: of fields the rows that are live."""
        shape, streams, eligibility, counters = self._shape, self._streams, self._eligibility, self.draws.counters
        places: list[tuple[np.ndarray, Any]] = [(counters, ...)]
        places += [(each.numpy(), ...) for each in (streams.pending, streams.spans, streams.parted)]
        # from the oldest step whose start may be completed to the newest one that may lose a frame
        step = counters.item(Counter.ADDED) // shape.num_envs - shape.n_step
        count = min(shape.steps, rows // shape.num_envs + shape.n_step + shape.stack)
        for part, _ in parts_of(step % shape.steps, count, shape.steps):
            places += [(each, part) for each in (eligibility.flags, eligibility.depth, *eligibility.leaves)]
            places.append((self.draws.times_sampled.reshape(shape.steps, shape.num_envs), part))
            places += [(eligibility.final, part)] if shape.finals else []
        if with_finals:
            begin = counters.item(Counter.FINALS) % shape.finals
            for part, _ in parts_of(begin, min(rows, shape.finals), shape.finals):
                places += [(each, part) for each in (eligibility.owner, *self._pools.values())]
        for part in overwritten_parts(*self.draws.span(), rows, self._capacity):
            places += [(each, part) for each in self._rows.values()]
        return [(array, place, array[place].copy()) for array, place in places]

    def _put_back(self, before: list[Write]) -> None:
        """Let all be as it was, after an exception."""
        for array, index, held in before:
            array[index] = held
        for tree, _ in self._eligibility.trees:
            tree.build()
        self._measure()

    def _extend(
        self,
        values: dict[str, Any],
        terminated: np.ndarray,
        truncated: np.ndarray,
        priorities: np.ndarray | None,
        finals: GivenFinals | None,
    ) -> None:
        draws, envs, begin = self.draws, self._shape.num_envs, 0
        together = 0 if self._shape.hindsight else steps_together(self._eligibility)
        while begin < len(terminated):
            end = min(begin + max(1, together), len(terminated))
            some = slice(begin, end)
            part = {name: value[some] for name, value in values.items()}
            own = None if priorities is None else priorities[some]
            if together < 2 or self._initial_varies(end - begin, own is not None):
                for step in range(begin, end):
                    one = {name: value[step - begin] for name, value in part.items()}
                    given = None if priorities is None else priorities[step]
                    final = None if finals is None else finals.of_step(step, envs)
                    self.add_step(one, terminated[step], truncated[step], given, final)
                begin = end
                continue
            masses, rows = None, (end - begin) * envs
            if own is not None and draws.state.tree is not None:
                flat, _, saturated = draws.state.rule.masses(own.reshape(-1))
                masses = flat.reshape(own.shape)
                draws.counters[Counter.SATURATED] += saturated
            start = draws.counters.item(Counter.ADDED) % self._capacity
            for slots, taken in parts_of(start, rows, self._capacity):
                for name, value in part.items():
                    self._rows[name][slots] = as_numpy(value).reshape(rows, *value.shape[2:])[taken]
            self._times_sampled_from(start, rows)
            kept = add_steps(
                self._eligibility,
                draws.counters,
                terminated[some],
                truncated[some],
                masses,
                draws.initial_mass() or 1,
                running=draws.initial_runs,
                with_final=None if finals is None else finals.given[some],
            )
            if finals is not None and kept.places.size:
                chosen = finals.rows_of(begin, kept, envs)
                for name, value in finals.rows.items():
                    self._pools[name][kept.rows] = as_numpy(value[chosen])
            begin = end

    def _initial_varies(self, steps: int, given: bool) -> bool:
        """Whether the largest stored mass, which new starts get, may change within so many steps."""
        if not self.draws.initial_is_stored:
            return False
        first, after = self.span_of_steps()
        full = after > first and after + steps > self._shape.steps
        return given or full or bool(self._eligibility.pending.any())

    def _times_sampled_from(self, start: int, rows: int) -> None:
        """Forget how often the slots from `start` on were sampled."""
        counts = self.draws.times_sampled
        counts[start : start + rows] = 0
        counts[: max(0, start + rows - self._capacity)] = 0

    def break_streams(self, envs: Tensor | np.ndarray) -> None:
        """The next step of these environments, a bool (num_envs,), is the first of an episode."""
        added = self.draws.counters.item(Counter.ADDED)
        if added:
            row = (added // self._shape.num_envs - 1) % self._shape.steps
            self._eligibility.flags[row] |= as_numpy(envs) * np.uint8(Flag.CUT)

    def span_of_steps(self) -> tuple[int, int]:
        """The oldest stored step and the next one."""
        first, added = self.draws.span()
        return first // self._shape.num_envs, added // self._shape.num_envs

    # sample

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` starts: fields, windows, key, probability and weight."""
        found = None if self._compiled is None else self._compiled.sample(batch, beta)
        if found is not None:
            return found
        drawn = self.draws.draw(batch, beta)
        shifts = self._shifts(batch)
        tensors = self._transitions(drawn.slots, shifts)
        tensors.update(self.draws.named(drawn))
        return tensors

    def sample_shown(
        self, batch: int, beta: float | None, relabel: Relabels, count: int
    ) -> tuple[dict[str, Tensor], Shown]:
        """As `sample`, with other goals in `count` rows."""
        found = None if self._compiled is None else self._compiled.sample_shown(batch, beta, relabel, count)
        if found is not None:
            return found
        tensors, storage, achieved = self.sample(batch, beta), self._storage, relabel.achieved_field
        chosen = self.choose_goals(tensors["key"], count, relabel.strategy)
        raw, pool = storage.tensors[achieved].index_select(0, chosen.slots), storage.finals.get(achieved)
        goals = gather_goals(chosen, raw, pool, storage.fields[relabel.desired_field])
        return tensors, put_goals(tensors, chosen, goals, relabel, self._shape.stack)

    def among(self, length: int, strict: bool, stride: int) -> tuple[HostSampler, int]:
        """What draws only the starts that `sequence_starts` names, and how many there are."""
        added = self.draws.counters.item(Counter.ADDED)
        return self.draws.among(sequence_starts(self._streams, added, length, strict, stride))

    def sample_sequences(
        self, batch: int, length: int, beta: float | None, among: HostSampler | None = None
    ) -> dict[str, Tensor]:
        """Draw `batch` starts whose `length` steps are stored, from `among` if that is given, and read those steps."""
        draws, skipped = among or self.draws, 0 if among else (length - 1) * self._shape.num_envs
        drawn = draws.draw(batch, beta, skipped, exact=True)
        shifts = self._shifts(batch)
        return {**self._sequences(drawn.slots, length, shifts), **self.draws.named(drawn)}

    def _shifts(self, batch: int) -> np.ndarray | None:
        """(batch, 4) random shifts of pictures, or None without augmentation."""
        return shifts_from(self.draws.words(batch), self._shift) if self._shift else None

    # contents of a batch

    def _transitions(self, slots: np.ndarray, shifts: np.ndarray | None) -> dict[str, Tensor]:
        """Stacks, windows and single fields of starts."""
        return self._contents(slots, self._loops.windows(self._windows, slots), shifts)

    def _contents(self, slots: np.ndarray, windows: Windows, shifts: np.ndarray | None) -> dict[str, Tensor]:
        """What a batch holds of steps and their windows."""
        if self._ahead is None:
            return self._rows_at(slots, windows, shifts)
        with self._ahead.reading(windows.plan.slots):
            return self._rows_at(slots, windows, shifts)

    def _rows_at(self, slots: np.ndarray, windows: Windows, shifts: np.ndarray | None) -> dict[str, Tensor]:
        moved = None if shifts is None else np.concatenate((shifts[:, :2], shifts[:, 2:]))
        out, after = {}, {}
        # the stacks before and after in one gather: each array operation costs as much as the copy of a small batch
        for name, stacks in self._stacks(windows.plan, windows.final, moved).items():
            out[name], after[f"next_{name}"] = stacks.chunk(2)
        for name, rows, field in self._single:
            out[name] = gather_rows(rows, field, slots)
        out["reward"] = torch.from_numpy(windows.reward)
        out.update(after)
        out["discount"] = torch.from_numpy(windows.discount)
        out["terminated"] = torch.from_numpy(windows.terminated)
        out["truncated"] = torch.from_numpy(windows.truncated)
        return out

    def _stacks(self, plan: StackPlan, final: np.ndarray | None, shifts: np.ndarray | None) -> dict[str, Tensor]:
        """The planned stacks of every observation field; `final` are the rows that end with a final observation."""
        pooled = None if final is None else self._final.take(plan.slots[final, -1])
        out = {}
        for name, rows, field in self._stacked:
            kept = None if final is None or pooled is None else (final, self._pools[name].take(pooled, axis=0))
            stacks = gather_stacks(rows, field, plan, kept, self._outputs, name)
            if shifts is not None and len(field.shape) >= 2:
                stacks = shift_pictures(stacks, shifts)
            out[name] = stacks
        return out

    def _sequences(self, starts: np.ndarray, length: int, shifts: np.ndarray | None) -> dict[str, Tensor]:
        """`length` steps from each start with their windows, and the mask of those of its episode."""
        envs, steps, batch = self._shape.num_envs, self._shape.steps, starts.size
        ahead = np.arange(length, dtype=np.int64)
        slots = (starts[:, None] + ahead * envs) % self._capacity
        newest = self.draws.counters.item(Counter.ADDED) // envs - 1
        left = (newest - starts // envs) % steps + 1
        flat, left = slots.reshape(-1), (left[:, None] - ahead).reshape(-1)
        windows = open_windows(self._windows, self._rewards, flat, left)
        moved = None if shifts is None else shifts.repeat(length, axis=0)
        out = self._contents(flat, windows, moved)
        out = {name: value.reshape(batch, length, *value.shape[1:]) for name, value in out.items()}
        flags = self._flags.take(slots)
        ended = flags & (Flag.TERMINATED | Flag.TRUNCATED | Flag.CUT) != 0
        mask = np.ones((batch, length), dtype=bool)
        np.logical_not(np.logical_or.accumulate(ended[:, :-1], axis=1), out=mask[:, 1:])
        return out | endings(torch.from_numpy(flags)) | {"mask": torch.from_numpy(mask)}

    def choose_goals(self, keys: Tensor, count: int, strategy: Strategy) -> Chosen:
        """Choose `count` rows of the batch with these keys, and where their new goals are."""
        words = self.draws.words(PERMUTATION_WORDS)
        drawn = goal_words(count, strategy)
        doubles = self.draws.doubles(drawn) if drawn else np.zeros(count)
        slots = keys.numpy() % self._capacity
        return goals_from(self._streams, slots, self.draws.span(), words, doubles, strategy, self._loops)

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The transitions from these keys; KeyError naming the first that is not live or not eligible."""
        array = keys.numpy()
        first, added = self.draws.span()
        slots = array % self._capacity
        leaves = self.draws.state.eligible.arrays[0]
        readable = (array >= first) & (array < added) & (leaves.take(slots) > 0)
        if not np.logical_and.reduce(readable):
            raise not_readable(int(array[readable.argmin()]), first, added)
        return self._transitions(slots, None)

    def stored(self, keys: Tensor) -> dict[str, Tensor]:
        """The single steps of these live keys."""
        slots = keys.numpy() % self._capacity
        out = {name: gather_rows(rows, field, slots) for name, rows, field in (*self._stacked, *self._single)}
        return out | {"reward": torch.from_numpy(self._rewards.take(slots))} | endings(self._streams.flags[slots])
