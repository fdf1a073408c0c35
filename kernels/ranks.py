"""The search for the rank of a target."""

import triton
import triton.language as tl

from .constants import BASE, NO_MASS


@triton.jit
def rank_at(sums_ptr, target, count, DIGITS: tl.constexpr):
    """The first ranks whose sum of masses exceeds (DRAWS,) targets, one digit of the rank after the other.

    A thread searches for one target, as in `masses.py`.
    """
    rank = target * 0
    # of the parts into which a digit divides what is left
    width = tl.full([], BASE**DIGITS, tl.int64)
    for _ in range(DIGITS):
        width //= BASE
        passed = rank * 0
        for digit in tl.static_range(1, BASE):
            # the last rank of a part; no target passes the end of all ranks
            last = rank + (digit * width - 1)
            passed += (tl.load(sums_ptr + last, mask=last < count, other=NO_MASS) <= target).to(tl.int64)
        rank += passed * width
    # in bounds where nothing is ranked
    return tl.minimum(rank, count - 1)
