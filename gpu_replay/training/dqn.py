"""Deep Q-learning: from a sampled batch to a step of the optimiser.

Mnih et al. 2015 (DQN), van Hasselt et al. 2016 (double), Wang et al. 2016 (dueling), Schaul et al. 2016 (prioritized).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu_replay import Batch
from gpu_replay.training.exploration import Explorer
from gpu_replay.training.helper_thread import HelperThread, Task
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.settings import Settings


class Agent:
    """The online network, its target copy and the optimiser. Only `means` synchronises with the device.

    Weights of a network are views of one tensor, so that a step of the optimiser is one operation. Forward passes that
    need no gradient are tasks for `helper`, a second thread; without it the first one does them.

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
        helper: HelperThread | None = None,
    ) -> None:
        self.settings = settings
        self.device = device
        self.online = network.to(device)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.updates = 0
        self._average = average
        self._helper = helper
        self._weights = list(self.online.parameters())
        self._flat, self._flat_target = _flatten(self.online), _flatten(self.target)
        self._flat.grad = torch.zeros_like(self._flat)
        self._gradients = _views(self._flat.grad, self._weights)
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient
        self._lowered, self._lowered_target = _lowered(self.online), _lowered(self.target)
        self._averaged = copy.deepcopy(self.target) if settings.ema_updates else None
        self._flat_averaged = None if self._averaged is None else _flatten(self._averaged)
        # a CUDA graph needs the step size and the step count on the device
        cuda = device.type == "cuda"
        rate = torch.tensor(settings.learning_rate, device=device) if cuda else settings.learning_rate
        self._optimizer = torch.optim.Adam([self._flat], lr=rate, eps=settings.adam_eps, fused=True, capturable=cuda)
        self.explorer = Explorer(settings.persistence, torch.Generator(device=device).manual_seed(seed))
        self._sums = torch.zeros(3, device=device)
        self._summed = 0

    @property
    def judged(self) -> QNetwork:
        """The network to evaluate and to save: the average of the online one over the last updates, where it is kept.

        Near a plateau the policy of single networks changes from update to update, and that of their mean does not.

        Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging".
        """
        return self.online if self._averaged is None else self._averaged

    @torch.no_grad()
    def act(self, obs: Tensor, group: int = 0, groups: int = 1) -> Tensor:
        """obs: (E, *shape) on the agent's device; returns (E,) int64, explored with the epsilon of `explorer`.

        group, groups: which of the groups of environments these are, where each acts on its own in a step.
        """
        values = self.online.forward_with(self.online.prepare(obs), self._lowered)
        return self.explorer.choose(values, group, groups)

    def whiten(self, obs: Tensor) -> None:
        """Fit the networks' whitening to these observations, before the first update."""
        for network in (self.online, self.target, self.judged):
            network.whiten(obs)

    def update(self, batch: Batch) -> Tensor:
        """`updates_with` a single batch; returns (B,) absolute TD errors."""
        return self.updates_with([batch])[0]

    def updates_with(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Steps of the optimiser on an importance-weighted Huber loss, one a batch; returns (B,) absolute TD errors.

        batches: obs, action, reward, next_obs, discount, weight; the target is `reward + discount * value(next_obs)`.

        The target network stays as it is in between. Runs on the device alone, so that it can be captured in a CUDA
        graph; `after_update` follows on the host, once for each batch.
        """
        # what no update changes can be computed ahead
        ahead = [self._ahead(batch, offered=place > 0) for place, batch in enumerate(batches)]
        return [self._update(batch, each) for batch, each in zip(batches, ahead, strict=True)]

    def _ahead(self, batch: Batch, *, offered: bool) -> _Ahead:
        """Tasks of an update; `offered`: whether the helper may prepare `obs`, which the first update needs at once."""
        obs = Task(lambda: self.online.prepare(batch.obs))
        if offered:
            self._offer(obs)
        next_obs = self._offer(Task(lambda: self.online.prepare(batch.next_obs)))
        values = Task(lambda: self.target.forward_with(next_obs.result(), self._lowered_target))
        return _Ahead(obs, next_obs, self._offer(values))

    def _update(self, batch: Batch, ahead: _Ahead) -> Tensor:
        online = self.online
        if self.settings.double:
            best = self._offer(Task(lambda: online.forward_with(ahead.next_obs.result(), self._lowered)))
        values = online.forward_with(ahead.obs.result(), self._lowered)
        chosen = values.gather(1, batch.action[:, None]).squeeze(1)
        with torch.no_grad():
            chooser = best.result() if self.settings.double else ahead.values.result()
            next_value = ahead.values.result().gather(1, chooser.argmax(1, keepdim=True)).squeeze(1)
            target = batch.reward + batch.discount * next_value
        loss = (batch.weight * functional.smooth_l1_loss(chosen, target, reduction="none")).mean()
        gradients = torch.autograd.grad(loss, self._lowered)
        with torch.no_grad():
            self._step(gradients)
            td_error = (target - chosen).abs()
            self._sums += torch.stack((loss, td_error.mean(), chosen.mean()))
        return td_error

    def _step(self, gradients: Sequence[Tensor]) -> None:
        """A step of the optimiser with the gradients of the lowered weights."""
        _copy(self._gradients, gradients)
        if self._average is not None:
            self._average(self._weights)
        flat = self._flat.grad
        if flat is not None:
            norm = torch.linalg.vector_norm(flat)
            flat.mul_((self.settings.max_grad_norm / (norm + 1e-6)).clamp_(max=1.0))
        self._optimizer.step()
        _copy(self._lowered, self._weights)
        if self._flat_averaged is not None:
            self._flat_averaged.lerp_(self._flat, 1 / self.settings.ema_updates)

    def _offer(self, task: Task[Tensor]) -> Task[Tensor]:
        return task if self._helper is None else self._helper.offer(task)

    def after_update(self) -> None:
        """Count an update, and copy to the target network when due."""
        self.updates += 1
        self._summed += 1
        if self.updates % self.settings.target_every == 0:
            self._update_target()

    def target_due(self, updates: int) -> bool:
        """Whether one of so many updates from now on is followed by a copy to the target network."""
        return self.updates % self.settings.target_every + updates >= self.settings.target_every

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
        return {
            "updates": self.updates,
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            **({} if self._averaged is None else {"averaged": self._averaged.state_dict()}),
            # empty before the first update
            "optimizer": dict(self._optimizer.state[self._flat]),
            "explorer": self.explorer.state(),
            "sums": self._sums,
            "summed": self._summed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another agent."""
        self.updates = state["updates"]
        self.online.load_state_dict(state["online"])
        self.target.load_state_dict(state["target"])
        if self._averaged is not None:
            # a run that kept no average begins one here
            self._averaged.load_state_dict(state.get("averaged", state["online"]))
        _copy(self._lowered, self._weights)
        _copy(self._lowered_target, list(self.target.parameters()))
        slots = _flat_slots(state["optimizer"])
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": {0: slots} if slots else {}, "param_groups": groups})
        self.explorer.restore(state["explorer"], self.device)
        self._sums.copy_(state["sums"])
        self._summed = state["summed"]

    @torch.no_grad()
    def _update_target(self) -> None:
        self._flat_target.lerp_(self._flat, self.settings.target_tau)
        _copy(self._lowered_target, list(self.target.parameters()))


@dataclass(frozen=True)
class _Ahead:
    """Of one batch, what no update changes: prepared observations, and what the target network says of the next."""

    obs: Task[Tensor]
    next_obs: Task[Tensor]
    values: Task[Tensor]


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a flat tensor, one after the other, with the shapes of these."""
    parts = flat.split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


@torch.no_grad()
def _flatten(network: QNetwork) -> Tensor:
    """Move the weights of a network into one flat tensor, of which they are views from then on."""
    weights = list(network.parameters())
    flat = torch.cat([weight.reshape(-1) for weight in weights])
    for weight, view in zip(weights, _views(flat, weights), strict=True):
        weight.data = view
    return flat


@torch.no_grad()
def _lowered(network: QNetwork) -> list[Tensor]:
    """The network's lowered weights, as leaves: those of float32 are the parameters themselves."""
    pairs = zip(network.lowered(), network.parameters(), strict=True)
    return [mine if mine is weight else mine.requires_grad_(weight.requires_grad) for mine, weight in pairs]


@torch.no_grad()
def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """targets[i] = sources[i], where they are two; a GPU copies those of the same dtypes and strides in one launch."""
    alike: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            kind = (target.dtype, source.dtype, target.stride() == source.stride())
            for some, each in zip(alike.setdefault(kind, ([], [])), (target, source), strict=True):
                some.append(each)
    for these, those in alike.values():
        torch._foreach_copy_(these, those)


def _flat_slots(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Adam's state of all weights in one; runs before 2026-11-22 saved it by the place of each weight."""
    if not saved or "exp_avg" in saved:
        return dict(saved)
    by_weight = [saved[place] for place in sorted(saved, key=int) if saved[place]]
    if not by_weight:
        return {}
    moments = {name: torch.cat([each[name].reshape(-1) for each in by_weight]) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": by_weight[0]["step"], **moments}
