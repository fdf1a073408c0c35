"""The ring of steps on CPU tensors: steps in, stacks and windows out; in `device_trajectory.py` kernels do it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host_sampler import HostSampler
from gpu_replay.engines.storage import not_readable
from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.ops import _backend
from gpu_replay.ops.batch_memory import BatchMemory
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag
from gpu_replay.ops.eligibility_host import HostEligibility
from gpu_replay.ops.frames import StackPlan, gather_stacks, plan_stacks, shift_pictures, shifts_from
from gpu_replay.ops.hindsight import Chosen, Strategy, goal_words, goals_from
from gpu_replay.ops.ring import as_numpy, gather_rows, write_rows
from gpu_replay.ops.uniform_draw import PERMUTATION_WORDS
from gpu_replay.ops.windows import StoredWindows, Windows, measured, powers_of

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
        self._loops: Any = _backend.inner_loops()

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
        starts = np.flatnonzero(self.draws.state.eligible.arrays[0])
        for begin in range(0, starts.size, _MEASURED):
            some = starts[begin : begin + _MEASURED]
            self._lengths[some], self._sums[some] = measured(
                self._shape, self._flags, self._rewards, self._powers, some
            )

    # add

    def add_step(
        self,
        values: dict[str, Tensor | np.ndarray],
        terminated: Tensor | np.ndarray,
        truncated: Tensor | np.ndarray,
        priorities: np.ndarray | None,
        finals: dict[str, Tensor] | None,
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
        write_rows(self._rows, values, start)
        draws.times_sampled[start : start + envs] = 0
        oldest = max(draws.counters.item(Counter.FIRST) // envs, step + 1 - steps)
        largest, kept = self._eligibility.add_step(
            step, oldest, as_numpy(terminated), as_numpy(truncated), masses, initial, finals is not None
        )
        if finals is not None and kept.size:
            rows = self._eligibility.final_rows(step, kept)
            for name, value in finals.items():
                self._pools[name][rows] = as_numpy(value)[kept]
        draws.count_given(largest, saturated)
        draws.counters[Counter.ADDED] = added + envs
        return torch.from_numpy(np.arange(added, added + envs))

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
        drawn = self.draws.draw(batch, beta)
        shifts = self._shifts(batch)
        tensors = self._transitions(drawn.slots, shifts)
        tensors.update(self.draws.named(drawn))
        return tensors

    def sample_sequences(self, batch: int, length: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` starts whose `length` steps are stored, and read those steps."""
        drawn = self.draws.draw(batch, beta, (length - 1) * self._shape.num_envs, exact=True)
        shifts = self._shifts(batch)
        return {**self._sequences(drawn.slots, length, shifts), **self.draws.named(drawn)}

    def _shifts(self, batch: int) -> np.ndarray | None:
        """(batch, 4) random shifts of pictures, or None without augmentation."""
        return shifts_from(self.draws.words(batch), self._shift) if self._shift else None

    # contents of a batch

    def _transitions(self, slots: np.ndarray, shifts: np.ndarray | None) -> dict[str, Tensor]:
        """Stacks, windows and single fields of starts."""
        windows: Windows = self._loops.windows(self._windows, slots)
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
        """`length` steps from each start, with the mask of those of its episode."""
        envs, batch = self._shape.num_envs, starts.size
        slots = starts[:, None] + np.arange(length, dtype=np.int64) * envs
        slots -= (slots >= self._capacity) * self._capacity
        flat = slots.reshape(-1)
        flags = self._flags.take(slots)
        ended = flags & (Flag.TERMINATED | Flag.TRUNCATED | Flag.CUT) != 0
        mask = np.ones((batch, length), dtype=bool)
        np.logical_not(np.logical_or.accumulate(ended[:, :-1], axis=1), out=mask[:, 1:])
        plan = plan_stacks(
            flat, self._depth.take(flat), self._shape.stack, envs, self._capacity, zero=self._windows.zero
        )
        out = self._stacks(plan, None, None)
        for name, rows, field in self._single:
            out[name] = gather_rows(rows, field, flat)
        out["reward"] = torch.from_numpy(self._rewards.take(flat))
        out = {name: value.reshape(batch, length, *value.shape[1:]) for name, value in out.items()}
        if shifts is not None:
            for name, _, field in self._stacked:
                if len(field.shape) >= 2:
                    out[name] = shift_pictures(out[name], shifts[:, :2])
        out["terminated"] = torch.from_numpy(flags & Flag.TERMINATED != 0)
        out["truncated"] = torch.from_numpy(flags & Flag.TRUNCATED != 0)
        out["mask"] = torch.from_numpy(mask)
        return out

    def choose_goals(self, keys: Tensor, count: int, strategy: Strategy) -> Chosen:
        """Choose `count` rows of the batch with these keys, and where their new goals are."""
        words = self.draws.words(PERMUTATION_WORDS)
        drawn = goal_words(count, strategy)
        doubles = self.draws.doubles(drawn) if drawn else np.zeros(count)
        return goals_from(self._streams, keys.numpy() % self._capacity, self.draws.span(), words, doubles, strategy)

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
