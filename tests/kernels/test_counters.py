"""The counters: their names in checkpoints, which stay as they are, and their places, in the kernels as on the host."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from gpu_replay import Field, ReplayBuffer
from gpu_replay.kernels import constants as of_kernels
from gpu_replay.kernels import random as permutation_of_kernels
from gpu_replay.ops import draw as uniform_draw
from gpu_replay.ops.counters import LASTING, NO_KEY, NO_MASS, Counter
from gpu_replay.ops.masses import fanout_for
from gpu_replay.ops.steps import Flag

# what checkpoints of earlier versions hold
SAVED = {"ADDED": 0, "FIRST": 1, "RANDOM": 2, "STEP": 3, "TOP": 4, "STALE": 6, "REJECTED": 7, "SATURATED": 8}
SAVED |= {"FINALS": 14, "FLAWED": 15, "NONFINITE": 16, "TERMINALS": 17, "LOST_TERMINALS": 19}


def test_counters_are_saved_under_the_names_of_earlier_versions() -> None:
    assert LASTING == SAVED
    buffer = ReplayBuffer(3, {"x": Field((), torch.float32)}, device="cpu")
    assert list(buffer.state_dict()["counters"]) == list(SAVED)


def test_every_counter_has_a_place_of_its_own() -> None:
    places = [place for name, place in vars(Counter).items() if name.isupper() and name != "COUNT"]
    assert sorted(places) == list(range(Counter.COUNT))


def constants(space: Any) -> dict[str, int]:
    """Names in capitals and their numbers."""
    values = {name: getattr(value, "value", value) for name, value in vars(space).items() if name.isupper()}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def test_kernels_have_the_same_numbers() -> None:
    host = constants(Counter) | constants(Flag) | {"NO_MASS": NO_MASS, "NO_KEY": NO_KEY}
    fanout = fanout_for("triton")
    host |= {"BASE": uniform_draw.BASE, "FANOUT": fanout, "SHIFT": fanout.bit_length() - 1}
    del host["COUNT"]
    assert constants(of_kernels) == host
    # nothing else may be read by a kernel
    assert all(isinstance(getattr(of_kernels, name), tl.constexpr) for name in host)
    rounds = {name: getattr(uniform_draw, name) for name in ("ROUNDS", "ROUNDS_OF_FEW", "FEW")}
    assert {name: getattr(permutation_of_kernels, name).value for name in rounds} == rounds
