"""Division by numbers that are known before the launch, as a multiplication by `ops.draw.reciprocal`.

A division of 64 bits is a call of some hundred instructions, for which registers are spilled.
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
