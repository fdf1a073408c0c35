"""Real Atari: stacks rebuilt from single frames equal, byte for byte, those that the ALE vector environment returned.

The buffer sees only the newest plane of each stack. Games are cut short, so that truncations and resets come often;
Breakout also ends by itself within the time that a test has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale, statistical
from trajectory_oracle import History

from gpu_replay import Field, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract

ENVS, SIDE, N_STEP, GAMMA = 3, 42, 3, 0.99
FIELDS = {"obs": Field((SIDE, SIDE), torch.uint8), "action": Field((), torch.int64)}


@dataclass
class Recording:
    """What a vector environment returned, step by step."""

    obs: list[np.ndarray] = field(default_factory=list)
    action: list[np.ndarray] = field(default_factory=list)
    reward: list[np.ndarray] = field(default_factory=list)
    terminated: list[np.ndarray] = field(default_factory=list)
    truncated: list[np.ndarray] = field(default_factory=list)
    final: list[np.ndarray | None] = field(default_factory=list)


def play_atari(game: str, autoreset: str, steps: int, frames: int) -> Recording:
    """So many steps of random actions."""
    vector = pytest.importorskip("ale_py.vector_env", reason="needs ale-py, in the extra `training`")
    mode = {"next_step": vector.AutoresetMode.NEXT_STEP, "same_step": vector.AutoresetMode.SAME_STEP}[autoreset]
    environments = vector.AtariVectorEnv(
        game,
        num_envs=ENVS,
        num_threads=1,
        stack_num=4,
        img_height=SIDE,
        img_width=SIDE,
        max_num_frames_per_episode=frames,
        autoreset_mode=mode,
        noop_max=12,
    )
    generator = np.random.default_rng(0)
    found = Recording()
    obs, _ = environments.reset(seed=3)
    for _ in range(steps):
        action = generator.integers(0, environments.single_action_space.n, ENVS)
        after, reward, terminated, truncated, info = environments.step(action)
        found.obs.append(obs)
        found.action.append(action)
        found.reward.append(reward)
        found.terminated.append(terminated)
        found.truncated.append(truncated)
        found.final.append(info.get("final_obs"))
        obs = after
    environments.close()
    return found


def windows(found: Recording, history: History, keys: list[int]) -> dict[str, Any]:
    """What the batch of these keys must hold, taken from the environment's own stacks."""
    rows: dict[str, list[Any]] = {name: [] for name in ("obs", "next_obs", "reward", "discount", "action")}
    for key in keys:
        start, env = divmod(key, ENVS)
        end, total, discount = start, 0.0, 1.0
        while True:
            total += discount * float(found.reward[end][env])
            discount *= GAMMA
            terminated, truncated = found.terminated[end][env], found.truncated[end][env]
            end += 1
            if terminated or truncated or end == start + N_STEP:
                break
        final = found.final[end - 1]
        seen = truncated and history.autoreset == "same_step" and final is not None
        rows["obs"].append(found.obs[start][env])
        # unspecified after a termination
        rows["next_obs"].append(None if terminated else final[env] if seen else found.obs[end][env])
        rows["reward"].append(np.float32(total))
        rows["discount"].append(0.0 if terminated else discount)
        rows["action"].append(found.action[start][env])
    return rows


def check_stacks(game: str, autoreset: str, steps: int, frames: int, capacity: int, device: str) -> Recording:
    """Play, and compare every eligible row at several places of the ring with what the environment returned."""
    found = play_atari(game, autoreset, steps, frames)
    settings: dict[str, Any] = {"stack": 4, "n_step": N_STEP, "gamma": GAMMA, "padding": "zero", "autoreset": autoreset}
    buffer = TrajectoryReplayBuffer(capacity, ENVS, FIELDS, **settings, sampler=Uniform(), device=device)
    history = History(capacity, ENVS, **settings)
    compared = 0
    for number in range(steps):
        final = found.final[number]
        flags = {"terminated": found.terminated[number], "truncated": found.truncated[number]}
        buffer.add(
            obs=found.obs[number][:, -1],
            action=found.action[number],
            reward=found.reward[number],
            **flags,
            final_obs=None if final is None else final[:, -1],
        )
        ends = {name: value.tolist() for name, value in flags.items()}
        history.add(
            [
                {"obs": number, "reward": 0.0, "final": None if final is None else {"obs": -1}}
                | {name: value[env] for name, value in ends.items()}
                for env in range(ENVS)
            ]
        )
        if number + 1 in (steps // 3, steps * 2 // 3, steps):
            compared += check_rows(buffer, history, found)
    assert compared > scale(capacity, 1)
    return found


def check_rows(buffer: TrajectoryReplayBuffer, history: History, found: Recording) -> int:
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
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_stacks_of_pong_equal_those_of_the_environment(autoreset: str, device: str) -> None:
    found = check_stacks("pong", autoreset, steps=1000, frames=4 * 170, capacity=1201, device=device)
    assert np.sum(found.truncated) >= 5 * ENVS


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_stacks_of_games_that_end_equal_those_of_the_environment(autoreset: str, device: str) -> None:
    steps = scale(400, 60)
    found = check_stacks("breakout", autoreset, steps, frames=4 * scale(150, 20), capacity=402, device=device)
    assert scale(bool(np.any(found.terminated)), True)
    assert np.any(found.truncated)
