# mypy: ignore-errors
# (types are what Numba infers)
"""The order of all slots that can be drawn by rank: updates of single slots, and draws.

A slot comes before those with smaller codes, and before those with the same code and larger keys. Slots stand in
blocks: all slots of a block come before all of the next one, but within a block they are sorted only when one of its
ranks is drawn.

codes, slots: (blocks, width) int64 and int32, the slots of each block and their codes, then unused entries.
block_of:     (slots,) int32, the block of each slot, -1 for slots without a rank.
fences:       (blocks,) int64, for each block in order a code, and in `fence_keys` a key, that none of its slots comes
              before.
listed:       (blocks,) int64, the blocks in order.
sizes:        (blocks,) int64, how many slots each block has.
counts:       (COUNT,) int64, at the places below.
"""

from __future__ import annotations

import numpy as np

from gpu_replay.loops.compiling import inner, loop
from gpu_replay.loops.masses import spread

# how many slots have a rank; how many blocks are in order, the first of all; the next key when the order was brought up
# to date, or -1 where it must be made anew
RANKED, BLOCKS, ADDED, COUNT = range(4)
# rows for which each step is taken together, so that the processor waits for the memory of several at once
_TOGETHER = 64
_ORDER = "int64[:, ::1], int32[:, ::1], int32[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1]"


@inner
def _key_of(slot, added, head, capacity):
    """The key of a slot where the next key is `added` and takes the slot `head`."""
    return added - head + np.int64(slot) - (capacity if slot >= head else 0)


@inner
def _read_ahead(blocks, begin, stop, entries, sizes, step):
    """Read every `step`-th entry of these blocks to bring them into the cache; the returned number means nothing."""
    bits = 0
    for at in range(begin, stop):
        for entry in range(0, sizes[blocks[at]], step):
            bits ^= entries[blocks[at], entry]
    return bits


@loop(f"(int64[::1], {_ORDER})")
def remove(changed, codes, slots, block_of, fences, fence_keys, listed, sizes, counts):
    """Remove those of these (B,) slots that are in the order."""
    blocks = np.empty(_TOGETHER + 1, dtype=np.int64)
    for begin in range(0, changed.size, _TOGETHER):
        stop = min(begin + _TOGETHER, changed.size)
        for at in range(begin, stop):
            blocks[at - begin] = max(block_of[changed[at]], 0)
        blocks[_TOGETHER] = _read_ahead(blocks, 0, stop - begin, slots, sizes, 16)
        for at in range(begin, stop):
            slot = changed[at]
            block, entry = block_of[slot], 0
            if block < 0:
                continue
            while slots[block, entry] != slot:
                entry += 1
            # the last slot of the block takes the place
            sizes[block] -= 1
            last = sizes[block]
            codes[block, entry], slots[block, entry] = codes[block, last], slots[block, last]
            block_of[slot] = -1
            counts[RANKED] -= 1


@inner
def _find_blocks(codes, keys, begin, stop, fences, fence_keys, blocks, places):
    """The places in order of the blocks where slots with these codes and keys belong, for rows `begin` to `stop`."""
    places[begin:stop] = 0
    left = blocks
    while left > 1:
        half = left >> 1
        for at in range(begin, stop):
            middle = places[at] + half
            reached = (fences[middle] > codes[at]) | ((fences[middle] == codes[at]) & (fence_keys[middle] <= keys[at]))
            places[at] = middle if reached else places[at]
        left -= half


@inner
def _sort(codes, slots, size, head, capacity):
    """Sort the first `size` slots of a block by insertion: few are out of place. head: slot of the next key."""
    for entry in range(1, size):
        code = codes[entry]
        if codes[entry - 1] > code:
            continue
        # slots from `head` on have the older keys
        slot, place = slots[entry], entry
        turned = slot - capacity if slot >= head else slot
        while place > 0 and codes[place - 1] <= code:
            other = slots[place - 1]
            if codes[place - 1] == code and (other - capacity if other >= head else other) < turned:
                break
            codes[place], slots[place] = codes[place - 1], other
            place -= 1
        codes[place], slots[place] = code, slot


@inner
def _divide(place, code, key, added, head, codes, slots, block_of, fences, fence_keys, listed, sizes, counts):
    """Give the later half of a full block to a new one, the next in order; nothing if this code and key come after all
    of it, so that slots that come one after the other fill their blocks.
    """
    block, other, width = listed[place], counts[BLOCKS], codes.shape[1]
    _sort(codes[block], slots[block], width, head, block_of.size)
    for later in range(other, place + 1, -1):
        listed[later] = listed[later - 1]
        fences[later], fence_keys[later] = fences[later - 1], fence_keys[later - 1]
    stay, last = width // 2, codes[block, width - 1]
    if last > code or (last == code and _key_of(slots[block, width - 1], added, head, block_of.size) < key):
        stay = width
        fences[place + 1], fence_keys[place + 1] = code, key
    else:
        fences[place + 1] = codes[block, stay]
        fence_keys[place + 1] = _key_of(slots[block, stay], added, head, block_of.size)
    for entry in range(stay, width):
        slot = slots[block, entry]
        codes[other, entry - stay], slots[other, entry - stay], block_of[slot] = codes[block, entry], slot, other
    listed[place + 1], sizes[block], sizes[other], counts[BLOCKS] = other, stay, width - stay, other + 1


@loop(f"(int64[::1], int64, int64, int64[::1], {_ORDER})")
def insert(changed, done, added, leaves, codes, slots, block_of, fences, fence_keys, listed, sizes, counts):
    """Bring these (B,) slots, all but the first `done`, into the order: those that have a code and are not in it.

    added:   the next key. leaves: the codes of all slots.
    returns: how many are done; fewer than B where no block is free any more.
    """
    capacity, width, head = block_of.size, codes.shape[1], added % block_of.size
    new_codes, keys, places = np.empty((3, _TOGETHER), dtype=np.int64)
    for begin in range(done, changed.size, _TOGETHER):
        count = min(_TOGETHER, changed.size - begin)
        for at in range(count):
            slot = changed[begin + at]
            new_codes[at], keys[at] = leaves[slot], _key_of(slot, added, head, capacity)
        _find_blocks(new_codes, keys, 0, count, fences, fence_keys, counts[BLOCKS], places)
        for at in range(count):
            slot = changed[begin + at]
            if new_codes[at] == 0 or block_of[slot] >= 0:
                continue
            while sizes[listed[places[at]]] == width:
                if counts[BLOCKS] == sizes.size:
                    return begin + at
                _divide(
                    places[at], new_codes[at], keys[at], added, head,
                    codes, slots, block_of, fences, fence_keys, listed, sizes, counts,
                )  # fmt: skip
                _find_blocks(new_codes, keys, at, count, fences, fence_keys, counts[BLOCKS], places)
            block = listed[places[at]]
            codes[block, sizes[block]], slots[block, sizes[block]], block_of[slot] = new_codes[at], slot, block
            sizes[block] += 1
            counts[RANKED] += 1
    return changed.size


@loop("(int64[::1], int64, float64[::1], boolean, int64[::1], int64[::1])")
def draw(sums, count, doubles, stratified, ranks, masses):
    """Draw (B,) of the first `count` ranks, counted from 0, by (B,) float64 in [0, 1).

    sums: the masses of all ranks up to each. masses: (B,) int64, those of the drawn ranks.
    """
    spread(sums[count - 1], doubles, stratified, masses)
    ranks[:] = 0
    left = count
    while left > 1:
        half = left >> 1
        for row in range(ranks.size):
            middle = ranks[row] + half
            ranks[row] = middle if sums[middle - 1] <= masses[row] else ranks[row]
        left -= half
    for row in range(ranks.size):
        rank = ranks[row]
        masses[row] = sums[rank] - (sums[rank - 1] if rank > 0 else 0)


@loop(f"(int64[::1], int64, int64[::1], {_ORDER})")
def locate(ranks, added, located, codes, slots, block_of, fences, fence_keys, listed, sizes, counts):
    """Find the (B,) slots that have these ranks, counted from 0, and sort their blocks. added: the next key."""
    blocks, ends = np.empty(_TOGETHER + 1, dtype=np.int64), np.empty(counts[BLOCKS], dtype=np.int64)
    head, last, end = added % block_of.size, -1, 0
    for place in range(ends.size):
        end += sizes[listed[place]]
        ends[place] = end
    for begin in range(0, ranks.size, _TOGETHER):
        count = min(_TOGETHER, ranks.size - begin)
        for at in range(count):
            rank, place, left = ranks[begin + at], 0, ends.size
            while left > 1:
                half = left >> 1
                place = place + half if ends[place + half - 1] <= rank else place
                left -= half
            blocks[at] = listed[place]
            located[begin + at] = rank - ends[place] + sizes[blocks[at]]
        blocks[_TOGETHER] = _read_ahead(blocks, 0, count, codes, sizes, 8)
        blocks[_TOGETHER] = _read_ahead(blocks, 0, count, slots, sizes, 16)
        for at in range(count):
            block = blocks[at]
            # equal ones are mostly adjacent
            if block != last:
                _sort(codes[block], slots[block], sizes[block], head, block_of.size)
                last = block
            located[begin + at] = slots[block, located[begin + at]]
