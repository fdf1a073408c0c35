"""The ring of steps on CPU tensors: stores steps, samples stacks and windows. `device_trajectory.py` uses kernels."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat, starmap
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host_sampler import HostSampler
from gpu_replay.engines.storage import check_live
from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.fields import as_numpy
from gpu_replay.loops.goals import choose_goals
from gpu_replay.ops.batch_memory import BatchMemory
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.draw import PERMUTATION_WORDS, permuted_ranks
from gpu_replay.ops.eligibility import Flag, GivenFinals, endings, powers_of
from gpu_replay.ops.frames import FrameStore, gather_stacks
from gpu_replay.ops.hindsight import GoalRows, Strategy, gather_goals, goal_words, put_goals
from gpu_replay.ops.ring import as_torch, convert, gather_rows, parts_of, put
from gpu_replay.ops.steps import NONE_KEPT, HostSteps
from gpu_replay.ops.windows import HostWindows, Windows

if TYPE_CHECKING:
    from gpu_replay.hindsight import Hindsight

# where the final observations of the only step are
_FIRST = np.zeros(1, dtype=np.int64)


class TrajectoryHostEngine:
    """Adds steps, samples and reads windows of one trajectory buffer whose tensors are on the CPU.

    The buffer has checked all arguments and holds the lock.
    """

    def __init__(self, storage: TrajectoryStorage, sampling: HostSampler) -> None:
        self.sampling = sampling
        self._relabel = storage.relabel
        self.count_at_least = sampling.count_at_least
        state, self._streams = sampling.state, storage.streams
        self._shape = shape = storage.streams.shape
        self._capacity = storage.capacity
        self._storage = storage
        rows = {name: as_numpy(tensor) for name, tensor in storage.tensors.items()}
        rewards, powers = rows.pop("reward"), powers_of(storage.gamma, shape.n_step)
        trees, ring = (state.tree, state.eligible_tree), (sampling.counters, rewards, sampling.times_sampled)
        self._steps = HostSteps(storage.streams, trees, state.initial, *ring)
        self._windows = HostWindows(storage.streams, rewards, powers, zero=storage.padding == "zero")
        self._flags, self._rewards = storage.streams.flags.numpy(), rewards
        self._pools = {name: as_numpy(tensor) for name, tensor in storage.finals.items()}
        # a view by steps of every field stored here; the loop stores rewards
        by_step = shape.steps, shape.num_envs
        self._rings = [each.reshape(*by_step, *each.shape[1:]) for each in rows.values()]
        columns = [(name, rows[name], storage.fields[name]) for name in rows]
        seen = [column for column in columns if column[0] in storage.observations]
        self._single = [column for column in columns if column[0] not in storage.observations]
        self._stored = seen + self._single
        self._stacked = [(name, FrameStore.of(each, self._pools.get(name)), field) for name, each, field in seen]
        self._outputs = BatchMemory()
        self._ahead = storage.read_ahead()
        if shape.hindsight:
            streams = storage.streams
            tensors = streams.flags, streams.depth, streams.episode_length, streams.clipped_length, streams.final
            self._choose = partial(choose_goals.compiled(), *[each.numpy() for each in tensors], shape.num_envs)

    # add

    def add_step(
        self,
        values: dict[str, np.ndarray],
        priorities: np.ndarray | None,
        finals: dict[str, Any] | None,
        ready: bool,
    ) -> Tensor:
        """Store one step of all environments and return its (num_envs,) keys."""
        added, envs = self.sampling.counters.item(Counter.ADDED), self._shape.num_envs
        row, keys = added // envs % self._shape.steps, torch.from_numpy(np.arange(added, added + envs))
        given_finals = None if finals is None else GivenFinals(finals, _FIRST)
        writes = map(put, self._rings, repeat(row), values.values())
        steps = values["terminated"], values["truncated"], values["reward"]
        return self._store(writes, steps, priorities, given_finals, keys)

    def extend(
        self,
        values: dict[str, Any],
        terminated: np.ndarray,
        truncated: np.ndarray,
        priorities: np.ndarray | None,
        finals: GivenFinals | None,
        keys: Tensor,
    ) -> Tensor:
        """Store T steps of all environments, as T calls of `add_step` do, and return `keys`."""
        count, steps = len(terminated), self._shape.steps
        first, skipped = self.span_of_steps()[1], max(0, count - steps)
        writes = [
            (ring, part, value[some])
            for part, some in parts_of((first + skipped) % steps, count - skipped, steps, skipped)
            for ring, value in zip(self._rings, values.values(), strict=False)
        ]
        return self._store(starmap(put, writes), (terminated, truncated, values["reward"]), priorities, finals, keys)

    def _store(
        self,
        writes: Iterable[object],
        steps: tuple[np.ndarray, np.ndarray, np.ndarray],
        priorities: np.ndarray | None,
        finals: GivenFinals | None,
        keys: Tensor,
    ) -> Tensor:
        """Make the writes of fields and all else that these steps change, together or not at all; returns `keys`.

        steps: terminated, truncated and rewards.
        """
        masses, saturated, state, kept = None, 0, self.sampling.state, NONE_KEPT
        if priorities is not None and state.tree is not None:
            masses, _, saturated = state.rule.masses(priorities.reshape(-1))
        if finals is not None:
            kept = self._steps.keep(steps[0], steps[1], finals)
            rows = [as_numpy(finals.rows[name])[kept.given] for name in self._pools]
            writes = chain(writes, map(put, self._pools.values(), repeat(kept.pool), rows))
        return self._steps.add(steps, masses, saturated, kept, keys, writes)

    def break_streams(self, envs: Tensor | np.ndarray) -> None:
        """The next step of these environments, a bool (num_envs,), is the first of an episode."""
        added = self.sampling.counters.item(Counter.ADDED)
        if added:
            row = (added // self._shape.num_envs - 1) % self._shape.steps
            flags = self._flags.reshape(self._shape.steps, self._shape.num_envs)
            flags[row] |= as_numpy(envs) * np.uint8(Flag.CUT)

    def span_of_steps(self) -> tuple[int, int]:
        """The oldest stored step and the next one."""
        first, added = self.sampling.span()
        return first // self._shape.num_envs, added // self._shape.num_envs

    # sample

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` starts: fields, windows, key, probability and weight.

        With `relabel` the user's functions run before the sample is counted, so that one that raises leaves all as it
        was.
        """
        drawn = self.sampling.draw(batch, beta)
        tensors = self._rows(drawn.slots)
        if self._relabel is not None and (count := self._relabel.count(batch)):
            self._rewrite(tensors, drawn.slots, count, self._relabel)
        return self.sampling.count_sample(tensors, drawn)

    def _rewrite(self, tensors: dict[str, Tensor], slots: np.ndarray, count: int, relabel: Hindsight) -> None:
        """Give `count` rows of a batch in (B,) slots other goals."""
        storage, achieved, desired = self._storage, relabel.achieved_field, relabel.desired_field
        chosen = self._goals_of(slots, count, relabel.strategy)
        raw = as_torch(gather_rows(as_numpy(storage.tensors[achieved]), chosen.slots.numpy()), storage.fields[achieved])
        goals = gather_goals(chosen, raw, storage.finals.get(achieved), storage.fields[desired])
        shown = put_goals(tensors, chosen, goals, achieved, desired, self._shape.stack)
        relabel.rewrite(tensors, shown, storage.singles, storage.gamma)

    # contents of a batch

    def _rows(self, slots: np.ndarray) -> dict[str, Tensor]:
        """Stacks, windows and single fields of eligible starts, or of the sequences from them on."""
        if self._shape.length:
            return self._sequences(slots, self._shape.length)
        return self._contents(slots, self._windows.at(slots))

    def _contents(self, slots: np.ndarray, windows: Windows) -> dict[str, Tensor]:
        """The tensors of a batch, made from steps and their windows."""
        frame_slots, out, after = windows.frame_slots, {}, {}
        with nullcontext() if self._ahead is None else self._ahead.reading(np.maximum(frame_slots, 0)):
            # the stacks before and after in one gather: an operation costs as much as the copy of a small batch
            for name, frames, field in self._stacked:
                out[name], after[f"next_{name}"] = gather_stacks(frames, field, frame_slots, self._outputs, name)
            for name, rows, field in self._single:
                out[name] = convert(as_torch(gather_rows(rows, slots), field), field)
        out["reward"] = torch.from_numpy(windows.reward)
        out.update(after)
        out["discount"] = torch.from_numpy(windows.discount)
        out["terminated"] = torch.from_numpy(windows.terminated)
        out["truncated"] = torch.from_numpy(windows.truncated)
        return out

    def _sequences(self, starts: np.ndarray, length: int) -> dict[str, Tensor]:
        """`length` steps from each start with their windows, and the mask of those of its episode that have targets."""
        batch, ahead = starts.size, np.arange(length, dtype=np.int64)
        slots = (starts[:, None] + ahead * self._shape.num_envs) % self._capacity
        flat = slots.reshape(-1)
        windows = self._windows.at(flat)
        out = self._contents(flat, windows)
        out = {name: value.reshape(batch, length, *value.shape[1:]) for name, value in out.items()}
        flags = self._flags.take(slots)
        # the episode of the first step began no later than that
        mask = (self._streams.depth.numpy().take(slots) >= ahead) & (flags & Flag.TARGET != 0)
        out["discount"] *= torch.from_numpy(mask)
        return out | endings(torch.from_numpy(flags)) | {"mask": torch.from_numpy(mask)}

    def _goals_of(self, slots: np.ndarray, count: int, strategy: Strategy) -> GoalRows:
        """Choose `count` rows of the batch in (B,) slots, and their goals."""
        shape, random, drawn = self._shape, self.sampling.random, goal_words(count, strategy)
        rows = permuted_ranks(slots.size, count, random.words(PERMUTATION_WORDS))
        doubles = random.doubles(drawn) if drawn else np.zeros(count)
        known, sources = np.empty(count, np.bool_), np.empty(count, np.int64)
        places = np.empty(count if shape.finals else 0, np.int64)
        (oldest, next_step), last, episode = self.span_of_steps(), strategy == "final", strategy == "episode"
        all_known = self._choose(last, episode, oldest, next_step - 1, slots, rows, doubles, known, sources, places)
        tensor = torch.from_numpy
        pooled = tensor(places) if shape.finals else None
        return GoalRows(tensor(rows), None if all_known else tensor(known), tensor(sources), pooled)

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The transitions from these keys; KeyError naming the first that is not live or not eligible."""
        array = keys.numpy()
        slots = array % self._capacity
        check_live(array, *self.sampling.span(), self.sampling.state.eligible.host.flat.take(slots) > 0)
        return self._rows(slots)

    def stored(self, keys: Tensor) -> dict[str, Tensor]:
        """The single steps of these live keys."""
        slots = keys.numpy() % self._capacity
        out = {name: convert(as_torch(gather_rows(rows, slots), field), field) for name, rows, field in self._stored}
        return out | {"reward": torch.from_numpy(self._rewards.take(slots))} | endings(self._streams.flags[slots])
