"""The trajectory buffer's work on CPU tensors, NumPy over whole batches; in `device_trajectory.py` kernels do it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host import HostEngine
from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag
from gpu_replay.ops.eligibility_host import HostEligibility
from gpu_replay.ops.eligible_draw import DrawRange, reach
from gpu_replay.ops.frames import StackPlan, gather_stacks, plan_stacks, shift_pictures, shifts_from
from gpu_replay.ops.hindsight import Chosen, Strategy, goal_words, goals_from
from gpu_replay.ops.mass import Rule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.ring import as_numpy, gather_rows
from gpu_replay.ops.stratified_draw import draw_by_mass, importance_weights, smallest, stratified_targets
from gpu_replay.ops.uniform_draw import PERMUTATION_WORDS, independent_ranks, permuted_ranks
from gpu_replay.ops.windows import StoredWindows, Windows, measured, powers_of
from gpu_replay.samplers import Combined, Latest, Proportional, RankBased, Sampler, Uniform

# starts whose windows are looked up together
_RECALLED = 2**16


def unreadable(key: int, first: int, added: int) -> KeyError:
    """What to raise for a key that has no transition, where the keys from `first` to `added` are live."""
    if not first <= key < added:
        held = f"the keys from {first} to {added - 1}" if added > first else "no steps"
        return KeyError(f"key {key} is not live; the buffer holds {held}.")
    return KeyError(
        f"key {key} is stored but not eligible: a part of its stack or window is missing, or its step only carries a "
        "final observation."
    )


class TrajectoryHostEngine(HostEngine):
    """Appends, draws and updates for one trajectory buffer whose tensors are on the CPU.

    The buffer has checked all arguments and holds the lock.
    """

    sparse = True

    def __init__(
        self,
        storage: TrajectoryStorage,
        sampler: Sampler,
        tree: MassTree | None,
        marks: MassTree | None,
        rule: Rule,
        counters: Tensor,
        seed: int,
    ) -> None:
        super().__init__(storage, sampler, tree, rule, counters, seed)
        self._marks = marks
        self._shape = storage.streams.shape
        self._shift = storage.random_shift
        self._rewards = self._rows["reward"]
        self._powers = powers_of(storage.gamma, self._shape.n_step)
        self._eligibility = HostEligibility(storage.streams, tree, marks, self._counters, self._rewards, self._powers)
        self._lengths, self._sums = self._eligibility.length, self._eligibility.reward
        self._streams = storage.streams
        self._flags = storage.streams.flags.numpy()
        self._depth = storage.streams.depth.numpy()
        self._final = storage.streams.final.numpy()
        zero, known = storage.padding == "zero", (self._flags, self._depth, self._lengths, self._sums)
        self._windows = StoredWindows(self._shape, zero, *known, self._powers)
        self._stacked = [column for column in self._columns if column[0] in storage.observations]
        self._single = [
            column for column in self._columns if column[0] not in storage.observations and column[0] != "reward"
        ]
        self._pools = {name: as_numpy(tensor) for name, tensor in storage.finals.items()}

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside storage, trees and counters."""
        return super().scratch_bytes + self._lengths.nbytes + self._sums.nbytes

    def recall(self) -> None:
        """Follow a restored state: look up the windows of all eligible starts."""
        starts = np.flatnonzero((self._marks if self._marks is not None else self._with_masses()).arrays[0])
        for begin in range(0, starts.size, _RECALLED):
            some = starts[begin : begin + _RECALLED]
            self._lengths[some], self._sums[some] = measured(
                self._shape, self._flags, self._rewards, self._powers, some
            )

    # add

    def follow(
        self,
        values: dict[str, Tensor | np.ndarray],
        terminated: Tensor | np.ndarray,
        truncated: Tensor | np.ndarray,
        priorities: np.ndarray | None,
        finals: dict[str, Tensor] | None,
    ) -> Tensor:
        """Store one step of all environments and return its (num_envs,) keys."""
        counters, envs, steps = self._counters, self._shape.num_envs, self._shape.steps
        added = counters.item(Counter.ADDED)
        step = added // envs
        masses, saturated = None, 0
        if priorities is not None and self._tree is not None:
            masses, _, saturated = self._rule.masses(priorities)
        # without priorities every start counts one
        initial = self._entry_masses(None) or 1
        start = step % steps * envs
        for name, value in values.items():
            self._rows[name][start : start + envs] = as_numpy(value)
        self._times_sampled[start : start + envs] = 0
        oldest = max(counters.item(Counter.FIRST) // envs, step + 1 - steps)
        largest, kept = self._eligibility.add_step(
            step, oldest, as_numpy(terminated), as_numpy(truncated), masses, int(initial), finals is not None
        )
        if finals is not None and kept.size:
            rows = self._eligibility.final_rows(step, kept)
            for name, value in finals.items():
                self._pools[name][rows] = as_numpy(value)[kept]
        self._given(largest, saturated)
        counters[Counter.ADDED] = added + envs
        return torch.from_numpy(np.arange(added, added + envs))

    def break_streams(self, envs: Tensor | np.ndarray) -> None:
        """The next step of these environments, a bool (num_envs,), is the first of an episode."""
        added = self._counters.item(Counter.ADDED)
        if added:
            row = (added // self._shape.num_envs - 1) % self._shape.steps
            self._eligibility.flags[row] |= as_numpy(envs) * np.uint8(Flag.CUT)

    def span_of_steps(self) -> tuple[int, int]:
        """The oldest stored step and the next one."""
        first, added = self.span()
        return first // self._shape.num_envs, added // self._shape.num_envs

    # sample

    def count_at_least(self, wanted: int, skipped: int) -> int:
        """Eligible starts, those in the newest `skipped` slots left out.

        Exact where starts are marked; without marks, whose samplers ask for one only, no more than 1.
        """
        if not skipped:
            return self._counters.item(Counter.ELIGIBLE)
        if self._ranks is not None:
            # order codes have no sums
            newest = self._with_masses().arrays[0].take(self._ranks.newest(skipped))
            return self._counters.item(Counter.ELIGIBLE) - np.count_nonzero(newest)
        tree = self._marks if self._marks is not None else self._with_masses()
        found = self._reach(tree, skipped).mass
        return found if tree is self._marks else min(found, 1)

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` starts: fields, windows, key, probability and weight."""
        slots, probability, weight = self._drawn(batch, beta)
        shifts = self._shifts(batch)
        return {**self._transitions(slots, shifts), **self._named(slots, probability, weight)}

    def sample_sequences(self, batch: int, length: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` starts whose `length` steps are stored, and read those steps."""
        skipped = (length - 1) * self._shape.num_envs
        slots, probability, weight = self._drawn(batch, beta, skipped, exact=True)
        shifts = self._shifts(batch)
        return {**self._sequences(slots, length, shifts), **self._named(slots, probability, weight)}

    def _named(self, slots: np.ndarray, probability: np.ndarray, weight: np.ndarray) -> dict[str, Tensor]:
        self._counters[Counter.STEP] += 1
        return {
            "key": torch.from_numpy(self._noted(slots)),
            "probability": torch.from_numpy(probability),
            "weight": torch.from_numpy(weight),
        }

    def _drawn(
        self, batch: int, beta: float | None, skipped: int = 0, *, exact: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, probabilities and weights of `batch` starts, none of them in the newest `skipped` slots.

        exact: ranks are those of this moment in any case.
        """
        newest = self._sampler.newest if isinstance(self._sampler, Combined) else 0
        if isinstance(self._base, Latest):
            newest = batch
        slots, probability, weight = self._by_chance(batch - newest, beta, skipped, exact=exact)
        if newest:
            found = self._reach(self._with_marks(), skipped, by_key=True)
            last = found.slots(np.arange(found.mass - newest, found.mass))
            sure = np.ones(newest, dtype=np.float32)
            slots = np.concatenate((slots, last))
            probability = np.concatenate((probability, sure))
            weight = np.concatenate((weight, sure))
        return slots, probability, weight

    def _by_chance(
        self, drawn: int, beta: float | None, skipped: int, *, exact: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, probabilities and weights of the starts that the base sampler draws."""
        base = self._base
        if drawn == 0:
            nothing = np.empty(0, dtype=np.float32)
            return np.empty(0, dtype=np.int64), nothing, nothing
        if isinstance(base, Proportional):
            tree = self._with_masses()
            doubles = self._words.doubles(self._blocks(drawn), drawn)
            if not skipped:
                return draw_by_mass(
                    tree,
                    doubles,
                    beta if beta is not None else self._scheduled(base),
                    stratified=base.stratified,
                    lowest_of_all=base.normalize == "buffer",
                )
            found = self._reach(tree, skipped)
            targets = stratified_targets if base.stratified else independent_ranks
            slots = found.slots(targets(found.mass, doubles))
            masses = tree.arrays[0].take(slots)
            lowest = smallest(masses) if base.normalize == "batch" else tree.lowest()
            exponent = beta if beta is not None else self._scheduled(base)
            return slots, (masses / found.mass).astype(np.float32), importance_weights(masses, lowest, exponent)
        if isinstance(base, RankBased):
            return self._by_rank(base, drawn, beta, skipped, exact=exact)
        found = self._reach(self._with_marks(), skipped)
        if isinstance(base, Uniform) and not base.replacement:
            words = self._words.words(self._blocks(PERMUTATION_WORDS), PERMUTATION_WORDS)
            ranks = permuted_ranks(found.mass, drawn, words)
        else:
            ranks = independent_ranks(found.mass, self._words.doubles(self._blocks(drawn), drawn))
        return found.slots(ranks), np.full(drawn, 1 / found.mass, np.float32), np.ones(drawn, np.float32)

    def _reach(self, tree: MassTree, skipped: int, *, by_key: bool = False) -> DrawRange:
        return reach(tree, self._counters.item(Counter.ADDED) % self._capacity, skipped, by_key=by_key)

    def _with_masses(self) -> MassTree:
        if self._tree is None:
            raise RuntimeError(f"{self._sampler} keeps no priorities.")
        return self._tree

    def _with_marks(self) -> MassTree:
        if self._marks is None:
            raise RuntimeError(f"{self._sampler} keeps no marks of eligible starts.")
        return self._marks

    def _shifts(self, batch: int) -> np.ndarray | None:
        """(batch, 4) random shifts of pictures, or None without augmentation."""
        if not self._shift:
            return None
        return shifts_from(self._words.words(self._blocks(batch), batch), self._shift)

    # what stands in the batch

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
        words = self._words.words(self._blocks(PERMUTATION_WORDS), PERMUTATION_WORDS)
        drawn = goal_words(count, strategy)
        doubles = self._words.doubles(self._blocks(drawn), drawn) if drawn else np.zeros(count)
        return goals_from(self._streams, keys.numpy() % self._capacity, self.span(), words, doubles, strategy)

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The transitions from these keys; KeyError naming the first that is not live or not eligible."""
        array = keys.numpy()
        first, added = self.span()
        slots = array % self._capacity
        leaves = (self._marks if self._marks is not None else self._with_masses()).arrays[0]
        readable = (array >= first) & (array < added) & (leaves.take(slots) > 0)
        if not np.logical_and.reduce(readable):
            raise unreadable(int(array[readable.argmin()]), first, added)
        return self._transitions(slots, None)
