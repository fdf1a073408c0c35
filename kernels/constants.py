"""Places in the counters, bits of a step's flags and sizes of trees; a test compares them with the host's.

Kernels import triton and loops numba, so both are written down twice.
"""

import triton
import triton.language as tl

ADDED = tl.constexpr(0)
FIRST = tl.constexpr(1)
RANDOM = tl.constexpr(2)
STEP = tl.constexpr(3)
MAX_MASS = tl.constexpr(4)
PENDING_MAX_MASS = tl.constexpr(5)
STALE = tl.constexpr(6)
REJECTED = tl.constexpr(7)
SATURATED = tl.constexpr(8)
SEED = tl.constexpr(9)
TICKET = tl.constexpr(10)
LOWEST = tl.constexpr(11)
HIGHEST = tl.constexpr(12)
ELIGIBLE = tl.constexpr(13)
FINALS = tl.constexpr(14)
FLAWED = tl.constexpr(15)
NONFINITE = tl.constexpr(16)
TERMINALS = tl.constexpr(17)
PENDING_TERMINALS = tl.constexpr(18)
LOST_TERMINALS = tl.constexpr(19)

NO_MASS = tl.constexpr(2**63 - 1)
NO_KEY = tl.constexpr(-1)

# children of a node of a tree, and log2 of that
FANOUT = tl.constexpr(32)
SHIFT = tl.constexpr(5)
# parts into which one step of the search for a rank divides the rest
BASE = tl.constexpr(32)

TERMINATED = tl.constexpr(1)
TRUNCATED = tl.constexpr(2)
DEAD = tl.constexpr(4)
FINAL = tl.constexpr(8)
CUT = tl.constexpr(16)
TARGET = tl.constexpr(32)
EXCLUDED = tl.constexpr(64)


@triton.jit
def last_of(counters_ptr, programs, count):
    """Whether this program is the last of `programs` to arrive, and the sum of all their counts, below 2**31.

    Only the last one may change memory that the others read. count: int64.
    """
    # every thread has read the counters before the last program changes them
    tl.debug_barrier()
    # the upper half of the ticket adds up the counts
    ticket = (count << 32) + 1
    taken = tl.atomic_add(counters_ptr + TICKET, ticket) + ticket
    last = (taken & 0xFFFFFFFF) == programs
    if last:
        tl.store(counters_ptr + TICKET, 0)
    return last, taken >> 32


@triton.jit
def is_last(counters_ptr, programs):
    """Whether this program is the last of `programs` to arrive: see `last_of`."""
    return last_of(counters_ptr, programs, tl.full([], 0, tl.int64))[0]
