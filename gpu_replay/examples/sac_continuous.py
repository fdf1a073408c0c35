"""Soft actor-critic with prioritized replay, on Pendulum-v1 or another task with vectors and continuous actions.

    python -m gpu_replay.examples.sac_continuous --env-id Pendulum-v1 --total-timesteps 8000

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications"; Schaul et al. 2016, "Prioritized Experience
Replay".
"""

from __future__ import annotations

import argparse
import copy
import time

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from gpu_replay import LinearSchedule, Proportional, ReplayBuffer


class Actor(nn.Module):
    """A Gaussian policy, squashed by tanh into the range of the actions."""

    def __init__(self, inputs: int, outputs: int, low: np.ndarray, high: np.ndarray) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.mean, self.log_std = nn.Linear(256, outputs), nn.Linear(256, outputs)
        self.scale: Tensor
        self.offset: Tensor
        self.register_buffer("scale", torch.tensor((high - low) / 2, dtype=torch.float32))
        self.register_buffer("offset", torch.tensor((high + low) / 2, dtype=torch.float32))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A sampled action (B, A), its log-probability (B,), and the action of the mean (B, A)."""
        hidden = self.body(obs)
        mean, log_std = self.mean(hidden), self.log_std(hidden).clamp(-5, 2)
        normal = torch.distributions.Normal(mean, log_std.exp())
        raw = normal.rsample()
        # log(1 - tanh(x)^2), which does not overflow
        log_slope = 2 * (np.log(2.0) - raw - nn.functional.softplus(-2 * raw))
        log_prob = (normal.log_prob(raw) - log_slope - self.scale.log()).sum(1)
        return raw.tanh() * self.scale + self.offset, log_prob, mean.tanh() * self.scale + self.offset


class Critics(nn.Module):
    """Two action values."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.values = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
            for _ in range(2)
        )

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """(2, B)"""
        both = torch.cat([obs, action], 1)
        return torch.stack([value(both)[:, 0] for value in self.values])


def evaluated(env_id: str, actor: Actor, episodes: int, seed: int, device: str) -> float:
    """The mean return of the actions of the mean, over fresh episodes."""
    total = 0.0
    with gymnasium.make(env_id) as env:
        for episode in range(episodes):
            obs, _ = env.reset(seed=seed + episode)
            ended = False
            while not ended:
                with torch.no_grad():
                    action = actor(torch.as_tensor(obs, dtype=torch.float32, device=device)[None])[2][0].cpu().numpy()
                obs, reward, terminated, truncated, _ = env.step(action)
                total += float(reward)
                ended = terminated or truncated
    return total / episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", default="Pendulum-v1")
    parser.add_argument("--total-timesteps", type=int, default=8_000)
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--learning-starts", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--tau", type=float, default=0.005)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    device, gamma = arguments.device, arguments.gamma

    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    env = gymnasium.make_vec(
        arguments.env_id, arguments.num_envs, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    space, actions = env.single_observation_space, env.single_action_space
    if not isinstance(space, gymnasium.spaces.Box) or not isinstance(actions, gymnasium.spaces.Box):
        parser.error(
            f"{arguments.env_id} needs vectors as observations and continuous actions; found {space}, {actions}"
        )
    inputs, outputs = int(np.prod(space.shape)), int(np.prod(actions.shape))
    actor = Actor(inputs, outputs, actions.low, actions.high).to(device)
    critics = Critics(inputs + outputs).to(device)
    target = copy.deepcopy(critics)
    log_alpha = torch.zeros((), device=device, requires_grad=True)
    trained = actor.parameters(), critics.parameters(), [log_alpha]
    optimizers = [torch.optim.Adam(each, lr=arguments.learning_rate) for each in trained]
    buffer = ReplayBuffer.from_spaces(
        100_000,
        space,
        actions,
        sampler=Proportional(alpha=0.6, beta=LinearSchedule(0.4, 1.0, arguments.total_timesteps)),
        device=device,
        seed=arguments.seed,
    )

    start = time.perf_counter()
    obs, _ = env.reset(seed=arguments.seed)
    actions.seed(arguments.seed)
    for step in range(0, arguments.total_timesteps, arguments.num_envs):
        if step < arguments.learning_starts:
            action = np.stack([actions.sample() for _ in range(arguments.num_envs)])
        else:
            with torch.no_grad():
                action = actor(torch.as_tensor(obs, dtype=torch.float32, device=device))[0].cpu().numpy()
        after, reward, terminated, truncated, info = env.step(action)
        next_obs = after.copy()
        for place in np.flatnonzero(terminated | truncated):
            next_obs[place] = info["final_obs"][place]
        buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, terminated=terminated)
        obs = after
        if step < arguments.learning_starts:
            continue

        batch = buffer.sample(arguments.batch_size)
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob, _ = actor(batch.next_obs)
            value = target(batch.next_obs, next_action).amin(0) - alpha * next_log_prob
            wanted = batch.reward + gamma * value * ~batch.terminated
        error = critics(batch.obs, batch.action) - wanted
        critic_loss = (batch.weight * error**2).mean(1).sum()
        optimizers[1].zero_grad()
        critic_loss.backward()
        optimizers[1].step()
        buffer.update_priorities(batch.key, error.detach().abs().mean(0))

        chosen, log_prob, _ = actor(batch.obs)
        actor_loss = (alpha * log_prob - critics(batch.obs, chosen).amin(0)).mean()
        optimizers[0].zero_grad()
        actor_loss.backward()
        optimizers[0].step()

        # the target entropy is minus the number of action components
        alpha_loss = -(log_alpha.exp() * (log_prob.detach() - outputs)).mean()
        optimizers[2].zero_grad()
        alpha_loss.backward()
        optimizers[2].step()
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), critics.parameters(), strict=True):
                mine.lerp_(theirs, arguments.tau)
        if (step + arguments.num_envs) % 2_000 < arguments.num_envs:
            mean, seconds = evaluated(arguments.env_id, actor, 5, 10_000, device), time.perf_counter() - start
            print(f"{step + arguments.num_envs:,} steps, {seconds:.0f} s: mean return {mean:.1f}", flush=True)
    print(f"mean return of 20 fresh episodes: {evaluated(arguments.env_id, actor, 20, 20_000, device):.1f}")


if __name__ == "__main__":
    main()
