# mypy: ignore-errors
# (types are what Numba infers)
"""The ring of transitions: loops that count added rows and drawn rows."""

from __future__ import annotations

from gpu_replay.loops.compiling import loop
from gpu_replay.loops.constants import Counter
from gpu_replay.loops.masses import highest_of, mark_changed, sum_above

_ADDED, _RANDOM, _STEP = Counter.ADDED, Counter.RANDOM, Counter.STEP
_MAX_MASS, _SATURATED = Counter.MAX_MASS, Counter.SATURATED
# sources of the mass of a row that was added without a priority
FIXED, LARGEST_EVER, LARGEST_STORED = range(3)


@loop("(int64, int64[::1], int64, int64, int64, int64, int64[::1], int32[::1], int64[::1], int64[::1], int64[::1])")
def append(
    rows, masses, largest, saturated, source, first_mass, counters, times_sampled, flat, starts, changed_slots
):  # fmt: skip
    """Count rows whose fields were written: update masses, sums and counters.

    rows:       rows added after the newest; if they are more than the slots, the last ones stay.
    masses:     (rows,) given with them, or empty; `largest` is the largest, and `saturated` counts those cut.
    source:     of masses that were not given; `first_mass` is the fixed one, or that before any other.
    flat, ...:  the tree, or nothing.
    """
    capacity, added = times_sampled.size, counters[_ADDED]
    skipped = max(0, rows - capacity)
    head = (added + skipped) % capacity
    mass = first_mass
    if source == LARGEST_EVER and counters[_MAX_MASS]:
        mass = counters[_MAX_MASS]
    elif source == LARGEST_STORED:
        stored = highest_of(flat, starts)
        mass = stored if stored else first_mass
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
