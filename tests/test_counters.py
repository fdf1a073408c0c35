"""The counters: their names in checkpoints, which stay as they are, and their places."""

from __future__ import annotations

import torch

from gpu_replay import Field, ReplayBuffer
from gpu_replay.ops.counters import LASTING, Counter

# what checkpoints of earlier versions hold
SAVED = {
    "ADDED": 0,
    "FIRST": 1,
    "RANDOM": 2,
    "STEP": 3,
    "TOP": 4,
    "STALE": 6,
    "REJECTED": 7,
    "SATURATED": 8,
    "FINALS": 14,
    "RANKED": 15,
    "SORTED": 16,
}


def test_counters_are_saved_under_the_names_of_earlier_versions() -> None:
    assert LASTING == SAVED
    buffer = ReplayBuffer(3, {"x": Field((), torch.float32)}, device="cpu")
    assert list(buffer.state_dict()["counters"]) == list(SAVED)


def test_every_counter_has_a_place_of_its_own() -> None:
    places = [place for name, place in vars(Counter).items() if name.isupper() and name != "COUNT"]
    assert sorted(places) == list(range(Counter.COUNT))
