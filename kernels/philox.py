"""Random words by position, shared by every kernel that draws."""

import triton
import triton.language as tl


@triton.jit
def words_of(block, seed):
    """The four words of Philox block `block`, which is int64; all uint64."""
    counter = (block + 1).to(tl.uint64)
    zero = counter * 0
    return tl.random.philox_impl(counter, zero, zero, zero, zero + seed.to(tl.uint64), zero, 10)


@triton.jit
def words_at(place, block, seed):
    """Word `place` of the stream that begins at Philox block `block`; place is int64, the result uint64."""
    first, second, third, fourth = words_of(block + place // 4, seed)
    lane = place % 4
    return tl.where(lane < 2, tl.where(lane == 0, first, second), tl.where(lane == 2, third, fourth))


@triton.jit
def floor_of_product(word, width):
    """floor(u * width) for the 53-bit double u of a word, at most width - 1 and at least 0; width is int64."""
    unit = (word >> 11).to(tl.float64) * 1.1102230246251565e-16
    product = (unit * width.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(product, width - 1), 0)
