# mypy: ignore-errors
# (types are what Numba infers)
"""Goals that later steps of the same episode achieved, looked up without walking along it."""

from __future__ import annotations

import numpy as np

from gpu_replay.loops.compiling import loop
from gpu_replay.loops.constants import Flag

_FINAL = Flag.FINAL


@loop(
    "(uint8[::1], int32[::1], int32[::1], int32[::1], int32[::1], int64, int64[::1], boolean, boolean, int64, int64,"
    " int64[::1], int64[::1], float64[::1], boolean[::1], int64[::1], int64[::1])"
)
def choose_goals(
    flags, depth, episode_length, clipped_length, final, num_envs, sums,
    last, episode, oldest, newest, slots, rows, doubles, known, sources, places,
):  # fmt: skip
    """Choose the goals of (K,) rows of a batch.

    flags to final: of the ring, as in `ops.steps.Streams`. oldest, newest: steps that are stored.
    sums: of the masses of goals at most so many steps ahead, for "geometric"; else empty.
    last, episode: the strategies; else "future" or "geometric". slots: (B,) of the batch. doubles: (K,) in [0, 1).
    known:   (K,) bool, false where the observation after the row's own step is not stored.
    sources: (K,) slots of the steps whose observations hold the goals; any slot if there is no goal.
    places:  (K,) rows of the kept final observations that hold them instead, else -1; empty without these.
    returns: whether all are known.
    """
    steps, complete = flags.size // num_envs, True
    last_line = newest % steps
    for row in range(rows.size):
        slot = slots[rows[row]]
        line, behind = slot // num_envs, int(depth[slot])
        env, age = slot - line * num_envs, last_line - line
        age += steps if age < 0 else 0
        if behind < steps - age:
            # the first step of the episode has not been overwritten
            first = slot - behind * num_envs
            span = episode_length[first + flags.size if first < 0 else first]
        else:
            span = clipped_length[env]
        # steps after this one whose goals are known; less than none where its own is not
        ahead = span - 1 - behind if span >= 0 else age - 1 + (flags[last_line * num_envs + env] & _FINAL != 0)
        ahead = min(ahead, age)
        known[row] = ahead >= 0
        complete = complete and ahead >= 0
        chosen = ahead = max(ahead, 0)
        if not last:
            back = min(behind, max(newest - oldest - age, 0)) if episode else 0
            width = sums[min(ahead, sums.size - 1)] if sums.size else back + ahead + 1
            chosen = min(int(doubles[row] * width), width - 1) - back
            if sums.size:
                chosen = np.searchsorted(sums, chosen, side="right")
        line += chosen
        line += steps if line < 0 else -steps if line >= steps else 0
        place = line * num_envs + env
        pooled = places.size > 0 and flags[place] & _FINAL != 0
        if places.size:
            places[row] = final[place] if pooled else -1
        line += 0 if pooled else 1
        sources[row] = (0 if line == steps else line) * num_envs + env
    return complete
