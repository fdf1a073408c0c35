# mypy: ignore-errors
# (types are what Numba infers)
"""The ring of transitions: loops that count added rows and drawn rows."""

from __future__ import annotations

from gpu_replay.loops.compiling import inner, loop
from gpu_replay.loops.constants import Counter
from gpu_replay.loops.masses import highest_of, mark_changed, sum_above

_ADDED, _RANDOM, _STEP = Counter.ADDED, Counter.RANDOM, Counter.STEP
_MAX_MASS, _SATURATED, _HIGHEST = Counter.MAX_MASS, Counter.SATURATED, Counter.HIGHEST


@inner
def initial_mass(source, first_mass, counters, flat, starts):
    """The mass of rows that come without a priority: that in the counter `source`; where it is 0, or there is none, -1,
    `first_mass`.
    """
    if source == _HIGHEST:
        counters[_HIGHEST] = highest_of(flat, starts)
    largest = counters[source] if source >= 0 else 0
    return largest if largest > 0 else first_mass


@loop("(int64, int64[::1], int64, int64, int64, int64, int64[::1], int32[::1], int64[::1], int64[::1], int64[::1])")
def append(
    rows, masses, largest, saturated, source, first_mass, counters, times_sampled, flat, starts, changed_slots
):  # fmt: skip
    """Count rows whose fields were written: update masses, sums and counters.

    rows:       rows added after the newest; if they are more than the slots, the last ones stay.
    masses:     (rows,) given with them, or empty; `largest` is the largest, and `saturated` counts those cut.
    source, first_mass: of masses that were not given, as in `initial_mass`.
    flat, ...:  the tree, or nothing.
    """
    capacity, added = times_sampled.size, counters[_ADDED]
    skipped = max(0, rows - capacity)
    head = (added + skipped) % capacity
    mass = initial_mass(source, first_mass, counters, flat, starts)
    begin, left, at = head, rows - skipped, skipped
    while left:
        stop = min(begin + left, capacity)
        for slot in range(begin, stop):
            times_sampled[slot] = 0
            if flat.size:
                flat[slot] = masses[at + slot - begin] if masses.size else mass
        mark_changed(changed_slots, begin, stop)
        sum_above(flat, starts, begin, stop)
        left -= stop - begin
        at += stop - begin
        begin = 0
    counters[_MAX_MASS] = max(counters[_MAX_MASS], largest)
    counters[_SATURATED] += saturated
    counters[_ADDED] = added + rows


@loop("(int64[::1], int64, int64[::1], int32[::1], int64[::1])")
def count_sample(slots, block, counters, times_sampled, keys):
    """Count a sample of (B,) slots that used random words up to this block, and find its (B,) keys."""
    capacity, added = times_sampled.size, counters[_ADDED]
    head = added % capacity
    for row in range(slots.size):
        slot = slots[row]
        times_sampled[slot] += 1
        keys[row] = added - head + slot - (capacity if slot >= head else 0)
    counters[_RANDOM] = block
    counters[_STEP] += 1
