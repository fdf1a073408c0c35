"""Which starts of a trajectory buffer can be drawn, step by step, and the final observations kept for them."""

import triton
import triton.language as tl

from .constants import (
    ADDED,
    CUT,
    DEAD,
    ELIGIBLE,
    EXCLUDED,
    FINAL,
    FINALS,
    FIRST,
    FLAWED,
    LOST_TERMINALS,
    NONFINITE,
    PENDING_MAX_MASS,
    PENDING_TERMINALS,
    REJECTED,
    SATURATED,
    SHIFT,
    TARGET,
    TERMINALS,
    TERMINATED,
    TRUNCATED,
    last_of,
)
from .masses import initial_mass, mass_of, raise_max_mass
from .random import remainder
from .ring import programs_of, tile_at, write_rows


@triton.jit
def assign(levels, eligible, slot, new, touched):
    """Give the touched slots new masses, 0 where they cannot be drawn, and all nodes above them the differences.

    eligible: the levels of a second tree, of ones, or nothing. Returns how many more can be drawn.
    """
    old = tl.load(levels[0] + slot, mask=touched, other=0)
    changed = touched & (new != old)
    change = tl.where(changed, new - old, 0)
    more = tl.where(changed, (new > 0).to(tl.int64) - (old > 0).to(tl.int64), 0)
    # copies of a thread's slot in other threads have been read before it changes
    tl.debug_barrier()
    tl.store(levels[0] + slot, new, mask=changed)
    for level in tl.static_range(1, len(levels)):
        tl.atomic_add(levels[level] + (slot >> (SHIFT * level)), change, mask=changed, sem="relaxed")
    if len(eligible) > 0:
        tl.store(eligible[0] + slot, tl.minimum(new, 1), mask=changed)
        for level in tl.static_range(1, len(eligible)):
            tl.atomic_add(eligible[level] + (slot >> (SHIFT * level)), more, mask=changed, sem="relaxed")
    return tl.sum(tl.sum(more, axis=1), axis=0)


@triton.jit
def keeps_final(env, named, ends, TERMINAL: tl.constexpr):
    """Whether episodes end with a final observation to be kept: 1 for truncated ones, 2**32 for terminated ones."""
    terminated_ptr, truncated_ptr = ends
    terminated = tl.load(terminated_ptr + env, mask=named, other=0)
    truncated = tl.load(truncated_ptr + env, mask=named, other=0)
    keeps = (truncated > terminated).to(tl.int64)
    if TERMINAL:
        keeps += terminated.to(tl.int64) << 32
    return keeps


@triton.jit
def final_rows(
    env,
    named,
    ends,
    ring,
    pool,
    envs,
    first,
    TERMINAL: tl.constexpr,
    HINDSIGHT: tl.constexpr,
    BEFORE: tl.constexpr = 128,
):
    """Rows of the pool for the final observations of environments from `first` on, whether this step takes them, for a
    truncated episode, from the step of a terminated one, and the slot and the flags of that.

    The policy is that of `place_finals` of the host. A row is free until the step of key `added + env` has claimed it,
    which other programs of the launch may have done by now, or not yet.

    ring: the next key, the oldest live key after this step, and the capacity with its reciprocal.
    pool: keys that own rows, flags of all steps, rows taken by truncated and tried by terminated episodes before, and
          the number of rows with its reciprocal.
    """
    added, oldest, capacity, per_capacity = ring
    owner_ptr, flags_ptr, kept, tried, finals, per_finals = pool
    before = tl.full([BEFORE], 0, tl.int64)
    others = tl.full([BEFORE], 0, tl.int64)
    # rows of terminated episodes depend on all truncated ones of the step
    for begin in range(0, envs if TERMINAL else first, BEFORE):
        other = begin + tl.arange(0, BEFORE)
        keeps = keeps_final(other, other < (envs if TERMINAL else first), ends, TERMINAL)
        before += tl.where(other < first, keeps, 0)
        others += keeps
    own = keeps_final(env, named, ends, TERMINAL)
    ranks = tl.sum(before, axis=0) + tl.cumsum(own, axis=0) - own
    wants = own > 0
    cut = (own & 0xFFFFFFFF) > 0
    # from here on numbers of environments and of rows
    rank = ranks.to(tl.int32)
    start = remainder(kept, finals, per_finals).to(tl.int32)
    if TERMINAL:
        all_cut = tl.sum(others, axis=0).to(tl.int32)
        over = (ranks >> 32).to(tl.int32)
        if HINDSIGHT:
            rank = tl.where(cut, rank, all_cut + over)
        else:
            rank = tl.where(cut, rank, over)
    few = wants & (rank < finals)
    # there may be as many rows as an int32 counts
    place = tl.where(rank < finals - start, start + rank, rank - (finals - start))
    if TERMINAL and not HINDSIGHT:
        turn = remainder(tried, finals, per_finals).to(tl.int32)
        back = finals - 1 - tl.where(over < finals - turn, turn + over, over - (finals - turn))
        # the truncated episodes of the step come first
        ahead = tl.where(back >= start, back - start, back - start + finals)
        few = few & (cut | (ahead >= all_cut))
        place = tl.where(cut, place, back)
    # addresses have 64 bits
    place = place.to(tl.int64)
    # an atomic that changes nothing, since another program may write it: no owner is below -1
    held = tl.atomic_max(owner_ptr + place, tl.full(place.shape, -1, tl.int64), mask=few, sem="relaxed")
    # owners are in the order of their keys, so the free rows come first
    taken = few & ((held < oldest) | (held == added + env))
    loses = few & (rank < 0)
    loser = place
    left = place
    if TERMINAL and not HINDSIGHT:
        loses = few & cut & (held >= oldest) & (held < added)
        loser = remainder(tl.where(loses, held, 0), capacity, per_capacity).to(tl.int32)
        left = tl.load(flags_ptr + loser, mask=loses, other=0).to(tl.int32)
        loses = loses & ((left & TERMINATED) != 0)
        taken = taken | loses
    return place, taken, cut, loses, loser, left


@triton.jit
def keep_finals(
    inputs,
    pools,
    ends,
    ring,
    pool,
    local,
    envs,
    LAYOUT: tl.constexpr,
    TERMINAL: tl.constexpr,
    HINDSIGHT: tl.constexpr,
):
    """pools[f][place] = inputs[f][e] for the environments whose final observations are kept; a program moves a tile."""
    for f in tl.static_range(len(LAYOUT.widths)):
        programs = programs_of(envs, f, LAYOUT)
        if (local >= 0) & (local < programs):
            env, column = tile_at(local, f, LAYOUT)
            first = local // LAYOUT.chunks[f] * LAYOUT.rows[f]
            place, taken, _, _, _, _ = final_rows(env, env < envs, ends, ring, pool, envs, first, TERMINAL, HINDSIGHT)
            live = taken[:, None] & (column < LAYOUT.widths[f])[None, :]
            # rows that are not kept may hold anything, and are not read
            values = tl.load(inputs[f] + env[:, None] * LAYOUT.widths[f] + column[None, :], mask=live, other=0)
            target = pools[f] + place[:, None] * LAYOUT.widths[f] + column[None, :]
            tl.store(target, values.to(pools[f].dtype.element_ty), mask=live)
        local -= programs


@triton.jit
def has_target(age, n_step, named, depth, full, waited, closing):
    """Whether a step stores the target of the one `age` steps before it, of its episode: [AGES, ENVS].

    Its observation ends the full windows, an ending or its final observation all windows.
    """
    early = closing[None, :] | (waited[None, :] & (age > 0))
    stored = ((age == n_step) & (full | waited)[None, :]) | ((age < n_step) & early)
    return stored & named[None, :] & (depth[None, :] >= age)


@triton.jit
def slots_before(head, back, capacity, env):
    """The slots of the keys `back` before those of a step whose first slot is `head`; the ring wraps at most once."""
    return tl.where(head >= back, head, head + capacity) - back + env[None, :]


@triton.jit(
    do_not_specialize=[
        "envs",
        "capacity",
        "stack",
        "n_step",
        "ahead",
        "turn",
        "finals",
        "per_capacity",
        "per_lines",
        "per_finals",
        "per_turn",
        "stepping",
    ]
)
def add_step_kernel(
    stores,
    pools,
    tree,
    eligible,
    streams,
    counters_ptr,
    times_sampled_ptr,
    inputs,
    final_inputs,
    ends,
    priority,
    keys_ptr,
    envs,
    capacity,
    stack,
    n_step,
    ahead,
    turn,
    finals,
    per_capacity,
    per_lines,
    per_finals,
    per_turn,
    stepping,
    LAYOUT: tl.constexpr,
    ENVS: tl.constexpr,
    AGES: tl.constexpr,
    FRAMES: tl.constexpr,
    SOURCE: tl.constexpr,
    NEXT_STEP: tl.constexpr,
    FINAL_LAYOUT: tl.constexpr,
    TERMINAL: tl.constexpr,
    HINDSIGHT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    LONG: tl.constexpr,
    STRICT: tl.constexpr,
    STRIDED: tl.constexpr,
):
    """Store a step and its flags, take away the starts that it costs, and add those that it completes.

    A program has ENVS environments, and alone touches their slots; sums above them change by atomics. It looks at the
    last AGES starts of each, which the step may complete, and FRAMES that may lose a frame of their stack. The programs
    after the first `stepping` ones move rows of the fields and final observations. The last program to finish moves the
    ring on.

    With SEQUENCES the flags of a step say whether its target is stored. The start of a LONG one, of more than one step,
    is `ahead` steps before the step that is settled. STRICT ones lie in one episode; keys of STRIDED ones are multiples
    of `turn`, but for the environment.

    pools, final_inputs: of final observations, where some came with the step; FINAL_LAYOUT is that of these.
    tree:     levels and rule of the masses, as in `add_kernel`; without masses those of eligible starts.
    eligible: levels of the tree of eligible starts beside one of masses, or ().
    streams:  flags, depth, open_masses, final, owner, episode_length and clipped_length of `ops.steps.Streams`.
    ends:     terminated and truncated of each environment.
    priority: of each environment, or ().
    per_...:  reciprocals for `remainder`.
    """
    flags_ptr, depth_ptr, open_masses_ptr, final_ptr, owner_ptr, episode_length_ptr, clipped_length_ptr = streams
    levels, rule = tree
    terminated_ptr, truncated_ptr = ends
    MASSES: tl.constexpr = len(rule) > 0
    WITH_FINALS: tl.constexpr = len(final_inputs) > 0
    program = tl.program_id(0).to(tl.int64)
    added = tl.load(counters_ptr + ADDED)
    finals_kept, tried = tl.load(counters_ptr + FINALS), tl.load(counters_ptr + TERMINALS)
    count = tl.full([], 0, tl.int64)
    oldest = tl.maximum(tl.load(counters_ptr + FIRST), added + envs - capacity)
    ring = added, oldest, capacity, per_capacity
    pool = owner_ptr, flags_ptr, finals_kept, tried, finals, per_finals
    if program < stepping:
        env = program * ENVS + tl.arange(0, ENVS)
        named = env < envs
        # slot of the first environment, and its place among the open masses
        its_lines = n_step + 1
        if LONG:
            its_lines += ahead
        lines = envs.to(tl.int64) * its_lines
        head = remainder(added, capacity, per_capacity)
        line = remainder(added, lines, per_lines)
        slot = head + env
        previous = tl.where(head > 0, head, capacity) - envs + env
        # environments past the end do nothing
        before = tl.load(flags_ptr + previous, mask=named, other=0).to(tl.int32)
        # it stops counting before the sum with a window is more than a 32-bit number
        depth = tl.minimum(tl.load(depth_ptr + previous, mask=named, other=0), 2147483646 - n_step) + 1
        terminated = tl.load(terminated_ptr + env, mask=named, other=0).to(tl.int32)
        truncated = tl.load(truncated_ptr + env, mask=named, other=0).to(tl.int32)
        flags = terminated * TERMINATED | truncated * TRUNCATED
        is_first = (before & (TERMINATED | TRUNCATED | CUT)) != 0
        # a truncated ending needs a final observation
        flawed = truncated > terminated
        # the last field is the reward
        reward = tl.load(inputs[len(inputs) - 1] + env, mask=named, other=0)
        nonfinite = (tl.abs(reward) <= 3.4028234663852886e38) == 0
        if NEXT_STEP:
            # the step after an ending has its final observation alone; one that was cut is followed by a first one
            is_dead = ((before & (TERMINATED | TRUNCATED)) != 0) & ((before & CUT) == 0)
            flags = tl.where(is_dead, DEAD, flags)
            is_first = (before & (DEAD | CUT)) != 0
            # a reset step lacks a reward, as it lacks an ending
            nonfinite = nonfinite & (is_dead == 0)
            flawed = is_dead & ((reward != 0) | ((terminated | truncated) != 0))
        behind = depth.to(tl.int64)
        # nothing comes before the very first step
        depth = tl.where(is_first | (added == 0), 0, depth)

        kept = env * 0
        if WITH_FINALS:
            place, taken, cut, loses, loser, left = final_rows(
                env, named, ends, ring, pool, envs.to(tl.int64), program * ENVS, TERMINAL, HINDSIGHT
            )
            flags = tl.where(taken, flags | FINAL, flags)
            kept = taken.to(tl.int64)
            flawed = flawed & (taken == 0)
            if TERMINAL:
                over = named & (terminated > 0)
                unkept = tl.sum((over & (taken == 0)).to(tl.int64))
                if not HINDSIGHT:
                    kept = (taken & cut).to(tl.int64)
                    unkept += tl.sum(loses.to(tl.int64))
                    tl.atomic_add(counters_ptr + PENDING_TERMINALS, tl.sum(over.to(tl.int64)), sem="relaxed")
                tl.atomic_add(counters_ptr + LOST_TERMINALS, unkept, sem="relaxed")
        if SEQUENCES:
            flags = tl.where((flags & (TERMINATED | FINAL)) != 0, flags | TARGET, flags)
        # one sum of two counts
        rare = tl.sum(flawed.to(tl.int64) + ((named & nonfinite).to(tl.int64) << 32))
        if rare > 0:
            tl.atomic_add(counters_ptr + FLAWED, rare & 0xFFFFFFFF, sem="relaxed")
            tl.atomic_add(counters_ptr + NONFINITE, rare >> 32, sem="relaxed")

        initial = tl.full([], 1, tl.int64)
        if MASSES:
            initial = initial_mass(rule, counters_ptr, SOURCE)
        own = env * 0
        if len(priority) > 0:
            given = tl.load(priority[0] + env, mask=named, other=0).to(tl.float64)
            own, saturated = mass_of(given, rule)
            rejected = named & (own == 0) & ((flags & DEAD) == 0)
            tl.atomic_add(counters_ptr + REJECTED, tl.sum(rejected.to(tl.int64)), sem="relaxed")
            tl.atomic_add(counters_ptr + SATURATED, tl.sum((named & saturated).to(tl.int64)), sem="relaxed")

        if HINDSIGHT:
            # the first step of an episode is overwritten: the rest of the episode is found by its environment
            gone = tl.load(depth_ptr + slot, mask=named, other=0) == 0
            clipped_length = tl.load(clipped_length_ptr + env, mask=named, other=0)
            clipped_length = tl.where(gone, tl.load(episode_length_ptr + slot, mask=named, other=0), clipped_length)
            # the span of the episode that this step leaves behind; before the very first step no flags are set
            leaves = named & is_first
            span = (behind - 1).to(tl.int32) + ((before & FINAL) != 0).to(tl.int32)
            stored = leaves & (behind * envs < capacity)
            clipped_length = tl.where(leaves & (stored == 0), span, clipped_length)
            first = tl.where(stored, head - behind * envs, 0)
            first = tl.where(first < 0, first + capacity, first) + env

        age = tl.arange(0, AGES)[:, None].to(tl.int64)
        if not SEQUENCES:
            # the starts that the step may complete, but itself, before a flag of theirs is stored
            stored_before = named[None, :] & (age > 0) & (age * envs <= added)
            known = tl.load(flags_ptr + slots_before(head, age * envs, capacity, env), mask=stored_before, other=0)
        # in a ring of one step these are the slots that were read above; and owners are read before rows are claimed
        tl.debug_barrier()
        if WITH_FINALS:
            # no earlier owner has a larger key
            tl.atomic_max(owner_ptr + place, added + env, mask=taken, sem="relaxed")
            tl.store(final_ptr + slot, place.to(tl.int32), mask=taken)
            if TERMINAL and not HINDSIGHT:
                # a terminated episode that lost its row has its own last observation from now on; other programs may
                # read these flags meanwhile, but only how the step ended, which stays
                tl.store(flags_ptr + loser, (left & (255 - FINAL)).to(tl.uint8), mask=loses)
        if HINDSIGHT:
            tl.store(clipped_length_ptr + env, clipped_length, mask=named)
            tl.store(episode_length_ptr + slot, tl.full([ENVS], -1, tl.int32), mask=named)
            tl.store(episode_length_ptr + first, span, mask=stored)
        if NEXT_STEP:
            # the final observation of the step before this dead one has come
            tl.store(flags_ptr + previous, (before | FINAL).to(tl.uint8), mask=named & is_dead & (previous != slot))
        tl.store(flags_ptr + slot, flags.to(tl.uint8), mask=named)
        tl.store(depth_ptr + slot, depth, mask=named)
        tl.store(open_masses_ptr + line + env, own, mask=named)
        tl.store(times_sampled_ptr + slot, tl.full([ENVS], 0, tl.int32), mask=named)
        tl.store(keys_ptr + env, added + env, mask=named)

        more = tl.full([], 0, tl.int64)
        # the slots that the step takes count among the starts it may complete; the ones after them lose a frame
        if FRAMES > 0:
            if added >= capacity:
                # a step completes no long sequence that begins with it
                after = ((0 if LONG else 1) + tl.arange(0, FRAMES))[:, None].to(tl.int64)
                near = (after < stack) & (after * envs < capacity) & named[None, :]
                # the ring wraps at most once, here and below
                later = head + after * envs
                later = tl.where(later < capacity, later, later - capacity) + env[None, :]
                # a deep stack lost its first frame steps ago
                framed = near
                if LONG:
                    framed = near & (after > 0)
                lost = near & (tl.load(depth_ptr + later, mask=framed, other=0 if LONG else -1) >= after)
                nothing = tl.full([FRAMES, ENVS], 0, tl.int64)
                more += assign(levels, eligible, later, nothing, lost)

        full = (flags & DEAD) == 0
        closing = (flags & (TERMINATED | FINAL)) != 0
        waited = (full == 0) & ((before & (TERMINATED | TRUNCATED)) == TRUNCATED)
        # the start lies so many steps back
        before_it = age
        back = age * envs
        chosen = has_target(age, n_step, named, depth, full, waited, closing)
        behind_start = depth[None, :] - age
        if SEQUENCES:
            if NEXT_STEP:
                # one of these may just have got its final observation
                tl.debug_barrier()
            told = chosen & (age > 0)
            told_slot = slots_before(head, back, capacity, env)
            told_flags = tl.load(flags_ptr + told_slot, mask=told, other=0)
            known = told_flags
        if LONG:
            # the steps that the one before left open are settled by an ending, a cut, or the observation after them
            SETTLES: tl.constexpr = TERMINATED | (DEAD if NEXT_STEP else TRUNCATED)
            settled = ((flags & SETTLES) != 0)[None, :]
            left_open = tl.where((before & SETTLES) != 0, 0, tl.minimum(behind, n_step))[None, :]
            over = settled | ((before & CUT) != 0)[None, :] | (age == n_step)
            chosen = named[None, :] & tl.where(age > 0, over & (age <= left_open), settled)
            if STRICT:
                # a reset step is of no episode; the steps before this one may be of the one that was cut
                own_depth = tl.where(full, depth.to(tl.int64), -1)
                chosen = chosen & (tl.where(age > 0, behind[None, :] - age, own_depth[None, :]) >= ahead)
            before_it = age + ahead
            back = before_it * envs
        start = added - back
        if LONG:
            earlier = slots_before(head, back, capacity, env)
            chosen = chosen & (start >= oldest)
            behind_start = tl.load(depth_ptr + earlier, mask=chosen, other=0)
            known = tl.load(flags_ptr + earlier, mask=chosen, other=0)
            has_its = has_target(before_it, n_step, named, depth, full, waited, closing)
            chosen = chosen & (((known & TARGET) != 0) | has_its)
        if STRIDED:
            chosen = chosen & (remainder(tl.maximum(start, 0), turn, per_turn) == 0)
        # the first frame of the stack is stored
        frames = tl.minimum(behind_start, stack - 1)
        chosen = chosen & (start - frames * envs >= oldest) & ((known & EXCLUDED) == 0)
        # the masses of this step have just been made
        its_line = tl.where(line >= back, line, line + lines) - back
        open_mass = tl.load(open_masses_ptr + its_line + env[None, :], mask=chosen & (before_it > 0), other=0)
        open_mass = tl.where(chosen, tl.where(before_it == 0, own[None, :], open_mass), 0)
        new = tl.where(chosen, tl.where(open_mass > 0, open_mass, initial), 0)
        earlier = slots_before(head, back, capacity, env)
        touched = chosen
        if not LONG:
            touched = chosen | (named[None, :] & (age == 0))
        more += assign(levels, eligible, earlier, new, touched)
        if SEQUENCES:
            # all copies of them have been read before the slots changed
            tl.store(flags_ptr + told_slot, told_flags | TARGET, mask=told)
        tl.atomic_add(counters_ptr + ELIGIBLE, more, sem="relaxed")
        if MASSES:
            tl.atomic_max(counters_ptr + PENDING_MAX_MASS, tl.max(tl.max(open_mass, axis=1), axis=0), sem="relaxed")
        count += tl.sum(kept, axis=0)
    else:
        local = write_rows(inputs, stores, added, program - stepping, envs, envs * 0, capacity, LAYOUT)
        if WITH_FINALS:
            keep_finals(
                final_inputs, pools, ends, ring, pool, local, envs.to(tl.int64), FINAL_LAYOUT, TERMINAL, HINDSIGHT
            )

    last, all_kept = last_of(counters_ptr, tl.num_programs(0), count)
    if last:
        if MASSES:
            raise_max_mass(counters_ptr)
        if WITH_FINALS:
            tl.store(counters_ptr + FINALS, finals_kept + all_kept)
            if TERMINAL and not HINDSIGHT:
                # an atomic, to see the sums of other programs; the ticket orders them before this
                now = tl.atomic_xchg(counters_ptr + PENDING_TERMINALS, 0, sem="relaxed")
                tl.store(counters_ptr + TERMINALS, tried + now)
        tl.store(counters_ptr + ADDED, added + envs)
