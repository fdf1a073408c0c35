"""R2D2 on a task that needs memory: a recurrent agent that learns from sequences, with stored states and burn-in.

The first step of an episode shows a cue, the following ones show nothing, and in the last one the agent must name the
cue: +1 if it does, -1 if not. The mean return is 0 without memory and 1 with it, which seeds 0, 1 and 2 reached.

What R2D2 needs from a replay buffer, and how this program gets it:

- each step is stored with the recurrent state in which it was taken: the field `hidden`;
- sequences of consecutive steps: the buffer's `sequences`, whose `mask` ends with the episode in which they begin;
- the first `BURN_IN` steps only bring the recurrent state up to date with the network as it is now;
- n-step targets: `reward`, `discount` and `next_obs` of each step are those of its window;
- a sequence's priority is 0.9 times the largest plus 0.1 times the mean of its TD errors.

    python -m gpu_replay.examples.r2d2_memory

Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning".
"""

from __future__ import annotations

import argparse
import copy
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpu_replay import Batch, Field, Proportional, Sequences, TrajectoryReplayBuffer

ENVS, EPISODE, CUES = 16, 10, 2
HIDDEN, BATCH, BURN_IN, LENGTH, N_STEP, GAMMA = 32, 32, 3, 8, 3, 0.97
WARM_UP, STEPS_PER_UPDATE, UPDATES_PER_TARGET = 50, 2, 50


class Recall:
    """`ENVS` environments that show a cue and ask for it later; after an episode ends, the next step begins a new one.

    An observation is the cue, one-hot and all 0 after the first step, and a flag that is 1 when the cue is asked for.
    """

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._cue = torch.randint(CUES, (ENVS,), generator=self._random)
        # start at different ages, so that each step ends some episodes
        self._step = torch.arange(ENVS) % EPISODE

    def observe(self) -> Tensor:
        """(ENVS, CUES + 1) float32."""
        cue = nn.functional.one_hot(self._cue, CUES) * (self._step == 0)[:, None]
        return torch.cat((cue, (self._step == EPISODE - 1)[:, None]), dim=1).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """(ENVS,) rewards and whether episodes terminated."""
        terminated = self._step == EPISODE - 1
        reward = terminated * torch.where(action == self._cue, 1.0, -1.0)
        fresh = torch.randint(CUES, (ENVS,), generator=self._random)
        self._cue = torch.where(terminated, fresh, self._cue)
        self._step = torch.where(terminated, 0, self._step + 1)
        return reward, terminated


class Network(nn.Module):
    """A recurrent layer followed by action values."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(CUES + 1, HIDDEN, batch_first=True)
        self.values = nn.Linear(HIDDEN, CUES)

    def forward(self, obs: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Action values (B, L, CUES) of L steps that start from the states (B, HIDDEN), and the states after them."""
        out, after = self.recurrent(obs, hidden[None].contiguous())
        return self.values(out), after[0]


class Agent:
    """The network and its target, which learn from batches of sequences."""

    def __init__(self, device: torch.device) -> None:
        self.network = Network().to(device)
        self._target = copy.deepcopy(self.network)
        self._optimizer = torch.optim.Adam(self.network.parameters(), lr=2e-3)
        self._updates = 0

    def learn(self, batch: Batch) -> Tensor:
        """Take one optimiser step; returns the priorities of the sequences, (B,)."""
        # the windows of the last steps reach past the end of the sequence: append their next observations
        obs = torch.cat((batch.obs, batch.next_obs[:, -N_STEP:]), dim=1)
        hidden = target_hidden = batch.hidden[:, 0]
        with torch.no_grad():
            _, hidden = self.network(obs[:, :BURN_IN], hidden)
            _, target_hidden = self._target(obs[:, :BURN_IN], target_hidden)
            target_values, _ = self._target(obs[:, BURN_IN:], target_hidden)
        values, _ = self.network(obs[:, BURN_IN:], hidden)

        reward, discount, mask = (batch[name][:, BURN_IN:] for name in ("reward", "discount", "mask"))
        with torch.no_grad():
            # the state after a window is found N_STEP later in the same sequence; if the episode ended before that, the
            # discount is 0. (Truncated episodes would need N_STEP = 1 and one step of the layer from each state.)
            best = values[:, N_STEP:].argmax(dim=2, keepdim=True)
            after = target_values[:, N_STEP:].gather(2, best)[..., 0]
            target = reward + discount * after
        chosen = values[:, :-N_STEP].gather(2, batch.action[:, BURN_IN:, None])[..., 0]
        error = (target - chosen) * mask
        loss = (batch.weight * error.square().sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 10.0)
        self._optimizer.step()

        self._updates += 1
        if self._updates % UPDATES_PER_TARGET == 0:
            self._target.load_state_dict(self.network.state_dict())
        size = error.detach().abs()
        return 0.9 * size.amax(dim=1) + 0.1 * size.sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def make_buffer(capacity: int, device: torch.device, seed: int) -> TrajectoryReplayBuffer:
    """A buffer for steps of all environments, each with the recurrent state in which it was taken."""
    return TrajectoryReplayBuffer(
        capacity,
        ENVS,
        {
            "obs": Field((CUES + 1,), torch.float32),
            "action": Field((), torch.int64),
            "hidden": Field((HIDDEN,), torch.float32),
        },
        n_step=N_STEP,
        gamma=GAMMA,
        autoreset="same_step",
        sequences=Sequences(BURN_IN + LENGTH),
        sampler=Proportional(alpha=0.9, beta=0.6),
        device=device,
        seed=seed,
    )


def train(steps: int, seed: int = 0, device: torch.device | str = "cpu") -> float:
    """Train for `steps` steps of all environments; returns the mean return of greedy episodes afterwards."""
    torch.manual_seed(seed)
    place = torch.device(device)
    envs, agent, buffer = Recall(seed), Agent(place), make_buffer(20_000, place, seed)
    # some environments explore more than others (Ape-X)
    epsilon = 0.4 ** (1 + 4 * torch.arange(ENVS) / (ENVS - 1))
    returns: deque[float] = deque(maxlen=200)
    obs, hidden = envs.observe(), torch.zeros(ENVS, HIDDEN, device=place)
    for step in range(steps):
        with torch.no_grad():
            values, after = agent.network(obs[:, None].to(place), hidden)
        greedy = values[:, 0].argmax(dim=1).cpu()
        action = torch.where(torch.rand(ENVS) < epsilon, torch.randint(CUES, (ENVS,)), greedy)
        reward, terminated = envs.step(action)
        buffer.add(
            obs=obs, action=action, hidden=hidden, reward=reward, terminated=terminated, truncated=terminated & False
        )
        returns.extend(reward[terminated].tolist())
        obs, hidden = envs.observe(), after * ~terminated.to(place)[:, None]
        if step >= WARM_UP and step % STEPS_PER_UPDATE == 0:
            batch = buffer.sample(BATCH)
            buffer.update_priorities(batch.key, agent.learn(batch))
        if (step + 1) % 500 == 0:
            print(f"step {step + 1:,}: mean return {sum(returns) / max(1, len(returns)):+.2f} while exploring")
    return evaluate(agent.network, seed + 1, place)


def evaluate(network: Network, seed: int, device: torch.device, episodes: int = 200) -> float:
    """The mean return of this many episodes without exploration."""
    envs, hidden = Recall(seed), torch.zeros(ENVS, HIDDEN, device=device)
    returns: list[float] = []
    # running episodes do not count: the network has not seen their first step
    seen = torch.zeros(ENVS, dtype=torch.bool)
    while len(returns) < episodes:
        with torch.no_grad():
            values, after = network(envs.observe()[:, None].to(device), hidden)
        reward, terminated = envs.step(values[:, 0].argmax(dim=1).cpu())
        returns.extend(reward[terminated & seen].tolist())
        seen |= terminated
        hidden = after * ~terminated.to(device)[:, None]
    return sum(returns) / len(returns)


def main(argv: Sequence[str] | None = None) -> None:
    """Train and print the return."""
    parser = argparse.ArgumentParser(description="R2D2 on a task that needs memory.")
    parser.add_argument("--steps", type=int, default=2_000, help="of all environments together (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    print(f"mean return of greedy episodes: {train(options.steps, options.seed, options.device):+.2f}")


if __name__ == "__main__":
    main()
