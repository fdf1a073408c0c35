"""Memory: each observation is stored once, and everything else of an Atari transition fits 80 bytes.

Bytes are those that the buffer says it allocates; test_memory.py holds such sums against the process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import host_only, scale
from trajectory_pair import FIELDS, Pair, live_through

from gpu_replay import Combined, Field, Latest, Proportional, ReplayBuffer, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract

FRAME = 84 * 84
ATARI = {"obs": Field((84, 84), torch.uint8), "action": Field((), torch.int64)}
BESIDE = 80
SAMPLERS = [
    Proportional(),
    Proportional(initial="stored", normalize="buffer"),
    Uniform(),
    Latest(),
    Combined(Uniform()),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("capacity, num_envs", [(100_000, 64), (100_000, 1)])
def test_an_atari_transition_takes_a_frame_and_80_bytes(
    capacity: int, num_envs: int, autoreset: str, sampler: Any, device: str
) -> None:
    # the pages of what is never written are never there
    buffer = TrajectoryReplayBuffer(
        capacity, num_envs, ATARI, stack=4, n_step=3, autoreset=autoreset, sampler=sampler, device=device
    )
    assert FRAME <= buffer.nbytes / buffer.capacity <= FRAME + BESIDE


@host_only
@pytest.mark.parametrize("stack, n_step", [(1, 1), (8, 8), (16, 20)])
def test_deeper_stacks_and_longer_windows_take_no_more(stack: int, n_step: int) -> None:
    sizes = {
        depth: TrajectoryReplayBuffer(100_000, 8, ATARI, stack=depth[0], n_step=depth[1], device="cpu").nbytes
        for depth in ((1, 1), (stack, n_step))
    }
    assert abs(sizes[stack, n_step] - sizes[1, 1]) <= 100_000


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_one_million_atari_transitions_take_seven_gigabytes_not_fifty(autoreset: str) -> None:
    transition = {name: Field((4, 84, 84), torch.uint8) for name in ("obs", "next_obs")} | {"action": ATARI["action"]}
    try:
        buffer = TrajectoryReplayBuffer(
            1_000_000, 64, ATARI, stack=4, autoreset=autoreset, sampler=Proportional(), device="cpu"
        )
    except MemoryError:
        pytest.skip("needs 7.1 GB of memory to be free, though it uses none of it")
    assert buffer.nbytes <= 7_140_000_000
    small = ReplayBuffer(1000, transition, sampler=Proportional(), device="cpu")
    assert small.nbytes / 1000 > 7 * buffer.nbytes / buffer.capacity


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("sampler", scale([Uniform(), Proportional(), Latest()], [Proportional()]), ids=repr)
def test_nothing_grows_with_use(sampler: Any, autoreset: str, device: str) -> None:
    pair = Pair(61, 3, sampler=sampler, device=device, stack=3, n_step=2, autoreset=autoreset)
    before = pair.buffer.nbytes
    assert before >= 61 // 3 * 3 * sum(kind.row_bytes for kind in FIELDS.values())
    live_through(pair, 50, end=0.3, final=1.0)
    pair.buffer.sample(5)
    pair.buffer.sample_sequences(2, 2)
    assert pair.buffer.nbytes == before


def test_final_observations_take_what_they_are_given(device: str) -> None:
    none, few, all_of_them = (
        TrajectoryReplayBuffer(1000, 4, ATARI, autoreset="same_step", final_capacity=rows, device=device).nbytes
        for rows in (0, 10, 1000)
    )
    assert 9 * FRAME <= few - none <= 11 * FRAME
    assert 989 * FRAME <= all_of_them - few <= 1001 * FRAME
