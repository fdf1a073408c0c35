"""Who has which rank, on the host: all that can be drawn in the order of priorities, kept exact while a few change.

Sorting a million priorities for every batch takes a hundred times as long as drawing it, and one sorted array is as
expensive to change. So what can be drawn lies in blocks: every entry of a block comes before every entry of the next,
but inside a block there is no order, and there are gaps. A change is a gap more here and one less there; a block that
overflows is divided. To find the entry at a rank, the block is found by the running sum of sizes, and that block alone
is sorted. That is a B+ tree of one level, all of whose work is done for a whole batch at once.

An entry comes before another with a smaller code, and before one with the same code and a larger key.
"""

from __future__ import annotations

import numpy as np

# in eighths of what fits a block: entries of a new one, of two put together at most, and of one on average at least
_NEW = 5
_JOINED = 7
_HELD = 4
# rows of blocks beyond those
_SPARE = 2
# when fewer than one row in so many can be gained, sorting anew is cheaper
_GAINED = 16
# when a larger share of all slots has changed, sorting anew is cheaper
_CHANGED = 8
_NO_PLACE = -1
_NO_KEY = 2**63 - 1


def width_for(slots: int) -> int:
    """Entries of a block at most: a batch costs as much as all blocks are, and as a block for each of its draws."""
    return 64 if slots <= 2**22 else 256


def order_bytes(slots: int) -> int:
    """Bytes that a `RankOrder` over so many slots takes."""
    width = width_for(slots)
    rows = _rows_for(slots, width)
    return rows * (width * (8 + 4) + 8 + 8 + 8 + 8 + 8 + 16) + slots * 8


def sorted_ages(codes: np.ndarray) -> np.ndarray:
    """The places of all (N,) int64 codes above 0, the largest code first and equal ones in their own order; (n,) int64.

    One sort of whole numbers: place in the low bits, as much of the code as fits above it. Codes that differ only below
    are sorted once more.
    """
    bits = max(1, codes.size - 1).bit_length()
    places = np.flatnonzero(codes)
    packed = _NO_KEY - codes.take(places)
    packed >>= bits
    packed <<= bits
    packed |= places
    packed.sort()
    found = packed & (2**bits - 1)
    exact = codes.take(found)
    if found.size and np.logical_or.reduce(exact[1:] > exact[:-1]):
        packed >>= bits
        alike = packed[1:] == packed[:-1]
        some = np.flatnonzero(np.append(alike, False) | np.append(False, alike))
        found[some] = found[some[np.lexsort((found[some], -exact[some], packed[some]))]]
    return found


def _rows_for(slots: int, width: int) -> int:
    return -(-slots // (width * _HELD // 8)) + _SPARE


def _steps(starts: np.ndarray, end: int) -> np.ndarray:
    """How far it is from each of these places to the next, and from the last to `end`."""
    steps = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=steps[:-1])
    steps[-1] = end - starts[-1]
    return steps


class RankOrder:
    """The order of the slots of a ring by the codes in `leaves`, 0 for what cannot be drawn.

    `note` and `note_slots` record what has changed, at next to no cost; `sort_changes` then moves it to its place.
    """

    def __init__(self, leaves: np.ndarray, slots: int) -> None:
        width = width_for(slots)
        rows = _rows_for(slots, width)
        self._leaves = leaves
        self._slots = slots
        self._width = width
        self._new = width * _NEW // 8
        self._full = width * _JOINED // 8
        # the code of each entry; 0 is a gap
        self._codes = np.zeros((rows, width), dtype=np.int64)
        self._flat = self._codes.reshape(-1)
        self._slot_at = np.zeros(rows * width, dtype=np.int32)
        # where the entry of each slot stands
        self._place = np.full(slots, _NO_PLACE, dtype=np.int64)
        self._sizes = np.zeros(rows, dtype=np.int64)
        # the row of each block in order, and an entry that none of the block comes before
        self._blocks = 0
        self._rows = np.zeros(rows, dtype=np.int64)
        self._first = np.zeros(rows, dtype=np.complex128)
        # the real parts of these, and how many entries come before the end of each block
        self._bounds = np.zeros(rows)
        self._ends = np.zeros(rows, dtype=np.int64)
        self._free = np.zeros(0, dtype=np.int64)
        self._added = 0
        self._standing = False
        self._changed: list[np.ndarray] = []
        self._changes = 0
        self.count = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return order_bytes(self._slots)

    # what has changed

    def note(self, start: int, stop: int) -> None:
        """The slots from `start` to `stop` have other keys or codes."""
        if self._standing:
            self.note_slots(np.arange(start, stop))

    def note_slots(self, slots: np.ndarray) -> None:
        """These (B,) slots have other keys or codes."""
        if not self._standing:
            return
        self._changes += slots.size
        if self._changes > self._slots // _CHANGED + self._width:
            self.invalidate()
        else:
            self._changed.append(slots)

    def invalidate(self) -> None:
        """All may be different."""
        self._standing = False
        self._changed.clear()
        self._changes = 0

    def sort_changes(self, added: int) -> None:
        """Bring the order up to date; `added` is the next key of the ring."""
        self._added = added
        if not self._standing:
            self._sort()
        elif self._changes:
            slots = self._remove(np.concatenate(self._changed))
            self._changed.clear()
            self._changes = 0
            codes = self._leaves.take(slots)
            if np.count_nonzero(codes) < slots.size:
                held = codes.nonzero()[0]
                slots, codes = slots[held], codes[held]
            if slots.size and not self._insert(slots, codes):
                self._sort()
                return
            self._count()

    def hide(self, slots: np.ndarray) -> None:
        """Leave out these slots until the next `sort_changes`."""
        self._remove(slots)
        self._count()
        self.note_slots(slots)

    # what stands where

    def at(self, ranks: np.ndarray) -> np.ndarray:
        """The slots at (B,) ranks from 0 to `count` - 1."""
        width, ends = self._width, self._ends[: self._blocks]
        block = ends.searchsorted(ranks, "right")
        rows = self._rows.take(block)
        codes = self._codes.take(rows, axis=0)
        # the largest of a block stands in the last column then
        ordered = codes.copy()
        ordered.sort(axis=1)
        column = ends.take(block)
        column -= ranks
        column -= self._sizes.take(rows)
        column += np.arange(width - 1, ordered.size, width)
        code = ordered.take(column)
        same = codes == code[:, None]
        rows *= width
        slots = self._slot_at.take(same.argmax(axis=1) + rows).astype(np.int64)
        if np.count_nonzero(same) > ranks.size:
            some = (np.add.reduce(same, axis=1) > 1).nonzero()[0]
            # entries with larger codes come first
            place = width - 1 - column[some] % width
            place -= np.add.reduce(codes[some] > code[some, None], axis=1)
            slots[some] = self._among_equals(same[some], place, rows[some])
        return slots

    def _among_equals(self, same: np.ndarray, place: np.ndarray, begin: np.ndarray) -> np.ndarray:
        """The slots at these places among those entries of rows that have the same code: the smaller keys first."""
        slots = self._slot_at.take(begin[:, None] + np.arange(self._width))
        keys = np.where(same, self._keys(slots), _NO_KEY)
        keys.sort(axis=1)
        return keys[np.arange(place.size), place] % self._slots

    def _keys(self, slots: np.ndarray) -> np.ndarray:
        """Their keys, as int64."""
        lap, head = divmod(self._added, self._slots)
        keys = slots + np.int64(lap * self._slots)
        keys -= (slots >= head) * np.int64(self._slots)
        return keys

    def _entries(self, slots: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Complex numbers that NumPy compares as the order does: by real parts, then by imaginary ones."""
        entries = np.empty(slots.size, dtype=np.complex128)
        np.negative((codes - 1).view(np.float64), out=entries.real)
        entries.imag = self._keys(slots)
        return entries

    def _count(self) -> None:
        ends = self._ends[: self._blocks]
        # rows exist, so clipping changes none; it is the mode that writes straight into `ends`
        self._sizes.take(self._rows[: self._blocks], 0, ends, "clip")
        np.add.accumulate(ends, 0, None, ends)
        self.count = ends.item(self._blocks - 1)

    # changes

    def _sort(self) -> None:
        """Make all blocks anew."""
        width, new, head = self._width, self._new, self._added % self._slots
        leaves = self._leaves[: self._slots]
        slots = sorted_ages(np.concatenate((leaves[head:], leaves[:head])))
        slots += head
        slots -= (slots >= self._slots) * self._slots
        codes = leaves.take(slots)
        blocks = max(1, -(-slots.size // new))
        places = np.arange(slots.size)
        places += places // new * (width - new)
        self._codes.fill(0)
        self._flat[places] = codes
        self._slot_at[places] = slots
        self._place.fill(_NO_PLACE)
        self._place[slots] = places
        self._sizes.fill(0)
        self._sizes[:blocks] = new
        self._sizes[blocks - 1] = slots.size - (blocks - 1) * new
        self._blocks = blocks
        self._rows[:blocks] = np.arange(blocks)
        # the first block takes whatever comes
        self._first[0] = complex(-np.inf, -np.inf)
        self._first[1:blocks] = self._entries(slots[new::new], codes[new::new])
        self._bounds[:blocks] = self._first.real[:blocks]
        self._free = np.arange(blocks, self._sizes.size)
        self._standing = True
        self._changed.clear()
        self._changes = 0
        self._count()

    def _remove(self, slots: np.ndarray) -> np.ndarray:
        """Take out the entries of these slots, where they have any; returns the slots, each of them once."""
        places = self._place.take(slots)
        # of a slot that comes twice the last number stays
        number = np.arange(slots.size)
        self._place[slots] = number
        distinct = self._place.take(slots) == number
        if not np.logical_and.reduce(distinct):
            slots, places = slots[distinct], places[distinct]
        self._place[slots] = _NO_PLACE
        places = places[places >= 0]
        self._flat[places] = 0
        np.subtract.at(self._sizes, places // self._width, np.ones(places.size, dtype=np.int64))
        return slots

    def _insert(self, slots: np.ndarray, codes: np.ndarray) -> bool:
        """Put in the entries of these distinct slots, which have none; false where that needs all to be sorted."""
        block = self._blocks_for(slots, codes)
        order = block.argsort(kind="stable")
        block, slots, codes = block[order], slots[order], codes[order]
        # the entries that come into the same block stand together
        begins = np.empty(block.size, dtype=bool)
        begins[0] = True
        np.not_equal(block[1:], block[:-1], out=begins[1:])
        starts = begins.nonzero()[0]
        blocks = block[starts]
        more = _steps(starts, block.size)
        rows = self._rows.take(blocks)
        full = more + self._sizes.take(rows) > self._width
        if not np.logical_or.reduce(full):
            self._fill(rows, more, slots, codes)
            return True
        crowded = full[np.repeat(np.arange(blocks.size), more)]
        # first those that fit: what is empty may be dropped when blocks are divided
        self._fill(rows[~full], more[~full], slots[~crowded], codes[~crowded])
        return self._divide(blocks[full], block[crowded], slots[crowded], codes[crowded])

    def _blocks_for(self, slots: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """The places in the order of blocks where the entries of these slots belong."""
        numbers = np.negative((codes - 1).view(np.float64))
        block = self._bounds[: self._blocks].searchsorted(numbers, "right")
        block -= 1
        # where a block begins with the same code, keys decide
        alike = self._bounds.take(block) == numbers
        if np.logical_or.reduce(alike):
            some = alike.nonzero()[0]
            entries = self._entries(slots[some], codes[some])
            block[some] = self._first[: self._blocks].searchsorted(entries, "right") - 1
        return block

    def _add_blocks(self, before: np.ndarray, rows: np.ndarray, first: np.ndarray) -> None:
        """Put in (K,) blocks before those at these places, ascending: their rows, and their first entries."""
        for array, values in ((self._rows, rows), (self._first, first), (self._bounds, first.real)):
            end = self._blocks
            for more in range(before.size, 0, -1):
                at = before.item(more - 1)
                array[at + more : end + more] = array[at:end]
                array[at + more - 1] = values[more - 1]
                end = at
        self._blocks += before.size

    def _fill(self, rows: np.ndarray, more: np.ndarray, slots: np.ndarray, codes: np.ndarray) -> None:
        """Put `more` entries, grouped by row, into each of these (K,) rows, which have the gaps for them."""
        if rows.size == 0:
            return
        width = self._width
        # the gaps of all rows end to end, of which each row gives its first ones
        gaps = (self._codes.take(rows, axis=0) == 0).reshape(-1).nonzero()[0]
        gap_counts = width - self._sizes.take(rows)
        before = np.add.accumulate(gap_counts) - gap_counts
        before -= np.add.accumulate(more) - more
        group = np.repeat(np.arange(rows.size), more)
        places = gaps[before[group] + np.arange(slots.size)]
        places += (rows * width - np.arange(0, rows.size * width, width))[group]
        self._put(slots, codes, places)
        self._sizes[rows] += more

    def _put(self, slots: np.ndarray, codes: np.ndarray, places: np.ndarray) -> None:
        self._flat[places] = codes
        self._slot_at[places] = slots
        self._place[slots] = places

    def _divide(self, blocks: np.ndarray, block: np.ndarray, slots: np.ndarray, codes: np.ndarray) -> bool:
        """Divide these blocks, together with the new entries that come into them, into blocks that are not full.

        blocks: (K,) places in the order of blocks, ascending; `block` the same of each of the new entries.

        False, with nothing changed, where there are not enough rows.
        """
        width, new = self._width, self._new
        rows = self._rows.take(blocks)
        held = np.flatnonzero(self._codes.take(rows, axis=0))
        places = rows[held // width] * width + held % width
        block = np.concatenate((blocks[held // width], block))
        slots = np.concatenate((self._slot_at.take(places).astype(np.int64), slots))
        codes = np.concatenate((self._flat.take(places), codes))
        order = np.lexsort((self._keys(slots), -codes, block))
        block, slots, codes = block[order], slots[order], codes[order]
        starts = block.searchsorted(blocks)
        sizes = _steps(starts, block.size)
        pieces = -(-sizes // new)
        further = int(np.add.reduce(pieces)) - blocks.size
        if further > self._free.size:
            blocks = self._spare_rows(blocks)
            # a few rows more would soon be gone again
            if further + self._sizes.size // _GAINED > self._free.size:
                return False
        taken, self._free = self._free[:further], self._free[further:]
        # the first piece of a block stays in its row
        group = np.repeat(np.arange(blocks.size), pieces)
        piece = np.arange(group.size) - (np.add.accumulate(pieces) - pieces)[group]
        begins = starts[group] + piece * sizes[group] // pieces[group]
        lengths = _steps(begins, slots.size)
        later = piece > 0
        row = rows[group]
        row[later] = taken
        self._codes[rows] = 0
        self._put(slots, codes, np.repeat(row * width - begins, lengths) + np.arange(slots.size))
        self._sizes[row] = lengths
        heads = begins[later]
        self._add_blocks(blocks[group[later]] + 1, taken, self._entries(slots[heads], codes[heads]))
        return True

    def _spare_rows(self, blocks: np.ndarray) -> np.ndarray:
        """Gain rows: put pairs of small blocks together, and drop empty ones; returns the new places of `blocks`.

        These stay as they are.
        """
        width, listed = self._width, self._rows[: self._blocks]
        sizes = self._sizes.take(listed)
        sizes[blocks] = width
        pairs = np.arange(0, sizes.size - 1, 2)
        pairs = pairs[sizes[pairs] + sizes[pairs + 1] <= self._full]
        emptied = listed[pairs + 1]
        held = np.flatnonzero(self._codes.take(emptied, axis=0))
        places = emptied[held // width] * width + held % width
        slots, codes = self._slot_at.take(places).astype(np.int64), self._flat.take(places)
        more = self._sizes.take(emptied)
        self._codes[emptied] = 0
        self._sizes[emptied] = 0
        self._fill(listed[pairs], more, slots, codes)
        stays = self._sizes.take(listed) > 0
        stays[blocks] = True
        # nothing comes before the first block
        stays[0] = True
        self._free = np.concatenate((self._free, listed[~stays]))
        self._blocks = int(np.count_nonzero(stays))
        for array in (self._rows, self._first, self._bounds):
            array[: self._blocks] = array[: stays.size][stays]
        return np.add.accumulate(stays, dtype=np.int64)[blocks] - 1
