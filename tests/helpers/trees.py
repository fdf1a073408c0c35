"""Trees of the kernels' shape: masses to fill them with, and the check that their sums are right."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from gpu_replay.ops.masses import MassTree


def random_masses(count: int, seed: int, largest: int) -> np.ndarray:
    """Masses over all orders of magnitude up to `largest`, a third of them 0, at least one not."""
    generator = np.random.default_rng(seed)
    masses = np.floor(2.0 ** generator.uniform(0, np.log2(largest), count)).astype(np.int64)
    masses[generator.random(count) < 1 / 3] = 0
    masses[generator.integers(count)] = largest
    return masses


def check_sums(tree: MassTree) -> None:
    """Fail unless every node is the sum of its block."""
    levels = [level.cpu().numpy() for level in tree.levels]
    for below, above in pairwise(levels):
        sums = below.reshape(-1, tree.fanout).sum(axis=1)
        assert np.array_equal(above[: sums.size], sums)
        assert not above[sums.size :].any()
    assert not levels[0][tree.slots :].any()
