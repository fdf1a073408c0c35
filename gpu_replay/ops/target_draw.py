"""Slots on which given targets fall: what a shard looks up when the targets were drawn for all shards together.

Targets are integers in [0, total), as `stratified_draw` places them; the slot of one is that whose inclusive prefix
sum, in slot order, first exceeds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.ops.counters import NO_MASS
from gpu_replay.ops.eligible_draw import draw_range
from gpu_replay.ops.mass_tree import MassTree


def slots_at(tree: MassTree, targets: Tensor) -> Tensor:
    """(B,) int64 slots of (B,) int64 targets; on a device a few operations of torch for each level."""
    if not targets.numel():
        return targets
    if tree.backend == "host":
        found = draw_range(tree, 0, 0, by_key=False).slots(targets.clone().numpy())
        return torch.from_numpy(found)
    rest, node = targets.clone(), torch.zeros_like(targets)
    for level in reversed(tree.levels):
        masses = level.view(-1, tree.fanout)[node]  # (B, fanout)
        prefix = masses.cumsum(1)
        step = (prefix <= rest[:, None]).sum(1).clamp_(max=tree.fanout - 1)[:, None]
        rest -= (prefix - masses).gather(1, step).squeeze(1)
        node = node * tree.fanout + step.squeeze(1)
    return node


def lowest_mass(tree: MassTree) -> Tensor:
    """The smallest mass that is not 0 as int64 without dimensions, NO_MASS without one; on a device all are read."""
    if tree.backend == "host":
        return torch.tensor(tree.lowest())
    masses = tree.masses
    return torch.where(masses > 0, masses, NO_MASS).min()
