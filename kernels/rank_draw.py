"""Draws by rank: the list of slots in order of their priorities, and the draws from it."""

import triton
import triton.language as tl

from .counters import ADDED, LOWEST, NO_MASS, RANKED, SORTED, STEP
from .division import remainder
from .eligible_draw import newest_eligible, store_words_after
from .stratified_draw import key_in_slot, store_draws, target_in, word_of


@triton.jit(do_not_specialize=["capacity", "skipped", "every"])
def arrange_kernel(
    codes_ptr,
    arranged_ptr,
    due_ptr,
    counters_ptr,
    capacity,
    skipped,
    every,
    SLOTS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """arranged[age] = code of the slot with the key of that age, the oldest first; 0 for the newest `skipped` slots.

    KEPT: the list serves `every` samples, and due[0] says whether it is out of date.
    """
    program = tl.program_id(0).to(tl.int64)
    if KEPT:
        if program == 0:
            old = tl.load(counters_ptr + STEP) - tl.load(counters_ptr + SORTED) >= every
            tl.store(due_ptr, (old | (tl.load(counters_ptr + RANKED) == 0)).to(tl.int64))
    age = program * SLOTS + tl.arange(0, SLOTS)
    slot = tl.load(counters_ptr + ADDED) % capacity + age
    slot = tl.where(slot >= capacity, slot - capacity, slot)
    # code 0: comes after all that can be drawn
    code = tl.load(codes_ptr + slot, mask=age < capacity - skipped, other=0)
    tl.store(arranged_ptr + age, code, mask=age < capacity)


@triton.jit(do_not_specialize=["capacity"])
def list_kernel(
    codes_ptr,
    ages_ptr,
    list_ptr,
    listed_ptr,
    known,
    due_ptr,
    counters_ptr,
    capacity,
    SLOTS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """list[rank] = slot of the age at that rank, and listed[0] = how many can be drawn, given the sorted codes.

    known: pointers, if any, to the codes of slots in a list that is merged with later ones, see `rank_merge.py`.
    KEPT:  the list serves further samples: nothing happens unless due[0], else it is noted when it was made.
    """
    program = tl.program_id(0).to(tl.int64)
    rank = program * SLOTS + tl.arange(0, SLOTS)
    end = capacity.to(tl.int64)
    if KEPT:
        end *= tl.load(due_ptr)
    live = rank < end
    first = (program == 0) & (end > 0)
    slot = tl.load(counters_ptr + ADDED) % capacity + tl.load(ages_ptr + rank, mask=live, other=0)
    slot = tl.where(slot >= capacity, slot - capacity, slot)
    tl.store(list_ptr + rank, slot.to(tl.int32), mask=live)
    # codes that can be drawn come first: the program that has the last of them counts, or the first where there is none
    code = tl.load(codes_ptr + rank, mask=live, other=0)
    after = tl.load(codes_ptr + rank + 1, mask=rank + 1 < end, other=0)
    listed = tl.max(tl.where((code > 0) & (after == 0), rank + 1, 0), axis=0)
    none = first & (tl.max(code, axis=0) == 0)
    tl.store(listed_ptr, listed, mask=none | (listed > 0))
    if len(known) > 0:
        tl.store(known[0] + slot, code, mask=live)
        # the list begins with the memory, and its keys are those of now
        tl.store(listed_ptr + 1, 0, mask=first)
        tl.store(listed_ptr + 2, tl.load(counters_ptr + ADDED), mask=first)
    if KEPT:
        tl.store(counters_ptr + SORTED, tl.load(counters_ptr + STEP), mask=first)


@triton.jit
def rank_at(sums_ptr, target, count, DIGITS: tl.constexpr, BASE: tl.constexpr):
    """The first ranks whose sum of masses exceeds (DRAWS,) targets, one digit of the rank after the other."""
    digit = tl.arange(0, BASE).to(tl.int64)
    rank = target * 0
    for place in tl.static_range(DIGITS):
        # the last rank of every part into which this digit divides what is left
        last = rank[:, None] + (digit[None, :] + 1) * (BASE ** (DIGITS - 1 - place)) - 1
        # there are no ranks past the end, so no target passes them
        total = tl.load(sums_ptr + last, mask=last < count, other=NO_MASS)  # [DRAWS, BASE]
        passed = tl.sum((total <= target[:, None]).to(tl.int64), axis=1)
        rank += passed * (BASE ** (DIGITS - 1 - place))
    # where nothing is ranked the draw stays inside
    return tl.minimum(rank, count - 1)


@triton.jit
def pass_on(list_ptr, codes_ptr, rank, count, head, capacity, by_rank, WIDTH: tl.constexpr):
    """The slots of the first ranks from (DRAWS,) given ones on that can be drawn; rank 1 comes after the last.

    A list of which nothing can be drawn any more leaves the oldest slot that can.
    """
    ahead = tl.arange(0, WIDTH).to(tl.int64)
    slot = rank * 0
    done = rank * 0
    waiting = by_rank
    while tl.max(waiting.to(tl.int32), axis=0) > 0:
        step = done[:, None] + ahead[None, :]
        place = rank[:, None] + step
        place = tl.where(place >= count, place - count, place)
        looked_at = waiting[:, None] & (step < count)
        listed = tl.load(list_ptr + place, mask=looked_at, other=0).to(tl.int64)
        # places beyond the end of the list cannot be drawn
        code = tl.load(codes_ptr + listed, mask=looked_at, other=0)
        first = tl.min(tl.where(code > 0, ahead[None, :], WIDTH), axis=1)
        slot = tl.where(waiting, tl.sum(tl.where(ahead[None, :] == first[:, None], listed, 0), axis=1), slot)
        done = tl.where(waiting & (first == WIDTH), done + WIDTH, done)
        waiting = waiting & (first == WIDTH) & (done < count)
    age = head * 0
    waiting = by_rank & (done >= count)
    while tl.max(waiting.to(tl.int32), axis=0) > 0:
        other = head + age + ahead
        other = tl.where(other >= capacity, other - capacity, other)
        # ages past the newest cannot be drawn
        code = tl.load(codes_ptr + other, mask=age + ahead < capacity, other=0)
        first = tl.min(tl.where(code > 0, ahead, WIDTH), axis=0)
        slot = tl.where(waiting, tl.sum(tl.where(ahead == first, other, 0), axis=0), slot)
        age += WIDTH
        waiting = waiting & (first == WIDTH) & (age < capacity)
    return slot


@triton.jit(do_not_specialize=["drawn", "batch", "capacity", "skipped", "per_drawn", "per_capacity"])
def rank_draw_kernel(
    ranks,
    codes_ptr,
    eligible,
    counters_ptr,
    outputs,
    words,
    drawn,
    batch,
    capacity,
    skipped,
    per_drawn,
    per_capacity,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
    FANOUT: tl.constexpr,
    DRAWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRATIFIED: tl.constexpr,
    SKIPS: tl.constexpr,
    MERGED: tl.constexpr,
    OUTDATED: tl.constexpr,
    LOWEST_OF_ALL: tl.constexpr,
):
    """Draw `drawn` slots by rank and take the newest for the rest of the batch, of eligible slots if there is a tree.

    ranks: pointers to the sums of the masses of the ranks up to each, to the list of slots, and to its length.
    MERGED: the list begins so many places later as the number after its length says.
    OUTDATED: the list may hold slots that can no longer be drawn. SKIPS: none of the newest is in the newest `skipped`
    slots, as none of the list is. Leaves the smallest mass of the batch, or with LOWEST_OF_ALL of the list, in
    counters[LOWEST]. The mass of a newest row is written as 0: it was not drawn. Where nothing is ranked, as in a graph
    replayed after a `clear`, the draws stay inside but mean nothing. words: see `store_words_after`.
    per_...: reciprocals, see `division.py`.
    """
    sums_ptr, list_ptr, listed_ptr = ranks
    if MERGED:
        list_ptr += tl.load(listed_ptr + 1)
    program = tl.program_id(0).to(tl.int64)
    draw = program * DRAWS + tl.arange(0, DRAWS)
    by_rank = draw < drawn
    added = tl.load(counters_ptr + ADDED)
    head = remainder(added, capacity, per_capacity)
    word = word_of(draw, counters_ptr)
    count = tl.maximum(tl.load(listed_ptr), 1)
    total = tl.load(sums_ptr + count - 1)
    store_words_after(words, drawn, counters_ptr)
    rank = rank_at(sums_ptr, target_in(total, draw, drawn, per_drawn, word, STRATIFIED), count, DIGITS, BASE)
    # nothing comes before rank 1
    mass = tl.load(sums_ptr + rank) - tl.load(sums_ptr + (rank - 1), mask=rank > 0, other=0)
    chance = mass.to(tl.float64) / total.to(tl.float64)
    if OUTDATED:
        slot = pass_on(list_ptr, codes_ptr, rank, count, head, capacity, by_rank, WIDTH)
    else:
        slot = tl.load(list_ptr + rank).to(tl.int64)
    # only the last programs have newest rows
    if (program + 1) * DRAWS > drawn:
        if len(eligible) > 0:
            newest = newest_eligible(eligible, draw, batch, head, skipped, capacity, FANOUT, SKIPS)
        else:
            newest = remainder(tl.maximum(added - batch + draw, 0), capacity, per_capacity)
        slot = tl.where(by_rank, slot, newest)
    key = key_in_slot(slot, added, head, capacity)
    store_draws(outputs, draw, drawn, batch, slot, key, chance, tl.where(by_rank, mass, 0))
    if LOWEST_OF_ALL:
        # that of the last rank
        before = tl.load(sums_ptr + count - 2, mask=count > 1, other=0)
        lowest = total - before
    else:
        lowest = tl.min(tl.where(by_rank, mass, NO_MASS), axis=0)
    tl.atomic_min(counters_ptr + LOWEST, lowest, sem="relaxed")
