"""DQN on Pong with the settings of CleanRL's `dqn_atari`, and with the buffer that it uses or with one of this package.

    python docs/evidence/dqn_atari.py --buffer sb3 --seed 0 --max-seconds 900 --output FILE.csv

It needs this package, stable-baselines3, ale-py and opencv-python-headless. A line of the file is an episode that
ended: seconds since the start, steps of the environment, and its return, unclipped.
"""

from __future__ import annotations

import argparse
import copy
import csv
import time
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation, RecordEpisodeStatistics, ResizeObservation
from stable_baselines3.common import atari_wrappers, buffers
from torch import Tensor, nn

from gpu_replay import Field, LinearSchedule, Proportional, TrajectoryReplayBuffer, Uniform

TOTAL, STARTS, TRAIN_EVERY, TARGET_EVERY, BATCH, GAMMA = 10_000_000, 80_000, 4, 1_000, 32, 0.99
SIDE, STACK = 84, 4


def make_env() -> gymnasium.Env[Any, Any]:
    """Pong with the usual wrappers: up to 30 no-ops, frame skip, lives as episodes, clipped rewards, stacks of four."""
    gymnasium.register_envs(ale_py)
    env: Any = RecordEpisodeStatistics(gymnasium.make("PongNoFrameskip-v4"))
    env = atari_wrappers.MaxAndSkipEnv(atari_wrappers.NoopResetEnv(env, noop_max=30), skip=4)
    env = atari_wrappers.ClipRewardEnv(atari_wrappers.FireResetEnv(atari_wrappers.EpisodicLifeEnv(env)))
    return FrameStackObservation(GrayscaleObservation(ResizeObservation(env, (SIDE, SIDE))), STACK)


def make_network(actions: int) -> nn.Module:
    """The network of Mnih et al. 2015."""
    convolutions = [nn.Conv2d(STACK, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3)]
    return nn.Sequential(
        *convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions)
    )


class OfStableBaselines3:
    """Its uniform buffer, which stores stacks, and `next_obs` as the following row."""

    def __init__(self, capacity: int, env: Any, seed: int) -> None:
        spaces = env.observation_space, env.action_space
        more: dict[str, Any] = {"optimize_memory_usage": True, "handle_timeout_termination": False}
        self._buffer = buffers.ReplayBuffer(capacity, *spaces, "cpu", **more)

    def add(self, obs: Any, after: Any, action: int, reward: float, terminated: bool, truncated: bool) -> None:
        """Store a step."""
        self._buffer.add(obs, after, np.array([action]), np.array([reward]), np.array([terminated]), [{}])

    def sample(self) -> tuple[Tensor, ...]:
        """Stacks, actions, rewards, following stacks, discounts, weights."""
        drawn = self._buffer.sample(BATCH)
        going = GAMMA * (1 - drawn.dones[:, 0])
        rewards, actions = drawn.rewards[:, 0], drawn.actions[:, 0]
        return drawn.observations, actions, rewards, drawn.next_observations, going, torch.ones(BATCH)

    def update(self, errors: Tensor) -> None:
        """It has no priorities."""


class OfThisPackage:
    """Single frames, of which the buffer makes stacks; uniform, or by priority."""

    def __init__(self, capacity: int, env: Any, seed: int, prioritized: bool) -> None:
        fields = {"obs": Field((SIDE, SIDE), torch.uint8), "action": Field((), torch.int64)}
        beta = LinearSchedule(0.4, 1.0, TOTAL // TRAIN_EVERY)
        sampler = Proportional(alpha=0.6, beta=beta) if prioritized else Uniform(replacement=True)
        self._buffer = TrajectoryReplayBuffer(
            capacity, 1, fields, stack=STACK, autoreset="same_step", sampler=sampler, device="cpu", seed=seed
        )

    def add(self, obs: Any, after: Any, action: int, reward: float, terminated: bool, truncated: bool) -> None:
        """Store a step."""
        ended = {"terminated": [terminated], "truncated": [truncated]}
        final = np.asarray(after)[-1:] if terminated or truncated else None
        self._buffer.add(obs=np.asarray(obs)[-1:], action=[action], reward=[reward], final_obs=final, **ended)

    def sample(self) -> tuple[Tensor, ...]:
        """Stacks, actions, rewards, following stacks, discounts, weights."""
        batch = self._buffer.sample(BATCH)
        self._key = batch.key
        return batch.obs, batch.action, batch.reward, batch.next_obs, batch.discount, batch.weight

    def update(self, errors: Tensor) -> None:
        """New priorities for what was sampled last."""
        self._buffer.update_priorities(self._key, errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffer", choices=("sb3", "uniform", "prioritized"), required=True)
    parser.add_argument("--capacity", type=int, default=1_000_000, help="28 GB with sb3, 7 GB with the others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=900)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    random, env = np.random.default_rng(options.seed), make_env()
    actions = int(env.action_space.n)  # type: ignore[attr-defined]
    online = make_network(actions)
    target, optimizer = copy.deepcopy(online), torch.optim.Adam(online.parameters(), lr=1e-4)
    buffer: Any
    if options.buffer == "sb3":
        buffer = OfStableBaselines3(options.capacity, env, options.seed)
    else:
        buffer = OfThisPackage(options.capacity, env, options.seed, options.buffer == "prioritized")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    obs, _ = env.reset(seed=options.seed)
    start = time.monotonic()
    with options.output.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["seconds", "step", "return"])
        for step in range(TOTAL):
            epsilon = max(0.01, 1.0 - 0.99 * step / (0.1 * TOTAL))
            if random.random() < epsilon:
                action = int(random.integers(actions))
            else:
                with torch.no_grad():
                    action = int(online(torch.from_numpy(np.asarray(obs))[None] / 255).argmax())
            after, reward, terminated, truncated, info = env.step(action)
            buffer.add(obs, after, action, float(reward), terminated, truncated)
            if "episode" in info:
                rows.writerow([f"{time.monotonic() - start:.1f}", step + 1, float(info["episode"]["r"])])
                file.flush()
            obs = env.reset()[0] if terminated or truncated else after
            if step > STARTS and step % TRAIN_EVERY == 0:
                learn(online, target, optimizer, buffer)
            if step % TARGET_EVERY == 0:
                target.load_state_dict(online.state_dict())
            if time.monotonic() - start > options.max_seconds:
                break
    print(f"{step + 1:,} steps in {time.monotonic() - start:.0f} s")


def learn(online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, buffer: Any) -> None:
    """One update on a batch."""
    obs, action, reward, after, discount, weight = buffer.sample()
    with torch.no_grad():
        wanted = reward + discount * target(after / 255).max(1).values
    errors = wanted - online(obs / 255).gather(1, action[:, None])[:, 0]
    optimizer.zero_grad()
    (weight * errors.square()).mean().backward()
    optimizer.step()
    buffer.update(errors.detach())


if __name__ == "__main__":
    main()
