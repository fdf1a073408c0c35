"""n-step transitions from parallel streams of steps, with shapes that never depend on the data.

Every transition is handed out `n_step - 1` steps after it began, whether its window is full or its episode ended inside
the window, in which case what follows the end is ignored. So each step of the environments gives exactly one
transition per environment, without a look at the data that would stall a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class NStepAssembler:
    """Turns one step of `E` environments into the n-step transitions that began `n_step - 1` steps earlier.

    n_step: steps in a window, at least 1.
    gamma:  discount per step.

    `push` takes tensors of one device; the first call fixes shapes and dtypes.
    """

    def __init__(self, n_step: int, gamma: float) -> None:
        if n_step < 1:
            raise ValueError(f"n_step must be at least 1; found {n_step}.")
        self.n_step = n_step
        self.gamma = gamma
        self.steps = 0
        self._ring: dict[str, Tensor] = {}

    def push(
        self, *, obs: Tensor, action: Tensor, reward: Tensor, next_obs: Tensor, terminated: Tensor, truncated: Tensor
    ) -> dict[str, Tensor] | None:
        """Take one step; return the transitions that it completes, or None before there are any.

        obs, next_obs: (E, *shape), the observation acted upon and the one it led to, the final one at an ending.
        action:        (E,) int64.
        reward:        (E,) float32.
        terminated, truncated: (E,) bool.
        returns:       obs, action, reward (the discounted sum), next_obs (where to bootstrap) and discount (0 after a
                       termination); the target is `reward + discount * value(next_obs)`.
        """
        step = {
            "obs": obs,
            "action": action,
            "reward": reward,
            "next_obs": next_obs,
            "terminated": terminated,
            "ended": terminated | truncated,
        }
        if not self._ring:
            self._allocate(step)
        slot = self.steps % self.n_step
        for name, value in step.items():
            self._ring[name][slot] = value
        self.steps += 1
        if self.steps < self.n_step:
            return None
        if self.n_step == 1:
            discount = self.gamma * (~terminated).float()
            return {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "discount": discount}
        return self._oldest(oldest=self.steps % self.n_step)

    def state(self) -> dict[str, Any]:
        """The windows that are still open."""
        return {"steps": self.steps, "ring": self._ring}

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on with these windows."""
        ring = {name: tensor.to(device) for name, tensor in state["ring"].items()}
        if ring:
            self._allocate({name: tensor[0] for name, tensor in ring.items()})
            self._ring = ring
        self.steps = state["steps"]

    def _allocate(self, step: dict[str, Tensor]) -> None:
        device = step["reward"].device
        self._ring = {
            name: torch.empty((self.n_step, *t.shape), dtype=t.dtype, device=device) for name, t in step.items()
        }
        self._order = torch.arange(2 * self.n_step, device=device) % self.n_step
        self._environments = torch.arange(step["reward"].shape[0], device=device)
        self._powers = self.gamma ** torch.arange(self.n_step + 1, device=device, dtype=torch.float32)

    def _oldest(self, oldest: int) -> dict[str, Tensor]:
        ring = self._ring
        order = self._order[oldest : oldest + self.n_step]
        ended = ring["ended"][order]  # (n, E), oldest first
        # a step counts while no earlier one of its window ended the episode
        counts = torch.ones_like(ended, dtype=torch.float32)
        counts[1:] = torch.cumprod((~ended[:-1]).float(), dim=0)
        reward = (ring["reward"][order] * counts * self._powers[:-1, None]).sum(0)
        length = counts.sum(0).long()
        last = order[length - 1]
        survived = ~ring["terminated"][last, self._environments]
        return {
            "obs": ring["obs"][oldest].clone(),
            "action": ring["action"][oldest].clone(),
            "reward": reward,
            "next_obs": ring["next_obs"][last, self._environments],
            "discount": self._powers[length] * survived,
        }
