"""Launches on rings of 2^31 - 1 slots, the most there can be: what they leave where offsets pass 2^31 and 2^32 bytes.

One function a kernel; each checks what was left against a few lines of Python, and that the kernel reached that far in
everything that grows with the ring or the batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from sparse_memory import SparseMemory
from torch import Tensor

from gpu_replay import Field
from gpu_replay.ops import priorities, rank_draw
from gpu_replay.ops.counters import NO_MASS, Counter, HostWords, new_counters
from gpu_replay.ops.draw import (
    PERMUTATION_WORDS,
    digits_for,
    independent_ranks,
    permuted_ranks,
    plan_draw,
    stratified_targets,
)
from gpu_replay.ops.mass import MassRule
from gpu_replay.ops.mass_tree import DIRTY, MassTree
from gpu_replay.ops.priorities import DeviceMasses, plan_insert, plan_update
from gpu_replay.ops.rank_draw import DeviceRanks
from gpu_replay.ops.ring import plan_gather, plan_write
from gpu_replay.ops.weights import pending_weights

CPU = torch.device("cpu")
SLOTS = 2**31 - 1
SEED = 5
# offsets of 4 and 8 bytes a slot pass 2^31 and 2^32 here
PLACES = [0, 2**28 - 1, 2**28, 2**29 - 1, 2**29, 2**29 + 1, 2**30 - 1, 2**30, 2**30 + 1, SLOTS - 2, SLOTS - 1]
FAR = 2**32
# Atari frames: fewer slots, whose rows are long
FRAME = {"x": Field((84, 84), torch.uint8)}
FRAMES = 1_300_000
FRAME_PLACES = [0, *(place + near for place in (2**31 // 7056, 2**32 // 7056) for near in (-1, 0, 1)), FRAMES - 1]


def counters_at(added: int, **more: int) -> Tensor:
    """Counters of a buffer that has seen so many transitions."""
    counters = new_counters(CPU, SEED)
    counters[Counter.ADDED] = added
    for name, value in more.items():
        counters[getattr(Counter, name)] = value
    return counters


def put(tree: MassTree, masses: Mapping[int, int]) -> None:
    """Give some slots of an empty tree their masses."""
    for slot, mass in masses.items():
        for level in tree.levels:
            level[slot] += mass
            slot //= tree.fanout


def check_tree(tree: MassTree, masses: Mapping[int, int]) -> None:
    """Fail unless these slots have these masses, and every node above them the sum of those below it."""
    expected = dict(masses)
    for level in tree.levels:
        assert {node: int(level[node]) for node in expected} == expected
        above: dict[int, int] = {}
        for node, mass in expected.items():
            above[node // tree.fanout] = above.get(node // tree.fanout, 0) + mass
        expected = above
    assert tree.total() == sum(masses.values())


def key_in(slot: int, added: int, slots: int) -> int:
    """The largest key below `added` in a slot."""
    key = added - added % slots + slot
    return key if key < added else key - slots


def drawn_slots(masses: Mapping[int, int], targets: np.ndarray) -> list[int]:
    """The slots on which targets fall."""
    slots = sorted(masses)
    sums = list(accumulate(masses[slot] for slot in slots))
    return [slots[bisect_right(sums, target)] for target in targets.tolist()]


def check_draws(
    found: Any, slots: list[int], added: int, times_sampled: Tensor, values: list[int] | None = None
) -> None:
    """Fail unless these slots were drawn, each with its key, its value if given, and counted as often as drawn."""
    assert found[0].tolist() == slots
    assert found[1].tolist() == [key_in(slot, added, SLOTS) for slot in slots]
    assert values is None or found[3].tolist() == values
    assert {slot: int(times_sampled[slot]) for slot in slots} == {slot: slots.count(slot) for slot in slots}


def write_kernel(memory: SparseMemory) -> None:
    store = {"x": torch.zeros((FRAMES, 84, 84), dtype=torch.uint8)}
    random = np.random.default_rng(1)
    for turn, start in ((0, 0), (2, 2**31 // 7056 - 2), (1, 2**32 // 7056 - 2), (3, FRAMES - 2)):
        rows = torch.from_numpy(random.integers(1, 256, (4, 84, 84), dtype=np.uint8))
        counters = counters_at(turn * FRAMES + start)
        plan_write(store, FRAME, 4, counters, None, highest=False)({"x": rows})
        assert torch.equal(store["x"][torch.arange(start, start + 4) % FRAMES], rows)
    memory.check("write_kernel", past=FAR, store=store["x"])

    fields = {"x": Field((3,), torch.uint8)}
    store = {"x": torch.zeros((SLOTS, 3), dtype=torch.uint8)}
    tree = MassTree(SLOTS, CPU, "triton", high=True)
    put(tree, {SLOTS - 1: 77})
    tree.high[-1] = DIRTY
    rows = torch.arange(1, 13, dtype=torch.uint8).view(4, 3)
    counters = counters_at(7 * SLOTS - 2)
    # the rows, and the last of the blocks whose largest mass is looked up
    memory.programs = lambda count: [0, count - 1]
    plan_write(store, fields, 4, counters, tree, highest=True)({"x": rows})
    assert torch.equal(store["x"][[SLOTS - 2, SLOTS - 1, 0, 1]], rows)
    assert int(counters[Counter.HIGHEST]) == int(tree.high[-1]) == 77
    memory.check("write_kernel", past=FAR, store=store["x"], leaves=tree.levels[0])


def gather_kernel(memory: SparseMemory) -> None:
    store = {"x": torch.zeros((FRAMES, 84, 84), dtype=torch.uint8)}
    random = np.random.default_rng(2)
    rows = torch.from_numpy(random.integers(1, 256, (len(FRAME_PLACES), 84, 84), dtype=np.uint8))
    store["x"][FRAME_PLACES] = rows
    order = random.permutation(len(FRAME_PLACES)).tolist()
    slots = torch.tensor(FRAME_PLACES)[order]
    gather = plan_gather(store, FRAME, len(FRAME_PLACES), CPU, weighed=False)
    assert torch.equal(gather(slots, None)["x"], rows[order])
    memory.check("gather_kernel", past=FAR, store=store["x"])

    # a batch that does not fit 2^32 bytes either, of which the last rows are gathered
    many = torch.zeros(2**32 // 7056 + 100, dtype=torch.int64)
    many[-4:] = slots[:4]
    memory.programs = lambda count: range(count - 2, count)
    out = plan_gather(store, FRAME, many.numel(), CPU, weighed=False)(many, None)["x"]
    assert torch.equal(out[-4:], rows[order[:4]])
    memory.check("gather_kernel", past=FAR, out=out)

    # weights of as many draws as there are bytes
    batch = 2**30 + 1000
    masses = torch.zeros(batch, dtype=torch.int64)
    masses[-3:] = torch.tensor([4, 0, 16])
    memory.programs = lambda count: [count - 1]
    weighing = pending_weights(masses, counters_at(0, LOWEST=4), None, 0.5, batch)
    plan_gather({}, {}, batch, CPU, weighed=True)(masses, weighing)
    assert weighing.weight[-4:].tolist() == pytest.approx([1, 1, 1, 0.5])
    memory.check("gather_kernel", past=FAR, masses=masses, weights=weighing.weight)


def _masses(*, low: bool = False, high: bool = False) -> DeviceMasses:
    """A tree of all slots, and what goes with it; the stamps of the places are at rest."""
    tree = MassTree(SLOTS, CPU, "triton", low=low, high=high)
    masses = DeviceMasses(tree, MassRule.for_slots(SLOTS, 1.0, 0.0, None), initial=100)
    masses.stamps[PLACES] = -1
    return masses


def insert_kernel(memory: SparseMemory) -> None:
    masses = _masses(low=True, high=True)
    tree = masses.tree
    times_sampled = torch.zeros(SLOTS, dtype=torch.int32)
    expected: dict[int, int] = {}
    for turn, start in ((1, 2**28 - 3), (9, 2**29 - 3), (0, 2**30 - 3), (2, SLOTS - 3)):
        slots = [(start + row) % SLOTS for row in range(6)]
        times_sampled[slots] = 9
        added = turn * SLOTS + start
        counters = counters_at(added)
        keys = torch.empty(6, dtype=torch.int64)
        insert = plan_insert(masses, counters, times_sampled, 6, None, given=True)
        insert(torch.arange(1, 7, dtype=torch.float32), keys)
        assert keys.tolist() == list(range(added, added + 6))
        assert int(counters[Counter.ADDED]) == added + 6
        assert not times_sampled[slots].any()
        expected |= {slot: (row + 1) * 2**20 for row, slot in enumerate(slots)}
        edges = (getattr(tree, name)[slot // tree.edge] for name in ("low", "high") for slot in slots)
        assert all(int(edge) == DIRTY for edge in edges)
    check_tree(tree, expected)
    memory.check("insert_kernel", past=FAR, leaves=tree.levels[0], times_sampled=times_sampled)


def _updated(memory: SparseMemory, kernel: str) -> None:
    masses = _masses(low=True)
    put(masses.tree, dict.fromkeys(PLACES, 1000))
    added = 3 * SLOTS + 2**29
    keys = [key_in(slot, added, SLOTS) for slot in PLACES]
    # the last of a repeated key wins; of keys that were overwritten, or are yet to come, nothing is kept
    given = torch.tensor([*keys, keys[1], keys[-1], keys[2] - SLOTS, added])
    counters = counters_at(added)
    priorities = torch.arange(1, given.numel() + 1, dtype=torch.float64) / 2**10
    plan_update(masses, counters, SLOTS, given.numel(), tracks_eligibility=True)(given, priorities)
    position = {slot: row for row, slot in enumerate(PLACES)} | {PLACES[1]: 11, PLACES[-1]: 12}
    check_tree(masses.tree, {slot: (row + 1) * 2**10 for slot, row in position.items()})
    assert int(counters[Counter.STALE]) == 2
    assert masses.stamps[PLACES].tolist() == [-1] * len(PLACES)
    leaves = {"leaves": masses.tree.levels[0]} if kernel == "update_kernel" else {}
    memory.check(kernel, past=FAR, stamps=masses.stamps, **leaves)


def settle_kernel(memory: SparseMemory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # as for more keys than one program takes
        patch.setattr(priorities, "keys_together", lambda batch, interpreted: 0)
        _updated(memory, "settle_kernel")


def update_kernel(memory: SparseMemory) -> None:
    _updated(memory, "update_kernel")


def draw_kernel_by_mass(memory: SparseMemory) -> None:
    tree = MassTree(SLOTS, CPU, "triton", low=True)
    masses = {slot: 1000 + 7 * row for row, slot in enumerate(PLACES)}
    put(tree, masses)
    # the last program's blocks
    tree.low[-256:] = NO_MASS
    tree.low[-1] = DIRTY
    times_sampled = torch.zeros(SLOTS, dtype=torch.int32)
    added = 5 * SLOTS + 2**30
    counters = counters_at(added)
    # the draws, and the last of the blocks whose smallest mass is looked up
    memory.programs = lambda count: [0, count - 1]
    found = plan_draw("mass", counters, times_sampled, 30, 32, SLOTS, tree=tree, lowest_of_all=True).launch()
    total = sum(masses.values())
    newest = [2**30 - 2, 2**30 - 1]
    expected = [*drawn_slots(masses, stratified_targets(total, HostWords(SEED).doubles(0, 30))), *newest]
    assert set(expected) == {*PLACES, *newest}
    check_draws(found, expected, added, times_sampled, [*(masses[slot] for slot in expected[:30]), 0, 0])
    assert found[2].tolist() == pytest.approx([*(masses[slot] / total for slot in expected[:30]), 1, 1])
    assert int(tree.low[-1]) == int(counters[Counter.LOWEST]) == masses[SLOTS - 2]
    memory.check("draw_kernel", past=FAR, leaves=tree.levels[0], times_sampled=times_sampled)


def draw_kernel_uniformly(memory: SparseMemory) -> None:
    added = 6 * SLOTS + 2**29
    for replacement in (False, True):
        times_sampled = torch.zeros(SLOTS, dtype=torch.int32)
        found = plan_draw("uniform", counters_at(added), times_sampled, 40, 42, SLOTS, replacement=replacement).launch()
        ranks = permuted_ranks(SLOTS, 40, HostWords(SEED).words(0, PERMUTATION_WORDS))
        if replacement:
            ranks = independent_ranks(SLOTS, HostWords(SEED).doubles(0, 40))
        slots = [(added + rank) % SLOTS for rank in [*ranks.tolist(), -2, -1]]
        check_draws(found, slots, added, times_sampled)
        memory.check("draw_kernel", past=FAR, times_sampled=times_sampled)


def arrange_kernel(memory: SparseMemory) -> None:
    tree = MassTree(SLOTS, CPU, "triton", summed=False)
    head, skipped = 2**30, 5
    tree.masses[PLACES] = torch.arange(1, len(PLACES) + 1)
    ages = {(slot - head) % SLOTS: row + 1 for row, slot in enumerate(PLACES)}
    programs = sorted({age // 2**16 for age in ages})
    counters, sums = counters_at(4 * SLOTS + head), torch.zeros(SLOTS, dtype=torch.int64)
    given: list[Tensor] = []
    memory.programs = lambda count: programs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_draw.torch, "sort", lambda codes, **_: given.append(codes))
        # the last program to come is none of all
        counters[Counter.TICKET] = -(-SLOTS // 2**16) - len(programs)
        made = DeviceRanks(SLOTS, 0.7, counters, sums).of(tree, skipped)
    (codes,) = given
    left_out = {age for age in ages if age >= SLOTS - skipped}
    assert left_out
    assert {age: int(codes[age]) for age in ages} == ages | dict.fromkeys(left_out, 0)
    assert (made.listed.tolist(), int(counters[Counter.TICKET])) == ([len(ages) - len(left_out)], 0)
    memory.check("arrange_kernel", past=FAR, codes=tree.levels[0], arranged=codes)


def draw_kernel_by_rank(memory: SparseMemory) -> None:
    """Ranks of mass 1 each, so that a target is a rank; only what the search of these draws looks at is there."""
    sums = torch.zeros(SLOTS, dtype=torch.int64)
    ages = torch.zeros(SLOTS, dtype=torch.int64)
    times_sampled = torch.zeros(SLOTS, dtype=torch.int32)
    targets = stratified_targets(SLOTS, HostWords(SEED).doubles(0, 12)).tolist()
    sums[[SLOTS - 1, SLOTS - 2]] = torch.tensor([SLOTS, SLOTS - 1])
    for target in targets:
        for digit in range(digits_for(SLOTS)):
            span = 32**digit
            looked_at = target // (32 * span) * 32 * span + np.arange(1, 33) * span - 1
            looked_at = looked_at[looked_at < SLOTS]
            sums[looked_at] = torch.from_numpy(looked_at + 1)
        sums[[target, max(0, target - 1)]] = torch.tensor([target + 1, max(1, target)])
    slots = [PLACES[row % len(PLACES)] for row in range(12)]
    added = 8 * SLOTS + 2**29
    ages[targets] = torch.tensor([(slot - added) % SLOTS for slot in slots])
    planned = plan_draw("rank", counters_at(added), times_sampled, 12, 12, SLOTS, sums=sums, lowest_of_all=True)
    found = planned.launch((ages, torch.tensor([SLOTS])))
    check_draws(found, slots, added, times_sampled, [1] * 12)
    memory.check("draw_kernel", past=FAR, sums=sums, ages=ages, times_sampled=times_sampled)


def scan_kernel(memory: SparseMemory) -> None:
    from gpu_replay.kernels.prefix_sum import scan_kernel as kernel

    block = 2048
    values, out = (torch.zeros(SLOTS, dtype=torch.int64) for _ in range(2))
    count = -(-SLOTS // block)
    state = torch.zeros((2, count), dtype=torch.int64)
    # all sums up to the block before the last: low and high words of the last stage
    state[:, -2], values[-3:] = torch.tensor([(2 << 32) + 100, 2 << 32]), torch.tensor([1, 2, 3])
    memory.programs = lambda count: [count - 1]
    kernel[(count,)](values, state, out, SLOTS, EVERY=1, BLOCK=block, WINDOW=256, LOOKS=1)
    assert out[-4:].tolist() == [100, 101, 103, 106]
    # a block that says nothing is read from where it lies
    state[:, -2], state[:, -3] = 0, torch.tensor([(2 << 32) + 50, 2 << 32])
    values[-2048 - 7] = 9
    kernel[(count,)](values, state, out, SLOTS, EVERY=1, BLOCK=block, WINDOW=256, LOOKS=1)
    assert out[-4:].tolist() == [59, 60, 62, 65]
    # every second sum
    kernel[(count,)](values, state, out, SLOTS, EVERY=2, BLOCK=block, WINDOW=256, LOOKS=1)
    assert out[SLOTS // 2 - 2 : SLOTS // 2].tolist() == [59, 62]
    memory.check("scan_kernel", past=FAR, values=values, out=out)
