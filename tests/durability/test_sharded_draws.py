"""Draws of several ranks against one tree over all of their slots, with ==; real processes on gloo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from ranks import Ranks, ranks_of  # noqa: E402
from sharded_work import SAMPLERS, Whole, life, sampled_rows_of  # noqa: E402

BATCH = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(4) as found:
        yield found


def adds_of(size: int, rounds: int, seed: int) -> list[list[int]]:
    """How many rows each rank adds in each round: enough for every batch at first, then also none, or a whole lap."""
    noise = np.random.default_rng(seed)
    return [[5] * size, *noise.choice([0, 1, 2, 5, 9], size=(rounds - 1, size)).tolist()]


def check(found: list[list[dict[str, Any]]], sampler: Any) -> None:
    """found: for each rank what `life` returned."""
    whole = Whole(sampler)
    for one_round in zip(*found, strict=True):
        expected = whole.draw([rank["before"] for rank in one_round], BATCH * len(one_round))
        for name, numbers in expected.items():
            drawn = np.concatenate([rank["drawn"][name] for rank in one_round])
            assert drawn.dtype == numbers.dtype
            np.testing.assert_array_equal(drawn, numbers, err_msg=name)
        for rank in one_round:
            for name, rows in sampled_rows_of(torch.from_numpy(rank["drawn"]["key"])).items():
                np.testing.assert_array_equal(rank["drawn"][name], rows, err_msg=name)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["proportional", "uniform"])
def test_ranks_together_draw_what_one_tree_draws(ranks: Ranks, name: str, size: int) -> None:
    # shards of 8 slots, some of them wrapped; 3 slots more than they share
    found = ranks.run(size, life, SAMPLERS[name], "global", 8 * size + size - 1, BATCH, adds_of(size, 4, size))
    check(found, SAMPLERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_together_draw_what_one_tree_draws_with_every_sampler(ranks: Ranks, name: str, size: int) -> None:
    for seed in range(4):
        # shards of 300 slots have several levels above the masses
        capacity = size * (8 if seed % 2 else 300)
        found = ranks.run(size, life, SAMPLERS[name], "global", capacity, BATCH, adds_of(size, 12, seed))
        check(found, SAMPLERS[name])
