"""Importance weights of a draw by priority: made by the launch that gathers its rows, or, without one, by the draw."""

import triton
import triton.language as tl

from .counters import LOWEST, NO_MASS, RANDOM, STEP, is_last


@triton.jit
def weigh(
    pending,
    counters_ptr,
    program,
    batch,
    blocks_drawn,
    beta,
    beta_rest,
    DRAWS: tl.constexpr,
):
    """weight = (lowest / mass) ** beta, 1 where the mass is 0; the last program moves schedule and stream on.

    Part of the launch that comes after a draw: its first programs weigh DRAWS draws each, and no other one of that
    launch may read the counters that move. Returns the program's number among those others, below 0 for one that
    weighs. pending: pointers to masses and weights, and with a schedule to its start, change and steps, used instead of
    beta. beta: in two parts, since a launch passes numbers as float32.
    """
    programs = (batch + (DRAWS - 1)) // DRAWS
    if program < programs:
        _weigh(pending, counters_ptr, program, programs, batch, blocks_drawn, beta, beta_rest, DRAWS)
    return program - programs


@triton.jit
def _weigh(pending, counters_ptr, program, programs, batch, blocks_drawn, beta, beta_rest, DRAWS: tl.constexpr):
    """What `weigh` does in one of its programs."""
    draw = program * DRAWS + tl.arange(0, DRAWS)
    lowest = tl.load(counters_ptr + LOWEST)
    # before the barrier, as all that the last program changes
    step, block = tl.load(counters_ptr + STEP), tl.load(counters_ptr + RANDOM)
    _store_weights(pending, draw, batch, lowest, step, beta, beta_rest)
    if is_last(counters_ptr, programs):
        _move_on(counters_ptr, step, block, blocks_drawn)


@triton.jit
def weigh_when_all_are_drawn(pending, counters_ptr, batch, blocks_drawn, beta, beta_rest, DRAWS: tl.constexpr):
    """What `weigh` does, at the end of the draw itself: the program that comes last weighs all of a batch.

    Every program of the launch calls it, after its draws. DRAWS: at least the batch.
    """
    # before the barrier, as all that the last program changes
    step, block = tl.load(counters_ptr + STEP), tl.load(counters_ptr + RANDOM)
    # the ticket releases what this program has written and acquires what all others released
    if is_last(counters_ptr, tl.num_programs(0)):
        # an atomic, so that what other programs left is seen; the ticket has put it in order
        lowest = tl.atomic_min(counters_ptr + LOWEST, NO_MASS, sem="relaxed")
        _store_weights(pending, tl.arange(0, DRAWS), batch, lowest, step, beta, beta_rest)
        _move_on(counters_ptr, step, block, blocks_drawn)


@triton.jit
def _store_weights(pending, draw, batch, lowest, step, beta, beta_rest):
    """The weights of some draws, given the smallest mass and the samples drawn before."""
    live = draw < batch
    lowest = lowest.to(tl.float64)
    exponent = tl.full([], 0.0, tl.float64) + beta + beta_rest
    if len(pending) > 2:
        schedule = pending[2]
        steps = tl.load(schedule + 2)
        done = tl.minimum(step.to(tl.float64), steps)
        exponent = tl.load(schedule) + tl.load(schedule + 1) * done / steps
    # rows that were not drawn have mass 0 and weight 1
    mass = tl.load(pending[0] + draw, mask=live, other=0)
    drawn = mass > 0
    ratio = tl.where(drawn, lowest / tl.where(drawn, mass, 1).to(tl.float64), 1.0)
    weight = tl.exp2(tl.log2(ratio) * exponent)
    tl.store(pending[1] + draw, weight.to(tl.float32), mask=live)


@triton.jit
def _move_on(counters_ptr, step, block, blocks_drawn):
    """Last program: put the smallest mass away and move schedule and stream on."""
    tl.store(counters_ptr + LOWEST, NO_MASS)
    tl.store(counters_ptr + STEP, step + 1)
    tl.store(counters_ptr + RANDOM, block + blocks_drawn)
