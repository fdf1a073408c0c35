# mypy: ignore-errors
# (types are what Numba infers)
"""n-step windows of steps in a ring, where the frames of the stacks before and after them lie, and their copies.

A plan says which frame stands where: a slot of the ring, ZEROS, or `ZEROS - 1 - row` for a row of the pool of kept
final observations. Frame `i` of a stack of S is the one S - 1 - i steps before its newest, unless the episode began
later: then it is the episode's first frame, or zeros.
"""

from __future__ import annotations

import numpy as np

from gpu_replay.loops.compiling import inner, loop
from gpu_replay.loops.constants import Flag

_TERMINATED, _TRUNCATED, _DEAD, _FINAL, _CUT = Flag.TERMINATED, Flag.TRUNCATED, Flag.DEAD, Flag.FINAL, Flag.CUT
_STOPS = _TERMINATED | _TRUNCATED | _CUT | _DEAD
ZEROS = -1
# windows whose frames are copied together
_BLOCK = 32


@inner
def window_reward(rewards, powers, slot, length, num_envs):
    """The discounted sum, in float64, of the rewards of `length` steps from a slot on, added in their order."""
    total = rewards[slot] * powers[0]
    for age in range(1, length):
        slot = slot + num_envs if slot + num_envs < rewards.size else slot + num_envs - rewards.size
        total += rewards[slot] * powers[age]
    return total


@inner
def _length_of(flags, slot, most, num_envs):
    """Steps of a window from a slot on that ends with the first step that ends its stream, and after `most` steps."""
    length = 1
    while length < most and flags[slot] & _STOPS == 0:
        slot = slot + num_envs if slot + num_envs < flags.size else slot + num_envs - flags.size
        length += 1
    return length


@inner
def _frame(newest, back, depth, num_envs, slots, zero):
    """Place of the frame `back` steps before the newest, in an episode that began `depth` steps before the newest."""
    if zero and back > depth:
        return ZEROS
    place = newest - min(back, depth) * num_envs
    return place + slots if place < 0 else place


@inner
def _plan_stacks(plan, row, slot, after, depth, length, stays, pooled, num_envs, slots, zero):
    """Plan the stacks before and after a window of `length` steps; `pooled` is the last frame's row of the pool, or -1.

    after: slot of the last step after the window, which is that of the window's last step where `stays`.
    """
    batch, stack = plan.shape[0] // 2, plan.shape[1]
    for frame in range(stack):
        back = stack - 1 - frame
        plan[row, frame] = _frame(slot, back, depth, num_envs, slots, zero)
        if pooled >= 0 and back == 0:
            plan[batch + row, frame] = ZEROS - 1 - pooled
        else:
            # a pooled frame comes after the last one in the ring
            back -= pooled >= 0
            plan[batch + row, frame] = _frame(after, back, depth + length - stays, num_envs, slots, zero)


@loop(
    "(int64[::1], uint8[::1], int32[::1], int32[::1], float32[::1], int32[::1], float64[::1], int64, boolean,"
    " boolean, boolean, int64[:, ::1], float32[::1], float32[::1], boolean[::1], boolean[::1])"
)
def windows(
    starts, flags, depth, lengths, sums, final, powers, num_envs, next_step, hindsight, zero,
    plan, reward, discount, terminated, truncated,
):  # fmt: skip
    """The windows of (B,) starts that can be drawn.

    flags, depth, final: as in `ops.eligibility.Streams`. lengths, sums: (slots,) of windows. powers: of gamma.
    zero:      whether stacks are padded with zeros.
    plan:      (2 * B, S), the stacks before the windows first.
    reward, discount: (B,) float32. terminated, truncated: (B,) bool, how the windows ended.
    """
    slots, batch = flags.size, starts.size
    steps, lasts = np.empty(batch, dtype=np.int64), np.empty(batch, dtype=np.int64)
    depths, endings = np.empty(batch, dtype=np.int64), np.empty(batch, dtype=np.uint8)
    # scattered memory is read in separate loops, so that the cache misses of several rows overlap
    for row in range(batch):
        slot = starts[row]
        length = int(lengths[slot])
        last = slot + (length - 1) * num_envs
        steps[row], lasts[row], reward[row] = length, last if last < slots else last - slots, sums[slot]
    for row in range(batch):
        depths[row], endings[row] = depth[starts[row]], flags[lasts[row]]
    for row in range(batch):
        slot, length, last, flag = starts[row], steps[row], lasts[row], endings[row]
        over, cut, known = flag & _TERMINATED != 0, flag & _TRUNCATED != 0, hindsight and flag & _FINAL != 0
        # a transition with another goal may go on after its ending: it needs the final observation if it is there
        kept = not next_step and ((cut and not over) or known)
        stays = kept or (over and not (next_step and known))
        after = last if stays else last + num_envs
        pooled = final[last] if kept else -1
        after = after if after < slots else after - slots
        _plan_stacks(plan, row, slot, after, depths[row], length, stays, pooled, num_envs, slots, zero)
        discount[row] = 0.0 if over else powers[length]
        terminated[row], truncated[row] = over, cut


@loop(
    "(int64[::1], int64[::1], uint8[::1], int32[::1], int32[::1], float32[::1], float64[::1], int64, boolean,"
    " boolean, int64[:, ::1], float32[::1], float32[::1], boolean[::1], boolean[::1])"
)
def open_windows(
    starts, left, flags, depth, final, rewards, powers, num_envs, next_step, zero,
    plan, reward, discount, terminated, truncated,
):  # fmt: skip
    """The windows of (B,) stored steps, which need not be whole: they end with the newest step at the latest.

    left: (B,) steps that are stored from each on. The rest as in `windows`.

    Where the observation after a window is not there, since it ends with the newest step, an ending whose final
    observation was not given or a broken stream, the last one stands in its place.
    """
    slots, n = flags.size, powers.size - 1
    for row in range(starts.size):
        slot = starts[row]
        length = _length_of(flags, slot, min(n, left[row]), num_envs)
        last = (slot + (length - 1) * num_envs) % slots
        flag = flags[last]
        over, cut = flag & _TERMINATED != 0, flag & _TRUNCATED != 0
        kept = not next_step and cut and not over and flag & _FINAL != 0
        stays = over or flag & (_CUT | _DEAD) != 0 or length >= left[row] or (cut and not next_step)
        after = last if stays else last + num_envs
        after = after if after < slots else after - slots
        pooled = final[last] if kept else -1
        _plan_stacks(plan, row, slot, after, int(depth[slot]), length, stays, pooled, num_envs, slots, zero)
        reward[row] = window_reward(rewards, powers, slot, length, num_envs)
        discount[row] = 0.0 if over else powers[length]
        terminated[row], truncated[row] = over, cut


@loop("(int64[::1], uint8[::1], float32[::1], float64[::1], int64, int32[::1], float32[::1])")
def measure(masses, flags, rewards, powers, num_envs, lengths, sums):
    """Find steps and discounted rewards of the windows of all starts that have mass."""
    for slot in range(flags.size):
        if masses[slot] > 0:
            length = _length_of(flags, slot, powers.size - 1, num_envs)
            lengths[slot] = length
            sums[slot] = window_reward(rewards, powers, slot, length, num_envs)


def _gather_stacks(ring, pool, plan, begin, end, first, out):
    """Copy the frames of the windows from `begin` to `end` to where the plan says.

    ring: (slots, words). pool: (finals, words). plan: (2 * B, S).
    out:  (2 * m * S, words) of m windows from `first` on, the stacks before them first.
    """
    batch, stack, words = plan.shape[0] // 2, plan.shape[1], ring.shape[1]
    windows = out.shape[0] // (2 * stack)
    for block in range(begin, end, _BLOCK):
        stop = min(block + _BLOCK, end)
        # the first words of a block, then the others: so the cache misses of several frames overlap
        for side in range(2):
            for row in range(block, stop):
                for frame in range(stack):
                    place = (side * windows + row - first) * stack + frame
                    out[place, 0] = ring[max(plan[side * batch + row, frame], 0), 0]
        # both stacks of a window together: most frames are in both, and then still in the cache
        for row in range(block, stop):
            for side in range(2):
                for frame in range(stack):
                    source = plan[side * batch + row, frame]
                    place = (side * windows + row - first) * stack + frame
                    if source >= 0:
                        for word in range(1, words):
                            out[place, word] = ring[source, word]
                    else:
                        for word in range(words):
                            out[place, word] = 0 if source == ZEROS else pool[ZEROS - 1 - source, word]


_PLACES = "int64[:, ::1], int64, int64, int64"
# the loops for frames viewed as words of 8 bytes, and as bytes
gather_words = loop(f"(int64[:, ::1], int64[:, ::1], {_PLACES}, int64[:, ::1])", nogil=True)(_gather_stacks)
gather_bytes = loop(f"(uint8[:, ::1], uint8[:, ::1], {_PLACES}, uint8[:, ::1])", nogil=True)(_gather_stacks)
