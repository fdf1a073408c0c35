"""Inclusive scans of int64 numbers, which read each number once.

The programs of a scan tell each other sums in two words a block, each a stage above 32 bits of a sum. All that is ever
written of one stage is the same, and a stage only rises (`atomic_max`): so two words of one stage are its sum, in
whatever order accesses become visible, and all of them are relaxed.
"""

import triton
import triton.language as tl

# stages: 0 says nothing; the sum of a block; the sum of all blocks up to it
AGGREGATE = tl.constexpr(1)
INCLUSIVE = tl.constexpr(2)
LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def publish(state_ptr, blocks, block, total, stage):
    """Publish a sum to the programs of later blocks; an entry of a later stage is kept."""
    word = tl.arange(0, 2)
    half = tl.where(word == 0, total, total >> 32) & LOW
    tl.atomic_max(state_ptr + (word * blocks + block), half | (stage.to(tl.int64) << 32), sem="relaxed")


@triton.jit
def sum_before(values_ptr, state_ptr, blocks, program, BLOCK: tl.constexpr, WINDOW: tl.constexpr, LOOKS: tl.constexpr):
    """The sum of all blocks before a program's: WINDOW blocks are looked at at once, back to the first inclusive sum.

    A block that says nothing LOOKS times in a row is summed up here, so that no program depends on another to go on.
    """
    back = tl.arange(0, WINDOW)
    before = program * 0
    # the nearest block that is not counted yet
    nearest = program - 1
    idle = 0
    while nearest >= 0:
        block = nearest - back
        # blocks before the first say nothing
        named = block >= 0
        # past the cache of a multiprocessor, which nobody tells; AMD's may answer all the same, which takes LOOKS
        low = tl.load(state_ptr + block, mask=named, other=0, volatile=True)
        high = tl.load(state_ptr + (blocks + block), mask=named, other=0, volatile=True)
        # words of different stages are not a sum
        stage = tl.where(low >> 32 == high >> 32, (low >> 32).to(tl.int32), 0)
        # the first block that says more or less than the sum of itself, and its stage
        first = tl.min(tl.where(stage == AGGREGATE, WINDOW * 4, back * 4 + stage), axis=0)
        count = first // 4
        ends = first % 4 == INCLUSIVE
        counted = back < tl.where(ends, count + 1, count)
        before += tl.sum(tl.where(counted, (low & LOW) | (high << 32), 0), axis=0)
        nearest = tl.where(ends, -1, nearest - count)
        idle = tl.where(count > 0, 0, idle + 1)
        if (nearest >= 0) & (idle >= LOOKS):
            # the block of another program is whole, since this one's comes after it
            PIECE: tl.constexpr = BLOCK if BLOCK < 2 * WINDOW else 2 * WINDOW
            late_ptr = values_ptr + nearest * BLOCK + tl.arange(0, PIECE)
            sums = tl.load(late_ptr)
            for begin in range(PIECE, BLOCK, PIECE):
                sums += tl.load(late_ptr + begin)
            total = tl.sum(sums, axis=0)
            before += total
            publish(state_ptr, blocks, nearest, total, tl.where(nearest == 0, INCLUSIVE, AGGREGATE))
            nearest -= 1
            idle = 0
    return before


@triton.jit(do_not_specialize=["length"])
def scan_kernel(
    values_ptr,
    state_ptr,
    out_ptr,
    length,
    EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    LOOKS: tl.constexpr,
):
    """out[i] = the sum of the first (i + 1) * EVERY values; a program scans one block.

    state: low and then high words of all blocks, 0 at first. With WINDOW 0 there is one block and no state.

    Merrill and Garland 2016, "Single-pass Parallel Prefix Scan with Decoupled Look-back"; for late blocks Smith, Levien
    and Owens 2025, "Decoupled Fallback: A Portable Single-Pass GPU Scan".
    """
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.num_programs(0).to(tl.int64)
    values_at, out_at = values_ptr + program * BLOCK, out_ptr + program * (BLOCK // EVERY)
    inside = tl.arange(0, BLOCK)
    count = tl.minimum(length - program * BLOCK, BLOCK).to(tl.int32)
    # a mask that may end anywhere would split words of 16 bytes
    if count == BLOCK:
        values = tl.load(values_at + inside)
    else:
        # values past the end add nothing
        values = tl.load(values_at + inside, mask=inside < count, other=0)  # [BLOCK]
    if WINDOW > 0:
        total = tl.sum(values, axis=0)
        # others need it, before this program needs anything of them
        publish(state_ptr, blocks, program, total, tl.where(program == 0, INCLUSIVE, AGGREGATE))
    sums = tl.cumsum(values, axis=0)
    if WINDOW > 0:
        before = sum_before(values_ptr, state_ptr, blocks, program, BLOCK, WINDOW, LOOKS)
        publish(state_ptr, blocks, program, before + total, tl.full([], INCLUSIVE, tl.int32))
        sums += before
    if EVERY > 1:
        tl.store(out_at + inside // EVERY, sums, mask=(inside % EVERY == EVERY - 1) & (inside < count))
    elif count == BLOCK:
        tl.store(out_at + inside, sums)
    else:
        tl.store(out_at + inside, sums, mask=inside < count)
