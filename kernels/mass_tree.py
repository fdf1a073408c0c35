"""What is made of the leaves of a tree of masses: the sums above them, and the smallest or largest of them."""

import triton
import triton.language as tl

from .constants import EDGE, FANOUT, HIGHEST, LOWEST, NO_MASS, PENDING_MAX_MASS, is_last


@triton.jit(do_not_specialize=["nodes"])
def block_sums_kernel(below_ptr, above, nodes, TOPS: tl.constexpr):
    """above[0][i] = the sum of block i of FANOUT nodes below; above[1], if it is there, has the same of above[0].

    nodes: of the level below, whole blocks. A program makes TOPS nodes of above[1], or as many blocks of above[0].
    """
    program = tl.program_id(0).to(tl.int64)
    block = program * (TOPS * FANOUT) + tl.arange(0, TOPS * FANOUT)
    named = block < nodes // FANOUT
    node = block[:, None] * FANOUT + tl.arange(0, FANOUT)[None, :]
    # blocks past the end, the padding of above[0], weigh nothing
    sums = tl.sum(tl.load(below_ptr + node, mask=named[:, None], other=0), axis=1)  # [TOPS * FANOUT]
    tl.store(above[0] + block, sums, mask=named)
    if len(above) > 1:
        top = program * TOPS + tl.arange(0, TOPS)
        tops = tl.sum(tl.reshape(sums, [TOPS, FANOUT]), axis=1)
        tl.store(above[1] + top, tops, mask=top * (FANOUT * FANOUT) < nodes)


@triton.jit(do_not_specialize=["blocks"])
def find_extreme_kernel(extremes_ptr, leaves_ptr, counters_ptr, blocks, LOW: tl.constexpr, BLOCKS: tl.constexpr):
    """counters[HIGHEST] = the largest mass, or with LOW counters[LOWEST] = the smallest that is not 0.

    What an earlier call left there does not matter: programs collect the extreme in a counter that is 0 between
    launches, and the last program moves it. extremes: of blocks of EDGE leaves; a program looks at BLOCKS of them.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    # blocks past the end hold no mass
    extreme = tl.load(extremes_ptr + block, mask=block < blocks, other=NO_MASS if LOW else 0)
    dirty = extreme < 0
    leaf = block[:, None] * EDGE + tl.arange(0, EDGE)[None, :]
    # only blocks that changed are read again
    masses = tl.load(leaves_ptr + leaf, mask=dirty[:, None], other=0)  # [BLOCKS, EDGE]
    if LOW:
        found = tl.min(tl.where(masses == 0, NO_MASS, masses), axis=1)
    else:
        found = tl.max(masses, axis=1)
    extreme = tl.where(dirty, found, extreme)
    # copies of a thread's block in other threads have been read before it changes
    tl.debug_barrier()
    tl.store(extremes_ptr + block, extreme, mask=dirty)
    if LOW:
        # the complement in 63 bits: the smallest mass has the largest
        extreme = extreme ^ NO_MASS
    tl.atomic_max(counters_ptr + PENDING_MAX_MASS, tl.max(extreme, axis=0), sem="relaxed")
    if is_last(counters_ptr, tl.num_programs(0)):
        # an atomic, to see what other programs have found; the ticket orders them before this
        largest = tl.atomic_max(counters_ptr + PENDING_MAX_MASS, 0, sem="relaxed")
        tl.store(counters_ptr + PENDING_MAX_MASS, 0)
        if LOW:
            tl.store(counters_ptr + LOWEST, largest ^ NO_MASS)
        else:
            tl.store(counters_ptr + HIGHEST, largest)
