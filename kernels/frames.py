"""What stands in a batch of a trajectory buffer, put together from steps that are stored once, in one launch.

Frames of stacks are moved as `ring.py` moves rows; only where a frame comes from takes some looking up, which every
program does for its own.
"""

import triton
import triton.language as tl

from .philox import words_at
from .ring import as_sampled, gather_rows
from .weights import weigh


@triton.jit
def later(slot, ages, num_envs, steps):
    """The slots `ages` steps after some, in a ring of so many steps; no age counts for more than one turn."""
    slots = num_envs * steps
    slot += tl.minimum(ages, steps - 1) * num_envs
    return tl.where(slot >= slots, slot - slots, slot)


@triton.jit
def earlier(slot, ages, num_envs, steps):
    """The slots `ages` steps before some; no age counts for more than one turn."""
    slot -= tl.minimum(ages, steps - 1) * num_envs
    return tl.where(slot < 0, slot + num_envs * steps, slot)


@triton.jit
def window_from(
    flags_ptr,
    rewards_ptr,
    powers_ptr,
    start,
    named,
    num_envs,
    steps,
    N: tl.constexpr,
    TOGETHER: tl.constexpr,
    ENDING: tl.constexpr,
    REWARDED: tl.constexpr,
):
    """The windows of N steps at most that begin in the slots `start`; TOGETHER steps are loaded at once.

    returns: their lengths; flags and slots of their last steps; if REWARDED their discounted rewards, float64.
    """
    length = start * 0
    last = start
    found = length.to(tl.uint8)
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
                given = tl.load(rewards_ptr + slot, mask=named, other=0).to(tl.float64)
                reward += tl.where(open, given, 0.0) * power
            length += open.to(tl.int64)
            last = tl.where(open, slot, last)
            found = tl.where(open, flag, found)
            open = open & ((flag & ENDING) == 0)
    return length, found, last, reward


@triton.jit
def shifts_of(item, span, block, seed, kind, MOST: tl.constexpr):
    """Rows and columns, from -MOST to MOST, by which the pictures of some items move; `span` items move alike.

    block: of the first word. kind: 0 for obs, 1 for next_obs.
    """
    word = words_at(item // span, block, seed) >> (kind * 32).to(tl.uint64)
    down = ((word & 0xFFFF) * (2 * MOST + 1) >> 16).to(tl.int32) - MOST
    right = ((word >> 16 & 0xFFFF) * (2 * MOST + 1) >> 16).to(tl.int32) - MOST
    return down, right


@triton.jit
def moved_column(column, down, right, HEIGHT: tl.constexpr, SIDE: tl.constexpr):
    """Where in a frame of pictures HEIGHT x SIDE a moved one finds its (COLUMNS,) values: [ROWS, COLUMNS]."""
    picture = column // (HEIGHT * SIDE) * (HEIGHT * SIDE)
    y = (column % (HEIGHT * SIDE) // SIDE)[None, :] + down[:, None]
    x = (column % SIDE)[None, :] + right[:, None]
    y = tl.minimum(tl.maximum(y, 0), HEIGHT - 1)
    x = tl.minimum(tl.maximum(x, 0), SIDE - 1)
    return picture[None, :] + y * SIDE + x


@triton.jit(do_not_specialize=["batch", "num_envs", "steps", "span", "blocks_drawn"])
def gather_windows_kernel(
    sources,
    pools,
    outputs,
    next_outputs,
    weighing,
    slots_ptr,
    flags_ptr,
    depth_ptr,
    final_ptr,
    rewards_ptr,
    powers_ptr,
    words_ptr,
    counters_ptr,
    reward_ptr,
    discount_ptr,
    terminated_ptr,
    truncated_ptr,
    batch,
    num_envs,
    steps,
    span,
    blocks_drawn,
    beta,
    beta_rest,
    STACKED: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDTHS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALES: tl.constexpr,
    WIDE: tl.constexpr,
    HEIGHTS: tl.constexpr,
    SIDES: tl.constexpr,
    ITEMS: tl.constexpr,
    WINDOWS: tl.constexpr,
    STACK: tl.constexpr,
    N: tl.constexpr,
    TOGETHER: tl.constexpr,
    NEXT_STEP: tl.constexpr,
    POOLED: tl.constexpr,
    ZERO: tl.constexpr,
    SHIFT: tl.constexpr,
    TERMINATED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    FINAL: tl.constexpr,
    SEED: tl.constexpr,
    DRAWS: tl.constexpr = 0,
    SCHEDULED: tl.constexpr = False,
    RANDOM: tl.constexpr = 0,
    STEP: tl.constexpr = 0,
    TICKET: tl.constexpr = 0,
    EDGE_LOW: tl.constexpr = 0,
):
    """Stacks of the starts in `slots`, the other fields there, and, with WINDOWS, all that their n-step windows give.

    The first STACKED of the fields are observations: frame `j` of item `i` is row `i * STACK + j` of an output.
    Programs of their `obs` and `next_obs` alternate, since most frames of the one are frames of the other: the second
    finds them in the cache. HEIGHTS and SIDES are those of the pictures that a random shift moves, 0 where it does not;
    `span` items in turn are moved alike, by the words from block words[0] of the stream on. FINAL: the flag of endings
    after which `next_obs` is the final observation in any case, or 0. With DRAWS the first programs make the weights of
    as many draws each, one for `span` items: see `weigh`.
    """
    batch = batch.to(tl.int64)
    num_envs = num_envs.to(tl.int64)
    steps = steps.to(tl.int64)
    ENDING: tl.constexpr = TERMINATED | TRUNCATED
    KINDS: tl.constexpr = 2 if WINDOWS else 1
    # the program's number among those of the weights, then among those of the field in turn
    local = tl.program_id(0).to(tl.int64)
    if DRAWS > 0:
        draws = batch // span
        programs = (draws + (DRAWS - 1)) // DRAWS
        if local < programs:
            weigh(
                weighing,
                counters_ptr,
                local,
                programs,
                draws,
                blocks_drawn,
                beta,
                beta_rest,
                DRAWS,
                SCHEDULED,
                RANDOM,
                STEP,
                TICKET,
                EDGE_LOW,
            )
        local -= programs
    for f in tl.static_range(STACKED):
        programs = (batch * STACK + (ROWS[f] - 1)) // ROWS[f] * CHUNKS[f] * KINDS
        if (local >= 0) & (local < programs):
            kind = local % KINDS
            piece = local // KINDS
            row = piece // CHUNKS[f] * ROWS[f] + tl.arange(0, ROWS[f])
            column = (piece % CHUNKS[f]).to(tl.int32) * COLUMNS[f] + tl.arange(0, COLUMNS[f])
            named = row < batch * STACK
            live = named[:, None] & (column < WIDTHS[f])[None, :]
            item = row // STACK
            age = STACK - 1 - row % STACK
            # rows past the batch look at slot 0 and write nothing
            newest = tl.load(slots_ptr + item, mask=named, other=0)
            depth = tl.load(depth_ptr + newest, mask=named, other=0).to(tl.int64)
            output = outputs[f]
            pooled = row < 0
            if WINDOWS:
                if kind == 1:
                    output = next_outputs[f]
                    length, flag, last, _ = window_from(
                        flags_ptr, rewards_ptr, powers_ptr, newest, named, num_envs, steps, N, TOGETHER, ENDING, False
                    )
                    stays = ((flag & TERMINATED) != 0) & ((flag & FINAL) == 0)
                    if not NEXT_STEP:
                        final = ((flag & ENDING) == TRUNCATED) | ((flag & FINAL) != 0)
                        stays = stays | final
                        # the newest frame is a kept final observation, the others are one step closer
                        pooled = final & (age == 0)
                        age = tl.where(final, tl.maximum(age - 1, 0), age)
                    newest = later(last, tl.where(stays, 0, 1), num_envs, steps)
                    depth += length - stays.to(tl.int64)
            slot = earlier(newest, tl.minimum(age, depth), num_envs, steps)
            inside = column[None, :]
            if SHIFT > 0 and HEIGHTS[f] > 0:
                seed = tl.load(counters_ptr + SEED)
                down, right = shifts_of(item, span, tl.load(words_ptr), seed, kind, SHIFT)
                inside = moved_column(column, down, right, HEIGHTS[f], SIDES[f])
            present = live
            if ZERO:
                present = live & (age <= depth)[:, None]
            values = tl.load(sources[f] + (slot[:, None] * WIDTHS[f] + inside), mask=present, other=0)
            if WINDOWS and POOLED:
                if kind == 1:
                    place = tl.load(final_ptr + newest, mask=pooled & named, other=0).to(tl.int64)
                    chosen = live & pooled[:, None]
                    finals = tl.load(pools[f] + (place[:, None] * WIDTHS[f] + inside), mask=chosen, other=0)
                    values = tl.where(chosen, finals, values)
            values = as_sampled(values, output, SCALES[f], WIDE[f])
            tl.store(output + (row[:, None] * WIDTHS[f] + column[None, :]), values, mask=live)
        local -= programs
    for f in tl.static_range(STACKED, FIELDS):
        programs = (batch + (ROWS[f] - 1)) // ROWS[f] * CHUNKS[f]
        if (local >= 0) & (local < programs):
            gather_rows(
                sources[f],
                outputs[f],
                slots_ptr,
                batch,
                local,
                WIDTHS[f],
                ROWS[f],
                COLUMNS[f],
                CHUNKS[f],
                SCALES[f],
                WIDE[f],
            )
        local -= programs
    if WINDOWS:
        if local >= 0:
            item = local * ITEMS + tl.arange(0, ITEMS)
            live = item < batch
            start = tl.load(slots_ptr + item, mask=live, other=0)
            length, flag, last, reward = window_from(
                flags_ptr, rewards_ptr, powers_ptr, start, live, num_envs, steps, N, TOGETHER, ENDING, True
            )
            terminated = (flag & TERMINATED) != 0
            discount = tl.load(powers_ptr + length, mask=live & ~terminated, other=0.0)
            tl.store(reward_ptr + item, reward.to(tl.float32), mask=live)
            tl.store(discount_ptr + item, discount.to(tl.float32), mask=live)
            tl.store(terminated_ptr + item, terminated, mask=live)
            tl.store(truncated_ptr + item, (flag & TRUNCATED) != 0, mask=live)
