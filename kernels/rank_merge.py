"""The list of ranks brought up to date by what has changed: changes are found, put in order, and merged into the list.

A change takes a slot out of its place in the list, puts one in, or both. Sets of changes come in pairs, those to put in
before those to take out, `capacity` apart; an entry that has its place is `place << 32 | slot`, where `place` is the
number of slots of the list before it.
"""

import triton
import triton.language as tl

from .counters import ADDED

SLOT_BITS = tl.constexpr(32)
SLOT_MASK = tl.constexpr(2**32 - 1)
# the state of a list, and a copy of it of before the launches in progress
LISTED = tl.constexpr(0)
OFFSET = tl.constexpr(1)
KEYS = tl.constexpr(2)
BEFORE = tl.constexpr(3)


@triton.jit
def key_at(slot, added, head, capacity):
    """The key of a slot when `added` was the next one, which went to the slot `head`."""
    return slot + (added - head) - tl.where(slot >= head, capacity, 0)


@triton.jit
def changes_of(counts_ptr, which):
    """How many slots are to be put in, or to be taken out if `which` is 1."""
    return (tl.load(counts_ptr) >> (which * SLOT_BITS)) & SLOT_MASK


@triton.jit
def next_key(which, state_ptr, counters_ptr):
    """The next key of now, or that of when the list was made if `which` is 1."""
    return tl.where(which == 0, tl.load(counters_ptr + ADDED), tl.load(state_ptr + BEFORE + KEYS))


@triton.jit
def standing(slot, live, which, codes_ptr, known_ptr, added, head, capacity):
    """Code and key by which slots are ranked: those of now, or those of the list if `which` is 1."""
    now = slot * 0 + which == 0
    # only one of the two is loaded
    code = tl.load(codes_ptr + slot, mask=live & now, other=0) + tl.load(known_ptr + slot, mask=live & ~now, other=0)
    return code, key_at(slot, added, head, capacity)


@triton.jit
def comes_before(code, key, than_code, than_key):
    """The order of ranks."""
    return (code > than_code) | ((code == than_code) & (key < than_key))


@triton.jit(do_not_specialize=["capacity"])
def changes_kernel(
    codes_ptr, known_ptr, changes_ptr, counts_ptr, state_ptr, counters_ptr, capacity, SLOTS: tl.constexpr
):
    """Find the slots whose code or key is not that of the list, and copy the state of the list.

    counts[0], 0 before, holds how many are to be put in, and times 2**32 how many to be taken out. Their order is that
    in which programs come.
    """
    program = tl.program_id(0).to(tl.int64)
    before = tl.load(state_ptr + KEYS)
    if program == 0:
        tl.store(state_ptr + BEFORE + LISTED, tl.load(state_ptr + LISTED))
        tl.store(state_ptr + BEFORE + OFFSET, tl.load(state_ptr + OFFSET))
        tl.store(state_ptr + BEFORE + KEYS, before)
    slot = program * SLOTS + tl.arange(0, SLOTS)
    live = slot < capacity
    code = tl.load(codes_ptr + slot, mask=live, other=0)
    known = tl.load(known_ptr + slot, mask=live, other=0)
    added = tl.load(counters_ptr + ADDED)
    key, old_key = key_at(slot, added, added % capacity, capacity), key_at(slot, before, before % capacity, capacity)
    changed = (code != known) | (key != old_key)
    put = changed & (code > 0)
    taken = changed & (known > 0)
    both = put.to(tl.int64) + (taken.to(tl.int64) << SLOT_BITS)
    total = tl.sum(both, axis=0)
    if total > 0:
        upto = tl.cumsum(both, axis=0) - both + tl.atomic_add(counts_ptr, total, sem="relaxed")
        tl.store(changes_ptr + (upto & SLOT_MASK), slot.to(tl.int32), mask=put)
        tl.store(changes_ptr + capacity + (upto >> SLOT_BITS), slot.to(tl.int32), mask=taken)


@triton.jit(do_not_specialize=["capacity"])
def order_kernel(
    changes_ptr,
    counts_ptr,
    entries_ptr,
    list_ptr,
    state_ptr,
    codes_ptr,
    known_ptr,
    counters_ptr,
    capacity,
    ENTRIES: tl.constexpr,
    RUN: tl.constexpr,
    CHUNK: tl.constexpr,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
):
    """Find the place of each change in the list, and put every RUN of them in order."""
    # every other program looks at those to put in
    which = tl.program_id(0).to(tl.int64) % 2
    added = next_key(which, state_ptr, counters_ptr)
    head = added % capacity
    then = tl.load(state_ptr + BEFORE + KEYS)
    count = changes_of(counts_ptr, which)
    changes_ptr += which * capacity
    entries_ptr += which * capacity
    listed = tl.load(state_ptr + BEFORE + LISTED)
    list_ptr += tl.load(state_ptr + BEFORE + OFFSET)
    digit = tl.arange(0, BASE).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) // 2 * ENTRIES
    while begin < count:
        entry = begin + tl.arange(0, ENTRIES)
        live = entry < count
        slot = tl.load(changes_ptr + entry, mask=live, other=0).to(tl.int64)
        code, key = standing(slot, live, which, codes_ptr, known_ptr, added, head, capacity)
        place = slot * 0
        for step in tl.static_range(DIGITS):
            # the last place of every part into which this digit divides what is left
            last = place[:, None] + (digit[None, :] + 1) * (BASE ** (DIGITS - 1 - step)) - 1
            inside = live[:, None] & (last < listed)
            other = tl.load(list_ptr + last, mask=inside, other=0).to(tl.int64)
            held = tl.load(known_ptr + other, mask=inside, other=0)
            older = key_at(other, then, then % capacity, capacity)
            passed = inside & comes_before(held, older, code[:, None], key[:, None])
            place += tl.sum(passed.to(tl.int64), axis=1) * (BASE ** (DIGITS - 1 - step))
        run = begin // RUN * RUN
        end = tl.minimum(run + RUN, count)
        ahead = slot * 0
        while run < end:
            rival = run + tl.arange(0, CHUNK)
            here = rival < end
            its_slot = tl.load(changes_ptr + rival, mask=here, other=0).to(tl.int64)
            its_code, its_key = standing(its_slot, here, which, codes_ptr, known_ptr, added, head, capacity)
            first = here[None, :] & comes_before(its_code[None, :], its_key[None, :], code[:, None], key[:, None])
            ahead += tl.sum(first.to(tl.int64), axis=1)
            run += CHUNK
        tl.store(entries_ptr + begin // RUN * RUN + ahead, (place << SLOT_BITS) | slot, mask=live)
        begin += tl.num_programs(0) // 2 * ENTRIES


@triton.jit(do_not_specialize=["capacity", "run", "steps"])
def join_kernel(
    entries_ptr,
    joined_ptr,
    counts_ptr,
    state_ptr,
    codes_ptr,
    known_ptr,
    counters_ptr,
    capacity,
    run,
    steps,
    ENTRIES: tl.constexpr,
    FAN: tl.constexpr,
):
    """Merge every FAN runs of `run` ordered changes into one; nothing where all are in one run.

    steps: halvings that a search of a run takes.
    """
    # every other program looks at those to put in
    which = tl.program_id(0).to(tl.int64) % 2
    added = next_key(which, state_ptr, counters_ptr)
    head = added % capacity
    count = changes_of(counts_ptr, which)
    entries_ptr += which * capacity
    joined_ptr += which * capacity
    begin = tl.program_id(0).to(tl.int64) // 2 * ENTRIES
    begin = tl.where(count > run, begin, count)
    number = tl.arange(0, FAN).to(tl.int64)
    while begin < count:
        entry = begin + tl.arange(0, ENTRIES)
        live = entry < count
        own = tl.load(entries_ptr + entry, mask=live, other=0)
        slot = own & SLOT_MASK
        code, key = standing(slot, live, which, codes_ptr, known_ptr, added, head, capacity)
        span = run.to(tl.int64) * FAN
        group = entry // span * span
        start = group[:, None] + number[None, :] * run
        low = start * 0
        high = tl.where(live[:, None], tl.minimum(tl.maximum(count - start, 0), run), 0)
        for _ in range(steps):
            middle = (low + high) // 2
            going = low < high
            other = tl.load(entries_ptr + start + middle, mask=going, other=0) & SLOT_MASK
            held, older = standing(other, going, which, codes_ptr, known_ptr, added, head, capacity)
            passed = going & comes_before(held, older, code[:, None], key[:, None])
            low = tl.where(passed, middle + 1, low)
            high = tl.where(going & (passed == 0), middle, high)
        tl.store(joined_ptr + group + tl.sum(low, axis=1), own, mask=live)
        begin += tl.num_programs(0) // 2 * ENTRIES


@triton.jit
def entries_upto(entries_ptr, bound, low, high):
    """How many entries are at most `bound`, given that at least `low` and at most `high` are; all of the same shape."""
    while tl.max((high - low).to(tl.int64), axis=0) > 0:
        middle = (low + high) // 2
        going = low < high
        passed = going & (tl.load(entries_ptr + middle, mask=going, other=0) <= bound)
        low = tl.where(passed, middle + 1, low)
        high = tl.where(going & (passed == 0), middle, high)
    return low


@triton.jit
def whole_search(entries_ptr, bound, count, DIGITS: tl.constexpr, BASE: tl.constexpr):
    """How many of `count` entries are at most each bound, a digit after the other."""
    digit = tl.arange(0, BASE).to(tl.int64)
    found = bound * 0
    for step in tl.static_range(DIGITS):
        last = found[:, None] + (digit[None, :] + 1) * (BASE ** (DIGITS - 1 - step)) - 1
        inside = last < count
        passed = inside & (tl.load(entries_ptr + last, mask=inside, other=0) <= bound[:, None])
        found += tl.sum(passed.to(tl.int64), axis=1) * (BASE ** (DIGITS - 1 - step))
    return found


@triton.jit(do_not_specialize=["capacity"])
def merge_kernel(
    entries_ptr,
    counts_ptr,
    list_ptr,
    state_ptr,
    codes_ptr,
    known_ptr,
    counters_ptr,
    capacity,
    SLOTS: tl.constexpr,
    JOINS: tl.constexpr,
    RUN: tl.constexpr,
    FAN: tl.constexpr,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
):
    """Write the other half of the list: what stays, in its order, and the changes; nothing where there are none."""
    puts = changes_of(counts_ptr, 0)
    takes = changes_of(counts_ptr, 1)
    if puts + takes > 0:
        program = tl.program_id(0).to(tl.int64)
        width = capacity.to(tl.int64)
        # a launch that joined runs has moved them from one pair of sets to the other
        turned_put = puts * 0
        turned_take = puts * 0
        for join in tl.static_range(JOINS):
            turned_put += (puts > RUN * FAN**join).to(tl.int64)
            turned_take += (takes > RUN * FAN**join).to(tl.int64)
        put_ptr = entries_ptr + turned_put % 2 * 2 * width
        take_ptr = entries_ptr + turned_take % 2 * 2 * width + width
        listed = tl.load(state_ptr + BEFORE + LISTED)
        offset = tl.load(state_ptr + BEFORE + OFFSET)
        other = width - offset
        if program == 0:
            tl.store(state_ptr + LISTED, listed - takes + puts)
            tl.store(state_ptr + OFFSET, other)
            tl.store(state_ptr + KEYS, tl.load(counters_ptr + ADDED))
        place = program * SLOTS + tl.arange(0, SLOTS)
        held = place < listed
        if program * SLOTS < listed:
            edge = program * SLOTS + tl.arange(0, 2).to(tl.int64) * (SLOTS - 1)
            slot = tl.load(list_ptr + offset + place, mask=held, other=0)
            # entries put in up to a place come before the slot there, entries taken out before it move it back
            bounds = whole_search(put_ptr, (edge << SLOT_BITS) | SLOT_MASK, puts, DIGITS, BASE)
            low, high = tl.min(bounds, axis=0), tl.max(bounds, axis=0)
            more = entries_upto(put_ptr, (place << SLOT_BITS) | SLOT_MASK, place * 0 + low, place * 0 + high)
            bounds = whole_search(take_ptr, (edge << SLOT_BITS) - 1, takes, DIGITS, BASE)
            low, high = tl.min(bounds, axis=0), tl.max(bounds, axis=0)
            less = entries_upto(take_ptr, (place << SLOT_BITS) - 1, place * 0 + low, place * 0 + high)
            gone = tl.load(take_ptr + less, mask=held & (less < takes), other=-1) >> SLOT_BITS
            tl.store(list_ptr + other + place + more - less, slot, mask=held & (gone != place))
        if program * SLOTS < puts:
            live = place < puts
            entry = tl.load(put_ptr + place, mask=live, other=0)
            at = entry >> SLOT_BITS
            slot = entry & SLOT_MASK
            less = entries_upto(take_ptr, (at << SLOT_BITS) - 1, place * 0, place * 0 + takes)
            tl.store(list_ptr + other + place + at - less, slot.to(tl.int32), mask=live)
            tl.store(known_ptr + slot, tl.load(codes_ptr + slot, mask=live, other=0), mask=live)
        if program * SLOTS < takes:
            live = place < takes
            slot = tl.load(take_ptr + place, mask=live, other=0) & SLOT_MASK
            code = tl.load(codes_ptr + slot, mask=live, other=0)
            # one that is put in again has its code by that
            tl.store(known_ptr + slot, code, mask=live & (code == 0))
