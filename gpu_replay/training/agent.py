"""The agent: how it acts, and how it learns from a sampled batch.

Mnih et al. 2015 (DQN), van Hasselt et al. 2016 (double), Schaul et al. 2016 (prioritized).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.adam import adam
from torch.optim.swa_utils import get_ema_multi_avg_fn

from gpu_replay import Batch
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.settings import Settings

# gradients are clipped to this norm, as in dueling networks
MAX_GRAD_NORM = 10.0


@torch.no_grad()
def greedy_actions(values: Tensor, epsilon: float | Tensor, generator: torch.Generator) -> Tensor:
    """Choose the best action in each row, or a random one with probability `epsilon`.

    values:  (E, actions).
    epsilon: a number, or a tensor of shape () that a captured graph reads again in each replay.
    returns: (E,) int64.
    """
    greedy = values.argmax(1)
    if not isinstance(epsilon, Tensor) and epsilon <= 0:
        return greedy
    count, actions = values.shape
    chance = torch.rand(count, generator=generator, device=values.device)
    random = torch.randint(actions, (count,), generator=generator, device=values.device)
    return torch.where(chance < epsilon, random, greedy)


class Explorer(nn.Module):
    """Epsilon-greedy actions in `E` environments, each random one repeated in the next step with some probability.

    In environments where one random action undoes the previous one (Acrobot, MountainCar), independent random actions
    lead nowhere: of 30 random episodes of Acrobot-v1 none reached the goal within 500 steps, and 13 did when each
    action was repeated with probability 0.8. In the long run a share `epsilon` of all actions is random, whatever the
    persistence.

    No call synchronises with the device. All state lies in the generator and in tensors that are changed in place, so
    a captured graph can be replayed.

    Dabney et al. 2021, "Temporally-Extended Epsilon-Greedy Exploration", with a geometric duration.
    """

    begin: Tensor
    random: Tensor
    exploring: Tensor

    def __init__(self, persistence: float, num_envs: int, device: torch.device, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self._persistence = persistence
        # the probability that exploration begins in a step that repeats no action
        self.register_buffer("begin", torch.zeros((), device=device))
        self.register_buffer("random", torch.zeros(num_envs, dtype=torch.int64, device=device))
        self.register_buffer("exploring", torch.zeros(num_envs, dtype=torch.bool, device=device))

    def set_epsilon(self, epsilon: float) -> None:
        """Set the share of random actions, for captured graphs too; it is 0 before the first call."""
        # with this probability a share `epsilon` of all steps explores
        self.begin.fill_(epsilon * (1 - self._persistence) / (1 - epsilon * self._persistence))

    @torch.no_grad()
    def choose(self, values: Tensor) -> Tensor:
        """Choose actions (E,) int64 by values (E, actions)."""
        if self._persistence <= 0:
            return greedy_actions(values, self.begin, self.generator)
        count, actions = values.shape
        fresh = torch.randint(actions, (count,), generator=self.generator, device=values.device)
        chance = torch.rand((2, count), generator=self.generator, device=values.device)
        persisting = self.exploring & (chance[0] < self._persistence)
        self.random.copy_(torch.where(persisting, self.random, fresh))
        # with an epsilon of 0 no action is repeated either
        self.exploring.copy_((persisting | (chance[1] < self.begin)) & (self.begin > 0))
        return torch.where(self.exploring, self.random, values.argmax(1))

    def get_extra_state(self) -> Tensor:
        """The state of the generator."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the state of the generator."""
        self.generator.set_state(state)


Mean = Callable[[Sequence[Tensor]], None]


def alone(weights: Sequence[Tensor]) -> None:
    """Leave the gradients of a run of one rank as they are."""


class Agent(nn.Module):
    """The online network, its target copy, the averaged network, and the optimiser.

    average: replaces the gradients of these weights by their mean over all ranks, in place.
    judged:  the network to evaluate and to save: the average of the online network over the last updates, if the
             settings ask for one. Near a plateau the policy of the online network changes from update to update, and
             that of the average does not (Polyak and Juditsky 1992, "Acceleration of stochastic approximation by
             averaging").
    updates: steps of the optimiser so far.

    Only `means` synchronises with the device.
    """

    sums: Tensor

    def __init__(
        self,
        network: QNetwork,
        settings: Settings,
        device: torch.device,
        num_envs: int,
        seed: int,
        average: Mean = alone,
    ) -> None:
        super().__init__()
        self.online = network.to(device)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.averaged = copy.deepcopy(self.target) if settings.ema_updates else None
        self.target.lower()
        self.explorer = Explorer(settings.persistence, num_envs, device, seed)
        self.updates = 0
        self._target_every, self._end_on_reward = settings.target_every, settings.end_on_reward
        self._advantage_learning = settings.advantage_learning
        self._average_gradients = average
        # a CUDA graph needs the step size and the step count on the device
        cuda = device.type == "cuda"
        self._rate = torch.tensor(settings.learning_rate, device=device) if cuda else settings.learning_rate
        self._weights: list[Tensor] = list(self.online.parameters())
        # the function that `torch.optim.Adam` calls: the class imports the compiler of torch, which takes a second
        rates: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": settings.adam_eps, "weight_decay": 0.0}
        options: dict[str, Any] = {"fused": True, "capturable": cuda, "amsgrad": False, "maximize": False}
        self._adam: Callable[..., None] = partial(adam, **rates, **options)
        self._moments = {name: [torch.zeros_like(each) for each in self._weights] for name in ("mean", "square")}
        self._moments["steps"] = [torch.zeros((), device=device) for _ in self._weights]
        self._averages: list[Tensor] = [] if self.averaged is None else list(self.averaged.parameters())
        self._move_average = get_ema_multi_avg_fn(1 - 1 / max(settings.ema_updates, 1))
        # sums of loss, absolute TD error and value since the last `means`, and the number of updates
        self.register_buffer("sums", torch.zeros(3, device=device))
        self._summed = 0

    @property
    def judged(self) -> QNetwork:
        """The network to evaluate and to save."""
        return self.online if self.averaged is None else self.averaged

    @torch.no_grad()
    def act(self, obs: Tensor) -> Tensor:
        """Epsilon-greedy actions (E,) int64 for observations (E, *shape) on the agent's device."""
        return self.explorer.choose(self.online(obs))

    def whiten(self, obs: Tensor) -> None:
        """Fit the networks' whitening to these observations, before the first update."""
        for network in (self.online, self.target, self.judged):
            network.whiten(obs)

    @torch.no_grad()
    def targets(self, batch: Batch) -> Tensor:
        """What the values of a batch's actions should be, (B,): `reward + discount * value(next_obs)`, where the online
        network, as it is now, chooses the next action and the target network values it.

        batch: reward, next_obs, discount.

        With `end_on_reward` the discount of a row whose reward is not 0 counts as 0.
        """
        next_obs = self.online.prepare(batch.next_obs)
        best = self.online.values(next_obs).argmax(1, keepdim=True)
        discount = batch.discount
        if self._end_on_reward:
            discount = discount.where(batch.reward == 0, 0.0)
        return batch.reward + discount * self.target.values(next_obs).gather(1, best).squeeze(1)

    def update(self, batch: Batch, target: Tensor) -> Tensor:
        """Take one optimiser step on an importance-weighted Huber loss; returns (B,) absolute TD errors.

        batch:  obs, action, weight.
        target: (B,) of `targets`.

        With `advantage_learning` that share of the gap between the action's value and the best one, both of the online
        network, is subtracted from the target. The best action keeps its value, and gaps grow by up to 1 / (1 - share),
        so that errors of the network change the best action less often (Bellemare et al. 2016, "Increasing the Action
        Gap: New Operators for Reinforcement Learning").

        Runs on the device alone, so it can be captured in a CUDA graph; call `after_updates` on the host afterwards.
        """
        values = self.online(batch.obs)
        chosen = values.gather(1, batch.action[:, None]).squeeze(1)
        if self._advantage_learning:
            target = target - self._advantage_learning * (values.amax(1) - chosen).detach()
        loss = (batch.weight * functional.smooth_l1_loss(chosen, target, reduction="none")).mean()
        gradients = torch.autograd.grad(loss, self._weights)
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient
        self._average_gradients(self._weights)
        nn.utils.clip_grad_norm_(self._weights, MAX_GRAD_NORM)
        with torch.no_grad():
            mean, square, steps = self._moments.values()
            self._adam(self._weights, list(gradients), mean, square, [], steps, lr=self._rate)
            if self.averaged is not None:
                self._move_average(self._averages, self._weights, 0)
            td_error = (target - chosen).abs()
            self.sums += torch.stack((loss, td_error.mean(), chosen.mean()))
        return td_error

    @torch.no_grad()
    def after_updates(self, count: int) -> None:
        """Count `count` updates, and copy the online network to the target network when due."""
        before, self.updates = self.updates, self.updates + count
        self._summed += count
        if self.updates // self._target_every > before // self._target_every:
            for target, weight in zip(self.target.parameters(), self._weights, strict=True):
                target.copy_(weight)

    def follow(self, learning_rate: float, epsilon: float) -> None:
        """Set the learning rate and the share of random actions, for captured graphs too."""
        self._rate = self._rate.fill_(learning_rate) if isinstance(self._rate, Tensor) else learning_rate
        self.explorer.set_epsilon(epsilon)

    def means(self) -> tuple[float, float, float]:
        """Mean loss, absolute TD error and value since the last call; NaN without updates in between."""
        if self._summed == 0:
            return (float("nan"),) * 3
        loss, td_error, value = (self.sums / self._summed).tolist()
        self.sums.zero_()
        self._summed = 0
        return loss, td_error, value

    def get_extra_state(self) -> dict[str, Any]:
        """The state beyond the networks' weights: counts, and the optimiser's moments."""
        moments = {name: {str(place): each for place, each in enumerate(of)} for name, of in self._moments.items()}
        return {"updates": self.updates, "summed": self._summed, "moments": moments}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore counts and moments."""
        self.updates, self._summed = state["updates"], state["summed"]
        for name, moments in self._moments.items():
            for place, moment in enumerate(moments):
                moment.copy_(state["moments"][name][str(place)])
