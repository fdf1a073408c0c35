"""The ring of steps on CPU tensors: stores steps, samples stacks and windows. `device_trajectory.py` uses kernels."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain, repeat, starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host import HostSampler
from gpu_replay.engines.storage import TrajectoryStorage
from gpu_replay.fields import as_numpy
from gpu_replay.loops import steps as step_loops
from gpu_replay.loops import windows as window_loops
from gpu_replay.loops.goals import choose_goals
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.draw import PERMUTATION_WORDS, permuted_ranks
from gpu_replay.ops.hindsight import GoalRows, Strategy, goal_sums
from gpu_replay.ops.ring import as_sampled, commit, contiguous, parts_of, put
from gpu_replay.ops.steps import Flag, GivenFinals, endings, powers_of, warn_of_flaw
from gpu_replay.ops.windows import make_gather_stacks

# where the final observations of the only step are
_FIRST = np.zeros(1, dtype=np.int64)
# no masses, and no places of final observations
_NOTHING, _NOWHERE = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
# raises KeyError for steps that were refused
_TAKEN = {False: None}


class TrajectoryHostEngine:
    """Adds steps, samples and reads windows of one trajectory buffer whose tensors are on the CPU.

    The buffer has checked all arguments and holds the lock.
    """

    def __init__(self, storage: TrajectoryStorage, sampling: HostSampler) -> None:
        self.sampling = sampling
        self.count_at_least = sampling.count_at_least
        state, self._streams = sampling.state, storage.streams
        self._shape = shape = storage.streams.shape
        self._storage = storage
        rows = {name: as_numpy(tensor) for name, tensor in storage.tensors.items()}
        rewards, powers = rows.pop("reward"), powers_of(storage.gamma, shape.n_step)
        rule = shape.length, shape.strict, shape.stride
        # the last one: nobody has been warned of a flawed ending
        settings = shape.num_envs, shape.stack, shape.next_step, *state.initial, shape.terminal, *rule, 1
        self._settings = np.array(settings, dtype=np.int64)
        metadata = [each.numpy().reshape(-1) for each in self._streams.tensors]
        tree, *ones = [each.host for each in state.trees]
        trees = *tree, *(ones[0][:2] if ones else (_NOTHING, _NOTHING))
        ring = *metadata, rewards, sampling.times_sampled, sampling.counters
        self._add_steps, self._add_arguments = step_loops.add_steps.compiled(), (self._settings, *ring, *trees)
        self._flags, self._rewards = storage.streams.flags.numpy(), rewards
        depth, final = storage.streams.depth.numpy(), storage.streams.final.numpy()
        layout = shape.num_envs, shape.next_step, storage.padding == "zero"
        self._windows = partial(window_loops.windows.compiled(), self._flags, depth, final, rewards, powers, *layout)
        self._pools = {name: as_numpy(tensor) for name, tensor in storage.finals.items()}
        # a view by steps of every field stored here; the loop stores rewards
        by_step = shape.steps, shape.num_envs
        self._rings = [each.reshape(*by_step, *each.shape[1:]) for each in rows.values()]
        fields, seen = storage.fields, [name for name in rows if name in storage.observations]
        self._stacks = {each: make_gather_stacks(rows[each], self._pools.get(each), fields[each]) for each in seen}
        names = [*seen, *(name for name in rows if name not in seen)]
        self._stored = [(name, rows[name], as_sampled(fields[name])) for name in names]
        self._single = self._stored[len(seen) :]
        self._ahead = storage.read_ahead()
        if storage.relabel is not None:
            streams = storage.streams
            tensors = streams.flags, streams.depth, streams.episode_length, streams.clipped_length, streams.final
            sums = goal_sums(storage.relabel.gamma, shape.steps)
            self._choose = partial(choose_goals.compiled(), *[each.numpy() for each in tensors], shape.num_envs, sums)

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
        return self._store(writes, values, priorities, given_finals, keys)

    def extend(
        self,
        values: dict[str, Any],
        priorities: np.ndarray | None,
        finals: GivenFinals | None,
        keys: Tensor,
    ) -> Tensor:
        """Store T steps of all environments, as T calls of `add_step` do, and return `keys`."""
        count, steps = len(keys), self._shape.steps
        first, skipped = self.span_of_steps()[1], max(0, count - steps)
        writes = [
            (ring, part, value[some])
            for part, some in parts_of((first + skipped) % steps, count - skipped, steps, skipped)
            for ring, value in zip(self._rings, values.values(), strict=False)
        ]
        return self._store(starmap(put, writes), values, priorities, finals, keys)

    def _store(
        self,
        writes: Iterable[object],
        values: dict[str, Any],
        priorities: np.ndarray | None,
        finals: GivenFinals | None,
        keys: Tensor,
    ) -> Tensor:
        """Make the writes of fields and all else that these steps change, together or not at all; returns `keys`.

        Warns of the first flawed ending, before anything changes.
        """
        masses, places, saturated, state = _NOTHING, _NOWHERE, 0, self.sampling.state
        if priorities is not None and state.tree is not None:
            masses, _, saturated = state.rule.masses(priorities.reshape(-1))
        ended, cut, rewards = steps = values["terminated"], values["truncated"], values["reward"]
        # arrays of a step mostly lie end to end
        if ended.ndim > 1 or not (ended.flags.carray and cut.flags.carray and rewards.flags.carray):
            ended, cut, rewards = map(contiguous, steps)
        if finals is not None and (ended.any() or cut.any()):
            places, given, pool = self._places(ended, cut, finals.place)
            rows = [as_numpy(finals.rows[name])[given] for name in self._pools]
            writes = chain(writes, map(put, self._pools.values(), repeat(pool), rows))
        call = ended, cut, rewards, masses, places, saturated, *self._add_arguments
        try:
            # the loop comes first: where it refuses, nothing is written
            return commit(keys, map(_TAKEN.__getitem__, starmap(self._add_steps, (call,))), writes)
        except KeyError:
            warn_of_flaw(self._shape)
            self._settings[-1] = 0
        return commit(keys, starmap(self._add_steps, (call,)), writes)

    def _places(self, ended: np.ndarray, cut: np.ndarray, place_of: np.ndarray) -> tuple[np.ndarray, ...]:
        """As `place_finals`: the row of the pool of each step, and which of the given rows go to which of the pool."""
        places, moves, shape = np.empty(ended.size, np.int32), np.empty((2, ended.size), np.int64), self._shape
        owned = self._streams.owner.numpy(), self._flags, self.sampling.counters
        kinds, place = (shape.num_envs, shape.terminal, shape.hindsight), step_loops.place_finals.compiled()
        count = place(ended, cut, contiguous(place_of), places, moves, *owned, *kinds)
        return places, *moves[:, :count]

    def break_streams(self, envs: Tensor | np.ndarray) -> None:
        """The next step of these environments, a bool (num_envs,), is the first of an episode."""
        self._streams.cut(torch.as_tensor(envs), self.sampling.state.counters)

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
        tensors = self._rows(drawn[0])
        relabel, storage = self._storage.relabel, self._storage
        if relabel is not None and (count := relabel.count(batch)):
            chosen = self._goals_of(drawn[0], count, relabel.strategy)
            relabel.rewrite(tensors, chosen, storage.tensors[relabel.achieved_field][chosen.slots], storage)
        return self.sampling.count_sample(tensors, drawn)

    # contents of a batch

    def _rows(self, slots: np.ndarray) -> dict[str, Tensor]:
        """Stacks, windows and single fields of eligible starts, or of the sequences from them on."""
        shape, ahead = self._shape, self._ahead
        if shape.length:
            slots = ((slots[:, None] + np.arange(shape.length) * shape.num_envs) % shape.slots).reshape(-1)
        frame_slots = np.empty((2 * slots.size, shape.stack), np.int64)
        reward, discount = np.empty((2, slots.size), np.float32)
        terminated, truncated = np.empty((2, slots.size), np.bool_)
        self._windows(slots, frame_slots, reward, discount, terminated, truncated)
        if ahead is not None:
            ahead.begin(np.maximum(frame_slots, 0))
        out, after = {}, {}
        # the stacks before and after in one gather: an operation costs as much as the copy of a small batch
        for name, gather in self._stacks.items():
            out[name], after[f"next_{name}"] = gather(frame_slots)
        for name, rows, sampled in self._single:
            out[name] = sampled(rows.take(slots, 0))
        if ahead is not None:
            ahead.end()
        out["reward"] = torch.from_numpy(reward)
        out.update(after)
        out["discount"] = torch.from_numpy(discount)
        out["terminated"] = torch.from_numpy(terminated)
        out["truncated"] = torch.from_numpy(truncated)
        return self._as_sequences(out, slots.reshape(-1, shape.length)) if shape.length else out

    def _as_sequences(self, out: dict[str, Tensor], slots: np.ndarray) -> dict[str, Tensor]:
        """These steps with their windows as sequences, in (B, L) slots, and the mask of those of the episode of the
        first one that have targets.
        """
        out = {name: value.reshape(*slots.shape, *value.shape[1:]) for name, value in out.items()}
        flags, ahead = self._flags.take(slots), np.arange(slots.shape[1])
        # the episode of the first step began no later than that
        mask = (self._streams.depth.numpy().take(slots) >= ahead) & (flags & Flag.TARGET != 0)
        out["discount"] *= torch.from_numpy(mask)
        return out | endings(torch.from_numpy(flags)) | {"mask": torch.from_numpy(mask)}

    def _goals_of(self, slots: np.ndarray, count: int, strategy: Strategy) -> GoalRows:
        """Choose `count` rows of the batch in (B,) slots, and their goals."""
        shape, random, last, episode = self._shape, self.sampling.random, strategy == "final", strategy == "episode"
        rows = permuted_ranks(slots.size, count, random.words(PERMUTATION_WORDS))
        doubles = np.zeros(count) if last else random.doubles(count)
        known, sources = np.empty(count, np.bool_), np.empty(count, np.int64)
        places = np.empty(count if shape.finals else 0, np.int64)
        oldest, next_step = self.span_of_steps()
        all_known = self._choose(last, episode, oldest, next_step - 1, slots, rows, doubles, known, sources, places)
        tensor = torch.from_numpy
        pooled = tensor(places) if shape.finals else None
        return GoalRows(tensor(rows), None if all_known else tensor(known), tensor(sources), pooled)

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """The transitions, or sequences, from the eligible starts in these slots on."""
        return self._rows(slots.numpy())

    def stored(self, slots: Tensor) -> dict[str, Tensor]:
        """The single steps that are stored in these slots."""
        array = slots.numpy()
        out = {name: sampled(rows.take(array, 0)) for name, rows, sampled in self._stored}
        return out | {"reward": torch.from_numpy(self._rewards.take(array))} | endings(self._streams.flags[slots])
