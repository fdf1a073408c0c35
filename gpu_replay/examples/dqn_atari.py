"""DQN on an Atari game with prioritized 3-step replay; each frame is stored once, and sampling assembles the stacks.

    python -m gpu_replay.examples.dqn_atari --game pong --total-timesteps 10000000

Mnih et al. 2015; double Q-learning of van Hasselt et al. 2016; Schaul et al. 2016; 3-step returns as in Hessel et al.
2018. `gpu-replay train pong` is the tuned program; this one is meant to be read and changed.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import deque

import numpy as np
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

from gpu_replay import Field, LinearSchedule, Proportional, TrajectoryReplayBuffer

STACK, SIDE = 4, 84


class Network(nn.Module):
    """The network of Mnih et al. 2015, for stacks of uint8 frames."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(STACK, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
            nn.Linear(512, actions),
        )

    def forward(self, stacks: Tensor) -> Tensor:
        values: Tensor = self.layers(stacks.float() / 255)
        return values


def update(
    online: Network, target: Network, optimizer: torch.optim.Adam, buffer: TrajectoryReplayBuffer, batch_size: int
) -> Tensor:
    """One step of double DQN; returns the loss as a tensor, without waiting for the device."""
    batch = buffer.sample(batch_size)
    with torch.no_grad():
        best = online(batch.next_obs).argmax(1, keepdim=True)
        # the discount is gamma to the power of the number of steps, or 0 if the episode terminated
        wanted = batch.reward + batch.discount * target(batch.next_obs).gather(1, best)[:, 0]
    error = wanted - online(batch.obs).gather(1, batch.action[:, None])[:, 0]
    loss = (batch.weight * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    buffer.update_priorities(batch.key, error.detach())
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="pong")
    parser.add_argument("--total-timesteps", type=int, default=10_000_000)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=1_000_000, help="7 GB for a million steps")
    parser.add_argument("--learning-starts", type=int, default=20_000)
    parser.add_argument("--train-every", type=int, default=4, help="steps of all environments together for each update")
    parser.add_argument("--target-every", type=int, default=2_000, help="updates")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--log-every", type=int, default=10_000, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, count, total = arguments.device, arguments.num_envs, arguments.total_timesteps
    torch.manual_seed(arguments.seed)
    generator = np.random.default_rng(arguments.seed)

    # the emulators return single frames; this program stacks them for acting, and the buffer stacks them for learning
    env = AtariVectorEnv(
        arguments.game,
        num_envs=count,
        stack_num=1,
        img_height=SIDE,
        img_width=SIDE,
        reward_clipping=True,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    actions = int(env.single_action_space.n)  # type: ignore[attr-defined]
    online = Network(actions).to(device)
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=arguments.learning_rate, eps=1.5e-4)
    buffer = TrajectoryReplayBuffer(
        arguments.capacity,
        count,
        {"obs": Field((SIDE, SIDE), torch.uint8), "action": Field((), torch.int64)},
        stack=STACK,
        n_step=3,
        gamma=arguments.gamma,
        autoreset="same_step",
        sampler=Proportional(alpha=0.5, beta=LinearSchedule(0.4, 1.0, total // arguments.train_every)),
        device=device,
        seed=arguments.seed,
    )

    start, logged, updates = time.perf_counter(), 0, 0
    losses = deque([torch.zeros((), device=device)], maxlen=1_000)
    scores: np.ndarray = np.zeros(count)
    returns: deque[float] = deque(maxlen=30)
    frames, _ = env.reset(seed=arguments.seed)
    stacks = np.repeat(frames, STACK, axis=1)
    for step in range(0, total, count):
        epsilon = max(0.01, 1.0 - step / (0.1 * total))
        with torch.no_grad():
            action = online(torch.from_numpy(stacks).to(device)).argmax(1).cpu().numpy()
        explored = generator.random(count) < epsilon
        action[explored] = generator.integers(0, actions, explored.sum())
        after, reward, terminated, truncated, info = env.step(action)
        ended = terminated | truncated
        final = info["final_obs"][:, -1] if ended.any() else None
        buffer.add(
            obs=stacks[:, -1],
            action=action,
            reward=np.asarray(reward, np.float32),
            terminated=terminated,
            truncated=truncated,
            final_obs=final,
        )
        stacks = np.concatenate([stacks[:, 1:], after], axis=1)
        # a new episode begins with its first frame repeated, as in the buffer
        stacks[ended] = np.repeat(after[ended], STACK, axis=1)
        scores += reward
        returns += scores[ended].tolist()
        scores[ended] = 0.0

        if step >= arguments.learning_starts:
            while updates * arguments.train_every < step - arguments.learning_starts + count:
                losses.append(update(online, target, optimizer, buffer, arguments.batch_size))
                updates += 1
                if updates % arguments.target_every == 0:
                    target.load_state_dict(online.state_dict())
        if step + count >= logged + arguments.log_every:
            logged = step + count
            played = f"mean return of {len(returns)} episodes {np.mean(returns):.1f}, " if returns else ""
            seconds = time.perf_counter() - start
            loss = torch.stack([*losses]).mean().item()
            done = f"{logged:,} steps, {updates:,} updates, {seconds:.0f} s"
            print(f"{done}: {played}loss {loss:.4f}, epsilon {epsilon:.2f}", flush=True)
    env.close()


if __name__ == "__main__":
    main()
