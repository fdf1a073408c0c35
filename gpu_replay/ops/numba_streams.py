# mypy: ignore-errors
# (types are what Numba infers)
"""Whole samples of a trajectory buffer, compiled once for all schemas: starts drawn, gathered, and given other goals.

Each does what the engine does in NumPy, number for number. What is known of a buffer comes as one array of numbers:

    environments, frames of a stack, whether steps after endings carry final observations, whether goals are looked up,
    whether stacks are padded with zeros, slots, observation fields, lines of the goals achieved and desired in the
    table, bytes of a goal; from place 10 on, as `places_of` has them, flags, depth, lengths and sums of windows, powers
    of gamma, rows of final observations, counters, times sampled, spans and parted as in `Streams`

and of each field, observations first, as a line of a table where its rows begin, how far they are apart, bytes of a
row, and where its kept final observations begin.
"""

from __future__ import annotations

import numpy as np

from gpu_replay.ops import counters, numba_loops, numba_transitions, uniform_draw
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.numba_loops import _copy_stacks
from gpu_replay.ops.numba_memory import (
    array_from,
    compiled,
    data_of,
    forget_older_code,
    inlined,
    item,
    move,
    places_of,  # noqa: F401
    prefetch,
    store,
)
from gpu_replay.ops.numba_transitions import _keys
from gpu_replay.ops.numba_tree import _descend, sums_of_root
from gpu_replay.ops.uniform_draw import FEW, PERMUTATION_WORDS, ROUNDS

_ADDED, _FIRST, _STEP = Counter.ADDED, Counter.FIRST, Counter.STEP
# loops that Python calls too, here without what that takes
_permuted_ranks, _windows, _choose_goals = (
    inlined(each.py_func) for each in (numba_loops._permuted_ranks, numba_loops._windows, numba_loops._choose_goals)
)
# rows that are on their way from memory while one is copied
_AHEAD = 16


@compiled
def draw_uniformly(doubles, words, sides, flat, starts, shift, slots, probability, weight):
    """Draw (B,) eligible starts alike; nothing is counted. Returns how many there are: if too few, none is drawn.

    doubles: (B,) float64 in [0, 1) to draw with replacement; else nothing, and
    words:   those of `uniform_draw.permuted_ranks`, sides: its rectangle over as many starts as there are.
    flat, starts, shift: the tree of ones, as `MassTree.compiled` has it. probability, weight: (B,) float32.
    """
    batch, prefix = slots.size, sums_of_root(flat, starts)
    total = prefix[-1]
    if total < (1 if doubles.size else batch):
        return total
    targets = np.empty(batch, dtype=np.int64)
    if doubles.size:
        for row in range(batch):
            targets[row] = min(np.int64(doubles[row] * total), total - 1)
    else:
        _permuted_ranks(np.uint64(total), np.uint64(sides[0]), np.uint64(sides[1]), words, targets)
    # all rows a step of the search on, then the next step: so nothing waits for what a comparison says
    slots[:] = 0
    left = prefix.size
    while left > 1:
        half = left >> 1
        for row in range(batch):
            middle = slots[row] + half
            slots[row] = middle if prefix[middle - 1] <= targets[row] else slots[row]
        left -= half
    if starts.size > 2:
        for row in range(batch):
            targets[row] -= prefix[slots[row] - 1] if slots[row] else 0
        _descend(flat, starts, shift, slots, targets, np.empty(batch, dtype=np.int64))
    for row in range(batch):
        probability[row] = 1.0 / total
        weight[row] = 1.0
    return total


@inlined
def _finish_stacks(line, plan, zero_padded, ending, final, out):
    """Put zeros and kept final observations where the frames of a field's stacks are not those of the plan."""
    stack, size = plan.shape[1], line[2]
    for place in zero_padded:
        for byte in range(size):
            store(out + size * place + byte, np.int8(0))
    if ending.size:
        for row in range(ending.size):
            if ending[row]:
                newest = row * stack + stack - 1
                move(out + size * newest, line[3] + size * final[plan[row, stack - 1]], size)


@compiled
def gather(slots, table, state, outputs, keys):
    """Gather (B,) drawn starts, find their keys, and count the sample.

    outputs: address of a tuple of arrays: the stacks of each observation field, (2 * B * S, ...), those after the
             windows behind those before; (B, ...) of each other field; reward, discount, terminated and truncated.
    """
    batch, stacked, others = slots.size, state[6], table.shape[0]
    flags, depth = array_from(state[10], state[11], np.uint8(0)), array_from(state[12], state[13], np.int32(0))
    lengths, sums = array_from(state[14], state[15], np.uint8(0)), array_from(state[16], state[17], np.float32(0))
    powers, final = array_from(state[18], state[19], np.float64(0)), array_from(state[20], state[21], np.int32(0))
    counters, times_sampled = (
        array_from(state[22], state[23], np.int64(0)),
        array_from(state[24], state[25], np.int32(0)),
    )
    plan = np.empty((2 * batch, state[1]), dtype=np.int64)
    zero = state[4] != 0
    zero_padded = np.empty(plan.size if zero else 0, dtype=np.int64)
    ending = np.empty(2 * batch, dtype=np.bool_)
    padded, ends = _windows(
        slots, flags, depth, lengths, sums, powers, state[0], state[1], state[2] != 0, state[3] != 0, zero,
        plan, zero_padded, ending,
        array_from(data_of(item(outputs, others)), batch, np.float32(0)),
        array_from(data_of(item(outputs, others + 1)), batch, np.float32(0)),
        array_from(data_of(item(outputs, others + 2)), batch, np.bool_(0)),
        array_from(data_of(item(outputs, others + 3)), batch, np.bool_(0)),
    )  # fmt: skip
    for number in range(others):
        line, out = table[number], data_of(item(outputs, number))
        origin, step, size = line[0], line[1], line[2]
        if number < stacked:
            _copy_stacks(origin, step, size, plan, out, 0, batch)
            _finish_stacks(line, plan, zero_padded[:padded], ending if ends else ending[:0], final, out)
        else:
            for row in range(batch):
                prefetch(origin + step * slots[min(row + _AHEAD, batch - 1)])
                move(out + size * row, origin + step * slots[row], size)
    _keys(slots, counters, state[5], keys)
    for row in range(batch):
        times_sampled[slots[row]] += 1
    counters[_STEP] += 1


@compiled
def put_goals(slots, table, state, outputs, last, episode, words, sides, rows, known, shown):
    """Give rows of a batch of (B,) slots the goals that later steps achieved; returns whether all of them have one.

    last, episode: the strategies.
    words:   uint64, those of `uniform_draw.permuted_ranks`, which chooses rows, and from PERMUTATION_WORDS on one for
             each goal, of which the strategy "final" needs none. sides: the rectangle over B.
    outputs: as of `gather`, which has filled them; the desired goals are changed.
    rows:    (K,) int64, the rows that were chosen. known: (K,) bool, whether each has a goal.
    shown:   address of a tuple of two arrays (K, *goal): the goals that the rows achieved, and those they have now.
    """
    batch, count, envs, stack, size = slots.size, rows.size, state[0], state[1], state[9]
    flags, depth = array_from(state[10], state[11], np.uint8(0)), array_from(state[12], state[13], np.int32(0))
    final, counters = array_from(state[20], state[21], np.int32(0)), array_from(state[22], state[23], np.int64(0))
    spans, parted = array_from(state[26], state[27], np.int32(0)), array_from(state[28], state[29], np.int32(0))
    choosing = words[: 2 * ROUNDS] if batch >= FEW else words[:PERMUTATION_WORDS]
    _permuted_ranks(np.uint64(batch), np.uint64(sides[0]), np.uint64(sides[1]), choosing, rows)
    doubles = np.empty(0 if last else count)
    for row in range(doubles.size):
        doubles[row] = np.int64(words[PERMUTATION_WORDS + row] >> np.uint64(11)) * (1.0 / 9007199254740992.0)
    added = counters[_ADDED]
    oldest, newest = max(counters[_FIRST], added - state[5]) // envs, added // envs - 1
    source, places = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    _choose_goals(
        slots, rows, doubles, last, episode, flags, depth, spans, parted, final, envs, flags.size // envs,
        oldest, newest, final.size > 0, known, source, places,
    )  # fmt: skip
    achieved, pool = table[state[7]], table[state[7], 3]
    reached, desired = data_of(item(outputs, state[7])), data_of(item(outputs, state[8]))
    after, wanted = data_of(item(shown, 0)), data_of(item(shown, 1))
    complete = True
    for row in range(min(_AHEAD, count)):
        prefetch(achieved[0] + achieved[1] * source[row])
    for row in range(count):
        prefetch(achieved[0] + achieved[1] * source[min(row + _AHEAD, count - 1)])
        place = rows[row] * stack
        later = place + batch * stack
        if known[row]:
            pooled = final.size > 0 and places[row] >= 0
            goal = pool + size * places[row] if pooled else achieved[0] + achieved[1] * source[row]
            for frame in range(stack):
                move(desired + size * (place + frame), goal, size)
                move(desired + size * (later + frame), goal, size)
        else:
            complete = False
        move(after + size * row, reached + size * (later + stack - 1), size)
        move(wanted + size * row, desired + size * (place + stack - 1), size)
    return complete


forget_older_code(gather, counters, numba_transitions, uniform_draw, *numba_transitions.CONTAINED)
