"""A buffer whose counters stand near 2^31, 2^32 or 2^40 draws as one at the beginning does, in loops and kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import thinned
from programs import SAMPLERS
from shifted_buffers import ACTION, GOALS, RELABEL, SMALL_STEPS, Shifted, play_rows, play_steps

from gpu_replay import Field, TrajectoryReplayBuffer
from gpu_replay.ops.counters import Counter

POWERS = [31, 32, 40]
CODE = pytest.mark.parametrize("backend", ["host", pytest.param("triton", marks=pytest.mark.slow)])
OBS = {"obs": Field((2,), torch.float32), **ACTION}
WINDOWS = {"stack": 3, "n_step": 3}
MODES = {
    "next_step": (OBS, {"autoreset": "next_step", **WINDOWS}),
    "same_step": (OBS, {"autoreset": "same_step", "padding": "zero", **WINDOWS}),
    "goals": (GOALS | ACTION, RELABEL),
}


@thinned("name, power", SAMPLERS, POWERS, times=2)
@CODE
def test_transitions_near_the_ends_of_numbers(backend: str, name: str, power: int) -> None:
    fields = {"x": Field((), torch.int64), "y": Field((3,), torch.float32)}
    twins = play_rows(Shifted(fields, SAMPLERS[name], 7, 0, 7, late=2**power - 4, backend=backend))
    assert twins.tested.added > 2**power
    assert twins.host.stats().stale_updates == twins.tested.stats().stale_updates > 0


@thinned("name, power, mode", SAMPLERS, POWERS, MODES, times=2)
@CODE
def test_steps_near_the_ends_of_numbers(backend: str, name: str, power: int, mode: str) -> None:
    fields, settings = MODES[mode]
    slots, late = 2 * SMALL_STEPS, 2 * 2**power - 2 * 4
    twins = play_steps(Shifted(fields, SAMPLERS[name], slots, 0, slots, 2, settings, late, backend))
    assert twins.tested.added > 2**power * 2
    assert twins.host.stats().eligible == twins.tested.stats().eligible > 0


@CODE
def test_an_episode_longer_than_a_number_stays_eligible(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_REPLAY_BACKEND", backend)
    buffer = TrajectoryReplayBuffer(14, 2, {"obs": Field((), torch.float32), **ACTION}, stack=2, n_step=2, device="cpu")
    buffer._counters[Counter.ADDED] = buffer._counters[Counter.FIRST] = 2 * (2**31 - 4)
    # since key 0
    buffer._streams.streams.depth.fill_(2**31 - 5)
    buffer._rebuild(0)
    flags = {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
    for turn in range(14):
        row = np.full(2, turn, np.float32)
        buffer.add(obs=row, action=np.full(2, turn), reward=row, **flags)
        # an ending of the other environment is no matter of this one
        flags["terminated"][1] = turn == 7
    # but for the steps without the observation after them, those without the frame before, and the ending's own
    assert buffer.stats().eligible >= 7
    assert int(buffer._streams.streams.depth.max()) == 2**31 - 1 - 2
    batch = buffer.sample(4)
    old = batch.key % 2 == 0
    assert torch.equal(batch.obs[old, 1], batch.obs[old, 0] + 1)
