"""The n-step assembler against a slow oracle that looks at whole streams of steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_replay.training.nstep import NStepAssembler

GAMMA = 0.9


def random_stream(seed: int, steps: int, num_envs: int, chance: float) -> dict[str, Tensor]:
    """Steps of environments in which episodes end often, both ways and now and then both at once."""
    generator = torch.Generator().manual_seed(seed)
    count = (steps, num_envs)
    # every observation has its own number, so that a wrong one is recognised
    obs = torch.arange(steps * num_envs).reshape(*count, 1).repeat(1, 1, 2)
    return {
        "obs": obs,
        "action": torch.randint(0, 5, count, generator=generator),
        "reward": torch.randint(-3, 4, count, generator=generator).float(),
        "next_obs": obs + 1_000_000,
        "terminated": torch.rand(count, generator=generator) < chance,
        "truncated": torch.rand(count, generator=generator) < chance,
    }


def oracle(stream: dict[str, Tensor], start: int, env: int, n_step: int) -> dict[str, object]:
    """The transition from `start`, step by step in Python."""
    reward, power = 0.0, 1.0
    for k in range(n_step):
        now = start + k
        reward += power * float(stream["reward"][now, env])
        power *= GAMMA
        terminated, truncated = bool(stream["terminated"][now, env]), bool(stream["truncated"][now, env])
        if terminated or truncated:
            break
    return {
        "obs": stream["obs"][start, env].tolist(),
        "action": int(stream["action"][start, env]),
        "reward": pytest.approx(reward, abs=1e-5),
        "next_obs": stream["next_obs"][now, env].tolist(),
        "discount": pytest.approx(0.0 if terminated else power, abs=1e-6),
    }


@pytest.mark.parametrize("n_step", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("chance", [0.0, 0.05, 0.4])
def test_every_start_comes_out_once_and_right(n_step: int, chance: float) -> None:
    steps, num_envs = 40, 3
    stream = random_stream(n_step, steps, num_envs, chance)
    assembler = NStepAssembler(n_step, GAMMA)
    start = 0
    for t in range(steps):
        found = assembler.push(**{name: values[t] for name, values in stream.items()})
        if t < n_step - 1:
            assert found is None
            continue
        assert found is not None
        for env in range(num_envs):
            row = {name: values[env].tolist() for name, values in found.items()}
            assert row == oracle(stream, start, env, n_step), f"start {start}, environment {env}"
        start += 1
    assert start == steps - n_step + 1


def test_a_transition_is_not_changed_by_later_steps() -> None:
    stream = random_stream(0, 12, 2, 0.2)
    assembler = NStepAssembler(3, GAMMA)
    kept = []
    for t in range(12):
        found = assembler.push(**{name: values[t] for name, values in stream.items()})
        if found is not None:
            kept.append((found, {name: values.clone() for name, values in found.items()}))
    for found, copy in kept:
        assert all(torch.equal(found[name], copy[name]) for name in copy)


def test_truncation_bootstraps_and_termination_does_not() -> None:
    assembler = NStepAssembler(2, 0.5)
    no, yes = torch.tensor([False, False]), torch.tensor([True, False])
    obs = torch.tensor([[1.0], [1.0]])
    action = torch.tensor([0, 0])
    reward = torch.tensor([1.0, 1.0])
    step = {"obs": obs, "action": action, "reward": reward, "next_obs": obs + 1}
    # environment 0 terminates in its first step, environment 1 is truncated there
    assembler.push(**step, terminated=yes, truncated=~yes)
    found = assembler.push(**step, terminated=no, truncated=no)
    assert found is not None
    assert found["reward"].tolist() == [1.0, 1.0]
    assert found["discount"].tolist() == [0.0, 0.5]
    assert found["next_obs"].tolist() == [[2.0], [2.0]]


def test_a_window_needs_a_step() -> None:
    with pytest.raises(ValueError, match="n_step must be at least 1; found 0"):
        NStepAssembler(0, 0.99)
