"""Inclusive sums of int64 numbers in two launches: the sum of each part, then each part scanned from the sum before it.

Numbers are read twice, but no program waits for another. The first launch reads each part from its end, so that the
second finds the beginnings of all parts in the cache.

It runs once, when a buffer that draws by rank is made, and would need no kernel for that. It stays because an exact
int64 scan is one of the operations that this package offers, tests and measures by themselves.
"""

import triton
import triton.language as tl


@triton.jit
def load_block(values_ptr, begin, length, BLOCK: tl.constexpr):
    """BLOCK values from `begin` on, 0 past the end."""
    inside = tl.arange(0, BLOCK)
    # a mask that may end anywhere would split words of 16 bytes
    if begin + BLOCK <= length:
        values = tl.load(values_ptr + begin + inside)
    else:
        values = tl.load(values_ptr + begin + inside, mask=inside < (length - begin).to(tl.int32), other=0)
    return values


@triton.jit(do_not_specialize=["length", "blocks"])
def sum_parts_kernel(values_ptr, sums_ptr, length, blocks, BLOCK: tl.constexpr):
    """sums[p] = the sum of part p, which is `blocks` blocks long; a program sums up one part."""
    part = tl.program_id(0).to(tl.int64)
    sums = tl.full([BLOCK], 0, tl.int64)
    for block in range(blocks):
        begin = ((part + 1) * blocks - 1 - block) * BLOCK
        if begin < length:
            sums += load_block(values_ptr, begin, length, BLOCK)
    tl.store(sums_ptr + part, tl.sum(sums, axis=0))


@triton.jit(do_not_specialize=["length", "blocks"])
def scan_parts_kernel(values_ptr, sums_ptr, out_ptr, length, blocks, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = the sum of the first i + 1 values; a program scans one of at most PARTS parts: see
    `sum_parts_kernel`.
    """
    part = tl.program_id(0).to(tl.int64)
    earlier = tl.arange(0, PARTS)
    before = tl.sum(tl.load(sums_ptr + earlier, mask=earlier < part, other=0), axis=0)
    inside = tl.arange(0, BLOCK)
    for block in range(blocks):
        begin = (part * blocks + block) * BLOCK
        if begin < length:
            values = load_block(values_ptr, begin, length, BLOCK)
            sums = before + tl.cumsum(values, axis=0)
            if begin + BLOCK <= length:
                tl.store(out_ptr + begin + inside, sums)
            else:
                tl.store(out_ptr + begin + inside, sums, mask=inside < (length - begin).to(tl.int32))
            before += tl.sum(values, axis=0)
