"""Deep Q-learning: from a sampled batch to a step of the optimiser.

Mnih et al. 2015 (DQN), van Hasselt et al. 2016 (double), Wang et al. 2016 (dueling), Schaul et al. 2016 (prioritized).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu_replay import Batch
from gpu_replay.training.exploration import Explorer
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.settings import Settings


class Agent:
    """The online network, its target copy and the optimiser. Only `means` synchronises with the device.

    average: makes the gradients of these weights the mean over all ranks of a run, in place; None in a run of one.
    """

    def __init__(
        self,
        network: QNetwork,
        settings: Settings,
        device: torch.device,
        seed: int,
        *,
        average: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        self.settings = settings
        self.device = device
        self.online = network.to(device)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.updates = 0
        self._average = average
        self._weights = list(self.online.parameters())
        # a CUDA graph needs the step size and the step count on the device
        cuda = device.type == "cuda"
        rate = torch.tensor(settings.learning_rate, device=device) if cuda else settings.learning_rate
        self._optimizer = torch.optim.Adam(self._weights, lr=rate, eps=settings.adam_eps, fused=True, capturable=cuda)
        generator = torch.Generator(device=device).manual_seed(seed)
        self._explorer = Explorer(settings.persistence, generator)
        self._sums = torch.zeros(3, device=device)
        self._summed = 0

    @torch.no_grad()
    def act(self, obs: Tensor, epsilon: float) -> Tensor:
        """obs: (E, *shape) on the agent's device; returns (E,) int64."""
        return self._explorer.choose(self.online(obs), epsilon)

    def whiten(self, obs: Tensor) -> None:
        """Fit the networks' whitening to these observations, before the first update."""
        self.online.whiten(obs)
        self.target.whiten(obs)

    def update(self, batch: Batch) -> Tensor:
        """One step of the optimiser on an importance-weighted Huber loss; returns (B,) absolute TD errors.

        batch: obs, action, reward, next_obs, discount, weight; the target is `reward + discount * value(next_obs)`.

        Runs on the device alone, so that it can be captured in a CUDA graph; `after_update` follows on the host.
        """
        chosen = self.online(batch.obs).gather(1, batch.action[:, None]).squeeze(1)
        target = batch.reward + batch.discount * self._next_value(batch.next_obs)
        loss = (batch.weight * functional.smooth_l1_loss(chosen, target, reduction="none")).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self._average is not None:
            self._average(self._weights)
        torch.nn.utils.clip_grad_norm_(self._weights, self.settings.max_grad_norm)
        self._optimizer.step()
        with torch.no_grad():
            td_error = (target - chosen).abs()
            self._sums += torch.stack((loss, td_error.mean(), chosen.mean()))
        return td_error

    def after_update(self) -> None:
        """Count an update, and copy to the target network when due."""
        self.updates += 1
        self._summed += 1
        if self.updates % self.settings.target_every == 0:
            self._update_target()

    def set_learning_rate(self, rate: float) -> None:
        """Set the step size of the following updates, also those of a captured graph."""
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def means(self) -> tuple[float, float, float]:
        """Mean loss, absolute TD error and value since the last call; NaN without updates in between."""
        if self._summed == 0:
            return (float("nan"),) * 3
        loss, td_error, value = (self._sums / self._summed).tolist()
        self._sums.zero_()
        self._summed = 0
        return loss, td_error, value

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs; the tensors are not copies."""
        weights = {index: self._optimizer.state[weight] for index, weight in enumerate(self._weights)}
        return {
            "updates": self.updates,
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            # empty before the first update
            "optimizer": {str(index): dict(slots) for index, slots in weights.items()},
            "explorer": self._explorer.state(),
            "sums": self._sums,
            "summed": self._summed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another agent."""
        self.updates = state["updates"]
        self.online.load_state_dict(state["online"])
        self.target.load_state_dict(state["target"])
        slots = {int(index): slots for index, slots in state["optimizer"].items() if slots}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": slots, "param_groups": groups})
        self._explorer.restore(state["explorer"], self.device)
        self._sums.copy_(state["sums"])
        self._summed = state["summed"]

    @torch.no_grad()
    def _next_value(self, next_obs: Tensor) -> Tensor:
        target_values = self.target(next_obs)
        if not self.settings.double:
            return target_values.amax(1)
        best = self.online(next_obs).argmax(1, keepdim=True)
        return target_values.gather(1, best).squeeze(1)

    @torch.no_grad()
    def _update_target(self) -> None:
        tau = self.settings.target_tau
        for ours, theirs in zip(self.target.parameters(), self._weights, strict=True):
            ours.lerp_(theirs, tau)
