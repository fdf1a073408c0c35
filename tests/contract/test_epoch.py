"""Epochs: each row that can be sampled once, as the call found them, in an order that seeds and devices share.

That `keys(eligible=True)` are those of the model is also compared in every random program.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from devices import scale, statistical, thinned
from distribution import check_counts
from hindsight_oracle import GOALS, hindsight, reward_of
from pairs import StepPair, live_through
from programs import SAMPLERS
from refusals import whole_state
from test_distributions import lived
from transitions import NUMBER, make

from gpu_replay import Batch, ReplayBuffer, Sequences, Uniform

pytestmark = pytest.mark.contract
KINDS = ("rows", "steps", "windows")


@thinned("name, kind", SAMPLERS, KINDS)
def test_an_epoch_has_each_row_that_can_be_sampled_once(name: str, kind: str, device: str) -> None:
    """Its order is that of keys, or of the next random words, which samples between epochs and copies go on from."""
    pair, keys = lived(kind, SAMPLERS[name], device, seed=3)
    pair.sample(5)
    for rows in (7, 2**20):
        pair.epoch(rows, shuffle=False)
        pair.epoch(rows)
    pair.sample(5)
    pair.renew("state")
    pair.epoch(len(keys))
    pair.sample(5)
    pair.clear()
    pair.epoch(3)


@statistical
def test_every_order_is_equally_likely(device: str) -> None:
    buffer = fill_numbers(4, device)
    orders = Counter(tuple(next(buffer.epoch(4)).key.tolist()) for _ in range(2_400))
    assert len(orders) == 24
    check_counts(orders, dict.fromkeys(orders, 1))


def fill_numbers(rows: int, device: str) -> ReplayBuffer:
    buffer = make(rows, device=device, **NUMBER)
    buffer.add(number=torch.arange(rows, device=device))
    return buffer


WALKS: dict[str, Callable[[ReplayBuffer, int], Iterator[Batch]]] = {
    "epoch": lambda buffer, rows: buffer.epoch(rows),
    "in the order of keys": lambda buffer, rows: buffer.epoch(rows, shuffle=False),
    "batches": lambda buffer, rows: buffer.batches(rows),
}


@pytest.mark.parametrize("walk_of", WALKS.values(), ids=WALKS)
def test_rows_and_order_are_those_of_the_call_and_overwritten_ones_are_left_out(walk_of: Any, device: str) -> None:
    buffer, other = fill_numbers(20, device), fill_numbers(20, device)
    walk, (expected,) = walk_of(buffer, 6), walk_of(other, 20)
    keys = expected.key.tolist()
    # the stream went on when the epoch was asked for
    assert whole_state(buffer) == whole_state(other)
    buffer.sample(3)
    assert next(walk).number.tolist() == keys[:6]
    buffer.add(number=torch.arange(20, 29, device=device))
    left = [key for key in keys[6:] if key >= 9]
    assert [batch.key.tolist() for batch in walk] == [left[at : at + 6] for at in range(0, len(left), 6)]
    walk = walk_of(buffer, 6)
    buffer.clear()
    assert list(walk) == []


def test_a_row_that_lost_its_first_frame_is_left_out_though_its_step_is_stored(device: str) -> None:
    pair = live_through(StepPair(12, 1, stack=3, device=device), 14, end=0.0)
    walk = pair.buffer.epoch(4, shuffle=False)
    before = pair.model.eligible()
    live_through(pair, 2, end=0.0)
    after = [key for key in before if key in pair.model.eligible()]
    assert before[2] == after[0] > pair.model.live().start
    assert [key for batch in walk for key in batch.key.tolist()] == after


def test_an_empty_buffer_says_what_is_missing(device: str) -> None:
    with pytest.raises(RuntimeError, match=r"epoch\(4\): the buffer holds no transitions\. Add more first\."):
        make(9, device=device).epoch(4)
    settings = {"n_step": 2, "sequences": Sequences(5, strict=True), "sampler": Uniform(), "device": device}
    pair = live_through(StepPair(20, 2, **settings), 4, end=0.0)
    before = whole_state(pair.buffer)
    with pytest.raises(RuntimeError, match=r"epoch\(4\): the buffer holds no eligible.*an episode of 5 steps"):
        pair.buffer.epoch(4)
    assert whole_state(pair.buffer) == before


def test_a_reward_function_may_walk_in_the_order_of_keys_but_not_shuffle(device: str) -> None:
    tried: dict[bool, Any] = {}

    def reward_fn(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        for shuffle in (False, True):
            try:
                tried[shuffle] = next(pair.buffer.epoch(3, shuffle=shuffle)).key.tolist()
            except RuntimeError as error:
                tried[shuffle] = str(error)
        return reward_of(achieved, desired)

    relabel = hindsight(reward_fn=reward_fn)
    pair = live_through(StepPair(12, 1, relabel=relabel, fields=GOALS, device=device), scale(9, 5), end=0.0)
    other = copy.deepcopy(pair.buffer)
    drawn = pair.buffer.sample(4).key
    assert tried[False] == [0, 1, 2]
    assert "must not change their buffer" in tried[True]
    # outside of its sample the buffer may shuffle
    assert torch.equal(other.sample(4).key, drawn)
    assert len(tried[True]) == 3
