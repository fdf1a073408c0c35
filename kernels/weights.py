"""The end of a sample: its importance weights, made by the launch that gathers its rows, which also counts it."""

import triton
import triton.language as tl

from .constants import LOWEST, NO_MASS, RANDOM, STEP, is_last


@triton.jit
def finish(sample, counters_ptr, program, batch, blocks_drawn, beta, DRAWS: tl.constexpr):
    """weight = (lowest / mass) ** beta, 1 where the mass is 0; counts the rows and moves schedule and stream on.

    Part of the last launch of a sample, so that what is interrupted before it has changed nothing: the first programs
    finish DRAWS draws each, and no other one of that launch may read the counters that move. Returns the program's
    number among those others, below 0 for one that finishes. sample: pointers to slots, masses, weights and how often
    slots were sampled, and with a schedule to its start, change and steps, used instead of beta.
    """
    slots_ptr, masses_ptr, weights_ptr, times_sampled_ptr = sample[0], sample[1], sample[2], sample[3]
    programs = (batch + (DRAWS - 1)) // DRAWS
    if program < programs:
        draw = program * DRAWS + tl.arange(0, DRAWS)
        live = draw < batch
        # before the barrier, as all that the last program changes
        step, block = tl.load(counters_ptr + STEP), tl.load(counters_ptr + RANDOM)
        lowest = tl.load(counters_ptr + LOWEST).to(tl.float64)
        exponent = tl.full([], 0.0, tl.float64) + beta
        if len(sample) > 4:
            schedule_ptr = sample[4]
            steps = tl.load(schedule_ptr + 2)
            done = tl.minimum(step.to(tl.float64), steps)
            exponent = tl.load(schedule_ptr) + tl.load(schedule_ptr + 1) * done / steps
        # rows that were not drawn have mass 0 and weight 1
        mass = tl.load(masses_ptr + draw, mask=live, other=0)
        drawn = mass > 0
        ratio = tl.where(drawn, lowest / tl.where(drawn, mass, 1).to(tl.float64), 1.0)
        weight = tl.exp2(tl.log2(ratio) * exponent)
        tl.store(weights_ptr + draw, weight.to(tl.float32), mask=live)
        slot = tl.load(slots_ptr + draw, mask=live, other=0)
        tl.atomic_add(times_sampled_ptr + slot, tl.full(slot.shape, 1, tl.int32), mask=live, sem="relaxed")
        if is_last(counters_ptr, programs):
            tl.store(counters_ptr + LOWEST, NO_MASS)
            tl.store(counters_ptr + STEP, step + 1)
            tl.store(counters_ptr + RANDOM, block + blocks_drawn)
    return program - programs
