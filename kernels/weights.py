"""The end of a sample: its importance weights, made by the launch that gathers its rows, which also counts it."""

import triton
import triton.language as tl

from .constants import NO_MASS, RANDOM, STEP, is_last


@triton.jit
def count_sample(sample, counted, counters_ptr, program, batch, minima, blocks_drawn, beta, DRAWS: tl.constexpr):
    """weight = (lowest / mass) ** beta, 1 where the mass is 0; counts the rows and moves schedule and stream on.

    Part of the last launch of a sample, so that what is interrupted before it has changed nothing: the first programs
    finish DRAWS draws each, and no other one of that launch may read the counters that move. Returns the program's
    number among those others, below 0 for one that finishes.

    sample:  slots, masses and weights of the rows, and `minima` masses, of which the smallest has the largest weight. A
             mass below 0 says that the row is none: its weight is 0, and it is not counted.
    counted: how often each slot was sampled and, with a schedule, its start, change and steps, used instead of beta.
    """
    programs = (batch + (DRAWS - 1)) // DRAWS
    if program < programs:
        slots_ptr, masses_ptr, weights_ptr, lowest_ptr = sample
        draw = program * DRAWS + tl.arange(0, DRAWS)
        live = draw < batch
        # before the barrier, as all that the last program changes
        step, block = tl.load(counters_ptr + STEP), tl.load(counters_ptr + RANDOM)
        smallest = tl.full([DRAWS], NO_MASS, tl.int64)
        for begin in range(0, minima, DRAWS):
            place = begin + tl.arange(0, DRAWS)
            smallest = tl.minimum(smallest, tl.load(lowest_ptr + place, mask=place < minima, other=NO_MASS))
        lowest = tl.min(smallest, axis=0).to(tl.float64)
        # rows that were not drawn have mass 0 and weight 1
        mass = tl.load(masses_ptr + draw, mask=live, other=0)
        drawn = mass > 0
        ratio = tl.where(drawn, lowest / tl.where(drawn, mass, 1).to(tl.float64), 1.0)
        exponent = tl.full([], 0.0, tl.float64) + beta
        if len(counted) > 1:
            schedule_ptr = counted[1]
            steps = tl.load(schedule_ptr + 2)
            done = tl.minimum(step.to(tl.float64), steps)
            exponent = tl.load(schedule_ptr) + tl.load(schedule_ptr + 1) * done / steps
        weight = tl.exp2(tl.log2(ratio) * exponent)
        found = mass >= 0
        tl.store(weights_ptr + draw, tl.where(found, weight, 0.0).to(tl.float32), mask=live)
        slot = tl.load(slots_ptr + draw, mask=live, other=0)
        tl.atomic_add(counted[0] + slot, tl.full(slot.shape, 1, tl.int32), mask=live & found, sem="relaxed")
        if is_last(counters_ptr, programs):
            tl.store(counters_ptr + STEP, step + 1)
            tl.store(counters_ptr + RANDOM, block + blocks_drawn)
    return program - programs
