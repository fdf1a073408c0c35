"""Importance weights of a draw by priority, made by the first programs of the launch that gathers its rows."""

import triton
import triton.language as tl

from .stratified_draw import NO_MASS


@triton.jit
def weigh(
    weighing,
    counters_ptr,
    program,
    programs,
    batch,
    blocks_drawn,
    beta,
    beta_rest,
    DRAWS: tl.constexpr,
    SCHEDULED: tl.constexpr,
    RANDOM: tl.constexpr,
    STEP: tl.constexpr,
    TICKET: tl.constexpr,
    EDGE_LOW: tl.constexpr,
):
    """weight = (lowest / mass) ** beta, 1 where the mass is 0; the last program moves schedule and stream on.

    Part of the launch that comes after a draw, `programs` of whose programs call it; no other one of that launch may
    read the counters that move. weighing: pointers to masses, weights and the schedule's start, change and steps, which
    is used instead of beta when SCHEDULED. beta: in two parts, since a launch passes numbers as float32.
    """
    draw = program * DRAWS + tl.arange(0, DRAWS)
    live = draw < batch
    lowest = tl.load(counters_ptr + EDGE_LOW).to(tl.float64)
    step = tl.load(counters_ptr + STEP)
    exponent = tl.full([], 0.0, tl.float64) + beta + beta_rest
    if SCHEDULED:
        schedule = weighing[2]
        steps = tl.load(schedule + 2)
        done = tl.minimum(step.to(tl.float64), steps)
        exponent = tl.load(schedule) + tl.load(schedule + 1) * done / steps
    # rows that were not drawn have mass 0 and weight 1
    mass = tl.load(weighing[0] + draw, mask=live, other=0)
    drawn = mass > 0
    ratio = tl.where(drawn, lowest / tl.where(drawn, mass, 1).to(tl.float64), 1.0)
    weight = tl.exp2(tl.log2(ratio) * exponent)
    tl.store(weighing[1] + draw, weight.to(tl.float32), mask=live)
    # every thread has read the counters before the last program changes them
    tl.debug_barrier()
    finished = tl.atomic_add(counters_ptr + TICKET, 1)
    if finished == programs - 1:
        tl.store(counters_ptr + TICKET, 0)
        tl.store(counters_ptr + EDGE_LOW, NO_MASS)
        tl.store(counters_ptr + STEP, step + 1)
        tl.store(counters_ptr + RANDOM, tl.load(counters_ptr + RANDOM) + blocks_drawn)
