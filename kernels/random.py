"""Random words by position, numbers and permutations made of them, and division by numbers known before a launch.

Such a division is a multiplication by `ops.launch.reciprocal`: one of 64 bits is a call of some hundred instructions,
for which registers are spilled.
"""

import triton
import triton.language as tl


@triton.jit
def divided(number, divisor, reciprocal):
    """number // divisor and number % divisor, where the reciprocal is (2**63 - 1) // divisor.

    number: int64, not negative. divisor: positive. The quotient that the product gives is at most one too small: the
    reciprocal is more than 2**63 / divisor - 1, so that the product is short by less than number / 2**63 < 1.
    """
    quotient = tl.umulhi(number.to(tl.uint64) << 1, reciprocal.to(tl.uint64)).to(tl.int64)
    rest = number - quotient * divisor
    short = rest >= divisor
    return quotient + short.to(tl.int64), tl.where(short, rest - divisor, rest)


@triton.jit
def remainder(number, divisor, reciprocal):
    """number % divisor: see `divided`."""
    return divided(number, divisor, reciprocal)[1]


# rounds of the permutation, those of one of fewer than FEW numbers, and the words that they take in blocks of 4
ROUNDS = tl.constexpr(8)
ROUNDS_OF_FEW = tl.constexpr(32)
FEW = tl.constexpr(64)


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


@triton.jit
def permute(place, wide, per_wide, high, pairs, first, second, third, fourth):
    """A permutation of [0, wide * high): the column is shifted by a hash of the row, then the other way round.

    first, second: multipliers and addends of the shifts of the column, one a round; third, fourth: those of the row.
    """
    row, column = divided(place.to(tl.int64), wide.to(tl.int64), per_wide)
    row, column = row.to(tl.uint64), column.to(tl.uint64)
    nothing = (place * 0).to(tl.int64)
    for pair in range(pairs):
        at = nothing + pair
        column += (((row * tl.gather(first, at, 0) + tl.gather(second, at, 0)) >> 32) * wide) >> 32
        column = tl.where(column >= wide, column - wide, column)
        row += (((column * tl.gather(third, at, 0) + tl.gather(fourth, at, 0)) >> 32) * high) >> 32
        row = tl.where(row >= high, row - high, row)
    return row * wide + column


@triton.jit
def permuted_rank(draw, by_chance, count, block, seed):
    """The places of a random permutation of [0, count) that the draws by chance take; 0 for the others.

    More draws than there are places take the last of them.
    """
    # the narrowest rectangle that covers the count: the root is mended where it was rounded
    wide = tl.sqrt((count - 1).to(tl.float64)).to(tl.int64) + 1
    wide = tl.where((wide - 1) * (wide - 1) >= count, wide - 1, wide)
    wide = tl.where(wide * wide < count, wide + 1, wide)
    # each walk divides by it again; what a float64 rounds is too little for a quotient of numbers of 31 bits
    per_wide = (9223372036854774784.0 / wide.to(tl.float64)).to(tl.int64)
    high = divided(count + wide - 1, wide, per_wide)[0]
    pairs = tl.where(count < FEW, ROUNDS_OF_FEW // 2, ROUNDS // 2)
    first, second, third, fourth = words_of(block + tl.arange(0, ROUNDS_OF_FEW // 2), seed)
    limit = count.to(tl.uint64)
    # rows that draw nothing stay where they are; a walk that starts in [0, count) comes back to it
    image = tl.where(by_chance, tl.minimum(draw, count - 1), 0).to(tl.uint64)
    outside = by_chance
    while tl.max(outside.to(tl.int32), axis=0) > 0:
        walked = permute(image, wide.to(tl.uint64), per_wide, high.to(tl.uint64), pairs, first, second, third, fourth)
        image = tl.where(outside, walked, image)
        outside = outside & (image >= limit)
    return image.to(tl.int64)
