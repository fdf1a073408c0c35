# mypy: ignore-errors
# (types are what Numba infers)
"""n-step windows of steps in a ring, where the frames of the stacks before and after them lie, and their copies.

Each frame has a slot of the ring, ZEROS, or `ZEROS - 1 - row` for a row of the pool of kept final observations. Frame
`i` of a stack of S is the one S - 1 - i steps before its newest, unless the episode began later: then it is the
episode's first frame, or zeros.
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
def _frame(newest, back, depth, num_envs, slots, zero):
    """Place of the frame `back` steps before the newest, in an episode that began `depth` steps before the newest."""
    if zero and back > depth:
        return ZEROS
    place = newest - min(back, depth) * num_envs
    return place + slots if place < 0 else place


@inner
def _find_stacks(frame_slots, row, slot, after, depth, length, stays, pooled, num_envs, slots, zero):
    """Find the stacks before and after a window of `length` steps; `pooled` is the last frame's row of the pool, or -1.

    after: slot of the last step after the window, which is that of the window's last step where `stays`.
    """
    batch, stack = frame_slots.shape[0] // 2, frame_slots.shape[1]
    for frame in range(stack):
        back = stack - 1 - frame
        frame_slots[row, frame] = _frame(slot, back, depth, num_envs, slots, zero)
        if pooled >= 0 and back == 0:
            frame_slots[batch + row, frame] = ZEROS - 1 - pooled
        else:
            # a pooled frame comes after the last one in the ring
            back -= pooled >= 0
            frame_slots[batch + row, frame] = _frame(after, back, depth + length - stays, num_envs, slots, zero)


@loop(
    "(uint8[::1], int32[::1], int32[::1], float32[::1], float64[::1], int64, boolean, boolean, int64[::1],"
    " int64[:, ::1], float32[::1], float32[::1], boolean[::1], boolean[::1])"
)
def windows(
    flags, depth, final, rewards, powers, num_envs, next_step, zero,
    starts, frame_slots, reward, discount, terminated, truncated,
):  # fmt: skip
    """The windows of (B,) stored steps.

    flags, depth, final: as in `ops.steps.Streams`. rewards: (slots,) of the ring. powers: of gamma.
    zero:      whether stacks are padded with zeros.
    frame_slots: (2 * B, S), the stacks before the windows first.
    reward, discount: (B,) float32. terminated, truncated: (B,) bool, how the windows ended.

    Where the observation after a window is not stored and never will be, the last one stands in its place.
    """
    slots, n, batch = flags.size, powers.size - 1, starts.size
    lengths, lasts, endings, depths = np.empty((4, batch), dtype=np.int64)
    # scattered memory is read in a loop of its own, so that the cache misses of several rows overlap
    for row in range(batch):
        last, length = starts[row], 1
        # summed in float64, in the order of the steps
        flag, total, depths[row] = flags[last], rewards[last] * powers[0], depth[last]
        while length < n and flag & _STOPS == 0:
            last += num_envs
            last -= slots if last >= slots else 0
            flag = flags[last]
            total += rewards[last] * powers[length]
            length += 1
        lengths[row], lasts[row], endings[row], reward[row] = length, last, flag, total
    for row in range(batch):
        length, last, flag = lengths[row], lasts[row], endings[row]
        over, cut, known = flag & _TERMINATED != 0, flag & _TRUNCATED != 0, flag & _FINAL != 0
        # without `next_step` the step after an ending belongs to another episode
        stays = (over and not known) or ((over or cut) and not next_step) or flag & (_CUT | _DEAD) != 0
        after = last if stays else last + num_envs
        after -= slots if after >= slots else 0
        pooled = final[last] if known and not next_step else -1
        _find_stacks(frame_slots, row, starts[row], after, depths[row], length, stays, pooled, num_envs, slots, zero)
        discount[row] = 0.0 if over else powers[length]
        terminated[row], truncated[row] = over, cut


def _gather_stacks(ring, pool, frame_slots, begin, end, first, out):
    """Copy the frames of the windows from `begin` to `end` from where these say.

    ring: (slots, words). pool: (finals, words). frame_slots: (2 * B, S).
    out:  (2 * m * S, words) of m windows from `first` on, the stacks before them first.
    """
    batch, stack, words = frame_slots.shape[0] // 2, frame_slots.shape[1], ring.shape[1]
    windows = out.shape[0] // (2 * stack)
    for block in range(begin, end, _BLOCK):
        stop = min(block + _BLOCK, end)
        # the first words of a block, then the others: so the cache misses of several frames overlap
        for side in range(2):
            for row in range(block, stop):
                for frame in range(stack):
                    place = (side * windows + row - first) * stack + frame
                    out[place, 0] = ring[max(frame_slots[side * batch + row, frame], 0), 0]
        # both stacks of a window together: most frames are in both, and then still in the cache
        for row in range(block, stop):
            for side in range(2):
                for frame in range(stack):
                    source = frame_slots[side * batch + row, frame]
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
