# mypy: ignore-errors
# (types are what Numba infers)
"""Whole calls of a buffer of transitions, compiled once for all schemas: a step added, a batch drawn and gathered.

Each does what the engine does in NumPy, number for number. The last function of a call is one that changes all that
changes: an exception comes before it or after it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gpu_replay.ops import (
    counters,
    numba_loops,
    numba_rank_loops,
    numba_rank_order,
    numba_tree,
    uniform_draw,
)
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.numba_loops import _permuted_ranks
from gpu_replay.ops.numba_memory import (
    array_at,
    compiled,
    data_of,
    dtype_of,
    forget_older_code,
    high_product,
    inlined,
    item,
    load,
    move,
    number_of,
    numbers_of,
    only_item,
    places_of,  # noqa: F401
    prefetch,
    rows_of,
    store,
    type_of,
)
from gpu_replay.ops.numba_tree import draw, set_range
from gpu_replay.ops.uniform_draw import FEW, PERMUTATION_WORDS, ROUNDS

_ADDED, _FIRST, _RANDOM, _STEP, _MAX_MASS = (
    Counter.ADDED, Counter.FIRST, Counter.RANDOM, Counter.STEP, Counter.MAX_MASS,
)  # fmt: skip
# the numbers that values may be: the place of each dtype in a table is its kind
KINDS = tuple(map(np.dtype, ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64", "float16")))
_BOOL, _UINT8, _INT8, _INT16, _INT32, _INT64, _FLOAT32, _FLOAT64, _FLOAT16 = range(9)
# NumPy's singletons of these, then classes and constants, by their addresses in this process: an argument, since
# compiled code outlives the process; then bytes of False and of True
_DTYPES = len(KINDS)
_NDARRAY, _LIST, _FLOAT, _FALSE, _TRUE, _BYTES = range(_DTYPES, _DTYPES + 6)
ADDRESSES = np.array([*map(id, (*KINDS, np.ndarray, list, float, False, True)), 0, 0x0101010101010101])
_WIDTHS = np.array([kind.itemsize for kind in KINDS])
# rows that are on their way from memory while one is copied
_AHEAD = 16
# from here on float64 rounds to an infinite float32
_TOO_LARGE = 2.0**128 - 2.0**103


# rows into the ring


@inlined
def _whole(address, kind):
    """A number that is not floating, as int64."""
    if kind == _INT64:
        return load(address, np.int64(0))
    if kind == _INT32:
        return np.int64(load(address, np.int32(0)))
    if kind == _INT16:
        return np.int64(load(address, np.int16(0)))
    if kind == _INT8:
        return np.int64(load(address, np.int8(0)))
    return np.int64(load(address, np.uint8(0)))


@inlined
def _fits(number, kind):
    """Whether a whole number is one of this kind."""
    if kind == _INT64:
        return True
    if kind == _INT32:
        return -(2**31) <= number < 2**31
    if kind == _INT16:
        return -(2**15) <= number < 2**15
    if kind == _INT8:
        return -(2**7) <= number < 2**7
    return 0 <= number < 2**8


@inlined
def _put_whole(address, kind, number):
    if kind == _INT64:
        store(address, number)
    elif kind == _INT32:
        store(address, np.int32(number))
    elif kind == _INT16:
        store(address, np.int16(number))
    elif kind == _FLOAT32:
        store(address, np.float32(number))
    elif kind == _FLOAT64:
        store(address, np.float64(number))
    else:
        # the low byte is that of either sign
        store(address, np.uint8(number))


@inlined
def _converts(data, count, source, target):
    """Whether `count` numbers of one kind may be stored as another, as `validation.cast` says."""
    if target in (_BOOL, _FLOAT16) or source == _FLOAT16:
        return False
    if source >= _FLOAT32:
        if target == _FLOAT32:
            for place in range(count):
                number = load(data + 8 * place, np.float64(0))
                if abs(number) >= _TOO_LARGE and abs(number) != np.inf:
                    return False
        return target >= _FLOAT32
    if target < _FLOAT32:
        for place in range(count):
            if not _fits(_whole(data + _WIDTHS[source] * place, source), target):
                return False
    return True


@inlined
def _put(data, count, source, place, target):
    """Store `count` numbers of one kind as another."""
    for number in range(count):
        to = place + _WIDTHS[target] * number
        if source == _FLOAT64:
            store(to, np.float32(load(data + 8 * number, np.float64(0))))
        elif source == _FLOAT32:
            store(to, np.float64(load(data + 4 * number, np.float32(0))))
        else:
            _put_whole(to, target, _whole(data + _WIDTHS[source] * number, source))


@inlined
def _kind_at(dtype, addresses):
    """The kind of a dtype by its address, -1 for others."""
    for kind in range(_DTYPES):
        if dtype == addresses[kind]:
            return kind
    return -1


@inlined
def _looked_up(value, shape, rows, addresses):
    """Where the numbers of an object are, and their kind: an array [rows, *shape], or a list of one float or bool.

    The kind is -1 for others.
    """
    kind = type_of(value)
    if kind == addresses[_NDARRAY]:
        if rows_of(value, shape) != rows:
            return np.int64(0), -1
        return data_of(value), _kind_at(dtype_of(value), addresses)
    if kind != addresses[_LIST] or rows != 1 or shape.size:
        return np.int64(0), -1
    number = only_item(value)
    if number == addresses[_FALSE] or number == addresses[_TRUE]:
        return addresses.ctypes.data + 8 * (_BYTES + (number == addresses[_TRUE])), _BOOL
    if number == 0 or type_of(number) != addresses[_FLOAT]:
        return np.int64(0), -1
    return number_of(number), _FLOAT64


@compiled
def append(given):
    """Store rows of all fields after the newest; returns 0, having done nothing, where a value needs a closer look.

    given: address of a tuple, in which stand, as arrays of int64,
           state: capacity, mass of the new transitions, -1 for the largest ever given, and what that is before any,
           shift of the tree; then as `places_of` has them ADDRESSES, counters, times sampled, the arrays of the tree;
           order: how many fields there are; of each the address of the ring, the step from row to row, bytes of a row,
           kind; where the shape of each begins, and where the last one ends; all shapes;
           keys: (rows,), of the new transitions, which are written;
           and then an object for each field, in that order.
    """
    # one number, since a call takes each argument apart by itself
    state, order, keys = numbers_of(item(given, 0)), numbers_of(item(given, 1)), numbers_of(item(given, 2))
    fields, rows = order[0], keys.size
    table = order[1 : 4 * fields + 1].reshape((fields, 4))
    starts_of, shapes = order[4 * fields + 1 :], order[5 * fields + 2 :]
    addresses, counters = array_at(state[4:], np.int64(0)), array_at(state[6:], np.int64(0))
    times_sampled = array_at(state[8:], np.int32(0))
    flat, starts = array_at(state[10:], np.int64(0)), array_at(state[12:], np.int64(0))
    low, high = array_at(state[14:], np.int64(0)), array_at(state[16:], np.int64(0))
    capacity, mass, shift = state[0], state[1], state[3]
    # of each field where its numbers are, and their kind
    found = np.empty((fields, 2), dtype=np.int64)
    for field in range(fields):
        value, kind = item(given, 3 + field), table[field, 3]
        data, source = _looked_up(value, shapes[starts_of[field] : starts_of[field + 1]], rows, addresses)
        if source != kind:
            count = rows * (table[field, 2] // _WIDTHS[kind])
            if source < 0 or not _converts(data, count, source, kind):
                return 0
        found[field, 0], found[field, 1] = data, source
    added = counters[_ADDED]
    head = added % capacity
    if mass < 0:
        mass = counters[_MAX_MASS]
        if mass == 0:
            mass = state[2]
    for field in range(fields):
        data, source, kind, size = found[field, 0], found[field, 1], table[field, 3], table[field, 2]
        count = size // _WIDTHS[kind]
        for row in range(rows):
            slot = head + row
            place = table[field, 0] + table[field, 1] * (slot - capacity if slot >= capacity else slot)
            if source == kind:
                move(place, data + size * row, size)
            else:
                _put(data + _WIDTHS[source] * count * row, count, source, place, kind)
    for row in range(rows):
        slot = head + row
        times_sampled[slot - capacity if slot >= capacity else slot] = 0
        keys[row] = added + row
    # in two pieces where the ring wraps; both ends are variables, since a constant would have this compiled twice
    begin, left = head, rows if flat.size else 0
    while left:
        end = min(begin + left, capacity)
        set_range(flat, starts, shift, low, high, begin, end, mass)
        left -= end - begin
        begin = np.int64(0)
    counters[_ADDED] = added + rows
    return 1


# draws


@inlined
def _philox(block, key, stream, words):
    """Words of the random stream from a block on, as `HostWords` gives them; whole blocks."""
    for start in range(0, words.size, 4):
        # NumPy counts before it makes words
        c0, c1 = np.uint64(block + start // 4 + 1), np.uint64(0)
        c2, c3 = np.uint64(0), np.uint64(0)
        k0, k1 = key, stream
        for _ in range(10):
            h0, l0 = high_product(np.uint64(0xD2E7470EE14C6C93), c0), np.uint64(0xD2E7470EE14C6C93) * c0
            h1, l1 = high_product(np.uint64(0xCA5A826395121157), c2), np.uint64(0xCA5A826395121157) * c2
            c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
            k0 += np.uint64(0x9E3779B97F4A7C15)
            k1 += np.uint64(0xBB67AE8584CAA73B)
        words[start], words[start + 1], words[start + 2], words[start + 3] = c0, c1, c2, c3


@njit(error_model="numpy")
def _doubles(block, key, batch):
    """(batch,) float64 in [0, 1) of the stream, as `HostWords.doubles` gives them."""
    words = np.empty((batch + 3) // 4 * 4, dtype=np.uint64)
    _philox(block, key[0], key[1], words)
    doubles = np.empty(batch)
    for row in range(batch):
        doubles[row] = np.int64(words[row] >> np.uint64(11)) * (1.0 / 9007199254740992.0)
    return doubles


def _copy_rows(slots, begin, end, table, lines, outputs):
    """Rows from `begin` to `end` of all fields at (B,) slots, into a tuple of arrays.

    lines: (K, 2) first cache lines of what lies together, and the steps from row to row.
    """
    fields = table.shape[0]
    targets = np.empty(fields, dtype=np.int64)
    for field in range(fields):
        targets[field] = data_of(item(outputs, field))
    for row in range(begin, end):
        slot = slots[row]
        later = slots[min(row + _AHEAD, end - 1)]
        for line in range(lines.shape[0]):
            prefetch(lines[line, 0] + lines[line, 1] * later)
        for field in range(fields):
            size = table[field, 2]
            move(targets[field] + size * row, table[field, 0] + table[field, 1] * slot, size)


_gather = inlined(_copy_rows)
# a part of a large batch, beside threads that do the others
gather = compiled(_copy_rows, nogil=True)


@inlined
def _keys(slots, counters, capacity, keys):
    added = counters[_ADDED]
    head = added % capacity
    for row in range(slots.size):
        slot = slots[row]
        keys[row] = added - head + slot - (capacity if slot >= head else 0)


@compiled
def draw_by_mass(
    flat,
    starts,
    shift,
    stratified,
    lowest,
    counters,
    key,
    capacity,
    table,
    lines,
    outputs,
    slots,
    keys,
    probability,
    ratio,
):
    """Draw (B,) slots by mass, unless there is none, and gather their fields; nothing is counted.

    key:     (2,) uint64 of the random stream. lowest: the mass with the largest weight, or 0 for that of the batch.
    table:   of the fields that are gathered here, none where threads do it afterwards.
    outputs: address of a tuple of arrays, one for each field of the table. ratio: (B,) float64, as `draw` has it.
    """
    masses = np.empty(slots.size, dtype=np.int64)
    doubles = _doubles(counters[_RANDOM], key, slots.size)
    if draw(flat, starts, shift, doubles, stratified, lowest, slots, masses, probability, ratio) == 0:
        return False
    _keys(slots, counters, capacity, keys)
    _gather(slots, 0, slots.size, table, lines, outputs)
    return True


@compiled
def draw_uniformly(
    replacement, wide, high, counters, key, capacity, table, lines, outputs, slots, keys, probability, weight
):
    """Draw (B,) slots of stored transitions alike, and gather their fields; nothing is counted.

    wide, high: sides of the rectangle of `permuted_ranks`.
    """
    added = counters[_ADDED]
    first = max(counters[_FIRST], added - capacity)
    count = added - first
    if replacement:
        doubles = _doubles(counters[_RANDOM], key, slots.size)
        for row in range(slots.size):
            slots[row] = min(np.int64(doubles[row] * count), count - 1)
    else:
        words = np.empty(PERMUTATION_WORDS, dtype=np.uint64)
        _philox(counters[_RANDOM], key[0], key[1], words)
        rounds = words[: 2 * ROUNDS] if count >= FEW else words
        _permuted_ranks(np.uint64(count), np.uint64(wide), np.uint64(high), rounds, slots)
    begin = first % capacity
    for row in range(slots.size):
        slot = slots[row] + begin
        slots[row] = slot - capacity if slot >= capacity else slot
        probability[row] = 1.0 / count
        weight[row] = 1.0
    _keys(slots, counters, capacity, keys)
    _gather(slots, 0, slots.size, table, lines, outputs)


@compiled
def count_draw(slots, times_sampled, counters, blocks):
    """Count (B,) drawn slots as sampled, the blocks of random words that they took, and the sample."""
    for row in range(slots.size):
        times_sampled[slots[row]] += 1
    counters[_RANDOM] += blocks
    counters[_STEP] += 1


# priorities


# new masses or order codes of live keys, as the loops of all buffers have it
update, update_codes = numba_tree.update, numba_rank_loops.update
shifted = numba_tree.shifted
noted_by = numba_rank_order.noted_by


CONTAINED = (counters, numba_loops, uniform_draw, *numba_loops.CONTAINED)
forget_older_code(append, *CONTAINED)
