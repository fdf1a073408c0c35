"""What kernels make of the leaves of a tree: all sums above them, and the smallest or largest mass."""

from __future__ import annotations

import pytest
import torch
from guards import Guards
from interpreted import kernel_device as kernel_device
from launches import use_sizes_of_a_gpu
from trees import check_sums, random_masses

from gpu_replay.ops.counters import NO_MASS, Counter, new_counters
from gpu_replay.ops.mass_tree import DIRTY, MassTree, make_extreme


def tree_of(slots: int, device: str) -> MassTree:
    """A tree whose leaves alone are right, and the padding above them, which nothing changes."""
    tree = MassTree(slots, torch.device(device), "triton", low=True, high=True)
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


@pytest.mark.parametrize("slots", [1, 129, 4096, 20_000])
def test_extremes_of_a_tree(slots: int, device: str, guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by several programs, in blocks that are dirty or not, whatever was found before; nothing else changes."""
    use_sizes_of_a_gpu(monkeypatch)
    tree, counters = tree_of(slots, device), new_counters(torch.device(device), 0)
    assert tree.low is not None
    assert tree.high is not None
    find_lowest, find_highest = (make_extreme(tree, counters, low=low) for low in (True, False))
    for leaf, mass in ((0, None), (slots - 1, 2**61), (slots // 2, 1), (0, 0), (0, None)):
        if mass is None:
            tree.masses.floor_divide_(2)
            tree.build()
        else:
            tree.masses[leaf] = mass
            tree.low[leaf // tree.extremes_block] = tree.high[leaf // tree.extremes_block] = DIRTY
        expected = counters.clone()
        expected[Counter.LOWEST] = torch.where(tree.masses > 0, tree.masses, NO_MASS).min()
        expected[Counter.HIGHEST] = tree.masses.max()
        counters[Counter.LOWEST], counters[Counter.HIGHEST] = 1, 2**62
        find_lowest()
        find_highest()
        assert counters.tolist() == expected.tolist()
        assert int(tree.low.min()) >= 0 <= int(tree.high.min())
        assert [int(tree.low.min()), int(tree.high.max())] == expected[[Counter.LOWEST, Counter.HIGHEST]].tolist()


def test_a_tree_without_extremes_says_so(device: str) -> None:
    tree = MassTree(10, torch.device(device), "triton")
    for low, which in ((True, "smallest"), (False, "largest")):
        with pytest.raises(RuntimeError, match=f"without its {which} masses"):
            make_extreme(tree, new_counters(torch.device(device), 0), low=low)
