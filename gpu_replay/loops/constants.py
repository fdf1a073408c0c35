"""Numbers that loops share with the operations around them."""

from __future__ import annotations


class Counter:
    """Places in the counters, (COUNT,) int64; `kernels/constants.py` has the same.

    Plain ints: indexing an array with a member of an enum takes five times as long.
    """

    ADDED = 0  # transitions ever added: the next key
    FIRST = 1  # smallest key that `clear` has not forgotten
    RANDOM = 2  # Philox blocks consumed
    STEP = 3  # samples drawn, the position of the beta schedule
    MAX_MASS = 4  # largest mass ever given, 0 before any
    PENDING_MAX_MASS = 5  # largest mass seen by the launch in progress, 0 between launches
    STALE = 6  # updates and writes of keys that were not live
    REJECTED = 7  # non-finite priorities
    SATURATED = 8  # priorities whose mass was cut to the limit
    SEED = 9  # seed of the Philox stream, 64 bits
    TICKET = 10  # programs of the launch in progress that have finished
    LOWEST = 11  # smallest stored mass, as the last sample that looked for it found it
    HIGHEST = 12  # largest stored mass, as the last add that looked for it found it
    ELIGIBLE = 13  # starts of a trajectory buffer that can be drawn
    FINALS = 14  # final observations of a trajectory buffer ever kept
    FLAWED = 15  # reset steps that look like none, or truncated endings whose final observation is not stored
    NONFINITE = 16  # rewards of a trajectory buffer that are not finite
    TERMINALS = 17  # final observations of terminated episodes that a trajectory buffer was given, without hindsight
    PENDING_TERMINALS = 18  # those of the launch in progress, 0 between launches
    LOST_TERMINALS = 19  # final observations of terminated episodes that found no place, or lost it
    COUNT = 20


class Flag:
    """Bits of the flags of a stored step. Plain ints, as in `Counter`."""

    TERMINATED = 1
    TRUNCATED = 2
    DEAD = 4  # carries the final observation of an episode and nothing else: never a start
    FINAL = 8  # ended, and its final observation is stored
    CUT = 16  # the stream was broken from outside after this step
    TARGET = 32  # kept for sequences: its window is stored, and the observation after it unless it terminated
    EXCLUDED = 64  # never begins a row that is sampled


# the smallest mass of an empty set
NO_MASS = 2**63 - 1
# stands for no key where keys are given; no transition has it
NO_KEY = -1
# log2 of the children of a node of a tree on the host
SHIFT = 4
# most nodes of the root level of a tree on the host: they are summed one by one
ROOT_LIMIT = 256
