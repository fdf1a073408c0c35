"""A buffer whose counters stand near 2^31, 2^32 or 2^40 draws as one at the beginning does, in loops and kernels.

The keys of both differ by a multiple of everything that keys are counted round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import thinned
from transitions import SAMPLERS

from gpu_replay import Field, Hindsight, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.ops.counters import Counter

ENVS, STEPS, N_STEP, ROWS = 2, 7, 2, 5
# steps of the ring and lines of pending masses
ROUND = ENVS * STEPS * (N_STEP + 1)
POWERS = [31, 32, 40]
CODE = pytest.mark.parametrize("code", ["host", pytest.param("kernels", marks=pytest.mark.slow)])


def use(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new buffers on the CPU run this code."""
    monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton" if code == "kernels" else "host")
    if code == "kernels":
        pytest.importorskip("triton")


def start_at(buffer: Any, key: int, depth: int | None = None) -> None:
    """Let the first transition have this key, and the first step continue an episode: by default since key 0."""
    buffer._counters[Counter.ADDED] = buffer._counters[Counter.FIRST] = key
    if isinstance(buffer, TrajectoryReplayBuffer):
        buffer._streams.streams.depth.fill_(min(key // ENVS - 1, 2**31 - 1 - N_STEP) if depth is None else depth)
    buffer._rebuild(buffer.seed)


def compare(both: list[Any], offset: int, call: str, *given: Any, **named: Any) -> torch.Tensor:
    """Fail unless both draw the same; returns the keys of the later one less the offset."""
    early, late = (getattr(each, call)(*given, **named) for each in both)
    assert torch.equal(early.key + offset, late.key)
    for name, value in early.items():
        assert name == "key" or torch.equal(value, late[name]), name
    return early.key


@thinned("name, power", SAMPLERS, POWERS, times=2)
@CODE
def test_transitions_near_the_ends_of_numbers(
    code: str, name: str, power: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(code, monkeypatch)
    fields = {"x": Field((), torch.int64), "y": Field((3,), torch.float32)}
    both = [ReplayBuffer(ROWS, fields, sampler=SAMPLERS[name], device="cpu", seed=1) for _ in range(2)]
    late = 2**power - 7
    offset = late - late % ROWS - ROWS
    for buffer, key in zip(both, (late - offset, late), strict=True):
        start_at(buffer, key)
    for turn in range(5):
        rows = 3 + turn % 2
        x = torch.arange(rows) + 10 * turn
        priority = x.float() if turn % 2 else None
        keys = [each.add(x=x, y=x[:, None] + torch.zeros(3), priority=priority) for each in both]
        assert torch.equal(keys[0] + offset, keys[1])
        drawn = compare(both, offset, "sample", 3)
        assert torch.equal(both[1][drawn + offset].x, both[0][drawn].x)
        for each, more in zip(both, (0, offset), strict=True):
            each.update_priorities(drawn + more - torch.tensor([0, 0, 4]), torch.tensor([0.5, 4.0, 2.0]))
        if turn == 2:
            for each in both:
                each.clear()
    assert both[1].added == both[0].added + offset > 2**power
    assert both[0].stats().stale_updates == both[1].stats().stale_updates
    assert both[0].keys().tolist() == [key - offset for key in both[1].keys().tolist()]


def rewards(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return (achieved - desired).sum(1)


SETTINGS: dict[str, Any] = {
    "next_step": {"n_step": N_STEP},
    "same_step": {"n_step": N_STEP, "autoreset": "same_step", "padding": "zero"},
    "hindsight": {"relabel": Hindsight("a", "d", reward_fn=rewards), "autoreset": "same_step"},
}


@thinned("name, power, mode", SAMPLERS, POWERS, SETTINGS, times=2)
@CODE
def test_steps_near_the_ends_of_numbers(
    code: str, name: str, power: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(code, monkeypatch)
    goal, settings = Field((2,), torch.float32), {"stack": 3, **SETTINGS[mode]}
    fields = {"obs.a": goal, "obs.d": goal, "action": Field((), torch.int64)}
    both = [
        TrajectoryReplayBuffer(ENVS * STEPS, ENVS, fields, sampler=SAMPLERS[name], device="cpu", **settings)
        for _ in range(2)
    ]
    # the power is that of steps of one environment
    late = (2**power - 9) * ENVS
    offset = late - late % ROUND - 2 * ROUND
    for buffer, key in zip(both, (late - offset, late), strict=True):
        # how many steps of an episode are left is not known of one longer than a number
        start_at(buffer, key, 20 if mode == "hindsight" else None)
    kinds, generator = "........T..U.....", np.random.default_rng(0)
    for turn, kind in enumerate(kinds):
        obs = generator.random((ENVS, 2)).astype(np.float32)
        step: dict[str, Any] = {"obs.a": obs, "obs.d": -obs, "action": np.full(ENVS, turn)}
        step["reward"] = generator.random(ENVS).astype(np.float32)
        step |= {"terminated": np.full(ENVS, kind == "T"), "truncated": np.array([kind == "U", False])}
        step |= {"final_obs.a": obs + 1, "final_obs.d": -obs} if kind in "TU" and mode != "next_step" else {}
        step |= {"priority": np.array([turn + 1.0, 2.0])} if turn % 3 == 0 else {}
        keys = [each.add(**step) for each in both]
        assert torch.equal(keys[0] + offset, keys[1])
        if turn == 5:
            for each in both:
                each.clear()
        if turn in (4, 10, 14, 16):
            drawn = compare(both, offset, "sample", 2)
            for each, more in zip(both, (0, offset), strict=True):
                each.update_priorities(drawn + more, torch.tensor([0.5, 4.0]))
    if mode != "hindsight":
        compare(both, offset, "sample_sequences", 2, 3)
    assert both[1].added == both[0].added + offset > 2**power * ENVS
    assert both[0].stats().eligible == both[1].stats().eligible > 0


@CODE
def test_an_episode_longer_than_a_number_stays_eligible(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(code, monkeypatch)
    fields = {"obs": Field((), torch.float32), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(ENVS * STEPS, ENVS, fields, stack=2, n_step=N_STEP, device="cpu")
    start_at(buffer, 2**31 * ENVS - 4 * ENVS)
    flags = {"terminated": np.zeros(ENVS, bool), "truncated": np.zeros(ENVS, bool)}
    for turn in range(2 * STEPS):
        row = np.full(ENVS, turn, np.float32)
        buffer.add(obs=row, action=np.full(ENVS, turn), reward=row, **flags)
        # an ending of the other environment is no matter of this one
        flags["terminated"][1] = turn == STEPS
    # but for the steps without the observation after them, those without the frame before, and the ending's own
    assert buffer.stats().eligible >= ENVS * (STEPS - N_STEP - 1) - 1
    assert int(buffer._streams.streams.depth.max()) == 2**31 - 1 - N_STEP
    batch = buffer.sample(4)
    old = batch.key % ENVS == 0
    assert torch.equal(batch.obs[old, 1], batch.obs[old, 0] + 1)
