"""Assembles a batch of a trajectory buffer from steps that are stored once, in one launch.

Frames of stacks are moved as `ring.py` moves rows; only where a frame comes from takes some looking up, which every
program does for its own, once for several pieces of them.
"""

import triton
import triton.language as tl

from .constants import CUT, DEAD, FINAL, TARGET, TERMINATED, TRUNCATED
from .ring import as_sampled, count_sample, gather_rows, slot_of


@triton.jit
def later(slot, ages, num_envs, steps):
    """The slots `ages` steps after some, in a ring; ages are limited to one lap."""
    slots = num_envs * steps
    slot += tl.minimum(ages, steps - 1) * num_envs
    return tl.where(slot >= slots, slot - slots, slot)


@triton.jit
def earlier(slot, ages, num_envs, steps):
    """The slots `ages` steps before some; no age counts for more than one lap."""
    slot -= tl.minimum(ages, steps - 1) * num_envs
    return tl.where(slot < 0, slot + num_envs * steps, slot)


@triton.jit
def window_from(
    flags_ptr,
    rewards,
    start,
    named,
    num_envs,
    steps,
    N: tl.constexpr,
    TOGETHER: tl.constexpr,
    REWARDED: tl.constexpr,
    BROKEN: tl.constexpr,
):
    """The windows of N steps at most that begin in the slots `start`; TOGETHER steps are loaded at once.

    rewards: pointers to those of all steps and to the powers of gamma.
    BROKEN:  whether windows may begin at any step, and streams be broken in them.
    returns: their lengths; flags and slots of their last steps; if REWARDED their discounted rewards, float64.
    """
    rewards_ptr, powers_ptr = rewards
    ENDS: tl.constexpr = (TERMINATED | TRUNCATED | CUT | DEAD) if BROKEN else (TERMINATED | TRUNCATED)
    length = start * 0
    last = start
    last_flag = length.to(tl.uint8)
    reward = length.to(tl.float64)
    open = named
    for begin in range(0, N, TOGETHER):
        for ahead in tl.static_range(TOGETHER):
            age = begin + ahead
            # what lies behind an ending is loaded as well, so that no load waits for another
            slot = later(start, age, num_envs, steps)
            flag = tl.load(flags_ptr + slot, mask=named, other=0)
            open = open & (age < N)
            if REWARDED:
                power = tl.load(powers_ptr + tl.minimum(age, N))
                step_reward = tl.load(rewards_ptr + slot, mask=named, other=0).to(tl.float64)
                reward += tl.where(open, step_reward, 0.0) * power
            length += open.to(tl.int64)
            last = tl.where(open, slot, last)
            last_flag = tl.where(open, flag, last_flag)
            open = open & ((flag & ENDS) == 0)
    return length, last_flag, last, reward


@triton.jit(
    do_not_specialize=[
        "batch",
        "num_envs",
        "steps",
        "span",
        "per_span",
        "together",
        "minima",
        "blocks_drawn",
    ]
)
def gather_windows_kernel(
    sources,
    pools,
    streams,
    rewards,
    counters_ptr,
    counted,
    batch,
    num_envs,
    steps,
    span,
    per_span,
    together,
    minima,
    blocks_drawn,
    outputs,
    next_outputs,
    numbers,
    slots_ptr,
    sample,
    beta: tl.float64,
    STACKED: tl.constexpr,
    LAYOUT: tl.constexpr,
    ITEMS: tl.constexpr,
    STACK: tl.constexpr,
    N: tl.constexpr,
    TOGETHER: tl.constexpr,
    NEXT_STEP: tl.constexpr,
    ZERO: tl.constexpr,
    SEQUENCES: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Gather the stacks and other fields of the starts in `slots`, with the results of their n-step windows.

    sources, pools: the ring, and the kept final observations or ().
    outputs, next_outputs: of `obs` and the other fields, and of `next_obs`.
    streams:   flags, depths and rows of final observations of all steps.
    rewards:   those of all steps, and the powers of gamma.
    numbers:   outputs for reward, discount, terminated, truncated and, of sequences, mask.

    The first STACKED of the fields are observations: frame `j` of item `i` is row `i * STACK + j` of an output.
    Programs of their `obs` and `next_obs` alternate, since most frames of the one are frames of the other: the second
    finds them in the cache. With SEQUENCES `span` successive items are the steps from one start on, some of which may
    lack their targets; each says how it ended itself. A program moves `together` pieces of its frames one after the
    other, having looked up once where they lie. `next_obs` of an ending is its final observation where that is stored.
    With DRAWS the first programs finish as many draws each, one for `span` items: see `count_sample`.
    """
    flags_ptr, depth_ptr, final_ptr = streams
    powers_ptr = rewards[1]
    batch = batch.to(tl.int64)
    num_envs = num_envs.to(tl.int64)
    steps = steps.to(tl.int64)
    sequence = (span.to(tl.int64), per_span, num_envs, num_envs * steps) if SEQUENCES else ()
    ENDING: tl.constexpr = TERMINATED | TRUNCATED
    KINDS: tl.constexpr = 2
    # the program's number among those of the weights, then among those of the current field
    local = tl.program_id(0).to(tl.int64)
    if DRAWS > 0:
        local = count_sample(sample, counted, counters_ptr, local, batch // span, minima, blocks_drawn, beta, DRAWS)
    for f in tl.static_range(STACKED):
        parts = (LAYOUT.chunks[f] + together - 1) // together if LAYOUT.chunks[f] > 1 else 1
        programs = (batch * STACK + (LAYOUT.rows[f] - 1)) // LAYOUT.rows[f] * parts * KINDS
        if (local >= 0) & (local < programs):
            kind = local % KINDS
            # no launch has more than 2^31 programs
            piece = (local // KINDS).to(tl.int32)
            row = (piece // parts).to(tl.int64) * LAYOUT.rows[f] + tl.arange(0, LAYOUT.rows[f])
            named = row < batch * STACK
            item = row // STACK
            age = STACK - 1 - row % STACK
            # rows past the batch look at slot 0 and write nothing
            newest = slot_of(slots_ptr, item, named, sequence)[0]
            depth = tl.load(depth_ptr + newest, mask=named, other=0).to(tl.int64)
            output = outputs[f]
            pooled = row < 0
            if kind == 1:
                output = next_outputs[f]
                length, flag, last, _ = window_from(
                    flags_ptr, rewards, newest, named, num_envs, steps, N, TOGETHER, False, SEQUENCES
                )
                stays = ((flag & TERMINATED) != 0) & ((flag & FINAL) == 0)
                if SEQUENCES:
                    # the observation after the window is not there, so that the last one stands in its place
                    stays = stays | ((flag & (CUT | DEAD)) != 0)
                if not NEXT_STEP:
                    final = ((flag & ENDING) == TRUNCATED) | ((flag & FINAL) != 0)
                    stays = stays | final
                    if SEQUENCES:
                        final = final & ((flag & FINAL) != 0)
                    # the newest frame is a kept final observation, the others are shifted by one step
                    pooled = final & (age == 0)
                    age = tl.where(final, tl.maximum(age - 1, 0), age)
                newest = later(last, tl.where(stays, 0, 1), num_envs, steps)
                depth += length - stays.to(tl.int64)
            slot = earlier(newest, tl.minimum(age, depth), num_envs, steps)
            present = named
            if ZERO:
                present = named & (age <= depth)
            if len(pools) > 0:
                place = tl.load(final_ptr + newest, mask=pooled & named, other=0).to(tl.int64)
                present = present & ~pooled
            # the places of the frames are known: from here on only frames are loaded
            begin = 0
            end = 1
            if LAYOUT.chunks[f] > 1:
                begin = piece % parts * together
                end = tl.minimum(begin + together, LAYOUT.chunks[f])
            for chunk in range(begin, end):
                column = chunk * LAYOUT.columns[f] + tl.arange(0, LAYOUT.columns[f])
                inside = column[None, :]
                within = (column < LAYOUT.widths[f])[None, :]
                read = present[:, None] & within
                values = tl.load(sources[f] + (slot[:, None] * LAYOUT.widths[f] + inside), mask=read, other=0)
                if len(pools) > 0:
                    if kind == 1:
                        chosen = (pooled & named)[:, None] & within
                        finals = tl.load(pools[f] + (place[:, None] * LAYOUT.widths[f] + inside), mask=chosen, other=0)
                        values = tl.where(chosen, finals, values)
                values = as_sampled(values, output, LAYOUT.scales[f], LAYOUT.wide[f])
                written = named[:, None] & within
                tl.store(output + (row[:, None] * LAYOUT.widths[f] + column[None, :]), values, mask=written)
        local -= programs
    local = gather_rows(sources, outputs, slots_ptr, batch, local, STACKED, LAYOUT, sequence)
    if local >= 0:
        item = local * ITEMS + tl.arange(0, ITEMS)
        live = item < batch
        start, ahead = slot_of(slots_ptr, item, live, sequence)
        length, flag, last, reward = window_from(
            flags_ptr, rewards, start, live, num_envs, steps, N, TOGETHER, True, SEQUENCES
        )
        bootstraps = live & ((flag & TERMINATED) == 0)
        reward_ptr, discount_ptr, terminated_ptr, truncated_ptr = numbers[0], numbers[1], numbers[2], numbers[3]
        tl.store(reward_ptr + item, reward.to(tl.float32), mask=live)
        if SEQUENCES:
            flag = tl.load(flags_ptr + start, mask=live, other=0)
            # the episode of the first step began no later than that
            depth = tl.load(depth_ptr + start, mask=live, other=0).to(tl.int64)
            counts = (depth >= ahead) & ((flag & TARGET) != 0)
            bootstraps = bootstraps & counts
            tl.store(numbers[4] + item, counts, mask=live)
        discount = tl.load(powers_ptr + length, mask=bootstraps, other=0.0)
        tl.store(discount_ptr + item, discount.to(tl.float32), mask=live)
        tl.store(terminated_ptr + item, (flag & TERMINATED) != 0, mask=live)
        tl.store(truncated_ptr + item, (flag & TRUNCATED) != 0, mask=live)
