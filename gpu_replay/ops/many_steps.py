"""Many steps of all environments at once: what as many calls of `HostEligibility.add_step` leave behind, to the bit.

A call for each step costs the same few dozen array operations whether a step has one environment or a thousand. Here
these operations are made over steps and environments together: which steps are dead, how deep each is and which starts
each completes follow from the endings by running maxima.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops import numpy_loops
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag
from gpu_replay.ops.eligibility_host import HostEligibility
from gpu_replay.ops.ring import parts_of

_ENDED = Flag.TERMINATED | Flag.TRUNCATED
# slots that are worked on together, so that their arrays stay in the cache
_TOGETHER = 2**16


class GivenFinals(NamedTuple):
    """Final observations that come with T steps of E environments.

    rows:  by observation field `(k * E, *shape)` tensors, those of k of the steps; rows not read may hold anything.
    place: (T,) which of the k each step is.
    given: (T,) bool, whether final observations came with each step.
    """

    rows: dict[str, Tensor]
    place: np.ndarray
    given: np.ndarray

    def rows_of(self, step: int, kept: KeptFinals, num_envs: int) -> Tensor:
        """(k,) rows of what was kept by a call whose first step is number `step` of the T."""
        steps, envs = np.divmod(kept.places, num_envs)
        return torch.from_numpy(self.place[step + steps] * num_envs + envs)

    def of_step(self, step: int, num_envs: int) -> dict[str, Tensor] | None:
        """`[E, *shape]` of one step, as `add` takes them; None where none came."""
        if not self.given[step]:
            return None
        begin = int(self.place[step]) * num_envs
        # of a step in which nothing ended there are no rows, and none is read
        return {
            name: rows[begin : begin + num_envs] if len(rows) else rows.new_zeros((num_envs, *rows.shape[1:]))
            for name, rows in self.rows.items()
        }


class KeptFinals(NamedTuple):
    """(k,) final observations that were kept: their places among the (C * num_envs) of the call, and their rows."""

    places: np.ndarray
    rows: np.ndarray


def steps_together(host: HostEligibility) -> int:
    """How many steps `add_steps` takes at once: so few that no slot is met twice; 0 where the ring is too short."""
    shape = host.shape
    return min(shape.steps - shape.n_step - shape.stack, max(1, _TOGETHER // shape.num_envs))


def overwritten_parts(first: int, added: int, rows: int, slots: int) -> list[slice]:
    """The slots of the live keys, those from `first` to `added`, that `rows` new ones take; two parts at the seam."""
    begin, end = max(first, added - slots), min(added, added - slots + rows)
    return [part for part, _ in parts_of(begin % slots, end - begin, slots)] if begin < end else []


def add_steps(
    host: HostEligibility,
    counters: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    masses: np.ndarray | None,
    initial: int,
    *,
    running: bool,
    with_final: np.ndarray | None,
) -> KeptFinals:
    """Add C steps, at most `steps_together`, whose rewards are written; the buffer has no hindsight.

    terminated, truncated: (C, num_envs) bool. masses: (C, num_envs) given with the steps, 0 where none was; or None.
    initial: of starts without; with `running` the largest mass that came to count before stands in its place.
    with_final: (C,) bool, whether final observations came with each step; None if with none.
    """
    shape, count = host.shape, len(terminated)
    first_step = counters.item(Counter.ADDED) // shape.num_envs
    rows = np.arange(first_step, first_step + count) % shape.steps
    before = host.flags[(first_step - 1) % shape.steps]
    flags = _flags(terminated, truncated, before, shape.next_step)
    depth = _depths(host, first_step, flags, before)
    oldest = np.maximum(
        counters.item(Counter.FIRST) // shape.num_envs, np.arange(count) + (first_step + 1 - shape.steps)
    )
    kept = KeptFinals(rows[:0], rows[:0])
    if with_final is not None and shape.finals:
        wanted = (flags == Flag.TRUNCATED) & with_final[:, None]
        kept = _keep_finals(host, counters, first_step, flags, np.flatnonzero(wanted), oldest, rows)

    granted = _Granted(host, first_step, count)
    _complete(host, granted, flags, before, depth, oldest)
    at, length = granted.at, granted.length
    chosen = at >= 0
    own = np.zeros(at.shape, dtype=np.int64)
    lines = shape.n_step + 1
    own[: shape.n_step] = host.pending[np.arange(first_step - shape.n_step, first_step) % lines]
    if masses is not None:
        own[shape.n_step :] = masses
    entering: int | np.ndarray = initial
    if own.any():
        entering = _entering(counters, own, at, chosen, initial, count, running=running)

    rings = np.arange(first_step - shape.n_step, first_step + count) % shape.steps
    _write_leaves(host, counters, rings, chosen, entering, first_step + count - 1)
    host.flags[rows] = flags
    host.depth[rows] = depth
    last = np.arange(max(0, count - lines), count)
    host.pending[(first_step + last) % lines] = 0 if masses is None else masses[last]
    _sum_windows(host, rings, chosen, length)
    counters[Counter.ADDED] += count * shape.num_envs
    return kept


def _flags(terminated: np.ndarray, truncated: np.ndarray, before: np.ndarray, next_step: bool) -> np.ndarray:
    """(C, num_envs) flags of steps after one with the flags `before`, without those of final observations."""
    ended = terminated * np.uint8(Flag.TERMINATED) | truncated * np.uint8(Flag.TRUNCATED)
    if not next_step:
        return ended
    # of steps that end one after the other every second one is dead; its own ending does not count
    step = np.arange(len(ended))[:, None]
    dead_at_first = (before & _ENDED != 0) & (before & Flag.CUT == 0)
    open_before = np.empty((len(ended), before.size), dtype=np.int64)
    open_before[0] = np.where(dead_at_first, -2, -1)
    open_before[1:] = np.where(ended[:-1] == 0, step[:-1], open_before[0])
    np.maximum.accumulate(open_before, axis=0, out=open_before)
    return np.where((step - open_before) % 2 == 0, np.uint8(Flag.DEAD), ended)


def _depths(host: HostEligibility, first_step: int, flags: np.ndarray, before: np.ndarray) -> np.ndarray:
    """(C, num_envs) int64 steps since the first of the episode."""
    shape = host.shape
    over = Flag.DEAD | Flag.CUT if shape.next_step else _ENDED | Flag.CUT
    step = np.arange(len(flags))[:, None]
    begun = np.empty(flags.shape, dtype=np.int64)
    behind = host.depth[(first_step - 1) % shape.steps].astype(np.int64) + 1
    begun[0] = 0 if first_step == 0 else np.where(before & over != 0, 0, -behind)
    begun[1:] = np.where(flags[:-1] & over != 0, step[1:], begun[0])
    np.maximum.accumulate(begun, axis=0, out=begun)
    return np.minimum(step - begun, shape.deepest)


def _keep_finals(
    host: HostEligibility,
    counters: np.ndarray,
    first_step: int,
    flags: np.ndarray,
    places: np.ndarray,
    oldest: np.ndarray,
    rows: np.ndarray,
) -> KeptFinals:
    """Choose rows for the final observations of the steps at (k,) places, as long as the next row is free."""
    shape, envs, owner = host.shape, host.shape.num_envs, host.owner
    keys, limits = first_step * envs + places, oldest[places // envs] * envs
    count = counters.item(Counter.FINALS)
    found = (count + np.arange(places.size)) % shape.finals
    if places.size > shape.finals or not np.logical_and.reduce(owner[found] < limits):
        taken = np.zeros(places.size, dtype=bool)
        # one that finds no free row leaves the row to the next
        for place, (key, limit) in enumerate(zip(keys.tolist(), limits.tolist(), strict=True)):
            if owner.item(count % shape.finals) < limit:
                owner[count % shape.finals] = key
                found[place] = count % shape.finals
                taken[place] = True
                count += 1
        places, keys, found = places[taken], keys[taken], found[taken]
    owner[found] = keys
    flags.reshape(-1)[places] |= Flag.FINAL
    host.final[rows[places // envs], places % envs] = found
    counters[Counter.FINALS] += places.size
    return KeptFinals(places, found)


class _Granted:
    """Which starts become eligible: those of the C steps, and of the `n_step` before them.

    at:     (n_step + C, num_envs) int64, the step of the call that completes each; -1 where none does.
    length: the same shape, steps of their windows.
    """

    def __init__(self, host: HostEligibility, first_step: int, count: int) -> None:
        shape = host.shape
        self.at = np.full((shape.n_step + count, shape.num_envs), -1, dtype=np.int64)
        self.length = np.zeros(self.at.shape, dtype=np.int64)
        self._first, self._back = first_step - shape.n_step, shape.stack - 1

    def grant(
        self, step: np.ndarray, env: np.ndarray, age: int, own: int, depth: np.ndarray, n_step: int, oldest: np.ndarray
    ) -> None:
        """Complete the starts of `age` steps before some (k,) steps, if their stacks are stored.

        own: 1 where the step belongs to their windows. depth: of the steps; none is less than `age`.
        """
        start = step + (n_step - age)
        stored = start + self._first - np.minimum(depth - age, self._back) >= oldest[step]
        start, env, step = start[stored], env[stored], step[stored]
        self.at[start, env] = step
        self.length[start, env] = age + own


def _complete(
    host: HostEligibility,
    granted: _Granted,
    flags: np.ndarray,
    before: np.ndarray,
    depth: np.ndarray,
    oldest: np.ndarray,
) -> None:
    """Find the starts that the steps complete, as `HostEligibility._grant` does for one step."""
    n = host.shape.n_step
    dead = flags & Flag.DEAD != 0
    # the observation of a step ends the full windows that began n steps ago
    step, env = np.nonzero(~dead & (depth >= n))
    granted.grant(step, env, n, 0, depth[step, env], n, oldest)
    closing = np.nonzero(flags & (Flag.TERMINATED | Flag.FINAL))
    # a dead step carries the observation that truncated windows waited for
    previous = np.concatenate((before[None], flags[:-1]))
    waited = np.nonzero(dead & (previous & _ENDED == Flag.TRUNCATED))
    for (step, env), ages, own in ((closing, range(n), 1), (waited, range(1, n + 1), 0)):
        for age in ages:
            behind = depth[step, env]
            if behind.size and behind.item(behind.argmin()) < age:
                step, env, behind = (each[behind >= age] for each in (step, env, behind))
            if not step.size:
                break
            granted.grant(step, env, age, own, behind, n, oldest)


def _entering(
    counters: np.ndarray,
    own: np.ndarray,
    at: np.ndarray,
    chosen: np.ndarray,
    initial: int,
    count: int,
    *,
    running: bool,
) -> np.ndarray:
    """The masses of starts that become eligible; counts the largest of those that were given."""
    given = np.zeros(count, dtype=np.int64)
    np.maximum.at(given, at[chosen], own[chosen])
    reached = np.maximum.accumulate(np.maximum(given, counters.item(Counter.MAX_MASS)))
    # what one step brings to count is the initial mass of the next
    earlier = np.append(counters.item(Counter.MAX_MASS), reached[:-1])
    counters[Counter.MAX_MASS] = reached[-1]
    start = np.where(earlier > 0, earlier, initial) if running else np.full(count, initial)
    return np.where(own > 0, own, start[at])


def _write_leaves(
    host: HostEligibility,
    counters: np.ndarray,
    rings: np.ndarray,
    chosen: np.ndarray,
    entering: int | np.ndarray,
    last: int,
) -> None:
    """Give the starts of the rows `rings` their masses, and take away those that lose a frame after the step `last`."""
    shape, n = host.shape, host.shape.n_step
    lost = (last + 1 + np.arange(shape.stack - 1 if last >= shape.steps else 0)) % shape.steps
    gone = host.depth[lost] >= np.arange(1, len(lost) + 1)[:, None]
    touched = np.concatenate((rings, lost))
    before = np.count_nonzero(host.leaves[0][touched])
    for (tree, unit), leaves in zip(host.trees, host.leaves, strict=True):
        kept = leaves[rings]
        kept[n:] = 0
        np.copyto(kept, 1 if unit else entering, where=chosen)
        leaves[rings] = kept
        leaves[lost] *= ~gone
        begin, rows = int(rings[0]), len(touched)
        wrapped = max(0, begin + rows - shape.steps)
        for first, end in ((begin, begin + rows - wrapped), (0, wrapped)):
            if first < end:
                # in NumPy: of so many sums compiled loops would first have to be compiled
                tree.sum_range(first * shape.num_envs, end * shape.num_envs, numpy_loops)
    counters[Counter.ELIGIBLE] += np.count_nonzero(host.leaves[0][touched]) - before


def _sum_windows(host: HostEligibility, rings: np.ndarray, chosen: np.ndarray, length: np.ndarray) -> None:
    """Note length and discounted reward of the windows of the chosen starts."""
    rewards = host.rewards[rings]
    # by arrays: NumPy 1 multiplies float32 by a scalar in float32
    sums = rewards * host.powers[:1]
    for later in range(1, host.shape.n_step):
        ahead = len(rings) - later
        power = host.powers[later : later + 1]
        np.add(sums[:ahead], rewards[later:] * power, out=sums[:ahead], where=length[:ahead] > later)
    for kept, new in ((host.sums, sums), (host.lengths, length)):
        rows = kept[rings]
        np.copyto(rows, new, "unsafe", chosen)
        kept[rings] = rows
