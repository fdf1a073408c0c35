"""Launches on streams whose ring has 2^31 - 2 slots, the most that two environments can fill.

What a step, a window or a goal looks at lies within a few steps of it, so the same few steps are put into a small ring
as well: what is found and left there, relative to the place of the next step, is what must be found in the large one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from address_cases import CPU, FAR, PLACES, SEED, SLOTS, check_draws, check_tree, counters_at, key_in, put
from sparse_memory import SparseMemory
from torch import Tensor

from gpu_replay import Field
from gpu_replay.ops.counters import Counter, HostWords, blocks_for
from gpu_replay.ops.draw import PERMUTATION_WORDS, permuted_ranks, plan_draw, stratified_targets
from gpu_replay.ops.eligibility import Flag, Streams, StreamShape, plan_add_step, plan_keep_finals, powers_of
from gpu_replay.ops.frames import plan_gather_windows
from gpu_replay.ops.hindsight import Strategy, plan_choose_goals
from gpu_replay.ops.mass import MassRule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.priorities import DeviceMasses

ENVS = 2
# steps before the next one, and from it on, that are filled
NEAR = 24
OBS = {"obs": Field((8,), torch.uint8)}


class Ring(NamedTuple):
    """A full ring, `head` the place of the next step; finals: rows beside it, of which the next is the last."""

    steps: int
    head: int
    finals: int
    envs: int = ENVS

    @property
    def slots(self) -> int:
        return self.steps * self.envs

    @property
    def added(self) -> int:
        return 3 * self.slots + self.head * self.envs

    @property
    def near(self) -> Tensor:
        """The slots of the filled steps, oldest first."""
        steps = (self.head + torch.arange(-NEAR, NEAR)) % self.steps
        return (steps[:, None] * self.envs + torch.arange(self.envs)).reshape(-1)

    def from_head(self, slots: Tensor) -> list[int]:
        """Slots as distances from that of the next step, the shorter way round."""
        apart = (slots - self.head * self.envs) % self.slots
        return torch.where(apart > self.slots // 2, apart - self.slots, apart).tolist()

    def from_last(self, places: Tensor) -> list[int]:
        """Rows of final observations as distances from the first one."""
        return torch.where(places > self.finals // 2, places - self.finals, places).tolist()

    def streams(self, seed: int, *, hindsight: bool) -> Streams:
        shape = StreamShape(self.envs, self.steps, 4, 3, False, self.finals, hindsight)
        random, near = np.random.default_rng(seed), self.near
        streams = Streams(shape, CPU)
        endings = (0, 0, 0, Flag.TERMINATED, Flag.TRUNCATED | Flag.FINAL, Flag.TERMINATED | Flag.FINAL)
        streams.flags[near] = torch.from_numpy(random.choice(endings, near.numel()).astype(np.uint8))
        streams.depth[near] = torch.from_numpy(random.integers(0, NEAR - 4, near.numel(), dtype=np.int32))
        # the rows before the next one to be taken, the last among them
        places = torch.from_numpy(random.integers(1, 12, near.numel()))
        streams.final[near] = ((self.finals - places) % self.finals).int()
        if self.steps == SMALL_STEPS:
            # as sparse memory is
            streams.owner.zero_()
            streams.spans.zero_()
        if hindsight:
            streams.spans[near] = torch.from_numpy(random.integers(0, 30, near.numel(), dtype=np.int32))
            streams.parted[:] = 5
        return streams


SMALL_STEPS = 256
LARGE_STEPS = (2**31 - 1) // ENVS
FINALS = 2**30 + 2**29
# rings alike but for their size: at the end, and in the middle, where offsets pass 2^32 and 2^31 bytes
PAIRS = [
    (Ring(LARGE_STEPS, head, FINALS), Ring(SMALL_STEPS, 100 if head < LARGE_STEPS - 1 else SMALL_STEPS - 1, 32))
    for head in (LARGE_STEPS - 1, 2**29 + 1, 2**28 - 1)
]
# the rings in which all that has 4 bytes a slot is that long
LONG = 2**29


def _follow(ring: Ring, memory: SparseMemory, *, hindsight: bool) -> dict[str, Any]:
    """Three steps of two environments; what is left, as seen from the first of them."""
    streams, near = ring.streams(3, hindsight=hindsight), ring.near
    random = np.random.default_rng(4)
    tree, marks = (MassTree(ring.slots, CPU, "triton", high=high) for high in (True, False))
    leaves = random.integers(0, 2, near.numel()) * random.integers(1, 2**30, near.numel())
    put(tree, dict(zip(near.tolist(), leaves.tolist(), strict=True)))
    put(marks, dict(zip(near.tolist(), (leaves > 0).astype(int).tolist(), strict=True)))
    masses = DeviceMasses(tree, MassRule(1.0, 0.0, float("inf"), 2**30), initial=100)
    times_sampled = torch.zeros(ring.slots, dtype=torch.int32)
    times_sampled[near] = 9
    counters = counters_at(ring.added, ELIGIBLE=int((leaves > 0).sum()), FINALS=5 * ring.finals - 1)
    state = (streams, masses, marks, counters, times_sampled)
    add_step, given, keys = plan_add_step(*state, None, with_final=True), torch.empty(2, dtype=torch.int64), []
    for terminated, truncated in (([0, 0], [0, 1]), ([1, 0], [0, 1]), ([0, 0], [1, 0])):
        ends = [torch.tensor(flags, dtype=torch.bool) for flags in (terminated, truncated)]
        add_step(*ends, torch.tensor([0.5, 0.25]), given)
        keys += given.tolist()
    found = tree.levels[0][near]
    check_tree(tree, dict(zip(near.tolist(), found.tolist(), strict=True)))
    check_tree(marks, dict(zip(near.tolist(), (found > 0).int().tolist(), strict=True)))
    assert int(counters[Counter.ELIGIBLE]) == marks.total()
    if ring.head >= LONG:
        far = {"depth": streams.depth, "final": streams.final, "times_sampled": times_sampled}
        far |= {"leaves": tree.levels[0], "marks": marks.levels[0], "owner": streams.owner}
        memory.check("add_step_kernel", past=FAR, **far, **({"spans": streams.spans} if hindsight else {}))
        memory.check("add_step_kernel", past=2**30, flags=streams.flags)
    if ring.head == LARGE_STEPS - 1:
        memory.check("add_step_kernel", past=ring.slots - ENVS, flags=streams.flags)
    counters[Counter.ADDED] -= ring.added
    counters[Counter.FINALS] -= 5 * ring.finals
    spans = [streams.spans] if hindsight else []
    kept = (streams.flags, streams.depth, times_sampled, *spans)
    beside: dict[str, Any] = {"near": [each[near].tolist() for each in kept]}
    owner = [int(streams.owner[place]) - ring.added for place in (ring.finals - 1, 0, 1)]
    beside |= {"keys": [key - ring.added for key in keys], "masses": found.tolist(), "owner": owner}
    beside |= {"final": ring.from_last(streams.final[near]), "parted": streams.parted.tolist()}
    return beside | {"counters": counters.tolist()}


def add_step_kernel(memory: SparseMemory) -> None:
    for (large, small), hindsight in zip(PAIRS, (True, False, False), strict=True):
        assert _follow(large, memory, hindsight=hindsight) == _follow(small, memory, hindsight=hindsight)


def keep_finals_kernel(memory: SparseMemory) -> None:
    for ring, _ in PAIRS:
        streams = ring.streams(1, hindsight=False)
        slot, places = ring.head * ENVS, [2**29, ring.finals - 1]
        streams.flags[slot : slot + ENVS] = Flag.FINAL
        streams.final[slot : slot + ENVS] = torch.tensor(places, dtype=torch.int32)
        pools = {"obs": torch.zeros((ring.finals, 8), dtype=torch.uint8)}
        given = torch.arange(1, 17, dtype=torch.uint8).view(ENVS, 8)
        plan_keep_finals(streams, pools, OBS, counters_at(ring.added + ENVS))({"obs": given})
        assert torch.equal(pools["obs"][places], given)
        memory.check("keep_finals_kernel", past=FAR, pool=pools["obs"])
        if ring.head >= LONG:
            memory.check("keep_finals_kernel", past=FAR, final=streams.final)


def _windows(ring: Ring, memory: SparseMemory, padding: str) -> dict[str, Tensor]:
    """Batches of starts around the next step."""
    streams, near = ring.streams(5, hindsight=True), ring.near
    random = np.random.default_rng(6)
    fields = {**OBS, "action": Field((), torch.int64), "reward": Field((), torch.float32)}
    tensors = {name: torch.zeros((ring.slots, *field.shape), dtype=field.dtype) for name, field in fields.items()}
    pool = torch.zeros((ring.finals, 8), dtype=torch.uint8)
    pool[-12:] = torch.from_numpy(random.integers(1, 256, (12, 8), dtype=np.uint8))
    tensors["obs"][near] = torch.from_numpy(random.integers(1, 256, (near.numel(), 8), dtype=np.uint8))
    tensors["action"][near] = torch.from_numpy(random.integers(1, 2**60, near.numel()))
    tensors["reward"][near] = torch.from_numpy(random.random(near.numel(), dtype=np.float32))
    storage = SimpleNamespace(tensors=tensors, fields=fields, streams=streams, finals={"obs": pool})
    vars(storage).update(observations=("obs",), padding=padding, random_shift=0)
    # their stacks and windows lie among the filled steps
    starts = near[8 * ENVS : -8 * ENVS]
    powers = torch.from_numpy(powers_of(0.9, 3))
    counters = counters_at(ring.added)
    gather = plan_gather_windows(storage, starts.numel(), powers, counters, shifted=False, weighed=False)
    out = gather(starts, None, None)
    if ring.head >= LONG:
        far = {**tensors, "depth": streams.depth, "final": streams.final, "pool": pool}
        memory.check("gather_windows_kernel", past=FAR, **far)
        memory.check("gather_windows_kernel", past=2**30, flags=streams.flags)
    return out


def gather_windows_kernel(memory: SparseMemory) -> None:
    for (large, small), padding in zip(PAIRS, ("zero", "reset", "zero"), strict=True):
        found, expected = (_windows(ring, memory, padding) for ring in (large, small))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert found["obs"].any()


def choose_goals_kernel(memory: SparseMemory) -> None:
    # with one environment a step's number and a distance together pass 2^31
    alone = Ring(SLOTS, 5, FINALS, 1), Ring(SMALL_STEPS, 5, 32, 1)
    strategies: tuple[Strategy, ...] = ("future", "final", "episode", "future")
    for pair, strategy in zip((alone, *PAIRS), strategies, strict=True):
        large, small = (_goals(ring, memory, strategy) for ring in pair)
        assert large == small


def _goals(ring: Ring, memory: SparseMemory, strategy: Strategy) -> tuple[list[Any], ...]:
    """Rows with new goals, which goals are known, and where they are."""
    streams = ring.streams(7, hindsight=True)
    keys = torch.tensor([key_in(slot, ring.added, ring.slots) for slot in ring.near.tolist()])
    chosen = plan_choose_goals(streams, keys.numel(), counters_at(ring.added), 40, strategy)(keys)
    assert chosen.places is not None
    if ring.head >= LONG:
        far = {"depth": streams.depth, "spans": streams.spans, "final": streams.final}
        memory.check("choose_goals_kernel", past=FAR, **far)
        memory.check("choose_goals_kernel", past=2**30, flags=streams.flags)
    known = chosen.known.tolist()
    assert any(known)
    places = ring.from_last(torch.where(chosen.places < 0, 0, chosen.places))
    return chosen.rows.tolist(), known, ring.from_head(chosen.slots), places


def _eligible() -> tuple[dict[int, int], int, int, list[int]]:
    """Masses by slot, the next key, how many newest slots are skipped, and those within reach, the oldest first."""
    masses = {slot: 1000 + 7 * row for row, slot in enumerate(PLACES)}
    head, skipped = 2**30 + 4, 4
    order = sorted(masses, key=lambda slot: (slot - head) % SLOTS)
    within = [slot for slot in order if (slot - head) % SLOTS < SLOTS - skipped]
    assert len(within) == len(PLACES) - 2
    return masses, 4 * SLOTS + head, skipped, within


def draw_kernel_of_starts_by_mass(memory: SparseMemory) -> None:
    masses, added, skipped, within = _eligible()
    tree, marks = (MassTree(SLOTS, CPU, "triton") for _ in range(2))
    put(tree, masses)
    put(marks, dict.fromkeys(masses, 1))
    times_sampled = torch.zeros(SLOTS, dtype=torch.int32)
    how: Any = {"starts": marks, "tracks_eligibility": True, "skipped": skipped}
    found = plan_draw("mass", counters_at(added), times_sampled, 30, 32, SLOTS, tree=tree, **how).launch()
    sums = np.cumsum([masses[slot] for slot in within])
    targets = stratified_targets(int(sums[-1]), HostWords(SEED).doubles(0, 30))
    slots = [*(within[rank] for rank in sums.searchsorted(targets, "right")), *within[-2:]]
    assert set(slots) == set(within)
    check_draws(found, slots, added, times_sampled, [*(masses[slot] for slot in slots[:30]), 0, 0])
    far = {"leaves": tree.levels[0], "marks": marks.levels[0], "times_sampled": times_sampled}
    memory.check("draw_kernel", past=FAR, **far)


def draw_kernel_of_starts_uniformly(memory: SparseMemory) -> None:
    masses, added, skipped, within = _eligible()
    marks = MassTree(SLOTS, CPU, "triton")
    put(marks, dict.fromkeys(masses, 1))
    times_sampled = torch.zeros(SLOTS, dtype=torch.int32)
    counters = counters_at(added)
    count, how = len(within), {"starts": marks, "tracks_eligibility": True, "skipped": skipped}
    found = plan_draw("uniform", counters, times_sampled, count, count + 2, SLOTS, **how).launch()
    ranks = permuted_ranks(len(within), len(within), HostWords(SEED).words(0, PERMUTATION_WORDS))
    slots = [*(within[rank] for rank in ranks), *within[-2:]]
    check_draws(found, slots, added, times_sampled)
    assert int(counters[Counter.RANDOM]) == blocks_for(PERMUTATION_WORDS)
    memory.check("draw_kernel", past=FAR, marks=marks.levels[0], times_sampled=times_sampled)
