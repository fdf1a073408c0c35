"""A step whose `add` a signal interrupts is stored whole or not at all, also where it ends an episode."""

from __future__ import annotations

import random
import signal
from types import FrameType

import numpy as np
import pytest
import torch
from devices import host_only

from gpu_replay import Field, Proportional, TrajectoryReplayBuffer
from gpu_replay.loops.compiling import compiler

# as Python a loop can be interrupted anywhere
pytestmark = [
    pytest.mark.contract,
    host_only,
    pytest.mark.skipif(compiler() is None, reason="loops run as Python here"),
]
ENVS, STEPS = 2, 9
FIELDS = {
    "obs": Field((2, 2), torch.float32),
    "action": Field((), torch.int64),
    "large": Field((20_000,), torch.float32),
}


class Interrupt(Exception):
    """What the signal raises."""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupt


def add(buffer: TrajectoryReplayBuffer, number: int) -> None:
    """Add a step in which every field holds its number; each third ends an episode."""
    value = np.full((ENVS, 2, 2), number, np.float32)
    buffer.add(
        obs=value,
        action=np.full(ENVS, number),
        large=np.full((ENVS, 20_000), number, np.float32),
        reward=np.full(ENVS, number, np.float32),
        terminated=np.array([number % 3 == 0, False]),
        truncated=np.full(ENVS, number % 3 == 1),
        final_obs=value,
        priority=np.array([number % 7 + 1.0, 2.0]),
    )


def test_an_interrupted_ending_tears_no_row() -> None:
    draw, interrupts = random.Random(5), 0
    settings = {"n_step": 2, "stack": 2, "autoreset": "same_step", "final_capacity": 2}
    buffer = TrajectoryReplayBuffer(ENVS * STEPS, ENVS, FIELDS, sampler=Proportional(), device="cpu", **settings)
    for number in range(3 * STEPS):
        add(buffer, number)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(600):
            added = buffer.added
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-5, 4e-4))
                add(buffer, added // ENVS)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupts += 1
            assert buffer.added in (added, added + ENVS)
            rows = next(iter(buffer.batches(ENVS * STEPS)))
            steps = rows.key // ENVS
            for name in ("obs", "action", "large", "reward"):
                wrong = (rows[name].reshape(len(steps), -1) != steps[:, None]).any(1)
                assert not wrong.any(), f"after {interrupts} interrupts {name} of keys {rows.key[wrong].tolist()}"
            assert buffer._state.masses.total() == int(buffer._state.masses.masses.sum())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 100
