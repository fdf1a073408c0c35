# mypy: ignore-errors
# (types are what Numba infers)
"""The masses of all slots and the sums above them: loops that draw by them, change them and sum them up.

A tree is two arrays of int64: `flat`, all levels end to end, leaves first, each padded to whole blocks of 16, and
`starts`, where each level begins and where the last one ends.

`changed_slots` lists them for an order of ranks: first a count, then that many slots. If the count exceeds the room,
the slots mean nothing. It is empty if no order is kept.
"""

from __future__ import annotations

import numpy as np

from gpu_replay.loops.compiling import inner, loop
from gpu_replay.loops.constants import NO_KEY, NO_MASS, SHIFT, Counter, Flag

_ADDED, _FIRST, _STALE = Counter.ADDED, Counter.FIRST, Counter.STALE
_SATURATED, _MAX_MASS = Counter.SATURATED, Counter.MAX_MASS
_TERMINATED, _DEAD, _CUT, _TARGET = Flag.TERMINATED, Flag.DEAD, Flag.CUT, Flag.TARGET
_EXCLUDED = Flag.EXCLUDED
_ENDED = Flag.TERMINATED | Flag.TRUNCATED
# numbers that fit in the cache; in a larger tree this many rows are located together
_FAR, _TOGETHER = 2**18, 64
_TREE = "int64[::1], int64[::1]"


# changes


@inner
def sum_above(flat, starts, begin, stop):
    """Give the ancestors of the slots from `begin` to `stop` their sums."""
    for level in range(1, starts.size - 1):
        below, above = starts[level - 1], starts[level]
        begin, stop = begin >> SHIFT, (stop + 15) >> SHIFT
        for node in range(begin, stop):
            place, total = below + (node << SHIFT), 0
            for child in range(place, place + 16):
                total += flat[child]
            flat[above + node] = total


@inner
def mark_changed(changed_slots, begin, stop):
    """Tell the order that these slots have changed."""
    for slot in range(begin, stop if changed_slots.size else begin):
        changed_slots[min(changed_slots[0] + 1, changed_slots.size - 1)] = slot
        changed_slots[0] += 1


@inner
def lowest_of(flat, starts):
    """The smallest mass that is not 0, NO_MASS when there is none."""
    smallest = NO_MASS
    for slot in range(starts[1]):
        smallest = min(smallest, flat[slot] if flat[slot] > 0 else NO_MASS)
    return smallest


@inner
def highest_of(flat, starts):
    """The largest mass, 0 when there is none."""
    largest = 0
    for slot in range(starts[1]):
        largest = max(largest, flat[slot])
    return largest


@inner
def total_of(flat, starts):
    """The total mass."""
    mass = 0
    for node in range(starts[starts.size - 2], starts[starts.size - 1]):
        mass += flat[node]
    return mass


# the same for Python
total = loop("(int64[::1], int64[::1])")(total_of)


# priorities


@loop(*(f"(float64, float64, float64, {real}[::1], float64[::1])" for real in ("float32", "float64")))
def shifted(eps, clip, least, priorities, numbers):
    """min(|priority| + eps, clip), at least `least`, of (B,) finite priorities."""
    for row in range(priorities.size):
        numbers[row] = max(min(abs(np.float64(priorities[row])) + eps, clip), least)


@inner
def masses_of(numbers, ordered):
    """The (B,) masses of (B,) powers before they are cut, or, if `ordered`, the codes of |priorities|: they overwrite
    the numbers.
    """
    masses = numbers.view(np.int64)
    for row in range(numbers.size):
        # the cast truncates, which is the floor of a positive number
        masses[row] = masses[row] + 1 if ordered else max(np.int64(numbers[row] * 1048576.0 + 0.5), 1)
    return masses


masses = loop("(float64[::1], boolean)")(masses_of)


@inner
def waiting_place(key, first, added, stream, flags, depth, open_masses):
    """Where the mass of a live step that cannot be drawn yet waits until it can; -1 if it never will be.

    The rule is that of `ops/steps.py`: it waits while the last step of its row is not settled, and neither an
    ending nor an interruption has decided against it.

    stream: environments, frames of a stack, whether the step after an ending carries the final observation, steps of a
            window, steps from the first of a row to its last, whether all lie in one episode, and the stride.
    """
    envs, ahead, slots = stream[0], stream[4], flags.size
    slot, number = key % slots, key // envs
    age = (added - 1) // envs - number
    newest = (added - envs + key % envs) % slots
    flag, behind = flags[newest], np.int64(depth[newest])
    settles = _TERMINATED | _DEAD if stream[2] else _ENDED
    # steps that are not settled, from the newest back
    unsettled = 0 if flag & settles else min(stream[3], behind + 1)
    if age >= ahead + unsettled or number % stream[6] or flags[slot] & _EXCLUDED:
        return -1
    if age < unsettled:
        # its own target is still to come
        if flag & _CUT:
            return -1
    elif flags[slot] & _TARGET == 0:
        return -1
    if stream[5]:
        last = (slot + ahead * envs) % slots
        if age < ahead:
            if flag & (_ENDED | _DEAD | _CUT) or behind < age:
                return -1
        elif flags[last] & _DEAD or depth[last] < ahead:
            return -1
    frames = min(np.int64(depth[slot]), stream[1] - 1)
    return key % open_masses.size if key - frames * envs >= first else -1


@loop(
    f"(int64[::1], float64[::1], boolean, int64, int64, int64[::1], {_TREE}, int64[::1],"
    " int64[::1], uint8[::1], int32[::1], int64[::1])"
)
def update(
    keys, numbers, ordered, limit, capacity, counters, flat, starts, changed_slots,
    stream, flags, depth, open_masses,
):  # fmt: skip
    """Give live keys their masses, but for those of mass 0, which keep it; the last of a repeated key wins.

    keys:     (B,). numbers, ordered: as in `masses_of`. limit: that masses are cut to.
    counters: count the largest mass given, keys that were not live, and masses that were cut.
    stream:   as in `waiting_place`, flags to open_masses as in `ops.steps.Streams`: masses of steps that cannot
              be drawn yet wait there; all are empty where everything stored can be drawn.
    """
    masses = masses_of(numbers, ordered)
    batch, levels, added = keys.size, starts.size - 1, counters[_ADDED]
    first = max(counters[_FIRST], added - capacity)
    lap = first - first % capacity
    # many rows: recomputing all sums is faster than updating the ancestors of each
    anew = 2 * (levels - 1) * batch >= capacity
    stale, largest = 0, 0
    for row in range(batch):
        key = keys[row]
        if key < first or key >= added:
            stale += key != NO_KEY
            continue
        slot = key - lap
        slot -= capacity if slot >= capacity else 0
        old, mass = flat[slot], min(masses[row], limit)
        if old == 0:
            # excluded, or a step that cannot be drawn yet
            place = waiting_place(key, first, added, stream, flags, depth, open_masses) if stream.size else -1
            if place >= 0:
                open_masses[place] = mass
                largest = max(largest, masses[row])
            continue
        largest = max(largest, masses[row])
        if changed_slots.size:
            changed_slots[min(changed_slots[0] + 1, changed_slots.size - 1)] = slot
            changed_slots[0] += 1
        flat[slot] = mass
        if not anew:
            node = slot
            for level in range(1, levels):
                node >>= SHIFT
                flat[starts[level] + node] += mass - old
    if anew:
        sum_above(flat, starts, 0, capacity)
    counters[_STALE] += stale
    if largest > limit or largest > counters[_MAX_MASS]:
        # only the last row of a key counts: going backwards, its mass turns negative once its row was found
        largest = 0
        for turn in range(2):
            for row in range(batch - 1, -1, -1):
                key = keys[row]
                if key < first or key >= added:
                    continue
                held, place = flat, key % capacity
                if flat[place] == 0 and stream.size:
                    held, place = open_masses, waiting_place(key, first, added, stream, flags, depth, open_masses)
                if place < 0 or (held[place] > 0) == turn:
                    continue
                held[place] *= -1
                if turn == 0:
                    largest = max(largest, min(masses[row], limit))
                    counters[_SATURATED] += masses[row] > limit
        counters[_MAX_MASS] = max(counters[_MAX_MASS], largest)


# draws


@inner
def locate_all(flat, starts, rests, slots):
    """The (B,) slots on which (B,) targets fall, which are overwritten; level by level for the whole batch, so that
    the processor waits for the memory of several rows at once.
    """
    top = starts.size - 2
    base = starts[top]
    before = np.zeros(starts[top + 1] - base, dtype=np.int64)
    for node in range(1, before.size):
        before[node] = before[node - 1] + flat[base + node - 1]
    # the last node of the root before which no more mass lies than the target: a step of the search for all rows
    slots[:] = 0
    left = before.size
    while left > 1:
        half = left >> 1
        for row in range(slots.size):
            slots[row] += half if before[slots[row] + half] <= rests[row] else 0
        left -= half
    for row in range(slots.size):
        rests[row] -= before[slots[row]]
    far, touched = flat.size > _FAR, 0
    for begin in range(0, slots.size, _TOGETHER):
        end = min(begin + _TOGETHER, slots.size)
        for level in range(top - 1, -1, -1):
            base = starts[level]
            if far and level == 0:
                # all loads are issued before the first is needed
                for row in range(begin, end):
                    place = base + (slots[row] << SHIFT)
                    touched |= flat[place] | flat[place + 8]
            for row in range(begin, end):
                place, rest = base + (slots[row] << SHIFT), rests[row]
                # which half of the 16 children, of 8, of 4 and of 2, chosen without a branch
                half = flat[place] + flat[place + 1] + flat[place + 2] + flat[place + 3]
                half += flat[place + 4] + flat[place + 5] + flat[place + 6] + flat[place + 7]
                over = rest >= half
                rest -= half if over else 0
                place += 8 if over else 0
                half = flat[place] + flat[place + 1] + flat[place + 2] + flat[place + 3]
                over = rest >= half
                rest -= half if over else 0
                place += 4 if over else 0
                half = flat[place] + flat[place + 1]
                over = rest >= half
                rest -= half if over else 0
                place += 2 if over else 0
                half = flat[place]
                over = rest >= half
                rests[row] = rest - half if over else rest
                slots[row] = place + 1 - base if over else place - base
    return touched


@loop("(int64[::1], int64[::1], int64, int64, int64[::1], int64[::1])")
def locate(flat, starts, offset, total, targets, slots):
    """The (B,) slots on which (B,) targets fall, which are overwritten.

    offset: mass of the slots before target 0; after the last slot targets go on with the first.
    """
    for row in range(slots.size):
        targets[row] += offset
        if targets[row] >= total:
            targets[row] -= total
    locate_all(flat, starts, targets, slots)


@inner
def spread(mass, doubles, stratified, targets):
    """(B,) targets in [0, mass), one in each of B equal parts of it, or anywhere, by (B,) float64 in [0, 1)."""
    batch = doubles.size
    if not stratified:
        for row in range(batch):
            # a wide product may round up to the width
            targets[row] = min(np.int64(doubles[row] * mass), mass - 1)
        return
    each, part = mass // batch, mass % batch
    begin, left = 0, 0
    for row in range(batch):
        # stratum i begins at i * each + i * part // batch
        left += part
        over = left >= batch
        width = each + 1 if over else each
        left -= batch if over else 0
        # a stratum without width takes the unit that it starts in
        targets[row] = begin + max(min(np.int64(doubles[row] * width), width - 1), 0)
        begin += width


targets = loop("(int64, float64[::1], boolean, int64[::1])")(spread)


@loop("(int64[::1], int64[::1], float64[::1], boolean, boolean, int64[::1], float32[::1], float64[::1])")
def draw(flat, starts, doubles, stratified, over_buffer, slots, probability, ratio):
    """Draw by mass.

    doubles:     (B,) float64 in [0, 1). over_buffer: whether the largest weight is that of the smallest stored mass.
    slots:       (B,) int64. probability: (B,) float32.
    ratio:       (B,) float64, the mass that has the largest weight over these masses.
    returns:     the total mass; nothing is drawn where that is 0.
    """
    mass = total_of(flat, starts)
    if mass == 0:
        return mass
    targets = np.empty(slots.size, dtype=np.int64)
    spread(mass, doubles, stratified, targets)
    locate_all(flat, starts, targets, slots)
    least = lowest_of(flat, starts) if over_buffer else NO_MASS
    for row in range(slots.size):
        targets[row] = flat[slots[row]]
        least = min(least, targets[row])
    for row in range(slots.size):
        probability[row] = targets[row] / mass
        ratio[row] = least / targets[row]
    return mass


@loop("(int64[::1], int64[::1], int64)")
def mass_before(flat, starts, slot):
    """The mass of the slots below `slot`."""
    mass, node = 0, slot
    for level in range(starts.size - 2):
        base = starts[level]
        for each in range(base + (node >> SHIFT << SHIFT), base + node):
            mass += flat[each]
        node >>= SHIFT
    for each in range(starts[starts.size - 2], starts[starts.size - 2] + node):
        mass += flat[each]
    return mass
