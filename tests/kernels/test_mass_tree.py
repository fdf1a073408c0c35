"""What kernels make of the leaves of a tree: all sums above them, and the smallest or largest mass."""

from __future__ import annotations

import pytest
import torch
from guards import Guards
from interpreted import kernel_device as kernel_device
from trees import check_sums, random_masses

from gpu_replay.ops.masses import MassTree


def tree_of(slots: int, device: str) -> MassTree:
    """A tree whose leaves alone are right, and the padding above them, which nothing changes."""
    tree = MassTree(slots, torch.device(device), "triton")
    tree.masses.copy_(torch.from_numpy(random_masses(slots, slots, 2**62 // slots)))
    for below, above in zip(tree.levels, tree.levels[1:], strict=False):
        above[: below.numel() // tree.fanout] = 7
    return tree


# of one to four levels, whole blocks, and a few leaves more than those
@pytest.mark.parametrize("slots", [1, 128, 1024, 1025, 2048, 32_768, 32_769, 70_001])
def test_every_node_is_the_sum_of_its_block(slots: int, device: str, guards: Guards) -> None:
    tree = tree_of(slots, device)
    tree.build()
    check_sums(tree)
    assert tree.total() == int(tree.masses.sum())
