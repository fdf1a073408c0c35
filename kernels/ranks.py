"""Ranks: codes in order of age, to be sorted, and the search for the rank of a target."""

import triton
import triton.language as tl

from .constants import ADDED, BASE, NO_MASS, last_of


@triton.jit(do_not_specialize=["capacity"])
def arrange_kernel(codes_ptr, arranged_ptr, count_ptr, counters_ptr, capacity, SLOTS: tl.constexpr):
    """arranged[age] = code of the slot with the key of that age, the oldest first.

    count[0] = how many codes are not 0.
    """
    age = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    slot = tl.load(counters_ptr + ADDED) % capacity + age
    slot = tl.where(slot >= capacity, slot - capacity, slot)
    # code 0: comes after all that can be drawn
    code = tl.load(codes_ptr + slot, mask=age < capacity, other=0)
    tl.store(arranged_ptr + age, code, mask=age < capacity)
    last, count = last_of(counters_ptr, tl.num_programs(0), tl.sum((code > 0).to(tl.int64), axis=0))
    if last:
        tl.store(count_ptr, count)


@triton.jit
def rank_at(sums_ptr, target, count, DIGITS: tl.constexpr):
    """The first ranks whose sum of masses exceeds (DRAWS,) targets, one digit of the rank after the other.

    A thread searches for one target: see `tree.py`.
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
