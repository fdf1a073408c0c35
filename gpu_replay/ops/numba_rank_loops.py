# mypy: ignore-errors
# (types are what Numba infers)
"""The compiled loops of `numba_rank_order.RankOrder`, whose arrays they take: changes, and what stands where.

state: numbers of the whole, at the places below. codes, slot_at: of each row its entries, sorted; past their end codes
are 0. row_of: of each slot, -1 without one. bounds: of each block the code and the key of an entry that none of it
comes before. blocks: of each its row and its size. tops: the first bounds of groups, in their order. listed: the groups
in their order. groups_of: of each its blocks and its entries. place_of: of each row its block. free: rows and groups.
"""

from __future__ import annotations

import numpy as np

from gpu_replay.ops import counters, mass_tree, numba_memory, numba_tree
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.mass_tree import DIRTY
from gpu_replay.ops.numba_memory import (
    before_in_row,
    compiled,
    forget_older_code,
    inlined,
    load,
    place_in_row,
    prefetch,
    put_in_row,
    shift,
    take_from_row,
)
from gpu_replay.ops.numba_tree import target_of

# entries of a block at most
WIDTH = numba_memory.ROW_WIDTH
# places in the state of an order: whether it stands, changes that are noted, entries, groups, free rows and groups,
# slots, blocks of a group at most, and where three arrays begin
STANDING, NOTED, RANKED, GROUPS, FREE_ROWS, FREE_GROUPS, FULL, SLOTS, FAN = range(9)
CODES, SLOT_AT, ROW_OF, LEAVES = range(9, 13)
STATE = 13
# sums of masses that a search looks at together
ROW = 64
# changes, or rows of a draw, that are on their way from memory while one is worked on
_AHEAD = 32
_HALF = _AHEAD // 2
# changes that are looked up before they are made
_KNOWN = 1024
# blocks of which sizes are summed up without a look at each
TOGETHER = 8
LINE = 64
_STALE, _MAX_MASS = Counter.STALE, Counter.MAX_MASS


# changes


@inlined
def _halve(begin, end, most, codes, keys, bounds, places, sizes):
    """Move places to the last of `sizes` bounds from there on that is not after an entry; the first of them is none.

    bounds: their address. most: how many there are at most.
    """
    while most > 1:
        # each step for some entries, which wait for memory at the same time
        for at in range(begin, end):
            half, low = sizes[at] >> 1, places[at]
            bound = bounds + 16 * (low + half)
            code, key = load(bound, np.int64(0)), load(bound + 8, np.int64(0))
            # without a branch that is hard to foresee
            later = (code > codes[at]) | ((code == codes[at]) & (key <= keys[at]))
            places[at] = low + (half & -np.int64(later))
            sizes[at] -= half
        most -= most >> 1


@inlined
def _look_up(begin, end, codes, keys, places, sizes, state, bounds, blocks, tops, listed, groups_of):
    """Find the places of the blocks where entries belong, those from `begin` to `end`, and ask for the blocks."""
    for first in range(begin, end, _AHEAD):
        last = min(first + _AHEAD, end)
        for at in range(first, last):
            places[at], sizes[at] = 0, state[GROUPS]
        _halve(first, last, state[GROUPS], codes, keys, tops.ctypes.data, places, sizes)
        for at in range(first, last):
            group = np.int64(listed[places[at]])
            places[at], sizes[at] = group * state[FAN], groups_of[2 * group]
        _halve(first, last, state[FAN], codes, keys, bounds.ctypes.data, places, sizes)
        for at in range(first, last):
            prefetch(blocks.ctypes.data + 8 * places[at])


@inlined
def _ask_for(row, state):
    """Begin to load a row."""
    for line in range(0, WIDTH * 8, LINE):
        prefetch(state[CODES] + row * WIDTH * 8 + line)
    for line in range(0, WIDTH * 4, LINE):
        prefetch(state[SLOT_AT] + row * WIDTH * 4 + line)


@compiled
def remove(slots, count, state, codes, slot_at, row_of, bounds, blocks, tops, listed, groups_of, place_of, free):
    """Take out the entries of the first `count` of (B,) slots, where they have any."""
    fan, removed = state[FAN], 0
    for turn in range(count + 2 * _AHEAD):
        # of a slot its row is asked for, then what stands there, and where its size is
        if turn < count:
            prefetch(state[ROW_OF] + 4 * slots[turn])
        if _HALF <= turn < count + _HALF:
            row = row_of[slots[turn - _HALF]]
            if row >= 0:
                _ask_for(row, state)
                prefetch(place_of.ctypes.data + 4 * row)
        if _AHEAD <= turn < count + _AHEAD:
            row = row_of[slots[turn - _AHEAD]]
            if row >= 0:
                prefetch(blocks.ctypes.data + 8 * place_of[row])
        if turn < 2 * _AHEAD:
            continue
        slot = np.int32(slots[turn - 2 * _AHEAD])
        row = np.int64(row_of[slot])
        if row < 0:
            continue
        row_of[slot] = -1
        place, entry = np.int64(place_of[row]), place_in_row(state[SLOT_AT] + row * WIDTH * 4, slot)
        take_from_row(state[CODES] + row * WIDTH * 8, entry, np.int64(0))
        take_from_row(state[SLOT_AT] + row * WIDTH * 4, entry, np.int32(0))
        blocks[2 * place + 1] -= 1
        groups_of[2 * (place // fan) + 1] -= 1
        removed += 1
    state[RANKED] -= removed


@inlined
def _divide(place, head, base, state, codes, slot_at, row_of, bounds, blocks, groups_of, place_of, free):
    """Give the later half of the entries of a block to a new one, for which its group has the place.

    head, base: the slot of the next key, and the key that slot 0 has or had before it.
    """
    group = place // state[FAN]
    later = group * state[FAN] + groups_of[2 * group] - place - 1
    shift(bounds, 2 * place + 4, 2 * place + 2, 2 * later)
    shift(blocks, 2 * place + 4, 2 * place + 2, 2 * later)
    state[FREE_ROWS] -= 1
    groups_of[2 * group] += 1
    row, other, stay = blocks[2 * place], free[0, state[FREE_ROWS]], WIDTH // 2
    blocks[2 * place + 1] = stay
    blocks[2 * place + 2], blocks[2 * place + 3] = other, WIDTH - stay
    for at in range(place + 1, place + 2 + later):
        place_of[blocks[2 * at]] = at
    to, origin = other * WIDTH, row * WIDTH + stay
    for entry in range(WIDTH - stay):
        slot = slot_at[origin + entry]
        codes[to + entry], slot_at[to + entry], row_of[slot] = codes[origin + entry], slot, other
        codes[origin + entry] = 0
    slot = slot_at[to]
    bounds[2 * place + 2] = codes[to]
    bounds[2 * place + 3] = base + slot - (state[SLOTS] if slot >= head else 0)


@compiled
def move(
    added, begin, leaves, changed,
    state, codes, slot_at, row_of, bounds, blocks, tops, listed, groups_of, place_of, free,
):  # fmt: skip
    """Bring what is noted, and has been removed, to its place; then the order stands.

    begin:   changes that an earlier call has brought there; 0 of the first one.
    returns: how many have been, all at the end. In `FULL` stands the group that must be divided first, or -1 where
             there is no room and blocks must be filled up again.
    """
    count = state[NOTED]
    fan, slots = state[FAN], state[SLOTS]
    head = added % slots
    base, known = added - head, min(_KNOWN, count - begin)
    codes_of, keys = np.empty(known, dtype=np.int64), np.empty(known, dtype=np.int64)
    places, sizes = np.empty(known, dtype=np.int64), np.empty(known, dtype=np.int64)
    found = codes_of, keys, places, sizes, state, bounds, blocks, tops, listed, groups_of
    # groups whose blocks may stand elsewhere than when they were looked up
    divided = np.empty(listed.size, dtype=np.bool_)
    for start in range(begin, count, _KNOWN):
        some = min(_KNOWN, count - start)
        for at in range(some):
            later = np.int64(changed[min(start + at + _AHEAD, count - 1)])
            prefetch(state[ROW_OF] + 4 * later)
            prefetch(state[LEAVES] + 8 * later)
            slot = np.int64(changed[start + at])
            codes_of[at], keys[at] = leaves[slot], base + slot - (slots if slot >= head else 0)
        _look_up(0, some, *found)
        divided[:] = False
        for at in range(-_AHEAD, some):
            if at + _AHEAD < some:
                _ask_for(blocks[2 * places[at + _AHEAD]], state)
            if at < 0:
                continue
            slot, place, code = np.int64(changed[start + at]), places[at], codes_of[at]
            if code == 0 or row_of[slot] >= 0:
                continue
            group = place // fan
            while divided[group] or blocks[2 * place + 1] == WIDTH:
                _look_up(at, at + 1, *found)
                place = places[at]
                if blocks[2 * place + 1] < WIDTH:
                    break
                if state[FREE_ROWS] == 0 or groups_of[2 * group] == fan:
                    state[FULL] = group if state[FREE_ROWS] and state[FREE_GROUPS] else -1
                    return start + at
                _divide(place, head, base, state, codes, slot_at, row_of, bounds, blocks, groups_of, place_of, free)
                divided[group] = True
            row = np.int64(blocks[2 * place])
            row_codes, row_slots = state[CODES] + row * WIDTH * 8, state[SLOT_AT] + row * WIDTH * 4
            # equal codes are in the order of their keys
            entry = before_in_row(row_codes, row_slots, code, np.int32(slot), np.int32(head), np.int32(slots))
            put_in_row(row_codes, entry, code)
            put_in_row(row_slots, entry, np.int32(slot))
            row_of[slot] = row
            blocks[2 * place + 1] += 1
            groups_of[2 * group + 1] += 1
            state[RANKED] += 1
    state[NOTED], state[STANDING] = 0, 1
    return count


# what stands where


@compiled
def draw(
    sums, ends, guide, bits, doubles, stratified, slots, masses,
    state, codes, slot_at, row_of, bounds, blocks, tops, listed, groups_of, place_of, free,
):  # fmt: skip
    """Draw (B,) slots by the masses of their ranks, of which there is one at least; returns the mass of all.

    sums, ends:  of the masses of ranks up to each, and those at the ends of rows of `ROW`.
    guide, bits: by the leading bits of a target, all but `bits`, the first row that it may be in.
    doubles:     (B,) float64 in [0, 1). masses: (B,) int64, of the ranks.
    """
    entries, total = np.empty(state[GROUPS], dtype=np.int64), np.int64(0)
    for at in range(entries.size):
        total += groups_of[2 * listed[at] + 1]
        entries[at] = total
    total, batch = sums[total - 1], doubles.size
    whole, part = total // batch, total % batch
    begin, at = np.int64(0), np.int64(0)
    places = np.empty(_AHEAD, dtype=np.int64)
    # some rows at once take each step, which asks for the memory of their next one
    for start in range(0, batch, _AHEAD):
        end = min(start + _AHEAD, batch)
        for row in range(start, end):
            masses[row], begin = target_of(row, batch, whole, part, begin, doubles[row], stratified)
            slots[row] = _near_rank(ends, guide, bits, masses[row])
            prefetch(sums.ctypes.data + 8 * slots[row])
        for row in range(start, end):
            rank, target = slots[row], masses[row]
            while rank and sums[rank - 1] > target:
                rank -= 1
            while sums[rank] <= target:
                rank += 1
            masses[row] = sums[rank] - (sums[rank - 1] if rank else 0)
            # targets of strata ascend: the group is often near
            at = _above(entries, rank, at if stratified else np.int64(0))
            slots[row] = rank - (entries[at - 1] if at else 0)
            places[row - start] = listed[at] * state[FAN]
            # most groups are filled about so far
            for line in range(0, state[FAN] * 5, LINE):
                prefetch(blocks.ctypes.data + 8 * places[row - start] + line)
        for row in range(start, end):
            slots[row] = _entry_at(blocks, places[row - start], slots[row])
            prefetch(state[SLOT_AT] + 4 * slots[row])
        for row in range(start, end):
            slots[row] = slot_at[slots[row]]
    return total


@inlined
def _near_rank(ends, guide, bits, target):
    """A rank in the row of masses on which a target falls, about where it does."""
    found = np.int64(guide[target >> bits])
    while ends[found] <= target:
        found += 1
    # in a row masses are much the same
    before = ends[found - 1] if found else 0
    return found * ROW + min(np.int64((target - before) / (ends[found] - before) * ROW), ROW - 1)


@inlined
def _entry_at(blocks, place, rank):
    """The entry at a rank among those of a group that begins at a place."""
    # sizes past the end of the group do no harm: the sum is above the rank then
    while True:
        together = np.int64(0)
        for later in range(TOGETHER):
            together += blocks[2 * (place + later) + 1]
        if together > rank:
            break
        rank -= together
        place += TOGETHER
    while blocks[2 * place + 1] <= rank:
        rank -= blocks[2 * place + 1]
        place += 1
    return blocks[2 * place] * WIDTH + rank


@inlined
def _above(sums, target, low):
    """The first place from `low` on with a larger sum; there is one."""
    high, step = low, 1
    while sums[high] <= target:
        low = high + 1
        high = min(high + step, sums.size - 1)
        step *= 2
    while low < high:
        middle = (low + high) >> 1
        if sums[middle] <= target:
            low = middle + 1
        else:
            high = middle
    return low


# priorities


@compiled
def update(keys, codes, first, added, counters, sparse, flat, starts, shift, low, high, state, changed):
    """Give live keys (B,) order codes, one less than them given; the last of a repeated key wins.

    sparse: whether slots without a code keep none. state, changed: where an order notes it, if it stands.
    counters: count the largest code given, and keys that were not live.
    """
    capacity, batch = state[SLOTS], keys.size
    slot_of = np.empty(batch, dtype=np.int64)
    stale, largest, noted = 0, np.int64(0), state[NOTED]
    begin = first % capacity - first
    # a leaf that is written holds the row that wrote it, as a negative number, until all rows are known
    for row in range(batch):
        ahead = keys[min(row + _AHEAD, batch - 1)]
        if first <= ahead < added:
            ahead += begin
            prefetch(flat.ctypes.data + 8 * (ahead - (capacity if ahead >= capacity else 0)))
        key, slot_of[row] = keys[row], -1
        if key < first or key >= added:
            stale += 1
            continue
        slot = key + begin
        slot -= capacity if slot >= capacity else 0
        code = flat[slot]
        if code < 0:
            slot_of[-code - 1] = -1
        elif sparse and code == 0:
            continue
        slot_of[row] = slot
        flat[slot] = -row - 1
    if state[STANDING] and noted + batch > changed.size:
        state[STANDING] = state[NOTED] = 0
    for row in range(batch):
        slot = slot_of[row]
        if slot < 0:
            continue
        flat[slot] = codes[row] + 1
        largest = max(largest, codes[row] + 1)
        if high.size:
            high[slot >> shift] = DIRTY
        if state[STANDING]:
            changed[state[NOTED]] = slot
            state[NOTED] += 1
    counters[_STALE] += stale
    counters[_MAX_MASS] = max(counters[_MAX_MASS], largest)


forget_older_code(move, counters, mass_tree, numba_tree, *numba_tree.CONTAINED)
