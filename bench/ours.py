"""This package's operations as the kernel microbenchmarks call them: launchers on a GPU, host code on a CPU.

They are called below the buffers, so that only the operation is measured: no arguments are checked and no lock is held.
On a GPU a draw computes its weights and advances the random counter as well, of more than 1,024 in a second launch.
"""

from __future__ import annotations

from itertools import cycle
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.ops._backend import choose
from gpu_replay.ops.counters import Counter, HostWords, new_counters
from gpu_replay.ops.frames import plan_gather_windows
from gpu_replay.ops.launch import Kept
from gpu_replay.ops.mass import UNIT, MassRule, OrderRule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.prefix_sum import inclusive_prefix_sum
from gpu_replay.ops.priorities import DeviceMasses, plan_update
from gpu_replay.ops.rank_draw import DeviceRanks, plan_rank_draw
from gpu_replay.ops.rank_draw_host import HostRanks
from gpu_replay.ops.ring import plan_gather
from gpu_replay.ops.stratified_draw import plan_stratified_draw
from gpu_replay.ops.weights import weighed_together, weighing_of
from gpu_replay.ops.windows import powers_of

from . import kernel_checks as checks
from .kernel_checks import Implementation
from .kernel_inputs import N_STEP, Inputs
from .subjects import ALPHA, BETA, EPS, IndexSubject

GAMMA = 0.99


class HostIndex:
    """The index on a CPU."""

    def __init__(self, inputs: Inputs) -> None:
        self._index = IndexSubject(inputs.capacity)
        self.tree = self._index.tree
        self.tree.masses.copy_(inputs.masses)
        self.tree.build()

    def draw(self, batch: int) -> Tensor:
        """(batch,) int64 slots, one for each stratum of the total."""
        return torch.from_numpy(self._index.sample(batch)[0])

    def update(self, slots: Tensor, errors: Tensor) -> None:
        """Give (B,) slots the masses of (B,) errors."""
        self._index.update((slots.numpy(), None), errors)


class DeviceIndex:
    """The index on a GPU, or interpreted on CPU tensors."""

    def __init__(self, inputs: Inputs) -> None:
        slots, device = inputs.capacity, inputs.device
        rule = MassRule.for_slots(slots, ALPHA, EPS, None)
        self.tree = MassTree(slots, device, "triton")
        self.tree.masses.copy_(inputs.masses)
        self.tree.build()
        self._masses = DeviceMasses(self.tree, rule, rule.mass(1.0))
        self._counters = full_counters(slots, device)
        times_sampled = torch.zeros(slots, dtype=torch.int32, device=device)
        self._draws = Kept(
            lambda batch: plan_stratified_draw(
                *(self.tree, self._counters, times_sampled, batch, batch),
                stratified=True,
                lowest_of_all=False,
                weighed=(None, BETA) if weighed_together(batch, False) else None,
            )
        )
        self._weights = Kept(lambda batch: plan_gather({}, {}, batch, device, weighed=True))
        self._updates = Kept(lambda batch, own: plan_update(self._masses, self._counters, slots, batch, sparse=False))

    def draw(self, batch: int) -> Tensor:
        """As HostIndex; one launch, two for thousands of slots."""
        found = self._draws[(batch,)]()
        if found.weight is None:
            self._weights[(batch,)](found.slots, weighing_of(found.value, self._counters, None, BETA, batch))
        return found.slots

    def update(self, slots: Tensor, errors: Tensor) -> None:
        """As HostIndex; one launch, two for thousands of slots. In a ring in its first lap, slots are keys."""
        self._updates[slots.numel(), errors.dtype](slots, errors)


def full_counters(slots: int, device: torch.device) -> Tensor:
    """The counters of a ring that has been filled once."""
    counters = new_counters(device, seed=0)
    counters[Counter.ADDED] = slots
    return counters


def index_for(inputs: Inputs) -> HostIndex | DeviceIndex:
    """The index where the inputs are."""
    return HostIndex(inputs) if choose(inputs.device) == "host" else DeviceIndex(inputs)


def prefix_sum(inputs: Inputs) -> Implementation:
    """Inclusive prefix sums of all masses."""
    values = inputs.masses
    return Implementation(
        lambda: inclusive_prefix_sum(values), lambda: checks.wrong_scan(values, inclusive_prefix_sum(values))
    )


def tree_build(inputs: Inputs) -> Implementation:
    """All sums of a tree, from its leaves."""
    tree = index_for(inputs).tree

    def wrong() -> list[str]:
        tree.levels[-1].zero_()
        tree.build()
        return [error for level in tree.levels[1:] for error in checks.wrong_totals(tree.masses, level.sum())]

    return Implementation(tree.build, wrong)


def draw(inputs: Inputs) -> Implementation:
    """Slots by mass, one for each stratum."""
    index = index_for(inputs)
    return Implementation(
        lambda: index.draw(inputs.batch), lambda: checks.wrong_draws(index.tree.masses, index.draw(inputs.batch))
    )


def update(inputs: Inputs) -> Implementation:
    """New masses for given slots, and the sums above them."""
    index = index_for(inputs)
    pool = cycle(zip(inputs.keys, inputs.errors, strict=True))
    return Implementation(
        lambda: index.update(*next(pool)),
        lambda: checks.wrong_update(index.update, lambda: index.tree.masses, index.tree.total, inputs, unit=UNIT),
    )


def draw_update(inputs: Inputs) -> Implementation:
    """Draw, and give what was drawn new masses."""
    index = index_for(inputs)
    pool = cycle(inputs.errors)

    def step() -> Tensor:
        slots = index.draw(inputs.batch)
        index.update(slots, next(pool))
        return slots

    def wrong() -> list[str]:
        before = index.tree.masses.clone()
        return checks.wrong_draws(before, step()) + checks.wrong_totals(index.tree.masses, index.tree.total())

    return Implementation(step, wrong)


def rank_draw(inputs: Inputs) -> Implementation:
    """Slots by rank when as many priorities as are drawn have changed since the last draw."""
    return _host_rank_draw(inputs) if choose(inputs.device) == "host" else _device_rank_draw(inputs)


def _host_rank_draw(inputs: Inputs) -> Implementation:
    slots, batch = inputs.capacity, inputs.batch
    rule = OrderRule()
    tree = MassTree(slots, inputs.device, "host", summed=False)
    current = inputs.priorities.clone()
    tree.arrays[0][:slots] = rule.masses(current.numpy().astype(np.float64))[0]
    counters = full_counters(slots, inputs.device).numpy()
    ranks = HostRanks(tree, counters, ALPHA, 1)
    words, position = HostWords(seed=0), cycle(range(0, 2**40, -(-batch // 4)))
    pool = cycle(zip(inputs.keys, inputs.errors, strict=True))

    def change() -> None:
        changed, errors = next(pool)
        current[changed] = errors
        tree.update(changed.numpy(), errors.numpy().astype(np.float64), rule, 0, slots, counters)

    def drawn() -> Tensor:
        doubles = words.doubles(next(position), batch)
        return torch.from_numpy(ranks.draw(doubles, stratified=True).slots)

    def wrong() -> list[str]:
        change()
        return checks.wrong_ranks(current, inputs.rank_masses, drawn())

    return Implementation(drawn, wrong, prepare=change)


def _device_rank_draw(inputs: Inputs) -> Implementation:
    slots, batch, device = inputs.capacity, inputs.batch, inputs.device
    tree = MassTree(slots, device, "triton", summed=False)
    # the bits of a float64 that is not negative ascend with it; a code of 0 stands for nothing
    tree.masses.copy_(inputs.priorities.double().view(torch.int64) + 1)
    counters = full_counters(slots, device)
    ranks = DeviceRanks(slots, ALPHA, 1, counters, inputs.rank_masses)
    times_sampled = torch.zeros(slots, dtype=torch.int32, device=device)
    pool = cycle([torch.unique(keys % slots) for keys in inputs.keys])

    given = (ranks.sums, tree, None, counters, times_sampled, batch, batch)
    draw_ranks = plan_rank_draw(*given, stratified=True, lowest_of_all=False, merged=True)
    weigh = plan_gather({}, {}, batch, device, weighed=True)

    def drawn() -> Tensor:
        changed = next(pool)
        # other codes at each replay of a graph, too: one less or one more
        tree.masses.index_copy_(0, changed, tree.masses[changed] ^ 1)
        found = draw_ranks(ranks.current(tree, True))
        weigh(found.slots, weighing_of(found.value, counters, None, BETA, batch))
        return found.slots

    def wrong() -> list[str]:
        found = drawn()
        return checks.wrong_ranks((tree.masses - 1).view(torch.float64), inputs.rank_masses, found)

    return Implementation(drawn, wrong)


def row_gather(inputs: Inputs) -> Implementation:
    """Rows of five small fields at given slots."""
    buffer = inputs.row_buffer
    pool = cycle(inputs.slots)
    storage, engine = buffer._storage, buffer._engine
    rows = Kept(lambda batch: plan_gather(storage.tensors, storage.fields, batch, inputs.device, weighed=False))

    def gather(slots: Tensor) -> dict[str, Tensor]:
        if buffer._backend == "host":
            # in a ring in its first lap, slots are keys
            return engine.read(slots)
        return rows[(slots.numel(),)](slots, None)

    return Implementation(lambda: gather(next(pool)), lambda: checks.wrong_rows(gather, inputs))


def frame_gather(inputs: Inputs) -> Implementation:
    """Stacks of four frames before and after, at given slots."""
    buffer = inputs.frame_buffer
    pool = cycle(inputs.starts)
    storage, engine, counters = cast(TrajectoryStorage, buffer._storage), buffer._engine, buffer._counters
    powers = torch.from_numpy(powers_of(GAMMA, N_STEP)).to(inputs.device)
    windows = Kept(lambda batch: plan_gather_windows(storage, batch, powers, counters, shifted=False, weighed=False))

    def gather(slots: Tensor) -> dict[str, Tensor]:
        if buffer._backend == "host":
            return engine.read(slots)
        return windows[(slots.numel(),)](slots, None, None)

    def wrong() -> list[str]:
        found = gather(inputs.starts[0])
        return checks.wrong_frames(found["obs"], found["next_obs"], inputs)

    return Implementation(lambda: gather(next(pool)), wrong)


def empty(inputs: Inputs) -> Implementation:
    """Nothing: an empty kernel on a GPU, the negative of one number in NumPy on a CPU."""
    number = torch.ones(1, device=inputs.device)
    if choose(inputs.device) == "host":
        array = number.numpy()
        return Implementation(lambda: np.negative(array, array), list)
    import triton

    @triton.jit
    def empty_kernel(pointer):  # type: ignore[no-untyped-def]
        return

    return Implementation(lambda: empty_kernel[(1,)](number), list)
