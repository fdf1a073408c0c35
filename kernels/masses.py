"""Masses of new transitions and of updated priorities, the sums above them, and the search for a target in them.

In the search a thread looks for one target and adds up the children of its node itself: sums pass through no other
thread. Targets of a stratified draw ascend, so that neighbouring threads read the same nodes but for the last levels.
"""

import triton
import triton.language as tl

from .constants import (
    ADDED,
    CUT,
    DEAD,
    EXCLUDED,
    FANOUT,
    FIRST,
    MAX_MASS,
    NO_KEY,
    PENDING_MAX_MASS,
    REJECTED,
    SATURATED,
    SHIFT,
    STALE,
    TARGET,
    TERMINATED,
    TRUNCATED,
    is_last,
)
from .random import divided, remainder
from .ring import is_live, write_rows


@triton.jit
def pass_child(mass, rest, sums, before, step):
    """Add the mass of a child to the sums; a target past it is in a later child: those before it are counted in `step`.

    before: the mass of those children.
    """
    sums += mass
    passed = sums <= rest
    return sums, tl.where(passed, sums, before), step + passed.to(tl.int32)


@triton.jit
def descend(levels, target):
    """The slots on which (DRAWS,) targets fall, and their masses; a slot for any target, wherever it lies.

    The last block of a level is padded with zeros: every place exists.
    """
    rest = target
    node = target * 0
    exists = target >= 0
    # a loop: the compiler's time grows faster than the loads that it sees
    for below in range(len(levels)):
        level_ptr = levels[len(levels) - 1]
        for level in tl.static_range(len(levels) - 1):
            level_ptr = tl.where(below == len(levels) - 1 - level, levels[level], level_ptr)
        # two children a load, 16 bytes
        children = level_ptr + (node * FANOUT)[:, None] + tl.arange(0, 2)[None, :]
        sums = target * 0
        before = sums
        step = sums.to(tl.int32)
        for child in tl.static_range(0, FANOUT, 2):
            first, second = tl.split(tl.load(children + child))
            sums, before, step = pass_child(first, rest, sums, before, step)
            sums, before, step = pass_child(second, rest, sums, before, step)
        # a tree without mass is descended along its first nodes, which exist
        exists = step < FANOUT
        node = node * FANOUT + tl.where(exists, step, 0)
        rest -= tl.where(exists, before, 0)
    return node, tl.load(levels[0] + node, mask=exists, other=0)


@triton.jit
def total_of(levels):
    """All mass."""
    return tl.sum(tl.load(levels[len(levels) - 1] + tl.arange(0, FANOUT)), axis=0)


@triton.jit
def mass_before(levels, slot):
    """The mass of the slots below one slot."""
    child = tl.arange(0, FANOUT)
    node = slot
    sums = tl.full([FANOUT], 0, tl.int64)
    for level in tl.static_range(len(levels)):
        first = node // FANOUT * FANOUT
        # the node itself and those after it are not before the slot
        sums += tl.load(levels[level] + first + child, mask=child < node - first, other=0)
        node = node // FANOUT
    return tl.sum(sums, axis=0)


@triton.jit
def from_oldest(target, before, total):
    """Targets counted from the oldest key, as the tree counts them: from slot 0."""
    target += before
    return tl.where(target >= total, target - total, target)


@triton.jit
def newest_eligible(eligible, draw, batch, head):
    """The slots of the newest eligible starts, for the last draws of a batch; eligible: levels of a tree of ones.

    head: slot of the next key; the slots from it on hold the oldest keys.
    """
    total = total_of(eligible)
    last = from_oldest(tl.maximum(total - batch + draw, 0), mass_before(eligible, head), total)
    return descend(eligible, last)[0]


@triton.jit
def newest_with_mass(masses_ptr, rank, wanted, stored, head, capacity, BLOCK: tl.constexpr = 8):
    """The slots of the newest transitions that have a mass: [DRAWS] ranks below `wanted`, counted from the newest.

    stored: live transitions. head: slot of the next key.
    """
    slots = rank * 0
    found = tl.full([], 0, tl.int64)
    begin = tl.full([], 0, tl.int64)
    # once, unless transitions were excluded
    while (found < wanted) & (begin < stored):
        age = begin + tl.arange(0, BLOCK)
        slot = head - 1 - age
        slot = tl.where(slot < 0, slot + capacity, slot)
        held = (tl.load(masses_ptr + slot, mask=age < stored, other=0) > 0).to(tl.int64)
        place = found + tl.cumsum(held, axis=0) - 1
        hit = (held[None, :] > 0) & (place[None, :] == rank[:, None])
        slots += tl.sum(tl.where(hit, slot[None, :], 0), axis=1)
        found += tl.sum(held, axis=0)
        begin += BLOCK
    return slots


@triton.jit
def mass_of(priority, rule):
    """float64 priorities to int64 masses, 0 where not finite, and whether they were cut to the limit.

    rule: pointers to the initial mass and the limit, int64, and to alpha, eps and clip, float64. Without the second
          masses are order codes: the bits of |priority|, plus 1.

    clamp(floor(min(|priority| + eps, clip) ** alpha * 2**20 + 0.5), 1, limit)
    """
    x = tl.abs(priority)
    finite = x <= 1.7976931348623157e308
    if len(rule) == 1:
        mass = x.to(tl.int64, bitcast=True) + 1
        saturated = x < 0
    else:
        masses_ptr, numbers_ptr = rule
        alpha, eps, clip = tl.load(numbers_ptr), tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
        limit = tl.load(masses_ptr + 1)
        x = tl.maximum(tl.minimum(tl.where(finite, x, 1.0) + eps, clip), 1e-300)
        exponent = tl.minimum(tl.log2(x) * alpha, 42.5)
        # a factor of 2**20 is exact, so fusing it with the addition changes nothing
        mass = (tl.exp2(exponent) * 1048576.0 + 0.5).to(tl.int64)
        saturated = finite & (mass > limit)
        mass = tl.minimum(tl.maximum(mass, 1), limit)
    return tl.where(finite, mass, 0), saturated


@triton.jit
def initial_mass(rule, counters_ptr, SOURCE: tl.constexpr):
    """The mass of transitions that come without a priority; SOURCE: the counter that holds it, or -1."""
    mass = tl.load(rule[0])
    if SOURCE >= 0:
        # the largest mass, 0 before there was any
        largest = tl.load(counters_ptr + SOURCE)
        mass = tl.where(largest > 0, largest, mass)
    return mass


@triton.jit
def count_masses(mass, saturated, live, counters_ptr, LARGEST: tl.constexpr, stale=None):
    """Count `live` masses that were rejected, 0, or cut to the limit, and keep the largest in counters[LARGEST].

    stale: keys to be counted as such, if there can be any.
    """
    # one sum of three counts, each of 20 bits: a program has fewer masses
    counted = tl.where(live & (mass == 0), 1 << 20, 0).to(tl.int64) + tl.where(live & saturated, 1 << 40, 0)
    if stale is not None:
        counted += stale.to(tl.int64)
    count = tl.sum(counted)
    tl.atomic_max(counters_ptr + LARGEST, tl.max(tl.where(live, mass, 0)), sem="relaxed")
    # rejected and saturated masses are rare
    if count > 0:
        if stale is not None:
            tl.atomic_add(counters_ptr + STALE, count & 0xFFFFF, sem="relaxed")
        tl.atomic_add(counters_ptr + REJECTED, (count >> 20) & 0xFFFFF, sem="relaxed")
        tl.atomic_add(counters_ptr + SATURATED, count >> 40, sem="relaxed")


@triton.jit
def raise_max_mass(counters_ptr):
    """Last program: update the largest mass ever given with that of this launch."""
    # an atomic, to see the values of other programs; the ticket orders them before this
    largest = tl.atomic_max(counters_ptr + PENDING_MAX_MASS, 0, sem="relaxed")
    tl.atomic_max(counters_ptr + MAX_MASS, largest, sem="relaxed")
    tl.store(counters_ptr + PENDING_MAX_MASS, 0)


@triton.jit(do_not_specialize=["rows", "skipped", "capacity", "segment", "inserting"])
def add_kernel(
    stores,
    tree,
    counters_ptr,
    times_sampled_ptr,
    inputs,
    keys_ptr,
    priority_ptr,
    rows,
    skipped,
    capacity,
    segment,
    inserting,
    LAYOUT: tl.constexpr,
    BLOCKS: tl.constexpr,
    GIVEN: tl.constexpr,
    SOURCE: tl.constexpr,
):
    """Store transitions, give them their keys and masses, and count them: an `add` is this launch.

    The first `inserting` programs give masses, the others move rows of the fields. The slots form one segment, or two
    where the ring wraps; each has `segment` programs, a program covers BLOCKS blocks of FANOUT slots. The last program
    to finish moves the ring on.

    tree: levels and the rule of `mass_of`; both empty without priorities.
    """
    levels, rule = tree
    program = tl.program_id(0).to(tl.int64)
    added = tl.load(counters_ptr + ADDED)
    skipped = skipped.to(tl.int64)
    start = (added + skipped) % capacity
    stop = start + (rows - skipped)
    if program < inserting:
        wrapped = program >= segment
        low = tl.where(wrapped, 0, start)
        high = tl.where(wrapped, stop - capacity, tl.minimum(stop, capacity))
        first_block = low // FANOUT + tl.where(wrapped, program - segment, program) * BLOCKS
        # without a wrap the second segment is empty, and programs past both are there for the keys alone
        if first_block * FANOUT < high:
            block = first_block + tl.arange(0, BLOCKS)
            slot = block[:, None] * FANOUT + tl.arange(0, FANOUT)[None, :]
            live = (slot >= low) & (slot < high)
            row = slot + (skipped - start + tl.where(wrapped, capacity, 0))
            tl.store(times_sampled_ptr + slot, tl.full([BLOCKS, FANOUT], 0, tl.int32), mask=live)
            tl.store(keys_ptr + row, added + row, mask=live)
            if len(levels) > 0:
                new = tl.full([BLOCKS, FANOUT], 0, tl.int64) + initial_mass(rule, counters_ptr, SOURCE)
                if GIVEN:
                    priority = tl.load(priority_ptr + row, mask=live, other=0).to(tl.float64)
                    own, saturated = mass_of(priority, rule)
                    new = tl.where(own > 0, own, new)
                    count_masses(own, saturated, live, counters_ptr, PENDING_MAX_MASS)
                # slots outside the segment keep their mass
                old = tl.load(levels[0] + slot, mask=live, other=0)
                change = tl.sum(tl.where(live, new - old, 0), axis=1)  # [BLOCKS]
                # copies of a thread's slot in other threads have been read before it changes
                tl.debug_barrier()
                tl.store(levels[0] + slot, new, mask=live)
                touched = (block * FANOUT < high) & (block * FANOUT + FANOUT > low)
                for level in tl.static_range(1, len(levels)):
                    tl.atomic_add(levels[level] + (block >> (SHIFT * (level - 1))), change, mask=touched, sem="relaxed")
        # keys of transitions that did not stay, because more came than fit; their priorities were given all the same
        if skipped > 0:
            for_key = program * (BLOCKS * FANOUT) + tl.arange(0, BLOCKS * FANOUT)
            named = for_key < skipped
            tl.store(keys_ptr + for_key, added + for_key, mask=named)
            if GIVEN:
                priority = tl.load(priority_ptr + for_key, mask=named, other=0).to(tl.float64)
                own, saturated = mass_of(priority, rule)
                count_masses(own, saturated, named, counters_ptr, PENDING_MAX_MASS)
    else:
        write_rows(inputs, stores, added, program - inserting, rows, skipped, capacity, LAYOUT)

    if is_last(counters_ptr, tl.num_programs(0)):
        if GIVEN:
            raise_max_mass(counters_ptr)
        tl.store(counters_ptr + ADDED, added + rows)


@triton.jit(do_not_specialize=["batch", "capacity", "per_capacity"])
def last_wins_kernel(keys_ptr, counters_ptr, stamp_ptr, batch, capacity, per_capacity, DRAWS: tl.constexpr):
    """Leave on the slot of every live key the largest position at which it stands: the last one wins."""
    position = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    # positions past the end name no key
    key = tl.load(keys_ptr + position, mask=position < batch, other=NO_KEY)
    live = is_live(key, counters_ptr, capacity)
    slot = remainder(tl.where(live, key, 0), capacity, per_capacity)
    tl.atomic_max(stamp_ptr + slot, position.to(tl.int32), mask=live, sem="relaxed")


@triton.jit
def add_to_root(root_ptr, node, change):
    """Add (DRAWS,) changes to nodes of the root, summed first: a program adds to each of them once, if at all."""
    child = tl.arange(0, FANOUT)
    total = tl.sum(tl.where(node[:, None] == child[None, :], change[:, None], 0), axis=0)
    tl.atomic_add(root_ptr + child, total, mask=total != 0, sem="relaxed")


@triton.jit
def waiting_steps(
    key, slot, named, streams, ring, rows, NEXT_STEP: tl.constexpr, LONG: tl.constexpr, STRICT: tl.constexpr
):
    """Which of the named live steps, which cannot be drawn, may be drawn once their rows are decided.

    The rule is that of `waiting_place` of the host.

    streams: flags, depths, and masses that wait. ring: the counters, slots and environments, both with their
             reciprocals. rows: frames of a stack, steps of a window and from the first of a row to its last, and the
             stride with its reciprocal.
    """
    flags_ptr, depth_ptr, _ = streams
    counters_ptr, capacity, per_capacity, envs, per_envs = ring
    stack, n_step, ahead, stride, per_stride = rows
    added = tl.load(counters_ptr + ADDED)
    oldest = tl.maximum(added - capacity, tl.load(counters_ptr + FIRST))
    number, env = divided(tl.where(named, key, 0), envs, per_envs)
    age = divided(tl.maximum(added - 1, 0), envs, per_envs)[0] - number
    waits = named & (age < ahead + n_step)
    newest = remainder(tl.maximum(added - envs, 0) + env, capacity, per_capacity)
    flag = tl.load(flags_ptr + newest, mask=waits, other=DEAD).to(tl.int32)
    behind = tl.load(depth_ptr + newest, mask=waits, other=-1).to(tl.int64)
    SETTLES: tl.constexpr = TERMINATED | (DEAD if NEXT_STEP else TRUNCATED)
    # steps that are not settled, from the newest back
    unsettled = tl.where((flag & SETTLES) != 0, 0, tl.minimum(behind + 1, n_step))
    known = tl.load(flags_ptr + slot, mask=waits, other=0).to(tl.int32)
    waits = waits & (age < ahead + unsettled) & ((known & EXCLUDED) == 0)
    # its own target is still to come
    own = (age < unsettled) & ((flag & CUT) == 0)
    if LONG:
        own = own | ((age >= unsettled) & ((known & TARGET) != 0))
        waits = waits & (remainder(number, stride, per_stride) == 0)
    waits = waits & own
    if STRICT:
        goes_on = ((flag & (TERMINATED | TRUNCATED | DEAD | CUT)) == 0) & (behind >= age)
        last = slot + ahead * envs
        last = tl.where(last < capacity, last, last - capacity)
        stored = waits & (age >= ahead)
        whole = (tl.load(flags_ptr + last, mask=stored, other=DEAD).to(tl.int32) & DEAD) == 0
        whole = whole & (tl.load(depth_ptr + last, mask=stored, other=-1) >= ahead)
        waits = waits & tl.where(age < ahead, goes_on, whole)
    # the first frame of the stack is stored
    frames = tl.minimum(tl.load(depth_ptr + slot, mask=waits, other=0).to(tl.int64), stack - 1)
    return waits & (key - frames * envs >= oldest)


@triton.jit(
    do_not_specialize=[
        "batch",
        "capacity",
        "per_capacity",
        "envs",
        "per_envs",
        "stack",
        "n_step",
        "lines",
        "per_lines",
        "ahead",
        "stride",
        "per_stride",
    ]
)
def update_kernel(
    keys_ptr,
    priority_ptr,
    tree,
    stamp_ptr,
    counters_ptr,
    streams,
    batch,
    capacity,
    per_capacity,
    envs,
    per_envs,
    stack,
    n_step,
    lines,
    per_lines,
    ahead,
    stride,
    per_stride,
    NEXT_STEP: tl.constexpr,
    LONG: tl.constexpr,
    STRICT: tl.constexpr,
    FINDS_WINNERS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Give the winners that `last_wins_kernel` left their masses and their ancestors the differences.

    Winners are distinct slots, so a leaf is read and written by one thread only. With FINDS_WINNERS a single program,
    which has all the keys, finds the winners itself. Without a tree, see `add_kernel`, stale keys are counted and
    nothing else happens.

    Slots of mass 0 keep it.

    streams: as in `waiting_steps`: the mass of a step that may be drawn later waits; () of transitions.
    lines:   masses that may wait. ahead, stride, LONG, STRICT: of rows that are sequences, see `waiting_steps`.
    per_...: reciprocals, see `random.py`.
    """
    levels, rule = tree
    position = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    named = position < batch
    # positions past the end name no key
    key = tl.load(keys_ptr + position, mask=named, other=NO_KEY)
    if len(levels) > 0:
        # asked for together with the keys, so that nothing waits for it: one that does not win is not looked at
        priority = tl.load(priority_ptr + position, mask=named, other=0).to(tl.float64)
        live = is_live(key, counters_ptr, capacity)
        slot = remainder(tl.where(live, key, 0), capacity, per_capacity)
        if FINDS_WINNERS:
            tl.atomic_max(stamp_ptr + slot, position.to(tl.int32), mask=live, sem="relaxed")
            # this program alone writes leaves, and not before all threads have passed the second barrier
            old = tl.load(levels[0] + slot, mask=live, other=0)
            # all stamps are of this block, within which a barrier orders what was written before it
            tl.debug_barrier()
        # a stamp is read and reset by atomics: a winner may be in another program, and no cache on the way can hold an
        # older one; no stamp is below -1
        stamp = tl.atomic_max(stamp_ptr + slot, tl.full([DRAWS], -1, tl.int32), mask=live, sem="relaxed")
        new, saturated = mass_of(priority, rule)
        # a loser sees the winner's position, or the reset that the winner left
        winner = live & (stamp == position)
        if not FINDS_WINNERS:
            # a winner in another program may be writing the leaf of a loser
            old = tl.load(levels[0] + slot, mask=winner, other=0)
        # a slot without mass must not be drawn, whatever its priority
        meant = winner & (old > 0)
        accepted = meant & (new > 0)
        if len(streams) > 0:
            ring = counters_ptr, capacity, per_capacity, envs.to(tl.int64), per_envs
            rows = stack, n_step, ahead, stride, per_stride
            waits = waiting_steps(key, slot, winner & (old == 0), streams, ring, rows, NEXT_STEP, LONG, STRICT)
            place = remainder(tl.where(waits, key, 0), lines, per_lines)
            tl.store(streams[2] + place, new, mask=waits & (new > 0))
            meant = meant | waits
        change = tl.where(accepted, new - old, 0)
        # copies of a thread's position in other threads have read stamp and leaf before they change
        tl.debug_barrier()
        tl.atomic_min(stamp_ptr + slot, tl.full([DRAWS], -1, tl.int32), mask=winner, sem="relaxed")
        tl.store(levels[0] + slot, new, mask=accepted)
        TOP: tl.constexpr = len(levels) - 1
        # all keys of thousands would wait for each other at the few nodes of the root
        SUMS: tl.constexpr = TOP > 0 and not FINDS_WINNERS
        for level in tl.static_range(1, TOP if SUMS else TOP + 1):
            tl.atomic_add(levels[level] + (slot >> (SHIFT * level)), change, mask=accepted, sem="relaxed")
        if SUMS:
            add_to_root(levels[TOP], slot >> (SHIFT * TOP), change)
        count_masses(new, saturated, meant, counters_ptr, MAX_MASS, (live == 0) & (key != NO_KEY))
    else:
        stale = (is_live(key, counters_ptr, capacity) == 0) & (key != NO_KEY)
        tl.atomic_add(counters_ptr + STALE, tl.sum(stale.to(tl.int64), axis=0), sem="relaxed")
