# mypy: ignore-errors
# (types are what Numba infers)
"""The order of `rank_order.py` in compiled loops: the same slots at the same ranks, one change after the other.

NumPy moves whole batches and leaves blocks unsorted. A loop can afford more: entries stand sorted in blocks, blocks in
groups, and groups in a list, which is a B+ tree of three levels. A change touches the few cache lines of two blocks,
which are asked for while others are worked on, and the entry at a rank is found by sizes alone.
"""

from __future__ import annotations

import numpy as np

from gpu_replay.ops import numba_rank_loops as loops
from gpu_replay.ops import rank_order

# in eighths of what fits: what a new block or group holds
_NEW = 5


def fan_for(slots: int) -> int:
    """Blocks of a group at most."""
    return 64 if slots <= 2**22 else 256


def _counts(slots: int) -> tuple[int, int, int, int]:
    """Blocks of a group, blocks, groups, and changes that are noted; all at most."""
    fan = fan_for(slots)
    rows = -(-slots // (loops.WIDTH // 2)) + 2
    return fan, rows, -(-rows // (fan // 2)) + 2, slots // rank_order._CHANGED + 64


def order_bytes(slots: int) -> int:
    """Bytes that a `RankOrder` over so many slots takes."""
    fan, rows, groups, changes = _counts(slots)
    by_row, by_group = rows * (loops.WIDTH * 12 + 4), groups * (fan * 24 + 28)
    whole = (slots + changes + _parts(slots)) * 4 + loops.STATE * 8
    return by_row + by_group + max(rows, groups) * 8 + whole


def _parts(slots: int) -> int:
    """Equal parts of the mass of all ranks for which `RankOrder` knows where they begin; a power of 2."""
    return 1 << (-(-slots // loops.ROW)).bit_length()


def _aligned(count: int, kind: type[np.generic]) -> np.ndarray:
    """Zeros that begin with a cache line."""
    size = np.dtype(kind).itemsize
    found = np.zeros(count + loops.LINE // size, dtype=kind)
    begin = -found.ctypes.data % loops.LINE // size
    return found[begin : begin + count]


class RankOrder:
    """The order of the slots of a ring by the codes in `leaves`, as `rank_order.RankOrder` says.

    arrays: what compiled loops find ranks in. noted: what they need to note changes.
    """

    def __init__(self, leaves: np.ndarray, slots: int) -> None:
        fan, rows, groups, changes = _counts(slots)
        self._leaves, self._slots, self._added = leaves, slots, 0
        state = self._state = np.zeros(loops.STATE, dtype=np.int64)
        # of each row its entries, sorted; past their end codes are 0
        codes, slot_at = _aligned(rows * loops.WIDTH, np.int64), _aligned(rows * loops.WIDTH, np.int32)
        row_of = np.full(slots, -1, dtype=np.int32)
        state[loops.SLOTS :] = slots, fan, *(array.ctypes.data for array in (codes, slot_at, row_of, leaves))
        # of each block the code and the key of an entry that none of it comes before; its row and size
        bounds = np.zeros(groups * fan * 2, dtype=np.int64)
        # a look at blocks may go past the last one
        blocks = np.zeros((groups * fan + loops.TOGETHER) * 2, dtype=np.int32)[: bounds.size]
        # of the groups in their order the first bounds, and their numbers; by number their blocks and entries
        tops, groups_of = np.zeros(groups * 2, dtype=np.int64), np.zeros(groups * 2, dtype=np.int32)
        listed = np.zeros(groups, dtype=np.int32)
        # where the block of a row stands; rows that are free, then groups
        place_of, free = np.zeros(rows, dtype=np.int32), np.zeros((2, max(rows, groups)), dtype=np.int32)
        self._changed = np.zeros(changes, dtype=np.int32)
        self.arrays = state, codes, slot_at, row_of, bounds, blocks, tops, listed, groups_of, place_of, free
        self.noted = state, self._changed
        self._guide = np.zeros(_parts(slots), dtype=np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return order_bytes(self._slots)

    @property
    def count(self) -> int:
        """Slots that have a rank."""
        return self._state.item(loops.RANKED)

    def note(self, start: int, stop: int) -> None:
        """The slots from `start` to `stop` have other keys or codes."""
        if self._state.item(loops.STANDING):
            self.note_slots(np.arange(start, stop))

    def note_slots(self, slots: np.ndarray) -> None:
        """These (B,) slots have other keys or codes."""
        if not self._state.item(loops.STANDING):
            return
        noted = self._state.item(loops.NOTED)
        if noted + slots.size > self._changed.size:
            self.invalidate()
        else:
            self._changed[noted : noted + slots.size] = slots
            self._state[loops.NOTED] = noted + slots.size

    def invalidate(self) -> None:
        """All may be different."""
        self._state[loops.STANDING : loops.NOTED + 1] = 0

    def sort_changes(self, added: int) -> None:
        """Bring the order up to date; `added` is the next key of the ring."""
        self._added, state = added, self._state
        if not state.item(loops.STANDING):
            self._sort()
            return
        noted = state.item(loops.NOTED)
        if not noted:
            return
        # until the changes are there
        state[loops.STANDING], begin = 0, 0
        loops.remove(self._changed, noted, *self.arrays)
        while (begin := loops.move(added, begin, self._leaves, self._changed, *self.arrays)) < noted:
            full = state.item(loops.FULL)
            if full < 0:
                # fill blocks up again
                self._build(self._slots_in_order())
            else:
                self._divide_group(full)
            state[loops.STANDING], state[loops.NOTED] = 0, noted

    def hide(self, slots: np.ndarray) -> None:
        """Leave out these slots until the next `sort_changes`."""
        self.note_slots(slots)
        given = slots.astype(np.int32)
        loops.remove(given, given.size, *self.arrays)

    def draw_by(self, sums: np.ndarray, ends: np.ndarray) -> None:
        """Let `draw` use the masses of all ranks up to each, and the sums at the ends of rows of 64."""
        # a part begins in a row that its first bits say: Chen and Asau 1974, "On generating random variates from an
        # empirical distribution"
        bits = max(0, sums.item(self._slots - 1).bit_length() - self._guide.size.bit_length() + 1)
        begin = np.arange(self._guide.size) << bits
        self._guide[:] = np.minimum(ends.searchsorted(begin, "right"), ends.size - 1)
        self._masses = sums, ends, self._guide, bits

    def draw(self, doubles: np.ndarray, stratified: bool) -> tuple[np.ndarray, np.ndarray, int]:
        """Draw by the masses of ranks, for which (B,) float64 in [0, 1) are given: slots, masses, and mass of all."""
        slots, masses = np.empty((2, doubles.size), dtype=np.int64)
        return slots, masses, loops.draw(*self._masses, doubles, stratified, slots, masses, *self.arrays)

    def _sort(self) -> None:
        """Sort all that has a code."""
        head, leaves = self._added % self._slots, self._leaves
        slots = rank_order.sorted_ages(np.concatenate((leaves[head:], leaves[:head])))
        slots += head
        slots -= (slots >= self._slots) * self._slots
        self._build(slots)

    def _slots_in_order(self) -> np.ndarray:
        """The slots that have a place, in order; (n,)."""
        state, _, slot_at, _, _, blocks, _, listed, groups_of, *_ = self.arrays
        order, fan = listed[: state.item(loops.GROUPS)], state.item(loops.FAN)
        standing = np.arange(fan) < groups_of[2 * order][:, None]
        rows, sizes = (blocks.reshape(-1, fan, 2)[order][standing]).T
        return slot_at.reshape(-1, loops.WIDTH)[rows][np.arange(loops.WIDTH) < sizes[:, None]].astype(np.int64)

    def _build(self, slots: np.ndarray) -> None:
        """Make all blocks anew of (n,) slots in order."""
        state, codes, slot_at, row_of, bounds, blocks, tops, listed, groups_of, place_of, free = self.arrays
        width, fan, head = loops.WIDTH, state.item(loops.FAN), self._added % self._slots
        new, most = width * _NEW // 8, fan * _NEW // 8
        needed = max(1, -(-slots.size // new))
        groups = -(-needed // most)
        state[loops.STANDING : loops.NOTED + 1] = 0
        ranks, held = np.arange(slots.size), self._leaves.take(slots)
        entries = ranks + ranks // new * (width - new)
        codes.fill(0)
        row_of.fill(-1)
        codes[entries] = held
        slot_at[entries] = slots
        row_of[slots] = ranks // new
        rows = np.arange(needed)
        place_of[:needed] = places = rows + rows // most * (fan - most)
        sizes = np.full(needed, new)
        sizes[-1] = slots.size - (needed - 1) * new
        by_place, by_bound = blocks.reshape(-1, 2), bounds.reshape(-1, 2)
        by_place[places] = np.stack((rows, sizes), axis=1)
        keys = slots[::new] + (self._added - head - self._slots * (slots[::new] >= head))
        # nothing comes before the first block
        by_bound[0] = 2**63 - 1, -1
        by_bound[places[1:], 0], by_bound[places[1:], 1] = held[new::new], keys[1:]
        listed[:groups] = np.arange(groups)
        tops.reshape(-1, 2)[:groups] = by_bound[: groups * fan : fan]
        counts = groups_of.reshape(-1, 2)[:groups]
        counts[:, 0] = most
        counts[-1, 0] = needed - (groups - 1) * most
        counts[:, 1] = np.add.reduceat(sizes, np.arange(0, needed, most))
        rows_left, groups_left = place_of.size - needed, tops.size // 2 - groups
        free[0, :rows_left] = np.arange(needed, place_of.size)
        free[1, :groups_left] = np.arange(groups, tops.size // 2)
        state[loops.RANKED : loops.FREE_GROUPS + 1] = slots.size, groups, rows_left, groups_left
        state[loops.STANDING] = 1

    def _divide_group(self, group: int) -> None:
        """Give the later half of the blocks of a full group to a new one."""
        state, _, _, _, bounds, blocks, tops, listed, groups_of, place_of, free = self.arrays
        count, fan, left = (state.item(place) for place in (loops.GROUPS, loops.FAN, loops.FREE_GROUPS))
        other, stay = free.item(1, left - 1), fan // 2
        at = int((listed[:count] == group).argmax())
        moved, to = slice((group * fan + stay) * 2, (group + 1) * fan * 2), slice(other * fan * 2, None)
        for array in (bounds, blocks):
            array[to][: moved.stop - moved.start] = array[moved]
        rows, sizes = blocks[moved].reshape(-1, 2).T
        place_of[rows] = np.arange(other * fan, other * fan + fan - stay)
        entries = int(sizes.sum())
        groups_of[2 * group] = stay
        groups_of[2 * group + 1] -= entries
        groups_of[2 * other : 2 * other + 2] = fan - stay, entries
        for array, each, value in ((listed, 1, other), (tops, 2, bounds[to][:2])):
            begin, end = (at + 1) * each, count * each
            array[begin + each : end + each] = array[begin:end].copy()
            array[begin : begin + each] = value
        state[loops.GROUPS], state[loops.FREE_GROUPS] = count + 1, left - 1


def noted_by(tree) -> tuple[np.ndarray, np.ndarray]:
    """Where `update` notes what changes in a tree of codes."""
    if tree.order is not None:
        return tree.order.noted
    # no order stands
    state = np.zeros(loops.STATE, dtype=np.int64)
    state[loops.SLOTS] = tree.slots
    return state, np.zeros(0, dtype=np.int32)
