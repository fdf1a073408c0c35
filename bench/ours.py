"""This package's operations as the kernel microbenchmarks call them: launchers on a GPU, host code on a CPU.

Operations of a buffer are called as a learner calls them, on a buffer with one-byte rows, so sampling also computes
weights and gathers rows. Sums and gathers from given slots are called below the buffers.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field, Proportional, RankBased, ReplayBuffer
from gpu_replay.engines.storage import TrajectoryStorage
from gpu_replay.ops._backend import choose
from gpu_replay.ops.launch import per_arguments
from gpu_replay.ops.masses import UNIT, MassTree
from gpu_replay.ops.ranks import inclusive_prefix_sum
from gpu_replay.ops.ring import make_gather
from gpu_replay.ops.steps import powers_of
from gpu_replay.ops.windows import make_gather_windows

from . import kernel_checks as checks
from .kernel_checks import Implementation
from .kernel_inputs import N_STEP, Inputs
from .subjects import ALPHA, BETA

GAMMA = 0.99


class Index:
    """A full buffer whose rows are one byte: `sample` and `update_priorities` with hardly any fields."""

    slack, unit = 0.0, UNIT

    def __init__(self, inputs: Inputs, sampler: Proportional | RankBased | None = None) -> None:
        sampler = sampler or Proportional(alpha=ALPHA, beta=BETA)
        buffer = ReplayBuffer(inputs.capacity, {"row": Field((), torch.uint8)}, sampler=sampler, device=inputs.device)
        for priorities in inputs.priorities.split(2**16):
            keys = buffer.add(row=torch.zeros(len(priorities), dtype=torch.uint8, device=inputs.device))
            buffer.update_priorities(keys, priorities)
        # keys are slots in a ring in its first lap
        self.draw = lambda: buffer.sample(inputs.batch).key
        self.update, self.weights, self.total = buffer.update_priorities, buffer.masses, buffer.total_mass


def prefix_sum(inputs: Inputs) -> Implementation:
    """Inclusive prefix sums of all masses."""
    return Implementation(partial(inclusive_prefix_sum, inputs.masses), partial(checks.wrong_scan, inputs.masses))


def tree_build(inputs: Inputs) -> Implementation:
    """All sums of a tree, from its leaves."""
    tree = MassTree(inputs.capacity, inputs.device, choose(inputs.device))
    tree.masses.copy_(inputs.masses)
    return Implementation(tree.build, lambda _: checks.wrong_totals(tree.masses, tree.total()))


def rank_draw(inputs: Inputs) -> Implementation:
    """Slots by rank, after as many priorities as are sampled have changed since the last call.

    On a GPU the time includes the change, because a replayed graph has no preparation.
    """
    index = Index(inputs, RankBased(alpha=ALPHA, beta=BETA))
    pool = cycle(zip(inputs.keys, inputs.errors, strict=True))
    current = inputs.priorities.clone()

    def change() -> None:
        slots, errors = next(pool)
        current[slots] = errors
        index.update(slots, errors)

    def changed() -> Tensor:
        change()
        return index.draw()

    wrong = partial(checks.wrong_ranks, current, inputs.rank_masses)
    if inputs.device.type == "cuda":
        return Implementation(changed, wrong)
    return Implementation(index.draw, wrong, prepare=change)


def row_gather(inputs: Inputs) -> Implementation:
    """Rows of five small fields at given slots."""
    buffer = inputs.row_buffer
    storage = buffer._storage
    rows = per_arguments(lambda batch: make_gather(storage.tensors, storage.fields, batch, buffer._counters))

    def gather(slots: Tensor) -> dict[str, Tensor]:
        if buffer._backend == "host":
            # in a ring in its first lap, slots are keys
            return buffer._engine.read(slots)
        return rows(slots.numel())(slots)

    return checks.gathers(gather, inputs.slots, lambda found: checks.wrong_rows(found, inputs))


def frame_gather(inputs: Inputs) -> Implementation:
    """Stacks of four frames before and after, at given slots."""
    buffer = inputs.frame_buffer
    storage, counters = cast(TrajectoryStorage, buffer._storage), buffer._counters
    powers = torch.from_numpy(powers_of(GAMMA, N_STEP)).to(inputs.device)
    windows = per_arguments(lambda batch: make_gather_windows(storage, batch, powers, counters))

    def gather(slots: Tensor) -> dict[str, Tensor]:
        if buffer._backend == "host":
            return buffer._engine.read(slots)
        return windows(slots.numel())(slots)

    def wrong(found: dict[str, Tensor]) -> list[str]:
        return checks.wrong_frames(found["obs"], found["next_obs"], inputs)

    return checks.gathers(gather, inputs.starts, wrong)


def empty(inputs: Inputs) -> Implementation:
    """Nothing: an empty kernel on a GPU, the negative of one number in NumPy on a CPU."""
    number = torch.ones(1, device=inputs.device)
    if choose(inputs.device) == "host":
        return Implementation(partial(np.negative, number.numpy(), number.numpy()), lambda _: [])
    import triton

    @triton.jit
    def empty_kernel(pointer):  # type: ignore[no-untyped-def]
        return

    return Implementation(lambda: empty_kernel[(1,)](number), lambda _: [])
