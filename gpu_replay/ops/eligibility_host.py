"""Which starts of a trajectory buffer can be drawn: the host implementation; the contract is in `eligibility.py`.

A start is eligible while its stack, its whole n-step window and, unless the episode terminated inside the window, the
observation after it are stored. So each new step settles at most one start more per environment, or all that an ending
closes, and takes away those that were overwritten or lost a frame of their stack at the ring's seam.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_replay.ops import _backend
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag, Streams, length_dtype
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.windows import sum_in_order

# slots that are summed up again at no cost beside that of the call
_FEW_SLOTS = 512
# an array, where in it, and what was there
Held = tuple[np.ndarray, Any, np.ndarray]


class HostEligibility:
    """Host: adds steps and keeps the trees: `tree` of masses, `eligible_tree` of ones, either or both.

    rewards: (slots,) of the ring, those of a step written before it is added. powers: of gamma, see `powers_of`.
    length, reward: (slots,) of the windows of eligible starts, found once, when they are complete: looking a window up
    means a trip to memory for each of its steps, which would be made anew with every draw.
    """

    def __init__(
        self,
        streams: Streams,
        tree: MassTree | None,
        eligible_tree: MassTree | None,
        counters: np.ndarray,
        rewards: np.ndarray,
        powers: np.ndarray,
    ) -> None:
        shape = streams.shape
        self.powers = powers
        self.rewards = rewards.reshape(shape.steps, shape.num_envs)
        self.length = np.zeros(shape.slots, dtype=length_dtype(shape.n_step))
        self.reward = np.zeros(shape.slots, dtype=np.float32)
        self.lengths = self.length.reshape(shape.steps, shape.num_envs)
        self.sums = self.reward.reshape(shape.steps, shape.num_envs)
        self.shape = shape
        self.counters = counters
        by_step = (shape.steps, shape.num_envs)
        self.flags = streams.flags.numpy().reshape(by_step)
        self.depth = streams.depth.numpy().reshape(by_step)
        self.pending = streams.pending.numpy()
        self.final = streams.final.numpy().reshape(by_step if shape.finals else (0, 0))
        self.owner = streams.owner.numpy()
        self._spans = streams.spans.numpy().reshape(by_step) if shape.hindsight else None
        self._parted = streams.parted.numpy()
        self.trees = [(each, each is eligible_tree) for each in (tree, eligible_tree) if each is not None]
        self.leaves = [each.arrays[0][: shape.slots].reshape(by_step) for each, _ in self.trees]
        self._envs = np.arange(shape.num_envs, dtype=np.int64)
        # in a ring this long no row that a step without endings touches is met twice
        self._roomy = shape.steps > shape.n_step + shape.stack
        self.ages = np.arange(shape.stack, dtype=np.int32)[:, None]
        self._no_flags = bytes(shape.num_envs)
        # what compiled loops take of it, once they are called
        self.compiled: tuple[Any, ...] | None = None
        self._loops: Any = _backend.inner_loops()
        # rows between two that changed are summed up with them while they are few; an order is told of changes only
        together = (shape.n_step + shape.stack) * shape.num_envs <= _FEW_SLOTS
        self.together = together and all(each.order is None for each, _ in self.trees)

    def goes_on(self, step: int, terminated: np.ndarray, truncated: np.ndarray) -> bool:
        """Whether no episode ends with this step, none did with the one before, and no row is met twice."""
        # bytes are compared faster than an array is reduced
        rows = terminated, truncated, self.flags[step % self.shape.steps - 1]
        return self._roomy and step > 0 and all(each.tobytes() == self._no_flags for each in rows)

    def extension(self, step: int, oldest: int, masses: np.ndarray | None, initial: int) -> Any:
        """The compiled function that adds a step that goes on, with its arguments; None where it takes more than one.

        It needs no reward of the step itself, and counts.
        """
        return None if self._spans is not None else self._loops.extension(self, step, oldest, masses, initial)

    def add_step(
        self,
        step: int,
        oldest: int,
        terminated: np.ndarray,
        truncated: np.ndarray,
        masses: np.ndarray | None,
        initial: int,
        with_final: bool,
        before: list[Held],
    ) -> tuple[int, np.ndarray]:
        """Add one step of all environments, given how it ended.

        step:       the number of the step; `oldest` is the first that is stored once this one is.
        masses:     (num_envs,) given with the step, or None; a start without gets `initial`.
        with_final: whether final observations came with the step.
        before:     gets what is changed, but for counters, and for sums and windows, which follow from it.

        returns: the largest given mass that came to count, 0 if none did; and (k,) environments whose final
        observation is to be kept, in the rows that `final_rows` then says.
        """
        shape = self.shape
        row = step % shape.steps
        if self.goes_on(step, terminated, truncated):
            self._hold(before, step, [(row - shape.n_step) % shape.steps, self._rows(row, row + shape.stack)])
            if self._spans is not None:
                self._hold_episodes(before, row)
                # as in `_remember`; no episode is left behind
                np.copyto(self._parted, self._spans[row], where=self.depth[row] == 0)
                self._spans[row] = -1
            more, largest = self._loops.extend_episodes(self, step, oldest, masses, initial)
            self.counters[Counter.ELIGIBLE] += more
            return int(largest), self._envs[:0]
        # all rows are in this one and those of the window before and the stack after it
        near = max(row - shape.n_step, row - shape.steps), min(row + shape.stack, row + shape.steps)
        self._hold(before, step, [self._rows(*near)])
        if self._spans is not None:
            self._hold_episodes(before, row)
        last = self.flags[(step - 1) % shape.steps].copy()
        depth = self._depth(step, last)
        # a step that was broken off from outside is followed by a first one, in every mode
        dead = (last & (Flag.TERMINATED | Flag.TRUNCATED) != 0) & (last & Flag.CUT == 0) & shape.next_step
        ended = terminated * np.uint8(Flag.TERMINATED) | truncated * np.uint8(Flag.TRUNCATED)
        flags = np.where(dead, np.uint8(Flag.DEAD), ended)
        self.revoke(row, step)
        if self._spans is not None:
            self._remember(self._spans, step, depth, last, dead)
        kept = self._envs[:0]
        if with_final and shape.finals:
            kept = self._keep_finals(step, row, oldest, flags, before)
        self.flags[row] = flags
        self.depth[row] = depth
        self.pending[step % (shape.n_step + 1)] = 0 if masses is None else masses
        return self._grant(step, oldest, flags, depth, last, initial), kept

    def _rows(self, begin: int, end: int) -> Any:
        """An index of the rows of the ring from `begin` to `end`, which may lie outside by a lap."""
        steps = self.shape.steps
        return slice(begin, end) if begin >= 0 and end <= steps else np.arange(begin, end) % steps

    def _hold(self, before: list[Held], step: int, granted: list[Any]) -> None:
        """Note what a step overwrites beside its reward, and the masses of these rows."""
        row = step % self.shape.steps
        places = [(self.flags, row), (self.depth, row), (self.pending, step % (self.shape.n_step + 1))]
        places += [(leaves, rows) for leaves in self.leaves for rows in granted]
        before += [(array, place, array[place].copy()) for array, place in places]

    def _hold_episodes(self, before: list[Held], row: int) -> None:
        """Note what is known of episodes where a step may change it."""
        last, steps = row - 1, self.shape.steps
        places: list[tuple[Any, Any]] = [(self.flags, last), (self._spans, row), (self._parted, self._envs)]
        # where the episodes began that this step may leave behind, if they are still there
        first = (last - np.minimum(self.depth[last], steps)) % steps
        places.append((self._spans, (first, self._envs)))
        before += [(array, place, array[place].copy()) for array, place in places]

    def _depth(self, step: int, before: np.ndarray) -> np.ndarray:
        """Steps since the first of the episode, for each environment."""
        if step == 0:
            return np.zeros(self.shape.num_envs, dtype=np.int32)
        over = Flag.DEAD | Flag.CUT if self.shape.next_step else Flag.TERMINATED | Flag.TRUNCATED | Flag.CUT
        depth = np.minimum(self.depth[(step - 1) % self.shape.steps], self.shape.deepest - 1)
        return (depth + 1) * (before & over == 0)

    def _remember(self, spans: np.ndarray, step: int, depth: np.ndarray, before: np.ndarray, dead: np.ndarray) -> None:
        """Note the span of each episode that this step's leaves behind, before the step's own depth is stored.

        depth, before, dead: of this step, of the step before it, and whether this one is dead.
        """
        steps = self.shape.steps
        row, last = step % steps, (step - 1) % steps
        # the first step of an episode is overwritten: what is left of it is found by its environment
        np.copyto(self._parted, spans[row], where=self.depth[row] == 0)
        if steps > 1:
            self.flags[last] |= dead * np.uint8(Flag.FINAL)
        over = np.flatnonzero(depth == 0) if step else self._envs[:0]
        if over.size:
            behind = self.depth[last, over] + 1
            span = behind - 1 + (before[over] & Flag.FINAL != 0)
            held = behind < steps
            spans[(row - behind[held]) % steps, over[held]] = span[held]
            self._parted[over[~held]] = span[~held]
        spans[row] = -1

    def revoke(self, row: int, step: int) -> None:
        """Take away the starts that are overwritten, and those that lose the first frame of their stack."""
        shape = self.shape
        if step < shape.steps:
            return
        for age in range(min(shape.stack, shape.steps)):
            other = (row + age) % shape.steps
            # a deep stack lost its first frame steps ago
            lost = (self.depth[other] >= age) & (self.leaves[0][other] > 0)
            if np.logical_or.reduce(lost):
                self._assign(other, lost, 0)

    def _keep_finals(self, step: int, row: int, oldest: int, flags: np.ndarray, before: list[Held]) -> np.ndarray:
        """Choose rows for the final observations of this step, as long as the next row is free."""
        shape, count = self.shape, self.counters.item(Counter.FINALS)
        ended = flags & (Flag.TERMINATED | Flag.TRUNCATED)
        # a terminated window needs no final observation, but its goal may be wanted
        wanted = np.flatnonzero(ended != 0 if shape.hindsight else ended == Flag.TRUNCATED)[: shape.finals]
        places = (count + np.arange(wanted.size)) % shape.finals
        # owners are in the order of their keys, so the free rows come first
        free = self.owner[places] < oldest * shape.num_envs
        kept, places = wanted[free], places[free]
        before += [(self.final, row, self.final[row].copy()), (self.owner, places, self.owner[places])]
        flags[kept] |= Flag.FINAL
        self.final[row, kept] = places
        self.owner[places] = step * shape.num_envs + kept
        self.counters[Counter.FINALS] = count + kept.size
        return kept

    def final_rows(self, step: int, envs: np.ndarray) -> np.ndarray:
        """The rows of the final observations kept at a step."""
        return self.final[step % self.shape.steps, envs]

    def _grant(
        self, step: int, oldest: int, flags: np.ndarray, depth: np.ndarray, before: np.ndarray, initial: int
    ) -> int:
        """Give their masses to the starts that this step completes; returns the largest given one."""
        shape, n = self.shape, self.shape.n_step
        alive = flags & Flag.DEAD == 0
        # the observation of this step ends the full windows that began n steps ago
        top = self._complete(step, n, 0, alive, depth, oldest, initial)
        closing = flags & (Flag.TERMINATED | Flag.FINAL) != 0
        if np.logical_or.reduce(closing):
            for age in range(min(n, shape.steps)):
                top = max(top, self._complete(step, age, 1, closing, depth, oldest, initial))
        # a dead step carries the observation that truncated windows waited for
        waited = ~alive & (before & (Flag.TERMINATED | Flag.TRUNCATED) == Flag.TRUNCATED)
        if np.logical_or.reduce(waited):
            for age in range(1, min(n + 1, shape.steps)):
                top = max(top, self._complete(step, age, 0, waited, depth, oldest, initial))
        return top

    def _complete(
        self, step: int, age: int, own: int, chosen: np.ndarray, depth: np.ndarray, oldest: int, initial: int
    ) -> int:
        """Make eligible the chosen starts of `age` steps ago, if in the same episode and with their stack stored.

        own: 1 where this step belongs to their windows, 0 where it only carries the observation after them.
        """
        shape = self.shape
        start = step - age
        if start < oldest:
            return 0
        chosen = chosen & (depth >= age)
        if start - shape.stack + 1 < oldest:
            # as 32-bit numbers: steps are counted further
            chosen &= np.minimum(depth - age, shape.stack - 1) <= start - oldest
        given = self.pending[start % (shape.n_step + 1)]
        largest = int(np.maximum.reduce(given * chosen))
        # most streams come without priorities of their own
        row = start % shape.steps
        self._assign(row, chosen, np.where(given > 0, given, initial) if largest else initial)
        length = age + own
        steps = np.arange(start, start + length) % shape.steps
        sums = sum_in_order(self.rewards[steps] * self.powers[:length, None])
        np.copyto(self.sums[row], sums, "same_kind", chosen)
        np.copyto(self.lengths[row], length, "unsafe", chosen)
        return largest

    def _assign(self, row: int, chosen: np.ndarray, masses: int | np.ndarray) -> None:
        """Give the chosen starts of one step of the ring their masses; 0 takes them away."""
        begin = row * self.shape.num_envs
        end = begin + self.shape.num_envs
        before = np.count_nonzero(self.leaves[0][row])
        for (tree, unit), leaves in zip(self.trees, self.leaves, strict=True):
            tree.set_masses(begin, end, np.where(chosen, np.minimum(masses, 1) if unit else masses, leaves[row]))
        self.counters[Counter.ELIGIBLE] += np.count_nonzero(self.leaves[0][row]) - before
