"""Chooses rows of a batch to relabel, and locates their new goals from a few numbers of each episode."""

import triton
import triton.language as tl

from .constants import ADDED, FINAL, FIRST, RANDOM, SEED
from .random import ROUNDS_OF_FEW, floor_of_product, permuted_rank, words_at


@triton.jit(do_not_specialize=["count", "batch", "envs", "steps", "finals", "sums", "after"])
def choose_goals_kernel(
    streams,
    counters_ptr,
    sums_ptr,
    drawn_ptr,
    outputs,
    count,
    batch,
    envs,
    steps,
    finals,
    sums,
    after,
    LAST: tl.constexpr,
    EPISODE: tl.constexpr,
    HALVINGS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """`count` random rows of the batch; of each whether its goal is known, and the slot or the kept row of the new one.

    Steps are counted from the row's own one, those before it with a minus. LAST: take the last step of the episode;
    EPISODE: any stored one; else one from the row's own on, if HALVINGS by the masses of which there are `sums` sums,
    fewer than 2**HALVINGS. Its words begin `after` blocks on. A replayed graph may have drawn slots that are not live:
    every access is in bounds.

    drawn:   slots of the batch.
    streams: flags, depth, episode_length, clipped_length and final of `ops.steps.Streams`.
    outputs: rows, known, slots and, where final observations are kept, their rows.
    """
    flags_ptr, depth_ptr, episode_length_ptr, clipped_length_ptr, final_ptr = streams
    rows_ptr, known_ptr, slots_ptr = outputs[0], outputs[1], outputs[2]
    draw = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    live = draw < count
    added = tl.load(counters_ptr + ADDED)
    block = tl.load(counters_ptr + RANDOM) + after
    seed = tl.load(counters_ptr + SEED)
    capacity = envs.to(tl.int64) * steps
    row = permuted_rank(draw, live, batch.to(tl.int64), block, seed)
    # rows past the end look at slot 0 and write nothing; slots and steps have 31 bits
    slot = tl.load(drawn_ptr + row, mask=live, other=0).to(tl.int32)
    line = slot // envs
    env = slot - line * envs
    newest = (added % capacity).to(tl.int32) // envs - 1
    newest = tl.where(newest < 0, steps - 1, newest)
    age = newest - line
    age = tl.where(age < 0, age + steps, age)
    depth = tl.load(depth_ptr + slot, mask=live, other=0)
    # the first step of the episode has not been overwritten
    unwrapped = depth < steps - age
    first = line - tl.where(unwrapped, depth, 0)
    first = tl.where(first < 0, first + steps, first) * envs + env
    span = tl.load(episode_length_ptr + first, mask=live & unwrapped, other=0)
    span = tl.where(unwrapped, span, tl.load(clipped_length_ptr + env, mask=live & (unwrapped == 0), other=0))
    last = tl.load(flags_ptr + (newest * envs + env), mask=live, other=0).to(tl.int32)
    running = age - 1 + ((last & FINAL) != 0).to(tl.int32)
    # steps after this one whose goals are known; less than none where its own is not
    ahead = tl.minimum(tl.where(span >= 0, span - 1 - depth, running), age)
    known = ahead >= 0
    ahead = tl.maximum(ahead, 0)
    chosen = ahead
    if not LAST:
        back = ahead * 0
        if EPISODE:
            oldest = tl.maximum(tl.load(counters_ptr + FIRST), added - capacity)
            stored = (added - oldest).to(tl.int32) // envs
            back = tl.minimum(depth, tl.maximum(stored - 1 - age, 0))
        width = (back + ahead + 1).to(tl.int64)
        if HALVINGS:
            width = tl.load(sums_ptr + tl.minimum(ahead, sums - 1), mask=live, other=1)
        target = floor_of_product(words_at(draw, block + ROUNDS_OF_FEW // 2, seed), width)
        chosen = target.to(tl.int32) - back
        if HALVINGS:
            # the goals whose sums the target has passed
            chosen = ahead * 0
            for halving in tl.static_range(HALVINGS):
                tried = chosen + (1 << (HALVINGS - 1 - halving))
                passed = tl.load(sums_ptr + tried - 1, mask=live & (tried <= sums), other=0) <= target
                chosen = tl.where(passed & (tried <= sums), tried, chosen)
    # in 64 bits, since the line may be up to two laps on
    line = line.to(tl.int64) + chosen
    line = tl.where(line < 0, line + steps, line)
    line = tl.where(line < steps, line, line - steps)
    after = tl.where(line + 1 < steps, line + 1, 0)
    if len(outputs) > 3:
        place = line * envs + env
        pooled = (tl.load(flags_ptr + place, mask=live, other=0).to(tl.int32) & FINAL) != 0
        kept = tl.load(final_ptr + place, mask=live & pooled, other=0)
        kept = tl.minimum(tl.maximum(kept, 0), finals - 1)
        places_ptr = outputs[3]
        tl.store(places_ptr + draw, tl.where(pooled, kept, -1).to(tl.int64), mask=live)
        after = tl.where(pooled, line, after)
    tl.store(rows_ptr + draw, row, mask=live)
    tl.store(known_ptr + draw, known, mask=live)
    tl.store(slots_ptr + draw, after * envs + env, mask=live)
