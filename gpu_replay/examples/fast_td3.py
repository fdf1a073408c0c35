"""TD3 with thousands of environments on the device of the learner: no observation visits the host.

    python -m gpu_replay.examples.fast_td3

A pendulum is swung up and balanced; masses and lengths differ, and only the critic sees them. There is no simulator to
install, and it is learned in half a minute of one CPU core. With a simulator the same loop is, in Isaac Lab,

    env = gymnasium.make("Isaac-Velocity-Flat-G1-v0", cfg=cfg).unwrapped    # cfg.compute_final_obs = True
    buffer = TrajectoryReplayBuffer.from_env(env, 4096 * 1024, n_step=3, gamma=0.97, sampler=Uniform(replacement=True))
    obs, _ = env.reset()
    while True:
        action = act(obs["policy"])
        after, reward, terminated, truncated, extras = env.step(action)
        flags = {"terminated": terminated, "truncated": truncated}
        buffer.add(obs=obs, action=action, reward=reward, **flags, final_obs=extras.get("final_obs"))
        obs = after

and in mjlab the same, whose `env.step` returns these five. Truncated windows whose final observation nobody gives are
not sampled. `dtypes={"obs": torch.bfloat16}` takes half the memory, as below.

Seo et al. 2025, "FastTD3"; Fujimoto et al. 2018 (TD3); Pinto et al. 2017 (critics that see more than the actor).
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from gpu_replay import Batch, Field, TrajectoryReplayBuffer, Uniform

EPISODE = 200


class Pendulums:
    """`num_envs` pendulums that step together as in a simulator: dictionaries of tensors, resets in the same step.

    "policy" (E, 3) is cosine, sine and speed; "critic" (E, 2) is what only the critic sees, mass and length less 1.
    Actions (E, 1) in [-1, 1] are torques. Episodes are cut after 200 steps and never terminate.
    """

    def __init__(self, num_envs: int, device: torch.device, stagger: bool = True) -> None:
        whole = torch.ones(num_envs, dtype=torch.bool, device=device)
        self.angle = self.speed = whole.float()
        self.body = torch.ones(num_envs, 2, device=device)
        self.steps = torch.randint(EPISODE, (num_envs,), device=device) * stagger
        self._begin(whole)

    def _begin(self, begins: Tensor) -> None:
        random = torch.rand(4, len(begins), device=begins.device) * 2 - 1
        self.angle = torch.where(begins, math.pi * random[0], self.angle)
        self.speed = torch.where(begins, random[1], self.speed)
        self.body = torch.where(begins[:, None], 1 + 0.2 * random[2:].T, self.body)

    def observe(self) -> dict[str, Tensor]:
        seen = torch.stack([self.angle.cos(), self.angle.sin(), self.speed / 8], 1)
        return {"policy": seen, "critic": self.body - 1}

    def step(self, action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        torque, (mass, length) = 2 * action[:, 0], self.body.unbind(1)
        upright = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        reward = -(upright**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        pull = 15 * self.angle.sin() / length + 3 * torque / (mass * length**2)
        self.speed = (self.speed + 0.05 * pull).clamp(-8, 8)
        self.angle, self.steps = self.angle + 0.05 * self.speed, self.steps + 1
        final, truncated = self.observe(), self.steps >= EPISODE
        self._begin(truncated)
        self.steps = self.steps % EPISODE
        return self.observe(), reward, torch.zeros_like(truncated), truncated, {"final_obs": final}


def network(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ELU(), nn.Linear(128, 128), nn.ELU(), nn.Linear(128, 1))


class Critics(nn.Module):
    """Two action values, (2, B)."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ModuleList(network(3 + 2 + 1) for _ in range(2))

    def forward(self, obs: Batch, action: Tensor) -> Tensor:
        both = torch.cat([obs.policy, obs.critic, action], 1)
        return torch.stack([value(both)[:, 0] for value in self.values])


class Learner:
    """Networks, and what the two captured steps do with a large batch: several updates, each with a part of it."""

    def __init__(self, device: torch.device, updates: int) -> None:
        self.actor, self.critic, self.updates = network(3).to(device), Critics().to(device), updates
        self.target, capturable = copy.deepcopy(self.critic), device.type == "cuda"
        both = (self.actor.parameters(), self.critic.parameters())
        self.of_actor, self.of_critic = (
            torch.optim.AdamW(each, 1e-3, fused=True, capturable=capturable) for each in both
        )

    def act(self, policy: Tensor) -> Tensor:
        return self.actor(policy).tanh()

    def learn_critic(self, large: Batch) -> tuple[None, Tensor]:
        for batch in large.minibatches(self.updates):
            with torch.no_grad():
                noise = (0.2 * torch.randn_like(batch.action)).clamp(-0.5, 0.5)
                action = (self.act(batch.next_obs.policy) + noise).clamp(-1, 1)
                wanted = batch.reward + batch.discount * self.target(batch.next_obs, action).amin(0)
            loss = (self.critic(batch.obs, batch.action) - wanted).square().mean(1).sum()
            self.of_critic.zero_grad()
            loss.backward()
            self.of_critic.step()
            with torch.no_grad():
                torch._foreach_lerp_(list(self.target.parameters()), list(self.critic.parameters()), 0.05)
        return None, loss.detach()

    def learn_actor(self, large: Batch) -> tuple[None, Tensor]:
        for batch in large.minibatches(self.updates // 2):
            loss = -self.critic(batch.obs, self.act(batch.obs.policy))[0].mean()
            self.of_actor.zero_grad()
            loss.backward()
            self.of_actor.step()
        return None, loss.detach()


class Loop:
    """Environments, networks and buffer; observations are stored in bfloat16 and sampled in float32."""

    def __init__(self, device: torch.device, envs: int, batch: int, updates: int, seed: int = 0) -> None:
        self.env, self.learner, self.device = Pendulums(envs, device), Learner(device, updates), device
        sizes = {"obs.policy": 3, "obs.critic": 2}
        fields = {name: Field((size,), torch.bfloat16, torch.float32) for name, size in sizes.items()}
        fields["action"] = Field((1,), torch.float32)
        settings: dict[str, Any] = {
            "n_step": 3,
            "gamma": 0.97,
            "autoreset": "same_step",
            "device": device,
            "seed": seed,
        }
        self.buffer = TrajectoryReplayBuffer(envs * 1024, envs, fields, sampler=Uniform(replacement=True), **settings)
        self.rows = updates * batch, updates // 2 * batch
        self.update_critic = self.buffer.capture(self.rows[0], self.learner.learn_critic)
        self.update_actor = self.buffer.capture(self.rows[1], self.learner.learn_actor)
        # as in FastTD3, each environment explores as much as it was given
        self.spread = 0.3 + 0.2 * torch.rand(envs, 1, device=device)
        self.obs = self.env.observe()
        self.added: dict[str, Any] = {}

    def step(self, learn: bool = True) -> Tensor:
        """Act, store a step of all environments and learn; returns rewards (E,). Without `learn` actions are random."""
        with torch.no_grad():
            noise = torch.randn_like(self.spread) * (self.spread if learn else 2)
            action = (self.learner.act(self.obs["policy"]) + noise).clamp(-1, 1)
        after, reward, terminated, truncated, extras = self.env.step(action)
        self.added = {"obs": self.obs, "action": action, "reward": reward, "terminated": terminated}
        self.added |= {"truncated": truncated, "final_obs": extras["final_obs"]}
        self.buffer.add(**self.added)
        self.obs = after
        if learn:
            self.update_critic()
            self.update_actor()
        return reward

    def seconds_of_buffer(self, calls: int = 20) -> float:
        """Of what a step asks of the buffer: an add and both samples."""
        began = time.perf_counter()
        for _ in range(calls):
            self.buffer.add(**self.added)
            for rows in self.rows:
                self.buffer.sample(rows)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - began) / calls


@torch.no_grad()
def mean_return(learner: Learner, device: torch.device) -> float:
    """Of whole episodes without noise, of 256 new pendulums."""
    env = Pendulums(256, device, stagger=False)
    rewards = [env.step(learner.act(env.observe()["policy"]))[1] for _ in range(EPISODE)]
    return float(torch.stack(rewards).sum(0).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--num-envs", type=int, default=4096 if cuda else 1024)
    parser.add_argument("--batch-size", type=int, default=32_768 if cuda else 512)
    parser.add_argument("--steps", type=int, default=600, help="of each environment")
    parser.add_argument("--updates", type=int, default=8, help="of the critics in a step; the actor has half as many")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    device, envs = torch.device(options.device), options.num_envs
    loop = Loop(device, envs, options.batch_size, options.updates, options.seed)
    began = last = time.perf_counter()
    for step in range(1, options.steps + 1):
        reward = loop.step(learn=step > 10)
        if step % 50 == 0:
            mean, now = float(reward.mean()), time.perf_counter()
            rate, last = 50 * envs / (now - last), now
            print(f"{step * envs:,} steps, {now - began:.0f} s, {rate:,.0f} steps/s: reward {mean:.2f}", flush=True)
    share = loop.seconds_of_buffer() * options.steps / (last - began)
    bytes_each = loop.buffer.nbytes / loop.buffer.capacity
    print(f"the buffer takes {share:.1%} of the time and {bytes_each:.0f} bytes a transition")
    print(f"mean return of 256 episodes: {mean_return(loop.learner, device):.1f}")


if __name__ == "__main__":
    main()
