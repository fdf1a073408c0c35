"""Real Atari: stacks rebuilt from single frames equal, byte for byte, those that the ALE vector environment returned.

The buffer sees only the newest plane of each stack. Games are cut short, so that truncations and resets come often;
Breakout also ends by itself within the time that a test has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale, statistical
from model import StepModel

from gpu_replay import Field, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract

ENVS, SIDE, N_STEP, GAMMA = 3, 42, 3, 0.99
FIELDS = {"obs": Field((SIDE, SIDE), torch.uint8), "action": Field((), torch.int64)}


@dataclass
class Step:
    """What a vector environment returned in one step, and the observation and the actions before it."""

    obs: np.ndarray
    action: np.ndarray
    after: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final: np.ndarray | None


def play_atari(game: str, autoreset: str, steps: int, frames: int) -> list[Step]:
    """So many steps of random actions."""
    vector = pytest.importorskip("ale_py.vector_env", reason="needs ale-py, in the extra `training`")
    mode = {"next_step": vector.AutoresetMode.NEXT_STEP, "same_step": vector.AutoresetMode.SAME_STEP}[autoreset]
    sizes = {"num_envs": ENVS, "num_threads": 1, "stack_num": 4, "img_height": SIDE, "img_width": SIDE}
    environments = vector.AtariVectorEnv(
        game, **sizes, max_num_frames_per_episode=frames, autoreset_mode=mode, noop_max=12
    )
    generator = np.random.default_rng(0)
    found: list[Step] = []
    obs, _ = environments.reset(seed=3)
    for _ in range(steps):
        action = generator.integers(0, environments.single_action_space.n, ENVS)
        *result, info = environments.step(action)
        found.append(Step(obs, action, *result, info.get("final_obs")))
        obs = found[-1].after
    environments.close()
    return found


def windows(found: list[Step], history: StepModel, keys: list[int]) -> dict[str, list[Any]]:
    """What the batch of these keys must hold, taken from the environment's own stacks."""
    rows: dict[str, list[Any]] = {name: [] for name in ("obs", "next_obs", "reward", "discount", "action")}
    for key in keys:
        start, env = divmod(key, ENVS)
        total, discount = 0.0, 1.0
        for step in found[start : start + N_STEP]:
            total += discount * float(step.reward[env])
            discount *= GAMMA
            if step.terminated[env] or step.truncated[env]:
                break
        seen = step.truncated[env] and history.autoreset == "same_step" and step.final is not None
        # unspecified after a termination
        after = None if step.terminated[env] else step.final[env] if seen else step.after[env]
        values = (found[start].obs[env], after, np.float32(total), 0.0 if step.terminated[env] else discount)
        for name, value in zip(rows, (*values, found[start].action[env]), strict=True):
            rows[name].append(value)
    return rows


def check_stacks(game: str, autoreset: str, steps: int, frames: int, capacity: int, device: str) -> list[Step]:
    """Play, and compare every eligible row at several places of the ring with what the environment returned."""
    found = play_atari(game, autoreset, steps, frames)
    settings: dict[str, Any] = {"stack": 4, "n_step": N_STEP, "gamma": GAMMA, "padding": "zero", "autoreset": autoreset}
    buffer = TrajectoryReplayBuffer(capacity, ENVS, FIELDS, **settings, sampler=Uniform(), device=device)
    history = StepModel(capacity, ENVS, **settings)
    compared = 0
    for number, step in enumerate(found, 1):
        final = None if step.final is None else step.final[:, -1]
        flags = {"terminated": step.terminated, "truncated": step.truncated}
        buffer.add(obs=step.obs[:, -1], action=step.action, reward=step.reward, **flags, final_obs=final)
        known = {"obs": number, "reward": 0.0, "final": None if final is None else {"obs": -1}}
        history.add([known | {name: value.tolist()[env] for name, value in flags.items()} for env in range(ENVS)])
        if number in (steps // 3, steps * 2 // 3, steps):
            compared += check_rows(buffer, history, found)
    assert compared > scale(capacity, 1)
    return found


def check_rows(buffer: TrajectoryReplayBuffer, history: StepModel, found: list[Step]) -> int:
    """Every eligible row, in pieces; returns their number."""
    eligible = history.view().eligible()
    assert buffer.stats().eligible == len(eligible)
    for first in range(0, len(eligible), 512):
        keys = eligible[first : first + 512]
        batch, rows = buffer[keys], windows(found, history, keys)
        assert np.array_equal(batch.obs.cpu().numpy(), np.stack(rows["obs"]))
        after = [(one, two) for one, two in zip(batch.next_obs.cpu().numpy(), rows["next_obs"], strict=True)]
        assert all(two is None or np.array_equal(one, two) for one, two in after)
        assert batch.action.tolist() == rows["action"]
        assert batch.reward.tolist() == rows["reward"]
        assert np.allclose(batch.discount.cpu().numpy(), rows["discount"], rtol=1e-6, atol=0)
    drawn = buffer.sample(min(64, len(eligible)))
    assert np.array_equal(drawn.obs.cpu().numpy(), np.stack(windows(found, history, drawn.key.tolist())["obs"]))
    return len(eligible)


@statistical
@pytest.mark.parametrize("autoreset", ["next_step", pytest.param("same_step", marks=pytest.mark.slow)])
def test_stacks_of_pong_equal_those_of_the_environment(autoreset: str, device: str) -> None:
    found = check_stacks("pong", autoreset, steps=1000, frames=4 * 170, capacity=1201, device=device)
    assert sum(step.truncated.sum() for step in found) >= 5 * ENVS


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_stacks_of_games_that_end_equal_those_of_the_environment(autoreset: str, device: str) -> None:
    steps = scale(400, 60)
    found = check_stacks("breakout", autoreset, steps, frames=4 * scale(150, 20), capacity=402, device=device)
    assert scale(any(step.terminated.any() for step in found), True)
    assert any(step.truncated.any() for step in found)
